"""Engine <-> arena, piece by piece: what a session moves at once, and the memory that takes.

A save captures one piece ahead of the one that is written. Memory that cannot be cut is held as a deferred copy from
the beginning of a save to its end, so that its size is known and it is of the same moment as the rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from strata.cache.blocks import BlockPool
from strata.cache.capturing import block_lengths
from strata.engine.interface import Engine
from strata.engine.protocol import Done
from strata.errors import Busy, EngineGone, EngineRefused, NoMemory, StrataError
from strata.store.session_format import Piece, Rows
from strata.types import BLOCK_BYTES, MIB, Span, StageShape, Tokens, pad_to_page


def piece_lengths(engine: Engine, piece: Piece, stages: Sequence[StageShape]) -> tuple[int, ...]:
    """Arena bytes of a piece: head room and padded payload of each of its blocks."""
    if isinstance(piece, Rows):
        return block_lengths(engine, piece.end - piece.start, stages)
    return (engine.info.head_room + pad_to_page(piece.length),)


def most_piece_bytes(engine: Engine) -> int:
    """Arena bytes of the largest piece of a session of this engine. One of another split needs a little more."""
    info = engine.info
    part = info.head_room + pad_to_page(min(BLOCK_BYTES, info.checkpoint_bytes)) if info.checkpoint_bytes else 0
    return max(part, sum(block_lengths(engine, info.block_tokens, info.stages)))


def take(pool: BlockPool, lengths: tuple[int, ...]) -> tuple[Span, ...]:
    """Memory for a piece. Raises NoMemory."""
    spans = pool.try_take(lengths, "restore")
    if spans is None:
        raise no_memory(sum(lengths))
    return spans


def no_memory(need_bytes: int) -> NoMemory:
    need_mib = -(-need_bytes // MIB)
    return NoMemory(
        f"physical memory does not admit {need_mib} MiB now: free some, or lower the floor "
        "(--conversation-cache-park-min-free-mib)",
        retry_after_s=5,
    )


# ---------------------------------------------------------------------------------------------------------------- apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The slot that a session of `tokens` goes to. `stages`: how the file's rows are split."""

    slot: int
    tokens: Tokens
    stages: tuple[StageShape, ...]
    checkpoint_bytes: int


async def apply_piece(engine: Engine, target: Target, piece: Piece, spans: tuple[Span, ...]) -> Done:
    """Put a verified piece into the slot."""
    if isinstance(piece, Rows):
        start, end = piece.start, piece.end
        return await engine.apply(
            target.slot,
            start=start,
            end=end,
            from_=start,
            upto=end,
            spans=spans,
            tokens=target.tokens[start:end],
            stages=target.stages,
        )
    (span,) = spans
    return await engine.apply_checkpoint(
        target.slot,
        position=len(target.tokens),
        offset=piece.offset,
        total=target.checkpoint_bytes,
        span=span,
    )


# -------------------------------------------------------------------------------------------------------------- capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an idle slot holds, in the engine process `generation`. `checkpoint` 0: its memory can be cut."""

    slot: int
    generation: int
    checkpoint: int = 0
    checkpoint_bytes: int = 0


@asynccontextmanager
async def hold(engine: Engine, slot: int, n_tokens: int, generation: int) -> AsyncIterator[Held]:
    """What `slot` holds, `n_tokens`, for as long as it is saved. Raises Busy, EngineRefused, EngineGone."""
    if engine.info.cuttable:
        yield Held(slot=slot, generation=generation)
        return
    _check_generation(engine, generation)
    holding = asyncio.ensure_future(engine.hold(slot))
    try:
        done = await asyncio.shield(holding)
        if not done.ok:
            raise Busy(f"slot {slot} cannot be saved now ({done.reason}): send it again", retry_after_s=1)
        if done.held != n_tokens:
            raise EngineRefused(f"slot {slot} holds {done.held} positions instead of {n_tokens}")
        yield Held(slot=slot, generation=generation, checkpoint=done.checkpoint, checkpoint_bytes=done.payload_bytes)
    finally:
        await asyncio.shield(_release(engine, holding, generation))


async def _release(engine: Engine, holding: asyncio.Future[Done], generation: int) -> None:
    """Give the spare back; also one that the engine gives out only now, to a save that was cancelled."""
    with suppress(StrataError):
        done = await holding
        if done.ok and engine.generation == generation:  # one that is gone holds nothing
            await engine.release_checkpoint(done.checkpoint)


def _check_generation(engine: Engine, generation: int) -> None:
    if engine.generation != generation:
        raise EngineGone("the engine was replaced during a save; what the slot held is gone", retry_after_s=1)


class Captures:
    """The pieces of a slot for the writing thread: one is captured ahead of the one that is written."""

    def __init__(self, engine: Engine, pool: BlockPool, held: Held, pieces: Iterable[Piece]) -> None:
        self._engine = engine
        self._pool = pool
        self._held = held
        self._pieces = iter(pieces)
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._ahead: asyncio.Task[tuple[Piece, tuple[Span, ...]]] | None = None
        self._written: tuple[Span, ...] = ()

    def payloads(self) -> Iterator[memoryview]:
        """On the writing thread: every block's payload in the file's order, each reused after the next is asked for."""
        while (views := asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()) is not None:
            yield from views

    def stop(self) -> None:
        """No block follows: the writing thread ends, and leaves nothing behind."""
        self._stopped = True

    async def _next(self) -> list[memoryview] | None:
        self._pool.give_back(self._written)
        self._written = ()
        if self._stopped:
            raise EngineGone("the save was given up")
        ahead = self._ahead or self._capture_next()
        self._ahead = None
        if ahead is None:
            return None
        piece, self._written = await ahead
        self._ahead = self._capture_next()
        return [self._pool.payload(span, n) for span, n in zip(self._written, self._lengths(piece), strict=True)]

    def _lengths(self, piece: Piece) -> tuple[int, ...]:
        if not isinstance(piece, Rows):
            return (piece.length,)
        return tuple(stage.payload_bytes(piece.end - piece.start) for stage in self._engine.info.stages)

    def _capture_next(self) -> asyncio.Task[tuple[Piece, tuple[Span, ...]]] | None:
        piece = next(self._pieces, None)
        return None if piece is None else asyncio.create_task(self._capture(piece))

    async def _capture(self, piece: Piece) -> tuple[Piece, tuple[Span, ...]]:
        spans = take(self._pool, piece_lengths(self._engine, piece, self._engine.info.stages))
        try:
            _check_generation(self._engine, self._held.generation)
            if isinstance(piece, Rows):
                done = await self._engine.capture(self._held.slot, piece.start, piece.end, spans)
            else:
                done = await self._engine.capture_checkpoint(self._held.checkpoint, piece.offset, spans[0])
            if not done.ok:
                raise EngineRefused(done.reason or "the engine refused the capture")
        except BaseException:
            self._pool.give_back(spans)
            raise
        return piece, spans

    async def close(self) -> None:
        """Give back what is left, once neither the engine nor the thread uses it."""
        self._pool.give_back(self._written)
        self._written = ()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            await asyncio.wait({ahead})
            if not ahead.cancelled() and ahead.exception() is None:
                self._pool.give_back(ahead.result()[1])
