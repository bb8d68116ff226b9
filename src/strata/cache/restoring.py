"""Disk -> engine: every header of the plan first, then block by block, each applied only after its checksum holds.

Reads and hashing run ahead of the engine by a few blocks. What fails ends the restore there: the slot keeps the
verified prefix, and the caller learns which segment was damaged or missing and why.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from strata.cache.blocks import BlockPool
from strata.cache.parking import block_lengths
from strata.cache.state import HeldSegment, Match
from strata.engine.protocol import Engine
from strata.errors import EngineGone
from strata.rules import prefix
from strata.store.format import SegmentHeader, plan_segment
from strata.store.reader import Damaged, Loaded, NotRead, Reader
from strata.types import MIB, Key, Span, Tokens

READ_AHEAD_BYTES = 64 * MIB
"""Blocks on their way between disk and engine at once: this many bytes of them, at least two and at most sixteen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSegment:
    """A segment that could not be used. `stage` None: the fault lies with no single file."""

    key: Key
    stage: int | None
    damaged: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """`held`: positions the slot holds now. `bad`: the segment that ended the restore early, if one did."""

    held: int
    n_bytes: int
    seconds: float
    bad: BadSegment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block of the plan: its token range and ids, and the header of each stage's file."""

    key: Key
    tokens: Tokens
    start: int
    end: int
    index: int
    headers: tuple[SegmentHeader, ...]


class Restoring:
    """One restore: the parts of `match` behind position `keep` into `slot`, which holds exactly [0, keep)."""

    def __init__(self, *, engine: Engine, reader: Reader, blocks: BlockPool, slot: int) -> None:
        self._engine = engine
        self._reader = reader
        self._blocks = blocks
        self._slot = slot
        self._engine_generation = engine.generation
        block_bytes = sum(block_lengths(engine, engine.info.block_tokens))
        self._window = min(16, max(2, READ_AHEAD_BYTES // block_bytes))

    async def run(self, match: Match, keep: int) -> Restored:
        """Raises EngineGone when the engine ends meanwhile; everything else is in the outcome."""
        began = time.perf_counter()
        plan, bad = await self._verify_headers([held for held in match.path if held.segment.end > keep])
        held, n_bytes, worse = await self._apply_all(plan, keep, match.upto)
        return Restored(held=held, n_bytes=n_bytes, seconds=time.perf_counter() - began, bad=worse or bad)

    # ------------------------------------------------------------------------------------------------------ headers

    async def _verify_headers(self, path: Sequence[HeldSegment]) -> tuple[list[_Block], BadSegment | None]:
        """The blocks to apply: those before the first segment with a bad header, and that segment."""
        info = self._engine.info
        rows = await asyncio.gather(*(self._headers_of(held) for held in path))
        plan: list[_Block] = []
        for held, row in zip(path, rows, strict=True):
            if isinstance(row, BadSegment):
                return plan, row
            segment = held.segment
            ranges = prefix.blocks(segment.start, segment.end, info.block_tokens)
            ids = held.tokens
            plan += [
                _Block(
                    key=held.key,
                    tokens=ids[a - segment.start : b - segment.start],
                    start=a,
                    end=b,
                    index=i,
                    headers=row,
                )
                for i, (a, b) in enumerate(ranges)
            ]
        return plan, None

    async def _headers_of(self, held: HeldSegment) -> tuple[SegmentHeader, ...] | BadSegment:
        info = self._engine.info
        stages = range(len(info.stages))
        outcomes = await asyncio.gather(*(asyncio.wrap_future(self._reader.header(held.key, s)) for s in stages))
        headers: list[SegmentHeader] = []
        for stage, outcome in enumerate(outcomes):
            if not isinstance(outcome, SegmentHeader):
                return _bad(held.key, stage, outcome)
            expected = plan_segment(
                held.segment,
                stage=stage,
                n_stages=len(info.stages),
                shape=info.stages[stage],
                block_tokens=info.block_tokens,
            )
            if not outcome.same_geometry(expected):
                return BadSegment(key=held.key, stage=stage, damaged=True, reason=f"unexpected header {outcome!r}")
            headers.append(outcome)
        return tuple(headers)

    # -------------------------------------------------------------------------------------------------------- blocks

    async def _apply_all(self, plan: list[_Block], keep: int, upto: int) -> tuple[int, int, BadSegment | None]:
        """Positions held, payload bytes applied, and what ended it early.

        Applies are sent in order without waiting for the one before: the engine takes several between two steps.
        """
        waiting = deque(block for block in plan if block.end > keep and block.start < upto)
        loads: deque[tuple[_Block, asyncio.Task[tuple[Span, ...] | BadSegment]]] = deque()
        applies: deque[tuple[_Block, asyncio.Task[BadSegment | None]]] = deque()
        sent = held = keep
        n_bytes = 0
        bad: BadSegment | None = None
        try:
            while waiting or loads or applies:
                while waiting and len(loads) + len(applies) < self._window:
                    block = waiting.popleft()
                    loads.append((block, asyncio.create_task(self._load(block))))
                heads = {queue[0][1] for queue in (loads, applies) if queue}
                await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
                if applies and applies[0][1].done():
                    block, applied = applies.popleft()
                    bad = applied.result() or bad
                    if applied.result() is not None:
                        break
                    held = min(block.end, upto)
                    n_bytes += sum(header.blocks[block.index].length for header in block.headers)
                elif loads[0][1].done():
                    block, load = loads.popleft()
                    loaded = load.result()
                    if isinstance(loaded, BadSegment):
                        bad = loaded
                        await self._drain(loads)
                        waiting.clear()
                        continue
                    last = min(block.end, upto)
                    applies.append((block, asyncio.create_task(self._apply(block, loaded, sent, last))))
                    sent = last
            return held, n_bytes, bad
        finally:
            await self._drain(loads)
            await asyncio.gather(*(task for _, task in applies), return_exceptions=True)

    async def _load(self, block: _Block) -> tuple[Span, ...] | BadSegment:
        """Read and verify one block, all stages; its spans on success."""
        spans = await self._blocks.take(block_lengths(self._engine, block.end - block.start))
        head_room = self._engine.info.head_room
        try:
            reads = [
                asyncio.wrap_future(self._reader.block(header, block.index, self._blocks.place(span, head_room)))
                for header, span in zip(block.headers, spans, strict=True)
            ]
            outcomes = await asyncio.shield(asyncio.gather(*reads))
        except asyncio.CancelledError:
            # The threads may still be writing into the spans: they come back when the reads end.
            asyncio.gather(*reads).add_done_callback(lambda _: self._blocks.give_back(spans))
            raise
        for stage, outcome in enumerate(outcomes):
            if not isinstance(outcome, Loaded):
                self._blocks.give_back(spans)
                return _bad(block.key, stage, outcome)
        return spans

    async def _apply(self, block: _Block, spans: tuple[Span, ...], held: int, upto: int) -> BadSegment | None:
        try:
            done = await self._engine.apply(
                self._slot,
                start=block.start,
                end=block.end,
                from_=held,
                upto=upto,
                spans=spans,
                tokens=block.tokens,
            )
        finally:
            self._blocks.give_back(spans)
        if done.ok and done.held == upto:
            return None
        if self._engine.generation != self._engine_generation:
            raise EngineGone("the engine was replaced during a restore; send the request again", retry_after_s=1)
        reason = done.reason or f"the slot holds {done.held} positions instead of {upto}"
        return BadSegment(key=block.key, stage=None, damaged=False, reason=reason)

    async def _drain(self, loads: deque[tuple[_Block, asyncio.Task[tuple[Span, ...] | BadSegment]]]) -> None:
        """Give back what was read but will not be applied."""
        for outcome in await asyncio.gather(*(task for _, task in loads), return_exceptions=True):
            if isinstance(outcome, tuple):
                self._blocks.give_back(outcome)
        loads.clear()


def _bad(key: Key, stage: int, outcome: NotRead) -> BadSegment:
    return BadSegment(key=key, stage=stage, damaged=isinstance(outcome, Damaged), reason=outcome.reason)
