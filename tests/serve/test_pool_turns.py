"""Turns in a pool that is too small for all of them, on the fake engine: who waits, who steps aside, what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.serve.workbench import Workbench, ask, right_answer, ticks, until, words

from strata.cache.ram import RamLimits
from strata.errors import ContextOverflow
from strata.serve.making_room import empty_idle
from strata.serve.parks import Workshop
from strata.serve.request import Completed, Parked, Started, Text, TurnEvent, TurnRequest
from strata.serve.turn import run_turn
from strata.types import MIB

pytestmark = pytest.mark.anyio

RAM = RamLimits(budget_bytes=32 * MIB, most=8)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def bench_of(root: Path, *, cells: int, slots: int = 3, **options: Any) -> AsyncIterator[Workbench]:
    """A workshop whose pool has `cells` for all slots together."""
    bench = Workbench(root, slots=slots, **options)
    info = bench.engine.info
    bench.engine.info = msgspec.structs.replace(info, room_cells=cells, context=min(info.context, cells))
    bench.shop = Workshop(engine=bench.engine, slots=bench.slots, cache=bench.cache)
    try:
        yield bench
        await bench.check()
    finally:
        bench.close()


class Turn:
    """A request that runs beside others; its events so far."""

    def __init__(self, bench: Workbench, request: TurnRequest) -> None:
        self.events: list[TurnEvent] = []
        self.request = request
        self._bench = bench
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with aclosing(run_turn(self._bench.shop, self.request)) as events:
            async for event in events:
                self.events.append(event)

    def has(self, kind: type[TurnEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def completed(self) -> Completed:
        return next(event for event in self.events if isinstance(event, Completed))

    async def is_right(self) -> None:
        """The reply is the one of a request that was never disturbed."""
        await self.task
        prompt = await self._bench.prompt_of(self.request)
        assert self.text == right_answer(prompt, len(self.text))
        assert len(self.text) == self.completed.completion_tokens == self.request.max_tokens


def used(bench: Workbench) -> int:
    return sum(map(len, bench.engine.states))


async def test_a_request_waits_until_another_has_ended(tmp_path: Path) -> None:
    async with bench_of(tmp_path, cells=1000) as bench:
        first = Turn(bench, ask(words(1, 600), max_tokens=30))
        await until(lambda: first.has(Started) > 0)
        second = Turn(bench, ask(words(2, 500), max_tokens=30))
        await until(lambda: second.has(Parked) > 0)
        assert bench.slots.all[1].doing == "waiting for room" and not bench.engine.states[1]
        await first.is_right()
        await second.is_right()
        assert not second.task.cancelled() and used(bench) <= 1000
        assert [slot.doing for slot in bench.slots.all] == ["idle"] * 3
        assert (bench.shop.pool.running, bench.shop.pool.waiting) == ([], [])


async def test_the_oldest_that_waits_goes_first(tmp_path: Path) -> None:
    """A small one that would fit does not overtake."""
    async with bench_of(tmp_path, cells=1000) as bench:
        first = Turn(bench, ask(words(1, 500), max_tokens=40))
        await until(lambda: first.has(Started) > 0)
        large = Turn(bench, ask(words(2, 700), max_tokens=5))
        await until(lambda: large.has(Parked) > 0)
        small = Turn(bench, ask(words(3, 20), max_tokens=5))
        await until(lambda: small.has(Parked) > 0)
        await asyncio.gather(first.is_right(), large.is_right(), small.is_right())


async def test_idle_slots_give_up_what_a_new_request_needs(tmp_path: Path) -> None:
    async with bench_of(tmp_path, cells=1000, ram=RAM) as bench:
        for seed in (1, 2):
            await Turn(bench, ask(words(seed, 300), max_tokens=3)).is_right()
        await Turn(bench, ask(words(3, 500), max_tokens=3)).is_right()
        assert used(bench) <= 1000 and not bench.engine.states[0]
        again = Turn(bench, ask(words(1, 300), max_tokens=3))
        await again.is_right()
        assert again.completed.cached_tokens > 256, "it was parked before its cells went"


@pytest.mark.parametrize("kept", ["ram", "disk", "nothing"])
async def test_a_paused_request_steps_aside_and_writes_on(tmp_path: Path, kept: str) -> None:
    async with bench_of(tmp_path, cells=1400, ram=RAM if kept == "ram" else None) as bench:
        if kept == "nothing":
            bench.shop = Workshop(engine=bench.engine, slots=bench.slots, cache=None)
        first = Turn(bench, ask(words(1, 300), max_tokens=60))
        await until(lambda: first.has(Text) > 3)
        second = Turn(bench, ask(words(2, 300), max_tokens=60))
        await until(lambda: second.has(Text) > 20)
        bench.engine.pause(1)
        await until(lambda: second.has(Parked) > 0)
        await asyncio.gather(first.is_right(), second.is_right())
        assert second.has(Parked) == 1 and first.has(Parked) == 0
        assert second.completed.cached_tokens == 0
        assert bench.engine.wrong_restores == 0
        if kept == "ram":
            assert bench.cache.counters.ram_hits == 1


async def test_a_paused_request_goes_on_at_once_when_an_idle_slot_gives_way(tmp_path: Path) -> None:
    async with bench_of(tmp_path, cells=1400) as bench:
        await Turn(bench, ask(words(9, 400), max_tokens=3)).is_right()
        turn = Turn(bench, ask(words(1, 300), max_tokens=40))
        await until(lambda: turn.has(Text) > 5)
        slot = next(iter(bench.engine.running))
        bench.engine.pause(slot)
        await turn.is_right()
        assert turn.has(Parked) == 1 and used(bench) == len(bench.engine.states[slot]), "only its own cells are left"


@pytest.mark.parametrize("when", ["waiting", "stepping aside", "aside"])
async def test_a_client_that_goes_away_meanwhile_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    async with bench_of(tmp_path, cells=1000, ram=RAM) as bench:
        first = Turn(bench, ask(words(1, 400), max_tokens=200))
        await until(lambda: first.has(Text) > 3)
        second = Turn(bench, ask(words(2, 500 if when == "waiting" else 100), max_tokens=200))
        if when != "waiting":
            await until(lambda: second.has(Text) > 3)
            bench.engine.pause(1)
        await until(lambda: second.has(Parked) > 0)
        if when == "aside":
            await until(lambda: bench.slots.all[1].doing == "waiting for room" and not bench.engine.states[1])
        else:
            await ticks(2)
        second.task.cancel()
        await asyncio.gather(second.task, return_exceptions=True)
        assert not bench.slots.all[1].busy and bench.shop.pool.waiting == []
        await first.is_right()
        assert bench.shop.pool.running == []
        third = Turn(bench, ask(words(3, 700), max_tokens=20))
        await third.is_right()


async def test_an_engine_that_dies_while_requests_wait(tmp_path: Path) -> None:
    async with bench_of(tmp_path, cells=1000) as bench:
        first = Turn(bench, ask(words(1, 600), max_tokens=50))
        await until(lambda: first.has(Text) > 3)
        second = Turn(bench, ask(words(2, 600), max_tokens=5))
        await until(lambda: second.has(Parked) > 0)
        bench.engine.kill()
        bench.engine.restart()
        await asyncio.gather(first.task, second.task, return_exceptions=True)
        assert (bench.shop.pool.running, bench.shop.pool.waiting) == ([], [])
        await Turn(bench, ask(words(3, 700), max_tokens=5)).is_right()


async def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with bench_of(tmp_path, cells=400) as bench:
        n = len(await bench.prompt_of(ask(words(1, 500))))
        with pytest.raises(ContextOverflow, match=f"the prompt has {n} tokens, and the K/V pool of 400 tokens"):
            await Turn(bench, ask(words(1, 500))).task


@pytest.mark.parametrize("seed", range(6))
async def test_many_in_a_pool_of_a_context_and_a_third(tmp_path: Path, seed: int) -> None:
    """Pauses at random: every reply is right, whole, and of its own conversation."""
    random = np.random.default_rng(seed)
    async with bench_of(tmp_path, cells=900, slots=4, ram=RAM if seed % 2 else None) as bench:
        turns = []
        for i in range(10):
            length, reply = int(random.integers(5, 600)), int(random.integers(1, 120))
            turns.append(Turn(bench, ask(words(100 * seed + i, length), max_tokens=reply)))
            for _ in range(int(random.integers(0, 6))):
                await ticks(int(random.integers(0, 30)))
                if bench.engine.running:
                    bench.engine.pause(int(random.choice(sorted(bench.engine.running))))
        async with asyncio.timeout(30):
            await asyncio.gather(*(turn.is_right() for turn in turns))
        await empty_idle(bench.shop)
        assert used(bench) <= 900 and bench.engine.wrong_restores == 0
        assert not any(slot.busy for slot in bench.slots.all)
        assert (bench.shop.pool.running, bench.shop.pool.waiting) == ([], [])
