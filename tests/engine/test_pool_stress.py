"""Many requests on a real engine whose pool is too small: forks, pauses, clients that leave, idle slots that give way.

The tiny model's cells carry the ids of their tokens, so at the end every slot can be asked whose rows it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.engine.rig import GREEDY
from tests.engine.test_kept_turns import engine, settings

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits, ConversationCache
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLimits
from strata.serve.making_room import empty_idle
from strata.serve.parks import Workshop
from strata.serve.request import Completed, Parked, TurnRequest
from strata.serve.slots import Slots
from strata.serve.tax import PoolTax, compact
from strata.serve.turn import run_turn
from strata.store.level import Level
from strata.types import MIB, pad_to_page

CONTEXT, CELLS, SLOTS = 1100, 1430, 4
LIMITS = CacheLimits(
    floors=Floors(parking_bytes=0, transient_bytes=0),
    park_target="ram",
    ram=RamLimits(budget_bytes=64 * MIB, most=6),
    ladder=True,
)
WORDS = ("mill", "river", "rain", "summer", "stone", "lamp", "letter", "crate", "road", "map", "harbour", "clerk")


def prose(random: np.random.Generator, n: int) -> str:
    return " ".join(random.choice(WORDS, n))


@asynccontextmanager
async def crowded(path: Path, root: Path, *, cached: bool) -> AsyncIterator[Workshop]:
    wanted = settings(
        path,
        slots=SLOTS,
        context=CONTEXT,
        pool_cells=CELLS,
        read_chunk=64,
        measure_idle_cells=True,
        spare_checkpoints=4,
    )
    async with engine(wanted) as (client, arena):
        cache = None
        if cached:
            levels = [(Level.open(root), DiskLimits(budget_bytes=1 << 40))]
            cache = ConversationCache(engine=client, arena=arena, limits=LIMITS, levels=levels, memory=lambda: 1 << 40)
        slots = Slots(SLOTS, is_kept=cache.keeps_live if cache is not None else lambda _: False)
        if not client.info.cuttable:
            slots.resume_point = cache.resume_point if cache is not None else lambda root, tokens: 0
        shop = Workshop(engine=client, slots=slots, cache=cache)
        tax = PoolTax(shop)
        shop.pool.on_written = tax.wrote
        try:
            yield shop
            while waiting := [*shop.parks, *tax.tasks]:
                await asyncio.wait(waiting)
            assert cache is None or cache.check() == []
        finally:
            if cache is not None:
                cache.close()


async def turn(shop: Workshop, request: TurnRequest) -> tuple[int, int]:
    """How often it was parked, and that its reply is as long as it must be."""
    parked, completed = 0, None
    async with aclosing(run_turn(shop, request)) as events:
        async for event in events:
            parked += isinstance(event, Parked)
            completed = event
    assert isinstance(completed, Completed) and request.max_tokens is not None
    assert completed.completion_tokens == min(request.max_tokens, CONTEXT - completed.prompt_tokens)
    return parked, completed.completion_tokens


async def rows_are_of_their_tokens(shop: Workshop) -> int:
    """Check the token ids in the cells of every slot; how many."""
    info, arena, checked = shop.engine.info, shop.engine._arena, 0  # type: ignore[attr-defined]
    stage = info.stages[0]
    for slot in shop.slots.all:
        for start in range(0, len(slot.tokens), info.block_tokens):
            end = min(start + info.block_tokens, len(slot.tokens))
            size = stage.payload_bytes(end - start)
            span = arena.alloc(info.head_room + pad_to_page(size))
            done = await shop.engine.capture(slot.index, start, end, (span,))
            assert done.ok and done.held == len(slot.tokens), done
            payload = bytes(arena.view(span)[info.head_room : info.head_room + size])
            arena.free(span)
            words = np.frombuffer(payload[-12 * (end - start) :], "<i4").reshape(-1, 3)
            assert np.array_equal(words[:, 2], slot.tokens[start:end]), f"slot {slot.index} [{start}, {end})"
            checked += end - start
    return checked


@pytest.mark.parametrize("cached", [False, True], ids=["nothing kept", "kept"])
@pytest.mark.parametrize("model", ["qwen2vl", "lfm2"])
def test_everybody_gets_their_reply(tmp_path: Path, tiny_paths: dict[str, Path], model: str, cached: bool) -> None:
    random = np.random.default_rng(len(model) + cached)
    shared = prose(random, 60)

    async def body() -> None:
        async with crowded(tiny_paths[model], tmp_path, cached=cached) as shop, asyncio.timeout(120):
            turns, leavers = [], []
            for n in range(14):
                head = shared if n % 3 == 0 else ""
                request = TurnRequest(
                    text=f"{head} {n} {prose(random, int(random.integers(20, 200)))}",
                    sampling=GREEDY,
                    max_tokens=int(random.integers(10, 500)),
                    ignore_eos=True,
                )
                task = asyncio.create_task(turn(shop, request))
                (leavers if n % 5 == 4 else turns).append(task)
                await asyncio.sleep(float(random.uniform(0, 0.1)))
                if n % 5 == 0 and leavers:
                    leavers.pop().cancel()
            parked = [count for count, _ in await asyncio.gather(*turns)]
            for task in leavers:
                task.cancel()
            await asyncio.gather(*leavers, return_exceptions=True)
            assert sum(parked) >= 2, "the pool was not too small"
            while any(slot.busy for slot in shop.slots.all):  # noqa: ASYNC110 a leaver puts its slot in order
                await asyncio.sleep(0.01)
            assert (shop.pool.running, shop.pool.waiting) == ([], [])
            if shop.engine.info.cuttable:
                await compact(shop)
                assert await rows_are_of_their_tokens(shop) > 100
            await empty_idle(shop, at_least=1 << 30)
            whole = TurnRequest(text=prose(random, 250), sampling=GREEDY, max_tokens=CONTEXT, ignore_eos=True)
            assert (await turn(shop, whole))[0] == 0, "nothing is left in the pool"

    asyncio.run(body())
