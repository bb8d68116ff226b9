"""Engine <-> session file, streamed: a conversation goes to one portable file and comes back from it.

Two blocks are held at once, never more, and nothing else that grows with the conversation but its tokens and 16 bytes
per block: while one is written, the next is captured; while one is applied, the next is read and verified. One session
moves at a time, so this bounds the whole server. A block is one range of tokens, all stages.

A save is captured between the steps of other slots. A restore reads the file twice (SPEC §7): `check` validates all of
it with the engine untouched; `apply` reads it again, refuses a file that has changed, and verifies every block once
more before it reaches the engine. Which slot, and what happens to what it held, is decided in serve/sessions.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from strata.cache.admission import Admission, Floors, Memory
from strata.cache.blocks import BlockPool
from strata.cache.capturing import block_lengths
from strata.cache.counters import CacheCounters
from strata.cache.writing import manifest_of
from strata.engine.protocol import Engine
from strata.errors import DamagedFile, DiskRefused, EngineGone, EngineRefused, NoMemory, NotFound, SessionRefused
from strata.rules import prefix
from strata.rules.stages import is_split
from strata.store.arena import Arena
from strata.store.session import SessionFile, SessionFolder
from strata.types import MIB, Key, Span, StageShape, Tokens

log = logging.getLogger("strata.sessions")

SESSION_ARENA_BYTES = 64 * MIB
"""The arena's share for sessions: two of the largest blocks, with their head room."""
BLOCKS_AT_ONCE = 2

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class SessionCounters:
    """Monotonic. Bytes are those of files; `refused`: files that were not restored, whatever the reason."""

    saved: int = 0
    restored: int = 0
    refused: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    restored_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """What a slot holds: exactly `tokens`. `frontier`: the last turn opener, or None."""

    slot: int
    root: Key
    tokens: Tokens
    frontier: int | None
    conversation: bytes


class SessionMover:
    """Saves and restores sessions, one at a time, through memory of its own share of the arena."""

    def __init__(self, *, engine: Engine, arena: Arena, folder: SessionFolder, floors: Floors, memory: Memory) -> None:
        self.counters = SessionCounters()
        self.folder = folder
        self._engine = engine
        self._pool = BlockPool(
            arena,
            transient_bytes=min(SESSION_ARENA_BYTES, arena.limit_bytes),
            reserve_bytes=0,
            head_room=engine.info.head_room,
        )
        self._by_floor = CacheCounters()  # of it, only the reads by floor: sessions are counted apart
        self._admission = Admission(
            memory=memory, floors=floors, target="disk", pool=self._pool, counters=self._by_floor
        )
        self._one_at_a_time = asyncio.Lock()

    def __repr__(self) -> str:
        return f"SessionMover({self.folder!r})"

    def status(self) -> dict[str, object]:
        """For /v1/status: counts only."""
        by_floor = self._by_floor
        return {
            **asdict(self.counters),
            "admitted": by_floor.disk_hits,
            "admitted_transient": by_floor.disk_hits_transient,
            "admission_refused": by_floor.disk_hits_refused,
        }

    @asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[None]:
        """This session's turn, once memory admits its blocks. Raises NoMemory."""
        async with self._one_at_a_time:
            info = self._engine.info  # a file of another split needs other head room, which is little
            need_bytes = BLOCKS_AT_ONCE * sum(block_lengths(self._engine, info.block_tokens, info.stages))
            if not self._admission.read(what, need_bytes).admitted:
                raise _no_memory(need_bytes)
            yield

    def _take(self, n_tokens: int, stages: Sequence[StageShape]) -> tuple[Span, ...]:
        """The spans of one block, one per stage. Raises NoMemory."""
        lengths = block_lengths(self._engine, n_tokens, stages)
        spans = self._pool.try_take(lengths, "restore")
        if spans is None:
            raise _no_memory(sum(lengths))
        return spans

    # ---------------------------------------------------------------------------------------------------------- save

    async def save(self, state: SessionState, *, owner: str, name: str) -> int:
        """Write the session `name` of `owner`; bytes written, durable when this returns.

        Raises DiskRefused, NoMemory, EngineGone, EngineRefused, SessionRefused (a name that is no file); then nothing
        is left behind, and a session that had this name is as it was.
        """
        info, born = self._engine.info, self._engine.generation
        segments = prefix.chain(state.root, state.tokens, prefix.cuts(len(state.tokens), state.frontier))
        manifest = manifest_of(
            self._engine,
            tokens=state.tokens,
            frontier=state.frontier,
            conversation=state.conversation,
            segments=segments,
        )
        ranges = [r for s in segments for r in prefix.blocks(s.start, s.end, info.block_tokens)]
        async with self._turn("API session save"):
            captures = _Captures(self, state.slot, ranges, born)
            job = asyncio.to_thread(self.folder.write, owner, name, manifest, info.kv, captures.payloads())
            try:
                with _refusals(name):
                    n_bytes = await _whole(job, captures.stop)
            finally:
                await captures.close()
        self.counters.saved += 1
        self.counters.saved_bytes += n_bytes
        return n_bytes

    # ------------------------------------------------------------------------------------------------------- restore

    async def check(self, *, owner: str, name: str, namespace: str) -> SessionFile:
        """The read pass: all of the file is validated, the engine is untouched.

        Raises NotFound (also for a session of another namespace), SessionRefused naming the field at fault, NoMemory,
        DiskRefused.
        """
        try:
            async with self._turn("streamed session restore"):
                with _refusals(name):
                    most = self._engine.info.context
                    file = await asyncio.to_thread(self.folder.open_file, owner, name, most_tokens=most)
                    self._check_fits(file, namespace)
                    await self._check_blocks(file)
        except (SessionRefused, DiskRefused, NotFound) as error:
            self.counters.refused += 1
            log.warning("session %r is not restored: %s", name, error.message)
            raise
        return file

    def _check_fits(self, file: SessionFile, namespace: str) -> None:
        """Raises FileNotFoundError for another key's session, DamagedFile for one that this engine cannot hold."""
        info, manifest = self._engine.info, file.plan.manifest
        if manifest.root != prefix.root_key(manifest.identity, namespace):
            log.warning("session %s was saved under another API key", file.path.name)
            raise FileNotFoundError
        if manifest.identity != info.fingerprint:
            theirs, ours = f"{manifest.model_name} ({file.plan.kv})", f"{info.model_name} ({info.kv})"
            problem = f"it was saved of {theirs}, this server runs {ours}"
            if theirs == ours:
                now = "on" if info.flash_attention else "off"
                problem += f" from another file, or its K/V lay otherwise: try --flash-attention (it is {now}) or --kv"
            _refuse("identity", problem)
        if not is_split(manifest.stages, info.row_layers):
            _refuse("stages", "it has other layers than this model")
        block_bytes = sum(block_lengths(self._engine, manifest.block_tokens, manifest.stages))
        if manifest.block_tokens > info.block_tokens or block_bytes > SESSION_ARENA_BYTES // BLOCKS_AT_ONCE:
            _refuse("stages", "it has larger blocks than this model's")
        if manifest.n_tokens > info.context:
            _refuse(
                "tokens", f"it has {manifest.n_tokens} tokens, more than the {info.context} of this server's context"
            )
        ids = manifest.token_ids
        if int(ids.min()) < 0 or int(ids.max()) >= info.vocab_tokens:
            _refuse("tokens", f"ids outside the {info.vocab_tokens} of this model")
        if file.plan.checkpoint_bytes:
            _refuse("checkpoint_bytes", "it has a checkpoint, which this server cannot restore")

    async def _check_blocks(self, file: SessionFile) -> None:
        spans = self._take(self._engine.info.block_tokens, file.plan.manifest.stages)
        view = max((self._pool.place(span) for span in spans), key=len)
        try:
            await _whole(asyncio.to_thread(self.folder.check_blocks, file, view))
        finally:
            self._pool.give_back(spans)

    async def apply(self, file: SessionFile, slot: int) -> int:
        """The apply pass, into `slot`, which must hold nothing; the positions that it holds then: all of the session's.

        Raises SessionRefused, NoMemory, DiskRefused, NotFound, EngineGone; then the slot holds some part of it, which
        the caller clears.
        """
        plan, name = file.plan, file.path.name
        born = self._engine.generation
        try:
            async with self._turn("streamed session restore"):
                with _refusals(name):
                    if plan.manifest.identity != self._engine.info.fingerprint:
                        _refuse("identity", "the engine was replaced by another one meanwhile")
                    await asyncio.to_thread(self.folder.check_unchanged, file)
                    held = await self._apply_all(file, slot, born)
            self._check_engine(born)
            if held != plan.manifest.n_tokens:
                raise EngineRefused(f"slot {slot} holds {held} positions instead of {plan.manifest.n_tokens}")
        except (SessionRefused, DiskRefused, NotFound, EngineRefused) as error:
            self.counters.refused += 1
            log.warning("session %r is not restored, slot %d is empty: %s", name, slot, error.message)
            raise
        self.counters.restored += 1
        self.counters.restored_bytes += plan.file_bytes
        self.counters.restored_tokens += held
        return held

    async def _apply_all(self, file: SessionFile, slot: int, born: int) -> int:
        """The positions held; the next range is read while one is applied."""
        ranges, held = file.plan.ranges, 0
        reading: asyncio.Task[tuple[Span, ...]] | None = asyncio.create_task(self._read(file, 0))
        try:
            for index in range(len(ranges)):
                assert reading is not None, "every range is read"
                spans = await asyncio.shield(reading)
                reading = asyncio.create_task(self._read(file, index + 1)) if index + 1 < len(ranges) else None
                try:
                    held = await _whole(self._apply_range(file, index, spans, slot, born))
                finally:
                    self._pool.give_back(spans)
            return held
        finally:
            if reading is not None:
                await asyncio.wait({reading})
                if reading.exception() is None:
                    self._pool.give_back(reading.result())

    async def _apply_range(self, file: SessionFile, index: int, spans: tuple[Span, ...], slot: int, born: int) -> int:
        start, end = file.plan.ranges[index]
        manifest = file.plan.manifest
        done = await self._engine.apply(
            slot,
            start=start,
            end=end,
            from_=start,
            upto=end,
            spans=spans,
            tokens=manifest.token_ids[start:end],
            stages=manifest.stages,
        )
        self._check_engine(born)
        if not done.ok or done.held != end:
            _refuse("payload", done.reason or f"slot {slot} holds {done.held} positions instead of {end}")
        return done.held

    def _check_engine(self, born: int) -> None:
        if self._engine.generation != born:
            raise EngineGone("the engine was replaced during a restore; send the request again", retry_after_s=1)

    async def _read(self, file: SessionFile, index: int) -> tuple[Span, ...]:
        """One verified range, all stages, in the arena."""
        start, end = file.plan.ranges[index]
        spans = self._take(end - start, file.plan.manifest.stages)
        jobs = [
            asyncio.to_thread(self.folder.read_block, file, block, self._pool.place(span))
            for block, span in zip(file.plan.blocks_of(index), spans, strict=True)
        ]
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self._pool.give_back(spans)
                raise outcome
        return spans


class _Captures:
    """The blocks of a slot for the writing thread: one is captured ahead of the one that is written."""

    def __init__(self, mover: SessionMover, slot: int, ranges: list[tuple[int, int]], born: int) -> None:
        """`born`: the generation of the engine process that holds them."""
        self.stopped = False
        self._mover = mover
        self._slot = slot
        self._ranges = iter(ranges)
        self._loop = asyncio.get_running_loop()
        self._born = born
        self._ahead: asyncio.Task[tuple[tuple[int, int], tuple[Span, ...]]] | None = None
        self._written: tuple[Span, ...] = ()

    def payloads(self) -> Iterator[memoryview]:
        """On the writing thread: every block's payload in the file's order, each reused after the next is asked for."""
        while (views := asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()) is not None:
            yield from views

    def stop(self) -> None:
        """No block follows: the writing thread ends, and leaves nothing behind."""
        self.stopped = True

    async def _next(self) -> list[memoryview] | None:
        mover = self._mover
        mover._pool.give_back(self._written)
        self._written = ()
        if self.stopped:
            raise EngineGone("the save was given up")
        ahead = self._ahead or self._capture_next()
        self._ahead = None
        if ahead is None:
            return None
        (start, end), self._written = await ahead
        self._ahead = self._capture_next()
        stages = mover._engine.info.stages
        return [
            mover._pool.payload(span, stage.payload_bytes(end - start))
            for span, stage in zip(self._written, stages, strict=True)
        ]

    def _capture_next(self) -> asyncio.Task[tuple[tuple[int, int], tuple[Span, ...]]] | None:
        place = next(self._ranges, None)
        return None if place is None else asyncio.create_task(self._capture(*place))

    async def _capture(self, start: int, end: int) -> tuple[tuple[int, int], tuple[Span, ...]]:
        mover = self._mover
        spans = mover._take(end - start, mover._engine.info.stages)
        try:
            if mover._engine.generation != self._born:
                raise EngineGone("the engine was replaced during a save; what the slot held is gone", retry_after_s=1)
            done = await mover._engine.capture(self._slot, start, end, spans)
            if not done.ok:
                raise EngineRefused(done.reason or "the engine refused the capture")
        except BaseException:
            mover._pool.give_back(spans)
            raise
        return (start, end), spans

    async def close(self) -> None:
        """Give back what is left, once neither the engine nor the thread uses it."""
        self._mover._pool.give_back(self._written)
        self._written = ()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            await asyncio.wait({ahead})
            if not ahead.cancelled() and ahead.exception() is None:
                self._mover._pool.give_back(ahead.result()[1])


async def _whole(job: Awaitable[T], on_cancel: Callable[[], None] = lambda: None) -> T:
    """Wait for a job to its end, also when cancelled meanwhile: it uses memory that is given back afterwards."""
    task = asyncio.ensure_future(job)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait({task})
        raise


def _no_memory(need_bytes: int) -> NoMemory:
    need_mib = -(-need_bytes // MIB)
    return NoMemory(
        f"physical memory does not admit {need_mib} MiB now: free some, or lower the floor "
        "(--conversation-cache-park-min-free-mib)",
        retry_after_s=5,
    )


def _refuse(field: str, problem: str) -> None:
    raise DamagedFile(f"{field}: {problem}", field=field)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn what a session file is found to be into what its client is told."""
    try:
        yield
    except DamagedFile as error:
        raise SessionRefused(f"session {name!r} is refused: {error.message}", field=error.field) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no session {name!r}", field="filename") from error
    except OSError as error:
        raise DiskRefused(f"session {name!r} cannot be read ({error.strerror}): check the disk") from error
