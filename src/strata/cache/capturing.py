"""Engine -> arena: take segments out of a slot, in order, several blocks under way at once.

The engine takes captures between its steps, one after the other; the next are in its queue already, so that it never
waits for the pipe. Where the blocks go is the caller's concern, and so is where their memory comes from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.cache.ram import Blocks
from strata.engine.interface import Engine
from strata.errors import EngineGone, EngineRefused
from strata.rules import prefix
from strata.types import Segment, Span, StageShape, pad_to_page

AHEAD = 4
"""Segments whose captures are sent before the first of them is answered."""

Lengths = tuple[tuple[int, ...], ...]
"""Arena bytes of a segment's blocks: [block][stage]."""
Deliver = Callable[[Segment, Blocks], None]


class BlockSource(Protocol):
    """Where the memory for captured blocks comes from."""

    def try_take(self, lengths: Lengths) -> Blocks | str | None:
        """The spans of one segment's blocks, all at once; why there will never be any; None: not now."""

    async def wait(self) -> None:
        """Return when it is worth asking again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Going:
    segment: Segment
    blocks: Blocks
    task: asyncio.Task[str]


class Capturing:
    """Captures from one slot of the engine process that runs when this is made."""

    def __init__(self, slot: int, *, engine: Engine, pool: BlockPool, counters: CacheCounters) -> None:
        self._slot = slot
        self._engine = engine
        self._pool = pool
        self._counters = counters
        self._engine_generation = engine.generation
        self.stop_reason = ""
        """Why fewer segments than wanted were captured; empty when all were."""

    @property
    def engine_is_gone(self) -> bool:
        """Whether what was to be captured is lost: the process that held it has been replaced."""
        return self._engine.generation != self._engine_generation

    async def run(self, segments: Iterable[Segment], source: BlockSource, deliver: Deliver) -> int:
        """Capture `segments` in order and deliver each; how many were delivered, all that precede the first failure."""
        going: deque[_Going] = deque()
        delivered = 0
        try:
            for segment in segments:
                lengths = segment_lengths(self._engine, segment)
                # What is captured is delivered before anything is waited for: its memory may be what comes back.
                while len(going) >= AHEAD or (blocks := source.try_take(lengths)) is None:
                    if not going:
                        await source.wait()
                    elif await self._land(going, deliver):
                        delivered += 1
                    else:
                        return delivered
                if isinstance(blocks, str):
                    self.stop_reason = blocks
                    break
                task = asyncio.create_task(self._capture(segment, blocks))
                going.append(_Going(segment=segment, blocks=blocks, task=task))
            while going:
                if not await self._land(going, deliver):
                    return delivered
                delivered += 1
            return delivered
        finally:
            await self._abandon(going)

    async def _land(self, going: deque[_Going], deliver: Deliver) -> bool:
        """Deliver the oldest capture; False, with a reason to stop, when it failed."""
        self.stop_reason = await asyncio.shield(going[0].task) or self.stop_reason
        if going[0].task.result():
            return False
        oldest = going.popleft()
        deliver(oldest.segment, oldest.blocks)
        return True

    async def _abandon(self, going: deque[_Going]) -> None:
        """Give back what will not be delivered, once the engine has done with it."""
        for left in going:
            left.task.add_done_callback(partial(self._give_back_later, left.blocks))
        if going:
            # What breaks them is what broke the first one, which the caller hears of.
            await asyncio.gather(*(left.task for left in going), return_exceptions=True)

    def _give_back(self, blocks: Blocks) -> None:
        for spans in blocks:
            self._pool.give_back(spans)

    def _give_back_later(self, blocks: Blocks, _: object) -> None:
        self._give_back(blocks)

    async def _capture(self, segment: Segment, blocks: Blocks) -> str:
        """Empty when every block of the segment was captured, else why not."""
        ranges = prefix.blocks(segment.start, segment.end, self._engine.info.block_tokens)
        for (start, end), spans in zip(ranges, blocks, strict=True):
            if reason := await self._capture_block(start, end, spans):
                return reason
        return ""

    async def _capture_block(self, start: int, end: int, spans: tuple[Span, ...]) -> str:
        if self.engine_is_gone:
            return "the engine was replaced; the new one does not hold it"
        try:
            outcome = await self._engine.capture(self._slot, start, end, spans)
        except (EngineGone, EngineRefused) as error:
            return error.message
        if not outcome.ok:
            return outcome.reason or "the engine refused the capture"
        self._counters.captured_bytes += sum(stage.payload_bytes(end - start) for stage in self._engine.info.stages)
        self._counters.capture_s += outcome.seconds
        return ""


class RamSource:
    """Memory for blocks that stay."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def try_take(self, lengths: Lengths) -> Blocks | str | None:
        spans = self._pool.try_take(tuple(length for row in lengths for length in row), "ram")
        return "the arena could not grow" if spans is None else rows(spans, len(lengths[0]))

    async def wait(self) -> None:
        raise AssertionError("memory for RAM is there or not; nothing is waited for")


def block_lengths(engine: Engine, n_tokens: int, stages: Sequence[StageShape]) -> tuple[int, ...]:
    """Arena bytes for a block of `n_tokens`, one per stage: head room and padded payload."""
    return tuple(engine.info.head_room + pad_to_page(stage.payload_bytes(n_tokens)) for stage in stages)


def segment_lengths(engine: Engine, segment: Segment) -> Lengths:
    """Arena bytes for every block of a segment."""
    ranges = prefix.blocks(segment.start, segment.end, engine.info.block_tokens)
    return tuple(block_lengths(engine, end - start, engine.info.stages) for start, end in ranges)


def payload_lengths(engine: Engine, segment: Segment) -> tuple[tuple[int, ...], ...]:
    """Payload bytes of every block of a segment: [block][stage]."""
    ranges = prefix.blocks(segment.start, segment.end, engine.info.block_tokens)
    return tuple(tuple(stage.payload_bytes(end - start) for stage in engine.info.stages) for start, end in ranges)


def rows(spans: Sequence[Span], n_stages: int) -> Blocks:
    """A flat list of spans as [block][stage]."""
    return tuple(tuple(spans[i : i + n_stages]) for i in range(0, len(spans), n_stages))
