"""The real model through the whole cache: what comes back after the process ended is what was there, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits, ConversationCache
from strata.cache.capturing import block_lengths
from strata.cache.put import DiskLimits
from strata.engine.client import EngineClient
from strata.engine.protocol import EngineSettings, Sampling
from strata.rules import prefix
from strata.serve.request import Completed, TurnRequest
from strata.serve.slots import Slots
from strata.serve.turn import Workshop, run_turn
from strata.serve.wiring import find_model
from strata.store.arena import Arena
from strata.store.level import Level
from strata.types import MIB, Key, Tokens

FACTS = " ".join(f"Shelf {i} holds {i * 37 % 101} boxes of nails." for i in range(60))
GREEDY = Sampling(temperature=0)


@asynccontextmanager
async def workshop(
    root: Path, *, ladder: bool = False, layer_split: tuple[float, ...] = ()
) -> AsyncIterator[tuple[Workshop, Arena]]:
    """A new engine process with three slots, on the directory `root`."""
    level, arena = Level.open(root), Arena(256 * MIB)
    model = str(find_model("demo"))
    settings = EngineSettings(model_path=model, slots=3, context=1024, flash_attention="on", layer_split=layer_split)
    engine = EngineClient(settings, arena)
    info = await engine.start()
    cache = ConversationCache(
        engine=engine,
        arena=arena,
        limits=CacheLimits(floors=Floors(parking_bytes=0, transient_bytes=0), park_target="disk", ladder=ladder),
        levels=[(level, DiskLimits(budget_bytes=1 << 34))],
        memory=lambda: 1 << 40,
    )
    try:
        yield Workshop(engine=engine, slots=Slots(info.slots), cache=cache), arena
        assert cache.check() == []
        assert level.used_bytes == level.usage()
        assert arena.used_bytes == 0
    finally:
        cache.close()
        await engine.close()
        arena.close()


async def turn(shop: Workshop, text: str, max_tokens: int) -> int:
    """Run a turn and its park to the end; the slot it had."""
    message = {"role": "user", "content": text}
    request = TurnRequest(messages=(message,), sampling=GREEDY, max_tokens=max_tokens, ignore_eos=True)
    before = [slot.tokens for slot in shop.slots.all]
    events = [event async for event in run_turn(shop, request)]
    assert isinstance(events[-1], Completed)
    while shop.parks:
        await asyncio.wait(set(shop.parks))
    assert shop.cache is not None and await shop.cache.flush(30)
    (slot,) = [slot for slot, old in zip(shop.slots.all, before, strict=True) if slot.tokens is not old]
    return slot.index


async def state(shop: Workshop, arena: Arena, slot: int, tokens: Tokens) -> bytes:
    """Everything a slot holds, in canonical form, without the padding."""
    info, found = shop.engine.info, b""
    for start, end in prefix.blocks(0, len(tokens), info.block_tokens):
        spans = tuple(
            span for n in block_lengths(shop.engine, end - start, info.stages) if (span := arena.alloc(n)) is not None
        )
        assert (await shop.engine.capture(slot, start, end, spans)).ok
        for span, stage in zip(spans, info.stages, strict=True):
            found += arena.view(span)[info.head_room :][: stage.payload_bytes(end - start)].tobytes()
            arena.free(span)
    return found


def test_parked_and_restored_states_are_equal_and_others_are_untouched(tmp_path: Path) -> None:
    async def first_life() -> tuple[bytes, Tokens, Key]:
        async with workshop(tmp_path) as (shop, arena):
            await turn(shop, "Something else in front, so that the cells are not those of the next life.", 8)
            index = await turn(shop, FACTS, 32)
            slot = shop.slots.all[index]
            assert slot.root is not None
            return await state(shop, arena, index, slot.tokens), slot.tokens, slot.root

    async def second_life(parked: bytes, tokens: Tokens, root: Key) -> None:
        async with workshop(tmp_path) as (shop, arena):
            cache = shop.cache
            assert cache is not None
            other = await turn(shop, "A conversation that lives here. " * 12, 16)
            beside = await state(shop, arena, other, shop.slots.all[other].tokens)
            target = (other + 1) % 3
            match = cache.lookup(root, np.append(tokens, np.int32(1)), beyond=1)
            assert match is not None and match.upto == len(tokens)
            assert (await cache.restore(target, match, 0)).held == len(tokens)
            assert await state(shop, arena, target, tokens) == parked
            assert await state(shop, arena, other, shop.slots.all[other].tokens) == beside

    async def lives() -> None:
        await second_life(*await first_life())

    asyncio.run(lives())
