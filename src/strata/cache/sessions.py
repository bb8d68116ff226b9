"""Engine <-> session file, streamed: a conversation goes to one portable file and comes back from it.

Two pieces are held at once, never more, and nothing else that grows with the conversation but its tokens and 16 bytes
per block: while one is written, the next is captured; while one is applied, the next is read and verified. One session
moves at a time, so this bounds the whole server. A piece is a range of tokens, all stages, or a block of the checkpoint
of memory that cannot be cut (session_pieces.py). The engine must have all of a checkpoint at once: llama.cpp gives and
takes it in one call. That is admitted too.

A save is captured between the steps of other slots. A restore reads the file twice (SPEC §7): `check` validates all of
it with the engine untouched; `apply` reads it again, refuses a file that has changed, and verifies every block once
more before it reaches the engine. Which slot, and what happens to what it held, is decided in serve/sessions.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from strata.cache.admission import Admission, Floors, Memory
from strata.cache.blocks import BlockPool
from strata.cache.capturing import block_lengths
from strata.cache.counters import CacheCounters
from strata.cache.session_pieces import (
    Captures,
    Held,
    Target,
    apply_piece,
    hold,
    most_piece_bytes,
    no_memory,
    piece_lengths,
    take,
)
from strata.cache.writing import manifest_of
from strata.engine.interface import Engine
from strata.errors import DamagedFile, DiskRefused, EngineGone, EngineRefused, NotFound, SessionRefused
from strata.rules import prefix
from strata.rules.stages import is_split
from strata.store.arena import Arena
from strata.store.format import CheckpointEntry, Manifest
from strata.store.session import SessionFile, SessionFolder
from strata.store.session_format import Rows, pieces_of
from strata.types import BLOCK_BYTES, MIB, Key, Span, Tokens

log = logging.getLogger("strata.sessions")

SESSION_ARENA_BYTES = 64 * MIB
"""The arena's share for sessions: two of the largest blocks, with their head room."""
BLOCKS_AT_ONCE = 2
ENGINE_COPIES = 2
"""Of a checkpoint that is captured the engine has what llama.cpp gives and, for a moment, its canonical form."""

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
        """This session's turn, once memory admits its pieces. Raises NoMemory."""
        async with self._one_at_a_time:
            self._admit(what, BLOCKS_AT_ONCE * most_piece_bytes(self._engine))
            yield

    def _admit(self, what: str, need_bytes: int) -> None:
        if not self._admission.read(what, need_bytes).admitted:
            raise no_memory(need_bytes)

    # ---------------------------------------------------------------------------------------------------------- save

    async def save(self, state: SessionState, *, owner: str, name: str) -> int:
        """Write the session `name` of `owner`; bytes written, durable when this returns.

        Raises DiskRefused, NoMemory, EngineGone, EngineRefused, Busy, SessionRefused (a name that is no file); then
        nothing is left behind, and a session that had this name is as it was.
        """
        engine, born = self._engine, self._engine.generation
        async with self._turn("API session save"), hold(engine, state.slot, len(state.tokens), born) as held:
            if held.checkpoint_bytes:
                self._admit("API session save", ENGINE_COPIES * held.checkpoint_bytes)
            manifest = self._manifest(state, held)
            captures = Captures(engine, self._pool, held, pieces_of(manifest))
            job = asyncio.to_thread(self.folder.write, owner, name, manifest, engine.info.kv, captures.payloads())
            try:
                with _refusals(name):
                    n_bytes = await _whole(job, captures.stop)
            finally:
                await captures.close()
        self.counters.saved += 1
        self.counters.saved_bytes += n_bytes
        return n_bytes

    def _manifest(self, state: SessionState, held: Held) -> Manifest:
        n_tokens = len(state.tokens)
        entry = CheckpointEntry(position=n_tokens, n_bytes=held.checkpoint_bytes)
        return manifest_of(
            self._engine,
            tokens=state.tokens,
            frontier=state.frontier,
            conversation=state.conversation,
            segments=prefix.chain(state.root, state.tokens, prefix.cuts(n_tokens, state.frontier)),
            checkpoints=(entry,) if held.checkpoint else (),
        )

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
        if bool(manifest.checkpoints) == info.cuttable:
            _refuse("checkpoints", "it has one too many" if info.cuttable else "it has none, which this model needs")
        if file.plan.checkpoint_bytes > info.checkpoint_bytes:
            most = f"at most {info.checkpoint_bytes}"
            _refuse("checkpoints", f"its checkpoint has {file.plan.checkpoint_bytes} bytes; this model's have {most}")

    async def _check_blocks(self, file: SessionFile) -> None:
        largest = max(block.padded for block in file.plan.blocks)
        spans = take(self._pool, (self._engine.info.head_room + largest,))
        try:
            await _whole(asyncio.to_thread(self.folder.check_blocks, file, self._pool.place(spans[0])))
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
                    if plan.checkpoint_bytes > BLOCK_BYTES:  # a smaller one is taken from where it was read to
                        self._admit("streamed session restore", plan.checkpoint_bytes)
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
        """The positions held; the next piece is read while one is applied."""
        plan, held = file.plan, 0
        target = Target(
            slot=slot,
            tokens=plan.manifest.token_ids,
            stages=plan.manifest.stages,
            checkpoint_bytes=plan.checkpoint_bytes,
        )
        reading: asyncio.Task[tuple[Span, ...]] | None = asyncio.create_task(self._read(file, 0))
        try:
            for index in range(len(plan.pieces)):
                assert reading is not None, "every piece is read"
                spans = await asyncio.shield(reading)
                reading = asyncio.create_task(self._read(file, index + 1)) if index + 1 < len(plan.pieces) else None
                try:
                    held = await _whole(self._apply_piece(file, index, spans, target, born))
                finally:
                    self._pool.give_back(spans)
            return held
        finally:
            if reading is not None:
                await asyncio.wait({reading})
                if reading.exception() is None:
                    self._pool.give_back(reading.result())

    async def _apply_piece(
        self, file: SessionFile, index: int, spans: tuple[Span, ...], target: Target, born: int
    ) -> int:
        piece = file.plan.pieces[index]
        done = await apply_piece(self._engine, target, piece, spans)
        self._check_engine(born)
        if not done.ok:
            _refuse("payload", done.reason)
        if isinstance(piece, Rows) and done.held != piece.end:
            _refuse("payload", f"slot {target.slot} holds {done.held} positions instead of {piece.end}")
        return done.held

    def _check_engine(self, born: int) -> None:
        if self._engine.generation != born:
            raise EngineGone("the engine was replaced during a restore; send the request again", retry_after_s=1)

    async def _read(self, file: SessionFile, index: int) -> tuple[Span, ...]:
        """One verified piece, in the arena."""
        spans = take(self._pool, piece_lengths(self._engine, file.plan.pieces[index], file.plan.manifest.stages))
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


async def _whole(job: Awaitable[T], on_cancel: Callable[[], None] = lambda: None) -> T:
    """Wait for a job to its end, also when cancelled meanwhile: it uses memory that is given back afterwards."""
    task = asyncio.ensure_future(job)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait({task})
        raise


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
