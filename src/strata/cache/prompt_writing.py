"""One system prompt on its way from a slot to disk. It runs beside the next requests, like a park.

All of it becomes durable or nothing: what is given up here is tried again by the next request that begins with it. No
conversation gives way for it.
"""

from __future__ import annotations

import asyncio

from strata.cache.blocks import BlockPool
from strata.cache.capturing import Capturing
from strata.cache.checkpoints import Captured
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.passing import PassingSource
from strata.cache.put import Put, PutOutcome
from strata.cache.writing import PutWriter
from strata.engine.interface import Engine
from strata.rules.system_prompts import Variant
from strata.types import Segment


class PromptWriting:
    """A write of one variant; `run` must follow."""

    def __init__(
        self,
        slot: int,
        variant: Variant,
        put: Put,
        *,
        checkpoint: Captured | None,
        disk: DiskLevel,
        engine: Engine,
        pool: BlockPool,
        counters: CacheCounters,
    ) -> None:
        """`slot` holds all of the variant's tokens. `checkpoint`: at its end, for memory that cannot be cut; its blocks
        belong to this from now on."""
        self.variant = variant
        self.wanted = False
        self._put = put
        self._checkpoint = checkpoint
        self._disk = disk
        self._pool = pool
        self._writing = PutWriter(put, disk=disk, engine=engine, pool=pool)
        self._capturing = Capturing(slot, engine=engine, pool=pool, counters=counters)
        self._captured = asyncio.Event()

    def __repr__(self) -> str:
        return f"PromptWriting({self.variant.n_tokens} tokens, {len(self._put.missing)} missing)"

    @property
    def reach(self) -> int:
        """The positions of the slot that this captures from: [0, reach)."""
        return self.variant.n_tokens

    async def give_way(self) -> None:
        """Return once the slot may change: when all is captured, or no block is free."""
        self.wanted = True
        self._pool.wake()
        self._writing.wake()
        await self._captured.wait()

    def make_room(self, n_bytes: int) -> None:
        """Nothing gives way."""

    async def run(self) -> PutOutcome:
        """Capture what the level lacks and write it."""
        reached = 0
        try:
            self._hand_over_checkpoint()
            reached = await self._write_rows()
        finally:
            self._captured.set()
            await self._writing.drained()
            outcome = await self._disk.finish_put(self._put, reached, self._capturing.stop_reason)
        return outcome

    def _hand_over_checkpoint(self) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None or checkpoint.room is None:
            return
        (key,) = self._put.manifest.checkpoint_keys
        if key in self._put.missing:
            self._writing.write_checkpoint(key, checkpoint.position, checkpoint.n_bytes, checkpoint.room.spans)
        else:
            self._pool.give_back(checkpoint.room.spans)

    async def _write_rows(self) -> int:
        """How many of the segments are written or were there."""
        missing: list[Segment] = [s for s in self.variant.segments if s.key in self._put.missing]
        source = PassingSource(self._pool, self, self._writing)
        n_captured = await self._capturing.run(missing, source, self._writing.from_capture)
        if n_captured == len(missing):
            return len(self.variant.segments)
        return self.variant.segments.index(missing[n_captured])
