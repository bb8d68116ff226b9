"""Memory for blocks on their way from a slot to disk: few at once, so that one park does not fill the arena.

It captures and writes nothing.
"""

from __future__ import annotations

from typing import Protocol

from strata.cache.blocks import BlockPool
from strata.cache.capturing import Lengths, rows
from strata.cache.ram import Blocks
from strata.cache.writing import MOST_QUEUED_BYTES, PutWriter


class Giver(Protocol):
    """Who captures from a slot. `wanted`: the slot is about to hold something else."""

    wanted: bool

    def make_room(self, n_bytes: int) -> None:
        """Let others give memory back, as far as they may."""


class PassingSource:
    """Memory for blocks that pass through: few at once, and as many as are free when the slot is wanted."""

    def __init__(self, pool: BlockPool, giver: Giver, writing: PutWriter) -> None:
        self._pool = pool
        self._giver = giver
        self._writing = writing

    def try_take(self, lengths: Lengths) -> Blocks | str | None:
        flat = tuple(length for row in lengths for length in row)
        if not self._pool.can_ever_park(flat):
            return f"a segment needs {sum(flat)} bytes of the arena, more than parks may have"
        wanted = self._giver.wanted
        if not wanted and self._writing.queued_bytes > MOST_QUEUED_BYTES:
            return None
        spans = self._pool.try_take(flat, "park")
        if spans is None and not self._pool.is_passing:
            # Nothing will come back: RAM has all of the arena, and the system gives no more.
            self._giver.make_room(sum(flat))
            spans = self._pool.try_take(flat, "park")
            if spans is None:
                return "the arena could not grow"
        if spans is None:
            return "its slot was wanted while the writer was behind" if wanted else None
        return rows(spans, len(lengths[0]))

    async def wait(self) -> None:
        """A block comes back with every write that ends."""
        await self._pool.returned()
