"""Engine -> disk, block by block: a checkpoint too large to wait in the arena until its turn is parked.

It is written while its turn runs, under a ticket of its own; the park takes the file over, or has it removed. Two
blocks are in memory at once, whatever its size, and one checkpoint is on its way at a time: others wait, and each holds
a spare of the engine meanwhile, of which there are few (`EngineInfo.spare_checkpoints`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.engine.interface import Engine
from strata.errors import StrataError
from strata.store.format import CheckpointHeader, plan_checkpoint
from strata.store.writer import Failed, Written
from strata.types import BLOCK_BYTES, Key, Span, pad_to_page

AHEAD = 2
"""Blocks of one in memory at once: one is captured while the one before is written."""

_Writes = deque["asyncio.Future[Written | Failed]"]


class Streaming:
    """To the write level."""

    def __init__(self, *, engine: Engine, pool: BlockPool, disk: DiskLevel, counters: CacheCounters) -> None:
        self._engine = engine
        self._pool = pool
        self._disk = disk
        self._counters = counters
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Streaming({self._disk!r})"

    async def run(self, checkpoint: int, key: Key, position: int, n_bytes: int, generation: int) -> int | str:
        """Write what the engine process `generation` holds as `checkpoint`; the ticket that has it, or why none has."""
        header = plan_checkpoint(key, position, n_bytes)
        if refusal := self._disk.refuses(header.file_bytes):
            return refusal
        async with self._turn:
            self._disk.make_room(header.file_bytes)
            ticket = self._disk.next_ticket()
            reason = await self._write(checkpoint, header, ticket, generation)
        if reason:
            await asyncio.wrap_future(self._disk.writer.abandon(ticket))
        return reason or ticket

    async def _write(self, checkpoint: int, header: CheckpointHeader, ticket: int, generation: int) -> str:
        """Why that failed; empty when all of it is written."""
        writes: _Writes = deque()
        try:
            for index in range(len(header.blocks)):
                while len(writes) >= AHEAD:
                    if reason := _reason(await writes.popleft()):
                        return reason
                span = await self._captured(checkpoint, header, index, generation)
                if isinstance(span, str):
                    return span
                writes.append(self._write_block(ticket, header, index, span))
            outcomes = [await write for write in tuple(writes)]
            return next(filter(None, map(_reason, outcomes)), "")
        finally:
            if writes:
                await asyncio.wait(writes)  # they use the memory until then

    async def _captured(self, checkpoint: int, header: CheckpointHeader, index: int, generation: int) -> Span | str:
        """One block in the arena."""
        spans = await self._taken(self._pool.head_room + pad_to_page(header.blocks[index].length))
        if spans is None:
            return "there is no memory for its blocks"
        reason = ""
        try:
            if self._engine.generation != generation:
                reason = "the engine was replaced; the new one does not hold it"
            else:
                done = await self._engine.capture_checkpoint(checkpoint, index * BLOCK_BYTES, spans[0])
                reason = "" if done.ok else done.reason or "the engine refused the capture"
                self._counters.capture_s += done.seconds
        except StrataError as error:
            reason = error.message
        if reason:
            self._pool.give_back(spans)
        return reason or spans[0]

    async def _taken(self, length: int) -> Sequence[Span] | None:
        """A span for one block, of what parks may have; waits while others may come back."""
        while (spans := self._pool.try_take((length,), "park")) is None and self._pool.is_passing:
            await self._pool.returned()
        return spans

    def _write_block(
        self, ticket: int, header: CheckpointHeader, index: int, span: Span
    ) -> asyncio.Future[Written | Failed]:
        payload = self._pool.payload(span, header.blocks[index].length)
        write = asyncio.wrap_future(self._disk.writer.write_block(ticket, header, index, payload))
        write.add_done_callback(lambda _: self._pool.give_back([span]))
        return write

    def give_up(self, ticket: int) -> None:
        """Nobody needs what was written."""
        self._disk.writer.abandon(ticket)


def _reason(outcome: Written | Failed) -> str:
    return outcome.reason if isinstance(outcome, Failed) else ""
