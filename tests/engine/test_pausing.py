"""A pool that is really full, and the requests that give way: on a context in this process, and by its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.rig import GREEDY, Rig
from tests.engine.test_loop import Stage, failing

from strata.engine.pool_messages import POOL_IS_FULL, Paused, Resume
from strata.engine.protocol import (
    Cancel,
    Delta,
    EngineSettings,
    Event,
    Finished,
    Progress,
    Run,
    RunFailed,
    Sampling,
    Shutdown,
    Trim,
    pack_tokens,
    unpack_tokens,
)
from strata.errors import RunError

PROMPT = (np.arange(900) * 7 % 2000).astype(np.int32)
MARGIN = 512


def run(request: int, slot: int, n: int, max_tokens: int, sampling: Sampling = GREEDY) -> Run:
    return Run(
        request=request,
        slot=slot,
        keep=0,
        tokens=pack_tokens(PROMPT[slot : slot + n]),
        sampling=sampling,
        max_tokens=max_tokens,
        limit=2000,
        ignore_eos=True,
    )


class Crowd(Stage):
    """A pool of 768 cells for three slots of 256 tokens and more: `front` answers each Paused with commands."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, context=256, pool_cells=256)
        assert self.served.context.cells == 768
        self.served.slots.limit = 2000  # the margin too may be used, so the pool is really full
        self.front: Any = lambda paused: []

    def _take(self, events: Sequence[Event]) -> None:
        super()._take(events)
        for event in events:
            if isinstance(event, Paused):
                for command in self.front(event):
                    self.inbox.put(command)

    def written(self, request: int) -> list[int]:
        deltas = [event for event in self.events if isinstance(event, Delta) and event.request == request]
        return [int(token) for delta in deltas for token in unpack_tokens(delta.tokens)]

    def paused(self) -> list[int]:
        return [event.request for event in self.events if isinstance(event, Paused)]


@pytest.fixture
def crowd(tiny_paths: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Crowd]:
    crowd = Crowd(tiny_paths[getattr(request, "param", "qwen2vl")])
    yield crowd
    crowd.served.context.close()


@pytest.mark.parametrize("crowd", ["qwen2vl", "lfm2", "qwen35"], indirect=True)
def test_the_youngest_steps_aside_and_comes_back(crowd: Crowd) -> None:
    """Its cells are freed for the older one; once that has ended, it reads all again and writes on."""
    aside: list[Paused] = []

    def front(paused: Paused) -> list[object]:
        aside.append(paused)
        return [Trim(job=len(aside), slot=1, n=0)]

    crowd.front = front

    def come_back(events: Sequence[Event]) -> None:
        take(events)
        if any(isinstance(event, Finished) and event.request == 1 for event in events):
            crowd.inbox.put(Resume(request=2, slot=1, keep=0))
            crowd.inbox.put(Trim(job=9, slot=0, n=0))

    take, crowd.loop._send = crowd.loop._send, come_back
    ends = crowd.play(run(1, 0, 360, 200), run(2, 1, 300, 120), ends=2)
    first, second = ends[1], ends[2]
    assert crowd.paused() == [2]
    assert isinstance(first, Finished) and (first.reason, len(crowd.written(1))) == ("length", 200)
    assert isinstance(second, Finished) and (second.reason, len(crowd.written(2))) == ("length", 120)
    assert aside[0].held >= 300
    again = [event for event in crowd.events if isinstance(event, Progress) and event.request == 2]
    assert again[-1].held == again[-1].total == aside[0].held + 1
    assert second.held == crowd.served.slots.held[1] == 300 + 120 - 1
    assert second.timing.write_tokens == 120 and second.timing.read_tokens == 300 + again[-1].total


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(temperature=1.0, seed=11), Sampling(temperature=0.7, seed=3, repeat_penalty=1.3)],
    ids=["greedy", "drawn", "with penalties"],
)
def test_what_it_writes_is_what_it_would_have_written(
    crowd: Crowd, sampling: Sampling, tiny_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same cells with and without pauses, in the reading and in the writing: token for token the same."""
    alone = Crowd(tiny_paths["qwen2vl"])
    try:
        hold(alone, slot=2)
        alone.play(run(1, 0, 100, 60, sampling), ends=1)
        expected = alone.written(1)
    finally:
        alone.served.context.close()
    assert len(set(expected)) > 2
    hold(crowd, slot=2)
    decode = crowd.served.context.decode
    monkeypatch.setattr(crowd.served.context, "decode", failing(decode, [0, 1, *[0] * 9, 1, 1, *[0] * 20, 1]))
    crowd.front = lambda paused: [Resume(request=1, slot=0, keep=paused.held)]
    ends = crowd.play(run(1, 0, 100, 60, sampling), ends=1)
    assert len(crowd.paused()) == 4 and isinstance(ends[1], Finished)
    assert crowd.written(1) == expected and ends[1].timing.write_tokens == 60


def hold(crowd: Crowd, *, slot: int) -> None:
    """An idle slot with a few cells."""
    crowd.served.context.feed(slot, [1] * 50, 0)
    crowd.served.slots.held[slot] = 50


def test_only_one_pauses_while_its_cells_are_about_to_be_free(crowd: Crowd) -> None:
    """The others wait for the front instead of pausing too, and lose nothing."""
    crowd.front = lambda paused: [Trim(job=1, slot=2, n=0), Resume(request=3, slot=2, keep=0)][
        : 1 if len(crowd.paused()) == 1 else 2
    ]
    ends = crowd.play(run(1, 0, 250, 40), run(2, 1, 250, 40), run(3, 2, 240, 60), Cancel(request=77), ends=2)
    assert crowd.paused() == [3]
    assert all(isinstance(ends[n], Finished) and len(crowd.written(n)) == 40 for n in (1, 2))


def test_a_paused_request_can_be_cancelled(crowd: Crowd) -> None:
    crowd.front = lambda paused: [Cancel(request=paused.request), Trim(job=1, slot=1, n=0)]
    ends = crowd.play(run(1, 0, 400, 100), run(2, 1, 320, 100), ends=2)
    cancelled = ends[2]
    assert isinstance(cancelled, Finished) and cancelled.reason == "cancelled" and cancelled.held >= 320
    assert isinstance(ends[1], Finished) and len(crowd.written(1)) == 100
    crowd.inbox.put(Resume(request=2, slot=1, keep=0))  # too late: nothing happens
    crowd.inbox.put(Shutdown())
    crowd.loop._closing = False
    crowd.loop.run()
    assert crowd.loop._active == []


def test_who_fills_the_pool_alone_fails(crowd: Crowd) -> None:
    failed = crowd.play(run(1, 0, 700, 100), ends=1)[1]
    assert isinstance(failed, RunFailed) and failed.message == POOL_IS_FULL
    assert failed.held == crowd.served.slots.held[0] == crowd.served.context.last_position(0) + 1 == 768
    assert crowd.served.slots.trim(0, 100) is None


def test_a_resume_into_a_slot_that_lacks_it_fails(crowd: Crowd) -> None:
    crowd.front = lambda paused: [Trim(job=1, slot=1, n=0), Resume(request=2, slot=1, keep=5)]
    ends = crowd.play(run(1, 0, 400, 100), run(2, 1, 320, 100), ends=2)
    failed = ends[2]
    assert isinstance(failed, RunFailed) and failed.kind == "state" and failed.held == 0


# ---------------------------------------------------------------------------------------------- in a process of its own


@pytest.fixture
def small(tiny_paths: dict[str, Path], runner: asyncio.Runner) -> Iterator[Rig]:
    settings = EngineSettings(
        model_path=str(tiny_paths["qwen2vl"]),
        slots=3,
        context=700,
        pool_cells=900,
        flash_attention="on",
        read_chunk=64,
        threads=1,
    )
    rig = Rig(settings, runner, arena_mib=64)
    rig.start()
    yield rig
    rig.close()


def test_the_pool_is_as_large_as_it_was_told(small: Rig) -> None:
    info = small.info
    assert (info.context, info.room_cells) == (700, 900)
    assert 900 + 256 <= info.pool_cells < 3 * 700


def test_a_context_is_no_larger_than_the_pool(tiny_paths: dict[str, Path], runner: asyncio.Runner) -> None:
    settings = EngineSettings(
        model_path=str(tiny_paths["qwen2vl"]), slots=2, context=700, pool_cells=300, flash_attention="on", threads=1
    )
    rig = Rig(settings, runner, arena_mib=16)
    try:
        assert (rig.start().context, rig.info.room_cells) == (300, 300)
    finally:
        rig.close()


def test_a_block_that_finds_no_cells_says_so_and_fits_later(small: Rig) -> None:
    """The slot is as it was; the same bytes go in once there is room."""
    tokens = PROMPT[:257]
    small.generate(tokens, slot=0, max_tokens=1)
    block = small.capture(0, 0, 256)
    small.do(small.client.trim(0, 0))
    small.generate(PROMPT[:690], slot=1, max_tokens=1)
    small.generate(PROMPT[:690], slot=2, max_tokens=1)
    done = small.do(small.apply(0, block, tokens))
    assert (done.ok, done.reason, done.held) == (False, POOL_IS_FULL, 0)
    small.do(small.client.trim(1, 0))
    small.restore(0, [block], tokens)
    assert small.payload(small.capture(0, 0, 256)) == small.payload(block)


def test_paused_resumed_and_cancelled_through_the_pipe(small: Rig) -> None:
    async def both() -> tuple[list[Event], Finished]:
        older = small.run(PROMPT[:690], slot=0, max_tokens=10)
        middle = small.run(PROMPT[:400], slot=1, max_tokens=400)
        youngest = small.run(PROMPT[:300], slot=2, max_tokens=400)
        events: list[Event] = []
        async for event in youngest:
            events.append(event)
            if isinstance(event, Paused):
                break
        assert (await small.client.trim(2, 0)).ok
        finished = [event async for event in older if isinstance(event, Finished)]
        assert finished[0].reason == "length"
        assert (await small.client.trim(0, 0)).ok
        youngest.resume(0)
        events.append(await anext(youngest))
        await middle.cancel()
        return events, await youngest.cancel()

    events, finished = small.do(both())
    paused = next(event for event in events if isinstance(event, Paused))
    progress = events[-1]
    assert isinstance(progress, Progress) and progress.total >= max(300, paused.held)
    assert finished.reason == "cancelled"


def test_a_killed_engine_ends_what_is_paused(small: Rig) -> None:
    async def paused() -> None:
        small.run(PROMPT[:690], slot=0, max_tokens=10)
        small.run(PROMPT[:690], slot=1, max_tokens=10)
        youngest = small.run(PROMPT[:690], slot=2, max_tokens=10)
        async for event in youngest:
            if isinstance(event, Paused):
                return
        raise AssertionError("it was not paused")

    small.do(paused())
    small.kill()
    small.clear()
    with pytest.raises(RunError):
        small.generate(PROMPT[:50], slot=0, keep=10)
