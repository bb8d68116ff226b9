"""Arena -> disk: hand the segments of a put to the writer, from captured blocks or from the RAM level.

Covers the headers and payloads of the files, and how much may wait in the writer's queue. A put's `unwritten` bytes go
down here as the files are written. Captured blocks go back to the pool then; those of the RAM level stay there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from strata.cache.blocks import BlockPool
from strata.cache.capturing import segment_lengths
from strata.cache.disk import DiskLevel
from strata.cache.put import Put
from strata.cache.ram import Blocks, Payloads, RamLevel
from strata.engine.interface import Engine
from strata.store.format import (
    CheckpointEntry,
    CheckpointHeader,
    Manifest,
    plan_checkpoint,
    plan_segment,
    segment_file_bytes,
)
from strata.store.writer import Failed, Written
from strata.types import MIB, Key, Segment, Span, Tokens

MOST_QUEUED_BYTES = 64 * MIB
"""Bytes of one put that may wait for the writer at once, beyond one segment."""


class PutWriter:
    """Writes the missing segments of one put."""

    def __init__(self, put: Put, *, disk: DiskLevel, engine: Engine, pool: BlockPool) -> None:
        self.put = put
        self.queued_bytes = 0
        self.disk = disk
        self._info = engine.info
        self._pool = pool
        self._files_left: dict[bytes, int] = {}
        self._progress = asyncio.Event()

    def from_capture(self, segment: Segment, blocks: Blocks) -> None:
        """Write captured blocks, which belong to this from now on."""
        sizes = [[stage.payload_bytes(n) for stage in self._info.stages] for n in self._block_tokens(segment)]
        payloads = tuple(
            tuple(self._pool.payload(span, n) for span, n in zip(spans, row, strict=True))
            for spans, row in zip(blocks, sizes, strict=True)
        )
        self._write(segment, payloads, None, blocks)

    async def from_ram(self, segment: Segment, ram: RamLevel) -> None:
        """Write a segment of the RAM level, which the caller leases; waits while enough is queued."""
        while self.queued_bytes > MOST_QUEUED_BYTES:
            await self.progress()
        digests = await ram.digests(segment.key)
        self._write(segment, ram.payloads(segment.key), digests, ())

    def write_checkpoint(self, key: Key, position: int, n_bytes: int, spans: tuple[Span, ...]) -> None:
        """Write a captured checkpoint, whose blocks belong to this from now on."""
        header = plan_checkpoint(key, position, n_bytes)
        pairs = zip(spans, header.blocks, strict=True)
        self._write_checkpoint(header, tuple(self._pool.payload(span, block.length) for span, block in pairs), spans)

    def take_checkpoint(self, key: Key, ticket: int) -> None:
        """Take over a checkpoint that is written already, under a ticket of its own, which ends."""
        self.put.unwritten.pop(key, None)
        job = asyncio.wrap_future(self.disk.writer.join(self.put.ticket, ticket))
        self.queued_bytes += 1  # it is waited for like a write
        job.add_done_callback(partial(self._took_checkpoint, key))

    def _took_checkpoint(self, key: Key, job: asyncio.Future[Written | Failed]) -> None:
        if isinstance(job.result(), Failed):
            self.put.unwritten[key] = 0  # it does not come
        self.queued_bytes -= 1
        self.wake()

    async def checkpoint_from_ram(self, key: Key, ram: RamLevel) -> None:
        """Write a checkpoint of the RAM level, which the caller leases; waits while enough is queued."""
        while self.queued_bytes > MOST_QUEUED_BYTES:
            await self.progress()
        entry = self.put.manifest.checkpoints[self.put.manifest.checkpoint_keys.index(key)]
        digests = await ram.digests(key)
        header = plan_checkpoint(key, entry.position, entry.n_bytes).with_digests([row[0] for row in digests])
        self._write_checkpoint(header, tuple(row[0] for row in ram.payloads(key)), ())

    def _write_checkpoint(
        self, header: CheckpointHeader, payloads: tuple[memoryview, ...], spans: tuple[Span, ...]
    ) -> None:
        self.queued_bytes += header.n_bytes
        job = self.disk.writer.write_checkpoint(self.put.ticket, header, payloads)
        asyncio.wrap_future(job).add_done_callback(partial(self._wrote_checkpoint, header, spans))

    def _wrote_checkpoint(
        self, header: CheckpointHeader, spans: tuple[Span, ...], job: asyncio.Future[Written | Failed]
    ) -> None:
        if isinstance(job.result(), Written):
            self.put.unwritten.pop(header.key, None)
        self.queued_bytes -= header.n_bytes
        self._pool.give_back(spans)
        self.wake()

    async def progress(self) -> None:
        """Wait until the writer has done more of it."""
        self._progress.clear()
        await self._progress.wait()

    async def drained(self) -> None:
        """Wait until nothing of it is queued."""
        while self.queued_bytes:
            await self.progress()

    def wake(self) -> None:
        self._progress.set()

    def _block_tokens(self, segment: Segment) -> list[int]:
        full, rest = divmod(segment.n_tokens, self._info.block_tokens)
        return [self._info.block_tokens] * full + ([rest] if rest else [])

    def _write(
        self, segment: Segment, payloads: Payloads, digests: Sequence[Sequence[bytes]] | None, blocks: Blocks
    ) -> None:
        """One file per stage."""
        n_bytes = sum(len(payload) for row in payloads for payload in row)
        self.queued_bytes += n_bytes
        self._files_left[segment.key] = len(self._info.stages)
        for stage, shape in enumerate(self._info.stages):
            header = plan_segment(
                segment,
                stage=stage,
                n_stages=len(self._info.stages),
                shape=shape,
                block_tokens=self._info.block_tokens,
            )
            if digests is not None:
                header = header.with_digests([row[stage] for row in digests])
            job = self.disk.writer.write_segment(self.put.ticket, header, tuple(row[stage] for row in payloads))
            asyncio.wrap_future(job).add_done_callback(partial(self._written, segment, blocks, n_bytes))

    def _written(self, segment: Segment, blocks: Blocks, n_bytes: int, _: object) -> None:
        self._files_left[segment.key] -= 1
        if self._files_left[segment.key]:
            return
        self.put.unwritten.pop(segment.key, None)
        self.queued_bytes -= n_bytes
        for spans in blocks:
            self._pool.give_back(spans)
        self.wake()


def manifest_of(
    engine: Engine,
    *,
    tokens: Tokens,
    frontier: int | None,
    conversation: bytes,
    segments: Sequence[Segment],
    checkpoints: tuple[CheckpointEntry, ...] = (),
) -> Manifest:
    """What a state will be on disk. Its serial and its stamps are given when it is committed."""
    info = engine.info
    return Manifest(
        serial=1,
        identity=info.fingerprint,
        root=segments[0].parent,
        conversation=conversation,
        tokens=tokens.astype("<i4").tobytes(),
        frontier=frontier,
        cuts=tuple(s.end for s in segments),
        keys=tuple(s.key for s in segments),
        file_bytes=tuple(file_bytes(engine, s) for s in segments),
        stages=info.stages,
        block_tokens=info.block_tokens,
        model_name=info.model_name,
        created_s=0.0,
        stamp_s=0.0,
        checkpoints=checkpoints,
    )


def file_bytes(engine: Engine, segment: Segment) -> int:
    """What the files of a segment take, of all stages."""
    info = engine.info
    return sum(segment_file_bytes(shape, segment.start, segment.end, info.block_tokens) for shape in info.stages)


def transient_need_bytes(
    engine: Engine, pool: BlockPool, segments: tuple[Segment, ...], missing: frozenset[Key]
) -> int:
    """Arena bytes that a park of these segments to disk holds at once."""
    sizes = [sum(map(sum, segment_lengths(engine, s))) for s in segments if s.key in missing]
    return min(sum(sizes), MOST_QUEUED_BYTES + max(sizes, default=0), pool.park_bytes)
