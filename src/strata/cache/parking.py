"""One park: a slot's state goes to RAM, else to disk, else nowhere. It runs beside the next requests.

It never makes a request wait for the disk: when its slot is wanted it goes on only as long as blocks are free, and what
it has captured by then is what is kept. Where it goes was decided by rules/placement.py, and is decided again when the
memory is not there after all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from strata.cache.admission import Admission
from strata.cache.blocks import BlockPool
from strata.cache.capturing import Capturing, RamSource, payload_lengths
from strata.cache.checkpoints import Captured, CheckpointTaker
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.kept import Kept
from strata.cache.parking_checkpoints import ParkingCheckpoints
from strata.cache.passing import PassingSource
from strata.cache.put import PutOutcome
from strata.cache.ram import Blocks, RamLevel
from strata.cache.spilling import Spiller
from strata.cache.story import Story
from strata.cache.write_levels import WriteLevels
from strata.cache.writing import PutWriter, manifest_of
from strata.engine.interface import Engine
from strata.rules.placement import (
    Destination,
    ParkFacts,
    Placement,
    after_capture,
    allocation_failed,
    skip_line,
    transient_line,
    writer_refused,
)
from strata.store.format import CheckpointEntry
from strata.types import Key, Segment, Tokens

log = logging.getLogger("strata.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkJob:
    """The state to keep: `slot` holds exactly `tokens`. `frontier`: the last turn opener of the prompt, or None.

    `provisional`: of a cancelled request, to which nothing is owed. `leaving`: the slot is about to hold something
    else, so a state that is kept nowhere now is lost. `checkpoints`: captured during its turn, for the park to write or
    to give back.
    """

    slot: int
    root: Key
    tokens: Tokens
    frontier: int | None
    conversation: bytes
    provisional: bool = False
    leaving: bool = False
    checkpoints: tuple[Captured, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What parks work with. `ram`: None when off. `mirror`: write RAM parks at once.

    `taker`: None for memory that can be cut, which needs no checkpoints.
    """

    engine: Engine
    pool: BlockPool
    admission: Admission
    counters: CacheCounters
    story: Story
    clock: Callable[[], float]
    ram: RamLevel | None
    levels: WriteLevels
    kept: Kept
    spiller: Spiller | None
    mirror: bool
    taker: CheckpointTaker | None = None

    def tell(self, job: ParkJob, verb: str, detail: str) -> None:
        self.story.tell(self.clock(), job.conversation, verb, detail)


class Parking:
    """A park on its way. Made by `ConversationCache.begin_park`; `run` must follow."""

    def __init__(
        self,
        job: ParkJob,
        segments: tuple[Segment, ...],
        whole: tuple[Key, ...],
        facts: ParkFacts,
        placed: Placement,
        desk: Desk,
        *,
        disk: DiskLevel | None,
        born: int,
    ) -> None:
        """`disk`: the level to write to. `whole`, `born`: see Conversation."""
        self.job = job
        self._born = born
        self._segments = segments
        self._keys = tuple(segment.key for segment in segments)
        self._whole = whole
        self._facts = facts
        self._placed = placed
        self._desk = desk
        self._disk = disk
        self._capturing = Capturing(job.slot, engine=desk.engine, pool=desk.pool, counters=desk.counters)
        self._captured = asyncio.Event()
        self._promised_bytes = self._promised = 0
        self._writing: PutWriter | None = None
        self._checkpoints: ParkingCheckpoints | None = None
        if desk.taker is not None:
            self._checkpoints = ParkingCheckpoints(desk.taker, desk.ram, job.checkpoints, job.root, job.tokens)
        self.wanted = False
        if desk.ram is not None:
            desk.ram.lease(self._keys)
        if placed.destination is Destination.RAM:
            self._promise(placed.need_bytes, 1)
        elif self._checkpoints is None:
            self._begin_put()

    def __repr__(self) -> str:
        return f"Parking(slot {self.job.slot}, {len(self._segments)} segments -> {self._placed.destination})"

    @property
    def reach(self) -> int:
        """The positions of the slot that this park captures from: [0, reach)."""
        return len(self.job.tokens)

    async def give_way(self) -> None:
        """Return once the slot may change: when all is captured, or no block is free."""
        self.wanted = True
        self._desk.pool.wake()
        if self._writing is not None:
            self._writing.wake()
        await self._captured.wait()

    async def run(self) -> bool:
        """Capture and keep; True when all of the state is kept outside the engine."""
        try:
            if self._placed.destination is Destination.RAM:
                if await self._into_ram():
                    return self._checkpoints is None or self._checkpoints.has_end
                if not self._goes_to_disk():
                    self.give_up(self._capturing.stop_reason)
                    return False
                if self._checkpoints is None:
                    self._begin_put()
            if self._checkpoints is not None and not await self._begin_with(self._checkpoints):
                return False
            return await self._onto_disk()
        finally:
            self._captured.set()
            self._promise(-self._promised_bytes, -self._promised)
            if self._checkpoints is not None:
                self._checkpoints.give_back()
            if self._desk.ram is not None:
                self._desk.ram.release(self._keys)

    def _goes_to_disk(self) -> bool:
        return self._placed.destination in (Destination.DISK, Destination.DISK_TRANSIENT)

    # ------------------------------------------------------------------------------------------------------------- RAM

    def _promise(self, n_bytes: int, conversations: int = 0) -> None:
        self._promised_bytes += n_bytes
        self._promised += conversations
        if self._desk.ram is not None:
            self._desk.ram.promise(n_bytes, conversations)

    async def _into_ram(self) -> bool:
        """False, and placed anew, when the memory was not there in the end."""
        desk, ram, job = self._desk, self._desk.ram, self.job
        assert ram is not None, "placed in RAM without a RAM level"
        checkpoints: tuple[tuple[int, Key], ...] = ()
        if self._checkpoints is not None:
            passing_bytes = self._checkpoints.passing_bytes
            checkpoints = await self._checkpoints.into_ram(job.slot)
            self._promise(-min(self._promised_bytes, passing_bytes - self._checkpoints.passing_bytes))
        if not await self._rows_into_ram(ram) or not (checkpoints or desk.taker is None):
            self._placed = allocation_failed(self._facts, self._placed)
            return False
        self._captured.set()
        staying = desk.admission.facts(
            ram_need_bytes=0,
            transient_need_bytes=0,
            evictable_bytes=ram.evictable_bytes(self._keys),
            fits_budget=True,
            disk_usable=self._facts.disk_usable,
            provisional=job.provisional,
            durable_below=desk.kept.anywhere(self._whole),
            mirror_parks=desk.mirror,
        )
        placed = after_capture(staying)
        if placed.destination is not Destination.RAM:
            self._placed = placed
            return False
        if placed.evict_bytes:
            desk.kept.evict(ram.plan_to_free(placed.evict_bytes, self._keys))
        self._promise(-self._promised_bytes, -self._promised)
        entry, old = ram.add_conversation(
            job.root,
            job.tokens,
            job.frontier,
            job.conversation,
            self._keys,
            born=self._born,
            checkpoints=checkpoints,
            provisional=job.provisional,
        )
        desk.counters.ram_superseded += len(old)
        desk.counters.provisional += job.provisional
        desk.counters.parked_ram += not job.provisional
        desk.counters.parked_tokens += len(job.tokens)
        desk.tell(job, "park", f"{len(job.tokens)} tokens, slot {job.slot} -> ram")
        if desk.spiller is not None and not job.provisional:
            desk.spiller.offer(entry.serial, instead_of=old)
        return True

    async def _rows_into_ram(self, ram: RamLevel) -> bool:
        """Capture the segments that RAM lacks; those of memory without rows have nothing to capture."""
        missing = [segment for segment in self._segments if not ram.index.holds(segment.key)]
        if not self._desk.engine.info.stages:
            for segment in missing:
                self._keep(segment, ())
            return True
        done = await self._capturing.run(missing, RamSource(self._desk.pool), self._keep)
        return done == len(missing) and all(map(ram.index.holds, self._keys))

    def _keep(self, segment: Segment, blocks: Blocks) -> None:
        ram = self._desk.ram
        assert ram is not None, "placed in RAM without a RAM level"
        self._promise(-min(self._promised_bytes, sum(span.length for spans in blocks for span in spans)))
        ids = self.job.tokens[segment.start : segment.end]
        engine = self._desk.engine
        ram.add_segment(segment, ids, blocks, payload_lengths(engine, segment), engine.info.stages)

    # ------------------------------------------------------------------------------------------------------------ disk

    def _written_to(self) -> DiskLevel:
        """Checkpoints that are written already are on the write level."""
        ticketed = self._checkpoints is not None and self._checkpoints.has_tickets
        disk = self._desk.levels.first if ticketed else self._disk
        assert disk is not None, "placed on disk without a disk level"
        return disk

    def _begin_put(self, checkpoints: tuple[CheckpointEntry, ...] = ()) -> PutWriter:
        desk, job, disk = self._desk, self.job, self._written_to()
        manifest = manifest_of(
            desk.engine,
            tokens=job.tokens,
            frontier=job.frontier,
            conversation=job.conversation,
            segments=self._segments,
            checkpoints=checkpoints,
        )
        written = {one.key for one in job.checkpoints if one.ticket}
        put = disk.begin_put(manifest, whole=False, born=self._born, written=written)
        self._writing = PutWriter(put, disk=disk, engine=desk.engine, pool=desk.pool)
        return self._writing

    async def _begin_with(self, checkpoints: ParkingCheckpoints) -> bool:
        """Begin the put once its last checkpoint is there; False when it has none and cannot be resumed anywhere."""
        await checkpoints.complete(self.job.slot)
        entries = checkpoints.for_disk(self._written_to())
        if not entries:
            self.give_up("no checkpoint of it could be taken")
            return False
        self._begin_put(entries)
        return True

    async def _onto_disk(self) -> bool:
        """Through a few transient blocks, but for what RAM holds already."""
        writing = self._writing
        assert writing is not None, "placed on disk without a put"
        outcome, failed = await self._put(writing), {writing.disk}
        while not outcome.durable and (other := self._another(writing, failed)) is not None:
            log.warning("%s: %s; %s takes it", writing.disk.name, outcome.reason, other.name)
            self._disk = other
            writing = self._begin_put()
            outcome = await self._put(writing)
            failed.add(writing.disk)
        self._account(outcome, writing.disk)
        return outcome.durable.issuperset(self._whole) and not outcome.reason

    async def _put(self, writing: PutWriter) -> PutOutcome:
        reached = 0
        try:
            reached = await self._write_missing(writing)
        finally:
            self._captured.set()
            if self._checkpoints is not None:
                await writing.drained()
            outcome = await writing.disk.finish_put(writing.put, reached, self._capturing.stop_reason)
        return outcome

    def _another(self, writing: PutWriter, failed: Collection[DiskLevel]) -> DiskLevel | None:
        """A level that takes what the `failed` ones did not, as long as all of it lies in the slot still."""
        if self.wanted or self._checkpoints is not None or self._capturing.stop_reason:
            return None
        other = self._desk.levels.taker(writing.put.manifest.objects, but=failed)
        if other is not None:
            self._captured.clear()
        return other

    async def _write_missing(self, writing: PutWriter) -> int:
        """Hand the missing segments to the writer; how many of all segments it has or had."""
        desk, ram, missing = self._desk, self._desk.ram, writing.put.missing
        if self._checkpoints is not None:
            for key in self._checkpoints.hand_over(writing):
                assert ram is not None, "held by a RAM level that is off"
                await writing.checkpoint_from_ram(key, ram)
        to_capture = [s for s in self._segments if s.key in missing and not (ram and ram.index.holds(s.key))]
        n_captured = await self._capturing.run(
            to_capture, PassingSource(desk.pool, self, writing), writing.from_capture
        )
        self._captured.set()
        lost = {segment.key for segment in to_capture[n_captured:]}
        reached = next((i for i, key in enumerate(self._keys) if key in lost), len(self._keys))
        captured = {segment.key for segment in to_capture}
        for segment in self._segments[:reached]:
            if ram is not None and segment.key in missing and segment.key not in captured:
                await writing.from_ram(segment, ram)
        return reached

    def _account(self, outcome: PutOutcome, disk: DiskLevel) -> None:
        desk, job, placed = self._desk, self.job, self._placed
        if not outcome.durable:
            desk.counters.refused += 1
            facts = replace(self._facts, durable_below=desk.kept.anywhere(self._whole))
            self._placed = writer_refused(facts, placed)
            self.give_up(outcome.reason)
            return
        transient = placed.destination is Destination.DISK_TRANSIENT
        desk.counters.parked_disk_transient += transient
        desk.counters.parked_disk += not transient
        desk.counters.parked_tokens += outcome.tokens
        desk.counters.park_cut_short += bool(outcome.reason)
        if transient and placed.floor_bytes < placed.parking_floor_bytes:
            log.info("%s", transient_line(placed))
        note = f", cut short: {outcome.reason}" if outcome.reason else ""
        where = f"slot {job.slot} -> {disk.name}"
        desk.tell(job, "park", f"{outcome.tokens} of {len(job.tokens)} tokens, {where}{note}")

    def make_room(self, n_bytes: int) -> None:
        """Let RAM give memory back, as far as it may."""
        ram = self._desk.ram
        if ram is not None:
            self._desk.kept.evict(ram.plan_to_free(n_bytes, self._keys))

    # --------------------------------------------------------------------------------------------------------- nowhere

    def give_up(self, reason: str = "") -> None:
        """The state is kept nowhere outside the engine: a discard, if it is about to leave its slot."""
        gone = self.wanted or self._capturing.engine_is_gone
        job = replace(self.job, leaving=self.job.leaving or gone)
        give_up(self._desk, job, self._placed, reason)


def give_up(desk: Desk, job: ParkJob, placed: Placement, reason: str = "", *, evicted: int = 0) -> None:
    """Count, log and tell that a state is not kept. One that still lies in its slot is tried again when it leaves."""
    counters, n_tokens = desk.counters, len(job.tokens)
    if placed.destination is Destination.DROP or job.provisional:
        counters.provisional_dropped += job.provisional
        counters.skipped += not job.provisional
        return
    if not job.leaving:
        counters.deferred += 1
        log.warning("%d tokens stay in slot %d only: %s", n_tokens, job.slot, reason or placed.reason)
        return
    counters.discards += 1
    if reason:
        log.warning("skip parking (%s) discards=%d", reason, counters.discards)
    else:
        still = len(desk.ram.index.conversations()) if desk.ram is not None else 0
        log.warning("%s", skip_line(placed, evicted=evicted, still_parked=still, discards=counters.discards))
    desk.tell(job, "discard", f"{n_tokens} tokens: {reason or placed.reason}")
