"""The capturing half of a park: take what the level lacks out of a slot, block by block, and hand it to the writer.

A park runs beside the next requests. It never makes one wait for the disk: when its slot is wanted it goes on only as
long as the arena has blocks free, and what it has captured by then is what the cache commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.engine.protocol import Engine
from strata.errors import EngineGone, EngineRefused
from strata.rules import prefix
from strata.store.format import plan_segment, segment_file_bytes
from strata.store.writer import Writer
from strata.types import Key, Segment, Span, Tokens, pad_to_page


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkJob:
    """The state to keep: `slot` holds exactly `tokens`. `frontier`: the last turn opener of the prompt, or None."""

    slot: int
    root: Key
    tokens: Tokens
    frontier: int | None
    conversation: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkPlan:
    """A park that has begun: all segments of the job, and the keys of those to capture. `ticket`: its writes."""

    job: ParkJob
    ticket: int
    segments: tuple[Segment, ...]
    missing: frozenset[Key]


class Parking:
    """A park on its way."""

    def __init__(
        self, plan: ParkPlan, *, engine: Engine, blocks: BlockPool, writer: Writer, counters: CacheCounters
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._blocks = blocks
        self._writer = writer
        self._counters = counters
        self._engine_generation = engine.generation
        self._captured = asyncio.Event()
        self._wanted = False
        self._unwritten = {s.key: self._file_bytes(s) for s in plan.segments if s.key in plan.missing}
        self.stop_reason = ""
        """Why fewer segments than planned were captured; empty when all were."""

    def __repr__(self) -> str:
        return f"Parking(slot {self.plan.job.slot}, {len(self.plan.segments)} segments, {self.stop_reason or 'going'})"

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of this park that are not on disk yet."""
        return sum(self._unwritten.values())

    @property
    def reach(self) -> int:
        """The positions of the slot that this park captures from: [0, reach)."""
        return len(self.plan.job.tokens)

    def _file_bytes(self, segment: Segment) -> int:
        info = self._engine.info
        return sum(segment_file_bytes(shape, segment.start, segment.end, info.block_tokens) for shape in info.stages)

    async def give_way(self) -> None:
        """Return once the slot may change: when all is captured, or the arena has no block free."""
        self._wanted = True
        self._blocks.wake()
        await self._captured.wait()

    async def capture(self) -> int:
        """Capture the missing segments in order; how many of all are now held, coming or handed to the writer."""
        try:
            for i, segment in enumerate(self.plan.segments):
                if segment.key in self.plan.missing and not await self._capture_segment(segment):
                    return i
            return len(self.plan.segments)
        finally:
            self._captured.set()

    async def _capture_segment(self, segment: Segment) -> bool:
        ranges = prefix.blocks(segment.start, segment.end, self._engine.info.block_tokens)
        blocks = await self._take_blocks([end - start for start, end in ranges])
        for (start, end), spans in zip(ranges, blocks, strict=False):
            self.stop_reason = await self._capture_block(start, end, spans)
            if self.stop_reason:
                break
        if self.stop_reason:
            for spans in blocks:
                self._blocks.give_back(spans)
            return False
        self._write(segment, blocks)
        return True

    async def _take_blocks(self, n_tokens: Sequence[int]) -> list[tuple[Span, ...]]:
        """The spans of a segment's blocks; none, with a reason to stop, when they cannot be had.

        All at once: parks that each hold a part of what they need could wait for each other for ever.
        """
        lengths = [block_lengths(self._engine, n) for n in n_tokens]
        wanted = tuple(length for block in lengths for length in block)
        if not self._blocks.can_ever_park(wanted):
            self.stop_reason = f"a segment needs {sum(wanted)} bytes of the arena, more than parks may have"
            return []
        while (spans := self._blocks.try_take(wanted, restoring=False)) is None:
            if self._wanted:
                self.stop_reason = "its slot was wanted while the writer was behind"
                return []
            await self._blocks.returned()
        n_stages = len(self._engine.info.stages)
        return [spans[i : i + n_stages] for i in range(0, len(spans), n_stages)]

    async def _capture_block(self, start: int, end: int, spans: tuple[Span, ...]) -> str:
        """Empty when the block was captured, else why not."""
        if self._engine.generation != self._engine_generation:
            return "the engine was replaced; the new one does not hold it"
        try:
            outcome = await self._engine.capture(self.plan.job.slot, start, end, spans)
        except (EngineGone, EngineRefused) as error:
            return error.message
        if not outcome.ok:
            return outcome.reason or "the engine refused the capture"
        self._counters.captured_bytes += sum(stage.payload_bytes(end - start) for stage in self._engine.info.stages)
        self._counters.capture_s += outcome.seconds
        return ""

    def _write(self, segment: Segment, blocks: Sequence[tuple[Span, ...]]) -> None:
        """Hand the segment's blocks to the writer, one file per stage; each block comes back when it is written."""
        info = self._engine.info
        for stage, shape in enumerate(info.stages):
            header = plan_segment(
                segment, stage=stage, n_stages=len(info.stages), shape=shape, block_tokens=info.block_tokens
            )
            spans = tuple(block[stage] for block in blocks)
            payloads = tuple(
                self._blocks.payload(span, info.head_room, entry.length)
                for span, entry in zip(spans, header.blocks, strict=True)
            )
            job = self._writer.write_segment(self.plan.ticket, header, payloads)
            asyncio.wrap_future(job).add_done_callback(partial(self._written, segment.key, spans))

    def _written(self, key: Key, spans: tuple[Span, ...], _: object) -> None:
        self._unwritten.pop(key, None)
        self._blocks.give_back(spans)


def block_lengths(engine: Engine, n_tokens: int) -> tuple[int, ...]:
    """Arena bytes for a block of `n_tokens`, one per stage: head room and padded payload."""
    info = engine.info
    return tuple(info.head_room + pad_to_page(stage.payload_bytes(n_tokens)) for stage in info.stages)
