"""The engine loop on a context in this process: decode failures, and who pays for them. Full pools: test_pausing.py."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.rig import GREEDY

from strata.engine.chunks import Chunks
from strata.engine.loop import Loop
from strata.engine.protocol import (
    Cancel,
    EngineSettings,
    Event,
    Finished,
    Remembered,
    Run,
    RunFailed,
    Shutdown,
    Trim,
    pack_tokens,
)
from strata.engine.startup import load

PROMPT = (np.arange(130) * 7 % 2000).astype(np.int32)


def run(request: int, slot: int, n: int = 130, max_tokens: int = 4) -> Run:
    return Run(
        request=request,
        slot=slot,
        keep=0,
        tokens=pack_tokens(PROMPT[:n]),
        sampling=GREEDY,
        max_tokens=max_tokens,
        limit=400,
        ignore_eos=True,
    )


class Stage:
    """A loop whose commands are all there before it starts; it ends behind the last of them."""

    def __init__(self, path: Path, *, slots: int = 3, **options: Any) -> None:
        options = {"read_chunk": 64, "agenda": True, "context": 256, **options}
        settings = EngineSettings(model_path=str(path), slots=slots, flash_attention="on", threads=1, **options)
        self.served = load(settings, Remembered(), lambda stage, done: None)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.events: list[Event] = []
        self.loop = Loop(self.served, Chunks(None), self.inbox, self._take)
        self._ends_after = 0

    def _take(self, events: Sequence[Event]) -> None:
        self.events += events
        ended = [event for event in self.events if isinstance(event, Finished | RunFailed)]
        if len(ended) >= self._ends_after:
            self.inbox.put(Shutdown())

    def play(self, *commands: object, ends: int) -> dict[int, Finished | RunFailed]:
        """Run the loop until `ends` requests have ended; how each did."""
        self._ends_after = ends
        for command in commands:
            self.inbox.put(command)
        self.loop.run()
        return {event.request: event for event in self.events if isinstance(event, Finished | RunFailed)}


@pytest.fixture
def stage(tiny_paths: dict[str, Path]) -> Iterator[Stage]:
    stage = Stage(tiny_paths["qwen2vl"])
    yield stage
    stage.served.context.close()


def failing(decode: Callable[[int], int], codes: list[int]) -> Callable[[int], int]:
    """`decode`, which gives the next of `codes` instead while there are any that are not 0."""

    def wrapped(rows: int) -> int:
        code = codes.pop(0) if codes else 0
        return code or decode(rows)

    return wrapped


def test_an_error_ends_only_who_is_at_fault(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint batch fails, then the requests one by one: the second of the two again."""
    context = stage.served.context
    monkeypatch.setattr(context, "decode", failing(context.decode, [0, 0, 0, -3, 0, -3]))
    ends = stage.play(run(1, 0, max_tokens=6), run(2, 1), ends=2)
    assert isinstance(ends[1], Finished) and ends[1].timing.write_tokens == 6
    failed = ends[2]
    assert isinstance(failed, RunFailed) and "code -3" in failed.message
    assert failed.held == context.last_position(1) + 1


def test_a_run_that_waits_can_be_cancelled(stage: Stage) -> None:
    """It waits behind a trim of its slot, which waits for nothing: cancelled before the loop looks at either."""
    ends = stage.play(Trim(job=1, slot=0, n=0), run(1, 0), Cancel(request=1), Cancel(request=77), ends=1)
    assert isinstance(ends[1], Finished)
    assert (ends[1].reason, ends[1].held, ends[1].timing.read_tokens) == ("cancelled", 0, 0)


def test_reading_is_first_come_first_served(stage: Stage) -> None:
    stage.play(run(1, 0, max_tokens=0), run(2, 1, max_tokens=0), run(3, 2, max_tokens=0), ends=3)
    assert [event.request for event in stage.events if isinstance(event, Finished)] == [1, 2, 3]
