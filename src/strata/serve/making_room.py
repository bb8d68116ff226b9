"""Making room in the K/V pool: idle slots are emptied, requests wait for room, a paused one steps aside and comes back.

What is owed is parked before its cells go. Who has room is decided in pool.py; the argument why nobody waits for ever
is in rules/pool.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import EngineGone, EngineRefused
from strata.rules.pool import IdleSlot, gives_up
from strata.rules.slots import Seat
from strata.serve.parks import Workshop, leave, park
from strata.serve.pool import Claim
from strata.serve.slots import NOTHING, Slot
from strata.types import Key, Tokens


async def empty_idle(shop: Workshop, *, at_least: int = 0) -> int:
    """Let idle slots give up what those that run need, and `at_least` so many cells; the cells that are free now."""
    freed = 0
    while chosen := _chosen(shop, at_least - freed):
        slot = shop.slots.all[chosen[0]]
        if not shop.slots.borrow(slot, "making room"):
            break
        try:
            freed += len(slot.tokens)
            await empty(shop, slot)
        finally:
            shop.slots.give_back(slot)
    return freed


def _chosen(shop: Workshop, at_least: int) -> tuple[int, ...]:
    running = {claim.slot for claim in shop.pool.running}
    others = [slot for slot in shop.slots.all if slot.index not in running]
    idle = [
        IdleSlot(
            index=slot.index,
            held=len(slot.tokens),
            kept=not slot.owed or shop.slots.is_kept(slot.index),
            last_used_s=slot.last_used_s,
        )
        for slot in others
        if not slot.busy
    ]
    return gives_up(idle, max(at_least, shop.pool.excess(sum(len(slot.tokens) for slot in others))))


async def empty(shop: Workshop, slot: Slot) -> None:
    """Park what a slot holds, if it is owed and nothing else keeps it, and free its cells. The slot must be ours."""
    leave(shop, slot, stays=0)
    slot.forget()
    await slot.give_way(0)
    done = await shop.engine.trim(slot.index, 0)
    if not done.ok or done.held:
        raise EngineRefused(f"slot {slot.index} cannot be emptied: {done.reason}")


async def cut_to_claim(shop: Workshop, slot: Slot) -> None:
    """Free what the slot holds beyond its claim: a restore that was left half-way had brought in more.

    Memory that cannot be cut there is emptied.
    """
    await slot.give_way(len(slot.tokens))
    done = await shop.engine.trim(slot.index, len(slot.tokens))
    if not done.ok or done.held != len(slot.tokens):
        slot.forget()
        await shop.engine.trim(slot.index, 0)


async def wait_for_room(shop: Workshop, slot: Slot, claim: Claim) -> Seat:
    """Until the request may begin. Its slot is emptied: what waits holds no cells."""
    slot.doing = "waiting for room"
    await empty(shop, slot)
    await shop.pool.wait(claim)
    slot.doing = "preparing"
    return Seat(slot=slot.index, keep=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A request that the engine paused: `tokens` are its prompt and reply so far, of which the slot holds `held`.

    `keeps`: it may be parked, and restored. `frontier`: of its prompt, None without one.
    """

    root: Key
    tokens: Tokens
    held: int
    frontier: int | None
    keeps: bool


async def step_aside(shop: Workshop, slot: Slot, claim: Claim, standing: Standing) -> int:
    """Make room, with the request's own cells if no idle slot has any; the positions that its slot holds at last.

    Raises EngineGone when the engine was replaced meanwhile.
    """
    generation = shop.engine.generation
    slot.doing = "waiting for room"
    if await empty_idle(shop, at_least=1):
        return standing.held
    await _put_aside(shop, slot, standing)
    await shop.pool.wait(claim)
    if shop.engine.generation != generation:
        raise EngineGone("the engine was replaced while the request waited for room; send it again", retry_after_s=1)
    await empty_idle(shop)
    return await _bring_back(shop, slot, standing)


async def _put_aside(shop: Workshop, slot: Slot, standing: Standing) -> None:
    slot.tokens = standing.tokens[: standing.held]
    if standing.keeps:
        park(shop, slot, frontier=standing.frontier)
        await slot.give_way(0)
    if shop.cache is not None:
        shop.cache.left(slot.index)
    slot.tokens = NOTHING
    done = await shop.engine.trim(slot.index, 0)
    if not done.ok:
        raise EngineRefused(f"slot {slot.index} cannot be emptied: {done.reason}")


async def _bring_back(shop: Workshop, slot: Slot, standing: Standing) -> int:
    """What is stored of it; the rest is read again."""
    if shop.cache is None or not standing.keeps:
        return 0
    found = shop.cache.lookup(standing.root, standing.tokens, beyond=1, held=0)
    if found is None:
        return 0
    restored = await shop.cache.restore(slot.index, found, 0)
    slot.tokens = standing.tokens[: restored.held]
    return restored.held
