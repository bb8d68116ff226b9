"""RAM or disk -> engine: every header of the plan first, then block by block, each applied once its checksum holds.

The plan says which level each segment comes from. Reads and hashing run ahead of the engine by a few blocks. What fails
ends the restore there: the slot keeps the verified prefix, and the caller learns which segment of which level it was,
which of its files are at fault, and why. What happens then is the ladder's business (cache/ladder.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from strata.cache.blocks import BlockPool
from strata.cache.capturing import block_lengths
from strata.cache.disk import DiskLevel
from strata.cache.entries import HeldSegment, Match
from strata.cache.ram import RamLevel
from strata.engine.interface import Engine
from strata.engine.pool_messages import POOL_IS_FULL
from strata.errors import EngineGone
from strata.rules import prefix
from strata.store.format import SegmentHeader, plan_segment
from strata.store.reader import Damaged, Loaded, Missing, NotRead
from strata.types import BLOCK_BYTES, MIB, Key, Span, StageShape, Tokens, pad_to_page

HEADERS_AT_ONCE = 16
"""Segments whose headers are read by one job."""
READ_AHEAD_BYTES = 48 * MIB
"""Blocks on their way between disk and engine at once: this many bytes of them, at least two and at most sixteen.

Enough that the disk always has several reads to do.
"""
BESIDE_OTHERS = 3
"""Blocks, while the engine serves others: what reads and hashes takes the cores that they decode on."""


class Fault(Enum):
    """What is wrong with a segment that could not be used."""

    DAMAGED = "damaged"  # a file, or the copy in RAM, is not what was stored, or a stage of it is missing
    UNREADABLE = "unreadable"  # the system cannot read it now; that says nothing about the file
    REFUSED = "refused"  # the engine did not take it
    NO_MEMORY = "no memory"  # nothing: there was no memory to read it into, or no room in the K/V pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A segment to restore, as the level it comes from holds it. `disk` None: RAM."""

    held: HeldSegment
    disk: DiskLevel | None

    @property
    def level(self) -> str:
        return RamLevel.name if self.disk is None else self.disk.name


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSegment:
    """A segment that could not be used. `stages`: those whose files are damaged, and only they are to be set aside."""

    planned: Planned
    fault: Fault
    reason: str
    stages: tuple[int, ...] = ()

    def text(self) -> str:
        """For people: where, and why."""
        segment = self.planned.held.segment
        where = f"tokens [{segment.start}, {segment.end}) of {self.planned.level}"
        return f"{where}, segment {segment.key.hex()[:12]}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """`held`: positions the slot holds now, if the engine is right. `bad`: what ended it early, if something did.

    `bytes_by_level`: payload that was applied, in the order of first use.
    """

    held: int
    bytes_by_level: dict[str, int]
    bad: BadSegment | None = None


_Headers = tuple[SegmentHeader, ...]
"""Of a segment, verified: the header of each stage's file; none when the segment is in RAM."""
_HeadersOf = asyncio.Task[dict[Key, "_Headers | BadSegment"]]
"""Those of several segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block of the plan: its token range and ids, and what will be the headers of its segment's files."""

    planned: Planned
    tokens: Tokens
    start: int
    end: int
    index: int
    headers: _HeadersOf

    @property
    def key(self) -> Key:
        return self.planned.held.key

    @property
    def stages(self) -> tuple[StageShape, ...]:
        return self.planned.held.stages

    @property
    def payload_bytes(self) -> list[int]:
        """By stage."""
        return [stage.payload_bytes(self.end - self.start) for stage in self.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A verified block in the arena. `ours`: to be given back after use; else it is the RAM level's."""

    spans: tuple[Span, ...]
    ours: bool


_Loads = deque[tuple[_Block, "asyncio.Task[_Ready | BadSegment]"]]


class Restoring:
    """One rung: the parts of a plan behind position `keep` into `slot`, which holds exactly [0, keep)."""

    def __init__(self, *, engine: Engine, ram: RamLevel | None, blocks: BlockPool, slot: int) -> None:
        """The caller leases every segment of the plan on the level it comes from."""
        self._engine = engine
        self._ram = ram
        self._blocks = blocks
        self._slot = slot
        self._engine_generation = engine.generation
        self._applied_bytes: Counter[str] = Counter()
        self._in_order = asyncio.Lock()
        self._most = window(engine)

    async def run(self, plan: Sequence[Planned], keep: int, upto: int) -> Applied:
        """Raises EngineGone when the engine ends meanwhile; everything else is in the outcome."""
        path = [planned for planned in plan if planned.held.segment.end > keep]
        groups = [path[i : i + HEADERS_AT_ONCE] for i in range(0, len(path), HEADERS_AT_ONCE)]
        headers = [asyncio.create_task(self._headers_of(group)) for group in groups]
        try:
            blocks = [
                block
                for group, found in zip(groups, headers, strict=True)
                for planned in group
                for block in self._cut(planned, found)
            ]
            held, bad = await self._apply_all(blocks, keep, upto)
        finally:
            await asyncio.gather(*headers, return_exceptions=True)
        return Applied(held=held, bytes_by_level=dict(self._applied_bytes), bad=bad)

    # ------------------------------------------------------------------------------------------------------ headers

    def _cut(self, planned: Planned, headers: _HeadersOf) -> Iterator[_Block]:
        """The blocks of a segment."""
        segment, ids = planned.held.segment, planned.held.tokens
        ranges = prefix.blocks(segment.start, segment.end, self._engine.info.block_tokens)
        for i, (start, end) in enumerate(ranges):
            tokens = ids[start - segment.start : end - segment.start]
            yield _Block(planned=planned, tokens=tokens, start=start, end=end, index=i, headers=headers)

    async def _headers_of(self, group: Sequence[Planned]) -> dict[Key, _Headers | BadSegment]:
        """The headers of all stages of these segments, one job for each level that they come from."""
        found: dict[Key, _Headers | BadSegment] = {planned.held.key: () for planned in group}
        for disk in {planned.disk for planned in group if planned.disk is not None}:
            here = [planned for planned in group if planned.disk is disk]
            files = [(planned.held.key, stage) for planned in here for stage in range(len(planned.held.stages))]
            outcomes = await asyncio.wrap_future(disk.reader.headers(files))
            rest = iter(outcomes)
            for planned in here:
                found[planned.held.key] = self._verified(planned, list(islice(rest, len(planned.held.stages))))
        return found

    def _verified(self, planned: Planned, outcomes: Sequence[SegmentHeader | NotRead]) -> _Headers | BadSegment:
        """A stage that is damaged or missing makes the whole segment damaged."""
        held, block_tokens = planned.held, self._engine.info.block_tokens
        headers: list[SegmentHeader] = []
        problems: list[NotRead | None] = []
        for stage, outcome in enumerate(outcomes):
            if not isinstance(outcome, SegmentHeader):
                problems.append(outcome)
                continue
            expected = plan_segment(
                held.segment,
                stage=stage,
                n_stages=len(held.stages),
                shape=held.stages[stage],
                block_tokens=block_tokens,
            )
            fits = outcome.same_geometry(expected)
            problems.append(None if fits else Damaged(reason=f"unexpected header {outcome!r}"))
            headers.append(outcome)
        return _bad(planned, problems) or tuple(headers)

    # -------------------------------------------------------------------------------------------------------- blocks

    async def _apply_all(self, plan: list[_Block], keep: int, upto: int) -> tuple[int, BadSegment | None]:
        """Positions held, and what ended it early.

        Blocks are read as soon as their own headers are verified, and applied from when those of the whole plan were
        looked at. Applies are sent in order without waiting for the one before: the engine takes several between steps.
        """
        waiting = deque(block for block in plan if block.end > keep and block.start < upto)
        loads: _Loads = deque()
        applies: deque[tuple[_Block, asyncio.Task[BadSegment | None]]] = deque()
        sent = held = keep
        is_verified = False
        bad: BadSegment | None = None
        try:
            while waiting or loads or applies:
                while waiting and len(loads) + len(applies) < self._window():
                    block = waiting.popleft()
                    loads.append((block, asyncio.create_task(self._load(block))))
                heads = {queue[0][1] for queue in (loads, applies) if queue}
                if not any(head.done() for head in heads):
                    await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
                if applies and applies[0][1].done():
                    block, applied = applies.popleft()
                    bad = applied.result() or bad
                    if applied.result() is not None:
                        break
                    held = min(block.end, upto)
                    self._count(block)
                elif loads[0][1].done():
                    if not is_verified:
                        await asyncio.wait({block.headers for block in plan})
                        is_verified = True
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

    def _count(self, block: _Block) -> None:
        self._applied_bytes[block.planned.level] += sum(block.payload_bytes)

    async def _load(self, block: _Block) -> _Ready | BadSegment:
        """One verified block, all stages, in the arena."""
        if block.planned.disk is not None:
            return await self._read(block, block.planned.disk)
        assert self._ram is not None, "a block was planned from RAM"
        # Another restore may have set it aside, or found another copy for it, meanwhile.
        is_there = self._ram.index.held(block.key) is block.planned.held
        if is_there and await self._ram.is_intact(block.key, block.index, block.payload_bytes):
            return _Ready(spans=self._ram.blocks(block.key)[block.index], ours=False)
        return BadSegment(planned=block.planned, fault=Fault.DAMAGED, reason="its copy in RAM has changed")

    async def _read(self, block: _Block, disk: DiskLevel) -> _Ready | BadSegment:
        async with self._in_order:  # or a later block could take the memory that the next one waits for
            headers = (await asyncio.shield(block.headers))[block.key]
            if isinstance(headers, BadSegment):
                return headers
            spans = await self._blocks.take(block_lengths(self._engine, block.end - block.start, block.stages))
        if spans is None:
            reason = "there is no memory to read it into"
            return BadSegment(planned=block.planned, fault=Fault.NO_MEMORY, reason=reason)
        try:
            reads = [
                asyncio.wrap_future(disk.reader.block(header, block.index, self._blocks.place(span)))
                for header, span in zip(headers, spans, strict=True)
            ]
            outcomes = await asyncio.shield(asyncio.gather(*reads))
        except asyncio.CancelledError:
            # The threads may still be writing into the spans: they come back when the reads end.
            asyncio.gather(*reads).add_done_callback(lambda _: self._blocks.give_back(spans))
            raise
        bad = _bad(block.planned, [None if isinstance(outcome, Loaded) else outcome for outcome in outcomes])
        if bad is not None:
            self._blocks.give_back(spans)
        return bad or _Ready(spans=spans, ours=True)

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
                stages=block.stages,
            )
        finally:
            self._give_back(ready)
        if done.ok and done.held == upto:
            return None
        if self._engine.generation != self._engine_generation:
            raise EngineGone("the engine was replaced during a restore; send the request again", retry_after_s=1)
        if done.reason == POOL_IS_FULL:
            return BadSegment(planned=block.planned, fault=Fault.NO_MEMORY, reason=done.reason)
        reason = done.reason or f"the slot holds {done.held} positions instead of {upto}"
        return BadSegment(planned=block.planned, fault=Fault.REFUSED, reason=reason)

    def _window(self) -> int:
        """Blocks on their way now."""
        return min(self._most, BESIDE_OTHERS) if self._engine.is_serving else self._most

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
    block_bytes = sum(block_lengths(engine, engine.info.block_tokens, engine.info.stages))
    return min(16, max(2, READ_AHEAD_BYTES // max(1, block_bytes)))


def need_bytes(engine: Engine, match: Match) -> int:
    """Bytes that a restore of these segments from disk, and of a checkpoint behind them, holds at once.

    A checkpoint of several blocks is put together in the engine process before llama.cpp takes it.
    """
    most = engine.info.block_tokens
    blocks = (sum(block_lengths(engine, min(held.segment.n_tokens, most), held.stages)) for held in match.path)
    rows = window(engine) * max(blocks)
    if match.checkpoint is None:
        return rows
    n_bytes = match.checkpoint.n_bytes
    assembled = n_bytes if n_bytes > BLOCK_BYTES else 0
    return max(rows, engine.info.head_room + pad_to_page(min(n_bytes, BLOCK_BYTES)) + assembled)


def planned_bytes(engine: Engine, plan: Sequence[Planned], held: int, upto: int) -> dict[str, int]:
    """Payload bytes by level that a restore from [0, held) to [0, upto) moves: whole blocks."""
    info, found = engine.info, Counter[str]()
    for planned in plan:
        segment = planned.held.segment
        for start, end in prefix.blocks(segment.start, segment.end, info.block_tokens):
            if end > held and start < upto:
                found[planned.level] += sum(stage.payload_bytes(end - start) for stage in planned.held.stages)
    return dict(found)


def _bad(planned: Planned, problems: Sequence[NotRead | None]) -> BadSegment | None:
    """What the outcomes of all stages say about a segment; None when every one is sound.

    Damage outweighs a read that failed: the files at fault are known then, whatever the others are.
    """
    damaged = tuple(stage for stage, problem in enumerate(problems) if isinstance(problem, Damaged))
    gone = [stage for stage, problem in enumerate(problems) if isinstance(problem, Missing)]
    failed = [stage for stage, problem in enumerate(problems) if problem is not None]
    if not failed:
        return None
    worst = [*damaged, *gone, *failed][0]
    problem = problems[worst]
    assert problem is not None, "one that failed"
    stage = f"stage {worst}: " if len(problems) > 1 else ""
    fault = Fault.DAMAGED if damaged or gone else Fault.UNREADABLE
    return BadSegment(planned=planned, fault=fault, reason=stage + problem.reason, stages=damaged)
