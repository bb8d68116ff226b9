"""The rules of the watch, tick by tick; that a real process which hangs is replaced is in tests/serve."""

from __future__ import annotations

import asyncio

import pytest

from strata.engine.liveness import TICK_S, Watch
from strata.engine.process import EngineProcess
from strata.engine.protocol import (
    Done,
    Event,
    LoadFailed,
    Paused,
    Pong,
    Prepare,
    Prepared,
    Run,
    RunFailed,
    Sampling,
    Trim,
)
from strata.engine.wire import encode_frame

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


class Pipe:
    """Stands for the transports of a process that was started."""

    def get_pipe_transport(self, _: int) -> Pipe:
        return self

    def is_closing(self) -> bool:
        return False

    def write(self, _: bytes) -> None:
        pass


def test_what_a_process_owes() -> None:
    async def scenario() -> None:
        process = EngineProcess(None, 0)
        process.connection_made(Pipe())  # type: ignore[arg-type]

        def hear(event: Event) -> None:
            process.pipe_data_received(1, encode_frame(event))

        assert process.is_waited_for and not process.is_to_step, "it loads"
        hear(LoadFailed(message="so that it has loaded"))
        assert not process.is_waited_for
        preparing = asyncio.ensure_future(process.call(Prepare(job=1, text="x"), 1, Prepared))
        await asyncio.sleep(0)
        assert process.is_waited_for and not process.is_to_step
        reports = process.reports
        hear(Prepared(job=1, tokens=b"", render_s=0.0, tokenize_s=0.0, reused=0))
        hear(Pong())
        await preparing
        assert not process.is_waited_for and process.reports == reports

        run = process.run(Run(request=2, slot=0, keep=0, tokens=b"", sampling=Sampling(), max_tokens=1, limit=1))
        assert process.is_to_step
        hear(Paused(request=2, held=1))
        assert process.is_waited_for and not process.is_to_step, "the front is to make room"
        trimming = asyncio.ensure_future(process.call(Trim(job=3, slot=1, n=0), 3, Done))
        await asyncio.sleep(0)
        assert process.is_to_step
        hear(Done(job=3, ok=True, held=0))
        await trimming
        assert not process.is_to_step
        run.resume(1)
        assert process.is_to_step
        hear(RunFailed(request=2, kind="decode", message="", held=0))
        assert not process.is_waited_for

    asyncio.run(scenario())
