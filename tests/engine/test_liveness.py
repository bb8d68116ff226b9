"""The rules of the watch, tick by tick; that a real process which hangs is replaced is in tests/serve."""

from __future__ import annotations

import pytest

from strata.engine.liveness import TICK_S, Watch

LIMIT_S = 10.0
TICKS = int(LIMIT_S / TICK_S)


class Process:
    """`answers`: whether it answers a Ping at once."""

    pid = 7

    def __init__(self, *, answers: bool, waited_for: bool = True, to_step: bool = True) -> None:
        self.signs = self.reports = 0
        self.is_waited_for, self.is_to_step = waited_for, to_step
        self.killed: list[str] = []
        self._answers = answers

    def ping(self) -> None:
        self.signs += self._answers

    def kill(self, why: str) -> None:
        self.killed.append(why)


def ticks(watch: Watch, n: int) -> None:
    for _ in range(n):
        watch.tick()


def test_a_process_that_sends_nothing_is_killed_at_the_limit() -> None:
    process = Process(answers=False, to_step=False)  # it loads, or prepares a prompt
    watch = Watch(process, LIMIT_S)
    ticks(watch, TICKS - 1)
    assert process.killed == [] and watch.silent_s == LIMIT_S - TICK_S
    ticks(watch, 1)
    assert process.killed == ["it did not answer for 10 s"]


def test_an_engine_thread_that_hangs_is_seen_behind_the_thread_that_answers() -> None:
    process = Process(answers=True)
    ticks(Watch(process, LIMIT_S), TICKS)
    assert len(process.killed) == 1


@pytest.mark.parametrize(
    ("answers", "waited_for", "to_step"),
    [
        (True, True, False),  # loading and tokenising may take as long as they like
        (False, False, False),  # nobody waits
    ],
)
def test_who_owes_nothing_is_left_alone(answers: bool, waited_for: bool, to_step: bool) -> None:
    process = Process(answers=answers, waited_for=waited_for, to_step=to_step)
    watch = Watch(process, LIMIT_S)
    ticks(watch, 10 * TICKS)
    assert process.killed == [] and watch.silent_s == 0


def test_every_report_and_every_idle_moment_begins_the_count_anew() -> None:
    process = Process(answers=True)
    watch = Watch(process, LIMIT_S)
    for _ in range(3):
        ticks(watch, TICKS - 1)
        process.reports += 1
        ticks(watch, TICKS - 1)
        process.is_to_step = False
        ticks(watch, 1)
        process.is_to_step = True
    assert process.killed == []


def test_without_a_limit_silence_is_only_told() -> None:
    process = Process(answers=False)
    watch = Watch(process, 0)
    ticks(watch, 1000)
    assert process.killed == [] and watch.silent_s == 1000 * TICK_S


def test_a_short_limit_takes_several_ticks_too() -> None:
    process = Process(answers=False)
    watch = Watch(process, TICK_S)
    ticks(watch, 3)
    assert process.killed == []
    ticks(watch, 1)
    assert len(process.killed) == 1
