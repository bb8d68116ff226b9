"""RAM -> disk: one cell per conversation, the newest state wins, and nothing that waits is lost.

A state that was parked in RAM is offered here. One task writes the cells one after the other: those of a state that was
superseded meanwhile collapse into the newer one, throttled ones wait, a failing disk is tried again after a while; the
copy in RAM stays until then. Nobody waits for it but the shutdown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from strata.cache.blocks import BlockPool
from strata.cache.checkpoints import CheckpointTaker
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation
from strata.cache.put import PutOutcome
from strata.cache.ram import RamLevel
from strata.cache.story import Story
from strata.cache.tasks import watched
from strata.cache.write_levels import WriteLevels
from strata.cache.writing import PutWriter, manifest_of
from strata.engine.interface import Engine
from strata.rules import prefix
from strata.store.format import Manifest
from strata.types import Segment

RETRY_S = 5.0
"""After a failed spill the state waits for so long."""
DAMAGED = "the copy in RAM was damaged"

log = logging.getLogger("strata.cache")


@dataclass(slots=True, kw_only=True)
class _Cell:
    """`not_before_s`: on the spiller's clock; a throttled or failed one waits until then."""

    serial: int
    not_before_s: float


class Spiller:
    """Writes RAM conversations to the write level, or past it."""

    def __init__(
        self,
        *,
        engine: Engine,
        pool: BlockPool,
        ram: RamLevel,
        levels: WriteLevels,
        counters: CacheCounters,
        story: Story,
        clock: Callable[[], float],
        throttle_s: float,
        taker: CheckpointTaker | None = None,
    ) -> None:
        """`taker`: of memory that cannot be cut."""
        self._engine = engine
        self._pool = pool
        self._ram = ram
        self._levels = levels
        self._counters = counters
        self._story = story
        self._clock = clock
        self._throttle_s = throttle_s
        self._taker = taker
        self._cells: dict[int, _Cell] = {}  # by serial in RAM, in the order they came
        self._written_s: dict[bytes, float] = {}  # when a conversation was last written
        self._told_failed: set[tuple[int, str]] = set()  # serial and level: logged once, counted each time
        self._tasks: set[asyncio.Task[None]] = set()  # at most one
        self._writing: int | None = None  # serial
        self._timer: asyncio.TimerHandle | None = None
        self._hurried = self._closed = False

    def __repr__(self) -> str:
        return f"Spiller({len(self._cells)} waiting)"

    @property
    def waiting(self) -> int:
        """Conversations that have yet to be written, or are being written."""
        return len(self._cells) + (self._writing is not None)

    @property
    def is_writing(self) -> bool:
        """Whether something is being written, or is due."""
        return bool(self._tasks)

    def offer(self, serial: int, *, instead_of: Iterable[int] = ()) -> None:
        """Write a RAM conversation soon. `instead_of`: what it superseded, which need not be written any more."""
        self.collapse(instead_of)
        if serial in self._cells or serial == self._writing or not self._ram.index.has_conversation(serial):
            return
        conversation = self._ram.index.conversation(serial).conversation
        not_before_s = self._written_s.get(conversation, -self._throttle_s) + self._throttle_s
        if self._hurried:
            not_before_s = 0.0
        self._counters.throttled += not_before_s > self._clock()
        self._cells[serial] = _Cell(serial=serial, not_before_s=not_before_s)
        self.wake()

    def offer_oldest(self, entries: Iterable[Conversation], n_bytes: int) -> None:
        """Write these, in their order, until `n_bytes` of RAM can be evicted afterwards."""
        for entry in entries:
            if n_bytes <= 0:
                break
            self.offer(entry.serial)
            n_bytes -= self._ram.index.bytes_named_by([entry.serial], alone=True)

    def collapse(self, serials: Iterable[int]) -> None:
        """These need not be written any more: a newer state of theirs is, or will be."""
        for serial in serials:
            self._counters.collapsed += self._cells.pop(serial, None) is not None

    def wake(self) -> None:
        """Write what is due; sleep until the next is."""
        if self._closed or self._tasks or not self._cells:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due() is not None:
            watched(self._run(), "the spiller", self._tasks).add_done_callback(lambda _: self.wake())
            return
        wait_s = max(0.0, min(cell.not_before_s for cell in self._cells.values()) - self._clock())
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.wake)

    def _due(self) -> _Cell | None:
        now = self._clock()
        return next((cell for cell in self._cells.values() if cell.not_before_s <= now), None)

    async def _run(self) -> None:
        while not self._closed and (cell := self._due()) is not None:
            del self._cells[cell.serial]
            if not self._ram.index.has_conversation(cell.serial):
                continue
            self._writing, done = cell.serial, False
            try:
                done = await self._spill(self._ram.index.conversation(cell.serial))
            finally:
                self._writing = None
                if not done and self._ram.index.has_conversation(cell.serial):
                    # At the end of the line, so that one that cannot be written does not keep the others waiting.
                    self._cells[cell.serial] = _Cell(serial=cell.serial, not_before_s=self._clock() + RETRY_S)

    async def flush(self) -> None:
        """Try to write everything that waits, throttled or not; what fails twice goes on waiting.

        Twice, because a segment that was on disk may be set aside while what shares it is written.
        """
        self._hurried = True
        try:
            for _ in range(2):
                for cell in self._cells.values():
                    cell.not_before_s = 0.0
                self.wake()
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
        finally:
            self._hurried = False

    async def _spill(self, entry: Conversation) -> bool:
        """Write one conversation; False when it did not become durable."""
        segments = prefix.chain(entry.root, entry.tokens, prefix.cuts(len(entry.tokens), entry.frontier or None))
        disk, manifest = self._chosen(entry, segments)
        if disk.index.stores(entry.whole):
            self._counters.spill_skipped += 1
            return True
        if entry.checkpoints and not self._ram.index.usable_checkpoints(entry.serial):
            return self._ended(entry, disk, PutOutcome(durable=frozenset(), tokens=0, reason=DAMAGED))
        n_bytes = sum(n for key, n in manifest.objects.items() if not disk.index.holds(key))
        if refusal := disk.refuses(n_bytes):
            disk.counters.rejected += 1
            return self._failed(entry, disk, refusal)
        if lack := disk.health.no_space_for(n_bytes):
            return self._failed(entry, disk, lack)
        leased = (*entry.keys, *manifest.checkpoint_keys)
        self._ram.lease(leased)
        put = disk.begin_put(manifest, whole=True, born=entry.born)
        writing = PutWriter(put, disk=disk, engine=self._engine, pool=self._pool)
        reached, reason = 0, ""
        try:
            reached = await self._write(segments, writing)
            if reached < len(segments):
                reason = DAMAGED
        finally:
            if manifest.checkpoints:
                await writing.drained()  # those that are written are named
            outcome = await disk.finish_put(put, reached, reason)
            self._ram.release(leased)
        return self._ended(entry, disk, outcome)

    def _chosen(self, entry: Conversation, segments: Sequence[Segment]) -> tuple[DiskLevel, Manifest]:
        """Where it goes, and what it is to be there; what it would be on the write level decides."""
        first = self._levels.first
        assert first is not None, "spilled without a disk level"
        manifest = self._manifest(entry, segments, first)
        disk = self._levels.choose(manifest.objects) or first
        return disk, manifest if disk is first else self._manifest(entry, segments, disk)

    def _manifest(self, entry: Conversation, segments: Sequence[Segment], disk: DiskLevel) -> Manifest:
        taker = self._taker
        return manifest_of(
            self._engine,
            tokens=entry.tokens,
            frontier=entry.frontier or None,
            conversation=entry.conversation,
            segments=segments,
            checkpoints=() if taker is None else taker.for_disk(disk, entry.root, entry.tokens, coming=False),
        )

    async def _write(self, segments: Sequence[Segment], writing: PutWriter) -> int:
        """Hand all that is missing to the writer; how many segments it has or had. What was damaged is left out."""
        put = writing.put
        for key in put.manifest.checkpoint_keys:
            if key in put.missing and self._ram.index.holds(key):
                await writing.checkpoint_from_ram(key, self._ram)
            elif key in put.missing:
                put.whole = False
        for i, segment in enumerate(segments):
            if segment.key in put.missing:
                if not self._ram.index.holds(segment.key):
                    put.whole = False  # what precedes it is kept
                    return i
                await writing.from_ram(segment, self._ram)
        return len(segments)

    def _ended(self, entry: Conversation, disk: DiskLevel, outcome: PutOutcome) -> bool:
        """Count and tell; True when nothing of it is left to write."""
        damaged = outcome.reason == DAMAGED
        if not outcome.durable and not damaged:
            return self._failed(entry, disk, outcome.reason)
        now = self._clock()
        if outcome.durable:
            self._counters.spilled += 1
            if self._throttle_s:
                self._written_s = {c: at for c, at in self._written_s.items() if at + self._throttle_s > now}
                self._written_s[entry.conversation] = now
            note = f", cut short: {DAMAGED}" if damaged else ""
            self._story.tell(now, entry.conversation, "spill", f"{outcome.tokens} tokens, ram -> {disk.name}{note}")
        else:
            self._counters.discards += 1
            self._story.tell(now, entry.conversation, "discard", f"{len(entry.tokens)} tokens: {DAMAGED}")
        if damaged:
            self._ram.drop([entry.serial])
        return outcome.durable.issuperset(entry.keys) or damaged

    def _failed(self, entry: Conversation, disk: DiskLevel, reason: str) -> bool:
        self._counters.spill_failed += 1
        if (entry.serial, disk.name) in self._told_failed:
            return False
        self._told_failed = {(s, n) for s, n in self._told_failed if self._ram.index.has_conversation(s)}
        self._told_failed.add((entry.serial, disk.name))
        log.warning("spill of %d tokens to %s failed: %s; they stay in RAM", len(entry.tokens), disk.name, reason)
        return False

    def close(self) -> None:
        """Write nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
