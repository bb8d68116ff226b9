"""The pool tax: idle conversations that are kept elsewhere leave the pool once they have cost the others too much.

Every row attends over all cells up to the highest used one, so an idle conversation slows everybody down. What its
cells cost a row is measured when the engine starts; what bringing it back costs, as it is done. When one has left, the
rows of the others move into the free cells below, block by block between the steps. Off where nothing was measured.
"""

from __future__ import annotations

import asyncio
import logging

from strata.cache.tasks import watched
from strata.errors import EngineGone
from strata.rules.pool import leaves_pool
from strata.serve.making_room import empty
from strata.serve.parks import Workshop
from strata.serve.slots import Slot

log = logging.getLogger("strata.pool")

_ROWS_BETWEEN_LOOKS = 8


class PoolTax:
    """Counts the rows that are written, and lets go of what has cost too much. Belongs to the event loop."""

    def __init__(self, shop: Workshop) -> None:
        self.left = 0
        """Conversations that left the pool so far."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._shop = shop
        self._cell_s = shop.engine.info.idle_cell_s
        self._rows = 0
        self._idle_since: dict[int, tuple[float, int]] = {}  # by slot: when it was used last, and the rows until then

    def __repr__(self) -> str:
        return f"PoolTax({self._rows} rows, {self.left} conversations left)"

    def wrote(self, n_rows: int) -> None:
        """So many tokens were written."""
        self._rows += n_rows
        if self._cell_s is None or self._shop.cache is None or self.tasks or self._rows % _ROWS_BETWEEN_LOOKS:
            return
        if self._due():
            watched(self._let_go(), "making the pool smaller", self.tasks)

    def status(self) -> dict[str, object]:
        """For /v1/status; null what was not measured."""
        return {"left": self.left, "idle_cell_us": None if self._cell_s is None else 1e6 * self._cell_s}

    def _due(self) -> list[Slot]:
        """The idle slots whose conversation has cost the others more than it costs to bring it back."""
        return [slot for slot in self._shop.slots.all if not slot.busy and len(slot.tokens) and self._costs_more(slot)]

    def _costs_more(self, slot: Slot) -> bool:
        cache = self._shop.cache
        restore_s = cache.restore_s(slot.index, len(slot.tokens)) if cache is not None else None
        last_used_s, rows = self._idle_since.get(slot.index, (-1.0, 0))
        if last_used_s != slot.last_used_s:
            rows = self._rows
            self._idle_since[slot.index] = (slot.last_used_s, rows)
        if restore_s is None or self._cell_s is None:
            return False
        return leaves_pool(held=len(slot.tokens), cell_s=self._cell_s, rows=self._rows - rows, restore_s=restore_s)

    async def _let_go(self) -> None:
        try:
            left = 0
            for slot in self._due():
                if not self._shop.slots.borrow(slot, "making room"):
                    break
                log.info("the conversation in slot %d leaves the pool: it slows the others down", slot.index)
                try:
                    await empty(self._shop, slot)
                    left += 1
                finally:
                    self._shop.slots.give_back(slot)
            self.left += left
            if left:
                await compact(self._shop)
        except EngineGone as error:  # nothing is in the pool of a new one
            log.info("%s", error.message)


async def compact(shop: Workshop) -> None:
    """Move what the slots hold into the lowest free cells, a block at a time. What refuses stays where it is."""
    step = shop.engine.info.block_tokens
    for slot in shop.slots.all:
        start, held = 0, 1
        while start < held:
            done = await shop.engine.compact(slot.index, start, start + step)
            if not done.ok:
                break
            start, held = start + step, done.held
        if start > step:  # the first block went behind everything, if there was no room below
            await shop.engine.compact(slot.index, 0, step)
