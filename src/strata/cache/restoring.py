"""RAM or disk -> engine: every header of the plan first, then block by block, each applied once its checksum holds.

Each segment comes from the RAM level if that has it, else from the disk level that was asked. Reads and hashing run
ahead of the engine by a few blocks. What fails ends the restore there: the slot keeps the verified prefix, and the
caller learns which segment was damaged or missing and why.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from strata.cache.blocks import BlockPool
from strata.cache.capturing import block_lengths
from strata.cache.entries import HeldSegment, Match
from strata.cache.ram import RamLevel
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
    """A segment that could not be used. `stage` None: the fault lies with no single file. `in_ram`: not with a file."""

    key: Key
    stage: int | None
    damaged: bool
    reason: str
    in_ram: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """`held`: positions the slot holds now. `bad`: the segment that ended the restore early, if one did.

    `n_bytes` of payload were applied, `ram_bytes` of them out of RAM.
    """

    held: int
    n_bytes: int
    ram_bytes: int
    seconds: float
    bad: BadSegment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block of the plan: its token range and ids, and the header of each stage's file; none when it is in RAM."""

    key: Key
    tokens: Tokens
    start: int
    end: int
    index: int
    headers: tuple[SegmentHeader, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A verified block in the arena. `ours`: to be given back after use; else it is the RAM level's."""

    spans: tuple[Span, ...]
    ours: bool


_Loads = deque[tuple[_Block, "asyncio.Task[_Ready | BadSegment]"]]


class Restoring:
    """One restore: the parts of `match` behind position `keep` into `slot`, which holds exactly [0, keep)."""

    def __init__(
        self, *, engine: Engine, ram: RamLevel | None, reader: Reader | None, blocks: BlockPool, slot: int
    ) -> None:
        """`reader`: of the disk level that has what RAM lacks. The caller leases every segment."""
        self._engine = engine
        self._ram = ram
        self._reader = reader
        self._blocks = blocks
        self._slot = slot
        self._engine_generation = engine.generation
        self._applied_bytes = self._ram_bytes = 0
        self._window = window(engine)

    async def run(self, match: Match, keep: int) -> Restored:
        """Raises EngineGone when the engine ends meanwhile; everything else is in the outcome."""
        began = time.perf_counter()
        plan, bad = await self._verify_headers([held for held in match.path if held.segment.end > keep])
        held, worse = await self._apply_all(plan, keep, match.upto)
        return Restored(
            held=held,
            n_bytes=self._applied_bytes,
            ram_bytes=self._ram_bytes,
            seconds=time.perf_counter() - began,
            bad=worse or bad,
        )

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
        if self._ram is not None and self._ram.index.holds(held.key):
            return ()
        info = self._engine.info
        if self._reader is None:
            return BadSegment(key=held.key, stage=None, damaged=False, reason="it left RAM meanwhile")
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

    async def _apply_all(self, plan: list[_Block], keep: int, upto: int) -> tuple[int, BadSegment | None]:
        """Positions held, and what ended it early.

        Applies are sent in order without waiting for the one before: the engine takes several between two steps.
        """
        waiting = deque(block for block in plan if block.end > keep and block.start < upto)
        loads: _Loads = deque()
        applies: deque[tuple[_Block, asyncio.Task[BadSegment | None]]] = deque()
        sent = held = keep
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
                    self._count(block)
                elif loads[0][1].done():
                    block, load = loads.popleft()
                    ready = load.result()
                    if isinstance(ready, BadSegment):
                        bad = ready
                        await self._drain(loads)
                        waiting.clear()
                        continue
                    last = min(block.end, upto)
                    applies.append((block, asyncio.create_task(self._apply(block, ready, sent, last))))
                    sent = last
            return held, bad
        finally:
            await self._drain(loads)
            await asyncio.gather(*(task for _, task in applies), return_exceptions=True)

    def _payload_bytes(self, block: _Block) -> list[int]:
        return [stage.payload_bytes(block.end - block.start) for stage in self._engine.info.stages]

    def _count(self, block: _Block) -> None:
        n_bytes = sum(self._payload_bytes(block))
        self._applied_bytes += n_bytes
        self._ram_bytes += 0 if block.headers else n_bytes

    async def _load(self, block: _Block) -> _Ready | BadSegment:
        """One verified block, all stages, in the arena."""
        if block.headers:
            return await self._read(block)
        assert self._ram is not None, "a block without headers is in RAM"
        if await self._ram.is_intact(block.key, block.index, self._payload_bytes(block)):
            return _Ready(spans=self._ram.blocks(block.key)[block.index], ours=False)
        return BadSegment(key=block.key, stage=None, damaged=True, reason="its copy in RAM has changed", in_ram=True)

    async def _read(self, block: _Block) -> _Ready | BadSegment:
        assert self._reader is not None, "headers were read"
        spans = await self._blocks.take(block_lengths(self._engine, block.end - block.start))
        if spans is None:
            return BadSegment(key=block.key, stage=None, damaged=False, reason="there is no memory to read it into")
        try:
            reads = [
                asyncio.wrap_future(self._reader.block(header, block.index, self._blocks.place(span)))
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
        return _Ready(spans=spans, ours=True)

    async def _apply(self, block: _Block, ready: _Ready, held: int, upto: int) -> BadSegment | None:
        try:
            done = await self._engine.apply(
                self._slot,
                start=block.start,
                end=block.end,
                from_=held,
                upto=upto,
                spans=ready.spans,
                tokens=block.tokens,
            )
        finally:
            self._give_back(ready)
        if done.ok and done.held == upto:
            return None
        if self._engine.generation != self._engine_generation:
            raise EngineGone("the engine was replaced during a restore; send the request again", retry_after_s=1)
        reason = done.reason or f"the slot holds {done.held} positions instead of {upto}"
        return BadSegment(key=block.key, stage=None, damaged=False, reason=reason)

    async def _drain(self, loads: _Loads) -> None:
        """Give back what was read but will not be applied."""
        for outcome in await asyncio.gather(*(task for _, task in loads), return_exceptions=True):
            if isinstance(outcome, _Ready):
                self._give_back(outcome)
        loads.clear()

    def _give_back(self, ready: _Ready) -> None:
        if ready.ours:
            self._blocks.give_back(ready.spans)


def window(engine: Engine) -> int:
    """Blocks on their way between disk and engine at once."""
    block_bytes = sum(block_lengths(engine, engine.info.block_tokens))
    return min(16, max(2, READ_AHEAD_BYTES // block_bytes))


def _bad(key: Key, stage: int, outcome: NotRead) -> BadSegment:
    return BadSegment(key=key, stage=stage, damaged=isinstance(outcome, Damaged), reason=outcome.reason)
