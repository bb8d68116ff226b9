"""What every turn works with, and parking what a slot holds: at the end of a request, or when it leaves its slot.

Starts parks and notes what still captures from a slot; where a park goes is decided in cache/.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from strata.cache.cache import ConversationCache
from strata.cache.checkpoints import Captured
from strata.cache.parking import Parking, ParkJob
from strata.cache.tasks import watched
from strata.engine.interface import Engine
from strata.rules import prefix
from strata.serve.pool import Pool
from strata.serve.slots import Slot, Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What every turn works with. `cache` None: nothing is kept. `parks`: tasks that outlive their request."""

    engine: Engine
    slots: Slots
    cache: ConversationCache | None
    parks: set[asyncio.Task[None]] = field(default_factory=set)
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        info = self.engine.info
        object.__setattr__(self, "pool", Pool(info.room_cells, info.context))

    def give_back(self, unused: Captured) -> None:
        """A checkpoint that nobody will write."""
        if self.cache is not None and self.cache.taker is not None:
            self.cache.taker.give_back(unused)


def leave(shop: Workshop, slot: Slot, *, stays: int) -> None:
    """The slot is about to lose what lies behind its first `stays` tokens: park it first, if nothing else keeps it."""
    if shop.cache is None:
        return
    goes = stays < (slot.frontier or len(slot.tokens))
    if slot.owed and goes and not slot.parkings and not shop.cache.keeps_live(slot.index):
        park(shop, slot, frontier=slot.frontier or None, leaving=True)
    shop.cache.left(slot.index)


def park(
    shop: Workshop,
    slot: Slot,
    *,
    frontier: int | None,
    leaving: bool = False,
    checkpoints: tuple[Captured, ...] = (),
) -> None:
    """Start parking what an idle slot holds. The next requests do not wait for it, but for its capture.

    `checkpoints`: those that were taken during its turn, which belong to the park from now on.
    """
    if shop.cache is None or slot.root is None or not len(slot.tokens):
        for unused in checkpoints:
            shop.give_back(unused)
        return
    job = ParkJob(
        slot=slot.index,
        root=slot.root,
        tokens=slot.tokens,
        frontier=frontier,
        conversation=prefix.conversation_key(slot.root, slot.tokens, shop.engine.info.openers),
        provisional=slot.provisional,
        leaving=leaving,
        checkpoints=checkpoints,
    )
    parking = shop.cache.begin_park(job)
    if parking is None:
        for unused in checkpoints:
            shop.give_back(unused)
        return
    slot.parkings.add(parking)
    watched(finish_park(slot, parking), f"the park of slot {slot.index}", shop.parks)


async def finish_park(slot: Slot, parking: Parking) -> None:
    """The rest of a park, beside whatever runs next."""
    try:
        await parking.run()
    finally:
        slot.parkings.discard(parking)
