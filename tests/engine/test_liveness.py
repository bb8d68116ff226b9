"""The rules of the watch, tick by tick; that a real process which hangs is replaced is in tests/serve."""

from __future__ import annotations

import asyncio

import pytest

from strata.engine.liveness import START_LIMIT_S, TICK_S, Watch
from strata.engine.process import EngineProcess
from strata.engine.protocol import (
    Done,
    EngineSettings,
    Event,
    LoadFailed,
    Paused,
    Pong,
    Prepare,
    Prepared,
    Remembered,
    Run,
    RunFailed,
    Sampling,
    Trim,
)
from strata.engine.wire import encode_frame
from strata.errors import EngineGone, ModelError, StrataError

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


def heard(process: Process, limit_s: float) -> Watch:
    """A watch that has just heard the process's first word."""
    watch = Watch(process, limit_s)
    process.signs += 1
    process.reports += 1
    watch.tick()
    return watch


def test_a_process_that_sends_nothing_is_killed_at_the_limit() -> None:
    process = Process(answers=False, to_step=False)  # it loads, or prepares a prompt
    watch = heard(process, LIMIT_S)
    ticks(watch, TICKS - 1)
    assert process.killed == [] and watch.silent_s == LIMIT_S - TICK_S
    ticks(watch, 1)
    assert process.killed == ["it did not answer for 10 s"]


def test_an_engine_thread_that_hangs_is_seen_behind_the_thread_that_answers() -> None:
    process = Process(answers=True)
    ticks(heard(process, LIMIT_S), TICKS)
    assert len(process.killed) == 1


@pytest.mark.parametrize("limit_s", [1.0, LIMIT_S, 2 * START_LIMIT_S])
def test_a_process_has_time_to_import_before_it_first_speaks(limit_s: float) -> None:
    process = Process(answers=False, to_step=False)
    watch = Watch(process, limit_s)
    allowed_s = max(limit_s, START_LIMIT_S)
    until_killed = round(allowed_s / min(TICK_S, limit_s / 4))
    ticks(watch, until_killed - 1)
    assert process.killed == []
    ticks(watch, 1)
    assert process.killed == [f"it did not start within {allowed_s:.0f} s"]


def test_once_it_has_spoken_the_limit_is_the_one_that_was_set() -> None:
    process = Process(answers=False, to_step=False)
    watch = Watch(process, LIMIT_S)
    ticks(watch, 5 * TICKS)
    process.signs += 1  # the first Pong: it has imported
    ticks(watch, TICKS)
    assert process.killed == []
    ticks(watch, 1)
    assert process.killed == ["it did not answer for 10 s"]


@pytest.mark.parametrize(
    ("answers", "waited_for", "to_step"),
    [
        (True, True, False),  # loading and tokenising may take as long as they like
        (False, False, False),  # nobody waits
    ],
)
def test_who_owes_nothing_is_left_alone(answers: bool, waited_for: bool, to_step: bool) -> None:
    process = Process(answers=answers, waited_for=waited_for, to_step=to_step)
    watch = heard(process, LIMIT_S)
    ticks(watch, 10 * TICKS)
    assert process.killed == [] and watch.silent_s == 0


def test_every_report_and_every_idle_moment_begins_the_count_anew() -> None:
    process = Process(answers=True)
    watch = heard(process, LIMIT_S)
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
    watch = heard(process, TICK_S)
    ticks(watch, 3)
    assert process.killed == []
    ticks(watch, 1)
    assert len(process.killed) == 1


class Pipe:
    """Stands for the transports of a process that was started."""

    def get_pid(self) -> int:
        return 7

    def get_returncode(self) -> int:
        return -9

    def kill(self) -> None:
        pass

    def get_pipe_transport(self, _: int) -> Pipe:
        return self

    def is_closing(self) -> bool:
        return False

    def write(self, _: bytes) -> None:
        pass


@pytest.mark.parametrize(
    ("killed", "kind", "message"),
    [(True, EngineGone, "it did not start within 120 s"), (False, ModelError, "signal 9.*the file is damaged")],
)
def test_the_file_is_blamed_only_for_an_end_of_its_own(killed: bool, kind: type[StrataError], message: str) -> None:
    async def scenario() -> None:
        process = EngineProcess(None, 5)
        process.connection_made(Pipe())  # type: ignore[arg-type]
        loading = asyncio.ensure_future(process.load(EngineSettings(model_path="a.gguf", slots=1), Remembered(), None))
        await asyncio.sleep(0)
        if killed:
            ticks(process.watch, int(START_LIMIT_S / TICK_S))
        process.connection_lost(None)
        with pytest.raises(kind, match=message):
            await loading

    asyncio.run(scenario())


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
