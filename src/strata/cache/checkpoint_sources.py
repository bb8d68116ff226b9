"""Where a stored checkpoint comes from when it is restored: RAM, or a disk level. Its blocks, each verified."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.entries import HeldCheckpoint
from strata.cache.ram import RamLevel
from strata.cache.restoring import Fault
from strata.store.format import CheckpointHeader
from strata.store.reader import Damaged, Loaded, Missing, NotRead
from strata.types import BLOCK_BYTES, Span, pad_to_page


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCheckpoint:
    """Why a checkpoint could not be used. `file`: its file is damaged, and is there."""

    fault: Fault
    reason: str
    file: bool = False


class Source(Protocol):
    """One checkpoint of one level, which the caller leases there. `n_blocks` counts once it is open."""

    n_blocks: int

    @property
    def level(self) -> RamLevel | DiskLevel: ...

    @property
    def checkpoint(self) -> HeldCheckpoint: ...

    async def open(self) -> BadCheckpoint | None:
        """Check what is known of it before anything is applied."""

    async def block(self, index: int) -> Span | BadCheckpoint:
        """A verified block in the arena, to be used until `done`."""

    def done(self, index: int) -> None:
        """The block is not used any more."""

    def set_aside(self, bad: BadCheckpoint) -> None:
        """Never serve it again from this level."""


class RamSource:
    """A checkpoint of the RAM level."""

    def __init__(self, level: RamLevel, checkpoint: HeldCheckpoint, *, counters: CacheCounters) -> None:
        self.level = level
        self.checkpoint = checkpoint
        self.n_blocks = 0
        self._counters = counters

    async def open(self) -> BadCheckpoint | None:
        if not self.level.index.holds(self.checkpoint.key):
            return BadCheckpoint(fault=Fault.DAMAGED, reason="it was set aside")
        self.n_blocks = len(self.level.blocks(self.checkpoint.key))
        return None

    async def block(self, index: int) -> Span | BadCheckpoint:
        key, n_bytes = self.checkpoint.key, self.checkpoint.n_bytes
        length = min(BLOCK_BYTES, n_bytes - index * BLOCK_BYTES)
        # Another restore may have set it aside meanwhile.
        if self.level.index.holds(key) and await self.level.is_intact(key, index, (length,)):
            return self.level.blocks(key)[index][0]
        return BadCheckpoint(fault=Fault.DAMAGED, reason="its copy in RAM has changed")

    def done(self, index: int) -> None:
        """The memory is the level's."""

    def set_aside(self, bad: BadCheckpoint) -> None:
        self.level.quarantine(self.checkpoint.key)
        self._counters.ram_quarantined += bad.fault is Fault.DAMAGED


class DiskSource:
    """A checkpoint of a disk level."""

    def __init__(self, level: DiskLevel, checkpoint: HeldCheckpoint, *, pool: BlockPool) -> None:
        self.level = level
        self.checkpoint = checkpoint
        self.n_blocks = 0
        self._pool = pool
        self._header: CheckpointHeader | None = None
        self._spans: dict[int, tuple[Span, ...]] = {}

    async def open(self) -> BadCheckpoint | None:
        header = await asyncio.wrap_future(self.level.reader.checkpoint_header(self.checkpoint.key))
        if not isinstance(header, CheckpointHeader):
            return _not_read(header)
        expected = (self.checkpoint.position, self.checkpoint.n_bytes, BLOCK_BYTES)
        if (header.position, header.n_bytes, header.block_bytes) != expected:
            return BadCheckpoint(fault=Fault.DAMAGED, reason=f"unexpected header {header!r}", file=True)
        self._header, self.n_blocks = header, len(header.blocks)
        return None

    async def block(self, index: int) -> Span | BadCheckpoint:
        assert self._header is not None, "opened before"
        length = self._header.blocks[index].length
        spans = await self._pool.take((self._pool.head_room + pad_to_page(length),))
        if spans is None:
            return BadCheckpoint(fault=Fault.NO_MEMORY, reason="there is no memory to read it into")
        self._spans[index] = spans
        read = await asyncio.wrap_future(self.level.reader.block(self._header, index, self._pool.place(spans[0])))
        return spans[0] if isinstance(read, Loaded) else _not_read(read)

    def done(self, index: int) -> None:
        self._pool.give_back(self._spans.pop(index, ()))

    def set_aside(self, bad: BadCheckpoint) -> None:
        self.level.set_aside_checkpoint(self.checkpoint.key, damaged=bad.file)


def _not_read(problem: NotRead) -> BadCheckpoint:
    fault = Fault.DAMAGED if isinstance(problem, Damaged | Missing) else Fault.UNREADABLE
    return BadCheckpoint(fault=fault, reason=problem.reason, file=isinstance(problem, Damaged))
