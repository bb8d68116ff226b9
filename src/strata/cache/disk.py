"""One disk level as the cache sees it: its index, its budget, its threads, and the writes under way into it.

A write is a pair: `begin_put` leases its segments and says which are missing, `finish_put` makes it durable and drops
what it supersedes. Belongs to the event loop. What captures or copies the bytes is elsewhere (parking, spilling,
cascade); so is what happens to entries that must leave: this level only says which, to `on_leaving`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec

from strata.cache.coming import Coming
from strata.cache.counters import LevelCounters
from strata.cache.entries import Conversation
from strata.cache.health import Health
from strata.cache.loading import conversation_of, load
from strata.cache.put import DiskLimits, Leaving, Put, PutOutcome
from strata.cache.removals import Removals
from strata.cache.room import Room, first_to_go
from strata.cache.splits import as_held, in_the_way
from strata.cache.state import LevelIndex
from strata.cache.vanished import forget_vanished
from strata.store.format import Manifest
from strata.store.level import Level
from strata.store.reader import Reader
from strata.store.writer import Committed, Writer
from strata.types import Key

log = logging.getLogger("strata.cache")


class DiskLevel:
    """One directory, with its index."""

    def __init__(self, level: Level, limits: DiskLimits, identity: bytes, clock: Callable[[], float]) -> None:
        """Scans the directory. Raises OSError when it cannot be listed."""
        self.level = level
        self.limits = limits
        self.index = LevelIndex()
        self.counters = LevelCounters()
        self.on_leaving: Callable[[DiskLevel, Sequence[int], Leaving], None] = DiskLevel.remove_now
        self.on_recorded: Callable[[Conversation], None] = lambda _: None
        """Told of every conversation that became durable here."""
        self.below: DiskLevel | None = None
        """The level that takes what does not fit; None: it is deleted here."""
        self.moving: set[int] = set()
        """Entries on their way to another level or the archive; their bytes count as gone already."""
        self.stuck: dict[int, Leaving] = {}
        """Entries that could not leave, and why they should; the tick lets them try again."""
        self._doomed: dict[int, Leaving] = {}  # of those that move: what else says that they must go
        self._clock = clock
        self.scan = level.scan(identity)
        self.writer = Writer(level)
        self.health = Health(self.writer)
        self.reader = Reader(level)
        self._tickets = 0
        self._puts: set[Put] = set()
        self._coming = Coming(self.index)
        self._unusable = load(self.index, self.scan, identity, name=level.name, is_archive=limits.is_archive)
        self.removals = Removals(level, self.writer, lambda: self.make_room(0))

    def __repr__(self) -> str:
        return f"DiskLevel({self.level!r}, {self.index!r})"

    @property
    def name(self) -> str:
        return self.level.name

    @property
    def puts_under_way(self) -> int:
        return len(self._puts)

    @property
    def manifests_under_way(self) -> tuple[Manifest, ...]:
        return tuple(put.manifest for put in self._puts)

    def takes(self, n_bytes: int) -> bool:
        """Whether a write of `n_bytes` should succeed, as far as anyone can tell before it."""
        lacks_space = self.health.lacking_bytes(n_bytes + self._coming_bytes)
        return self.health.usable and not self.refuses(n_bytes) and not lacks_space

    def refuses(self, n_bytes: int) -> str:
        """Why a write of `n_bytes` is not taken; empty when it is."""
        if self.limits.rejects and self.used_bytes + n_bytes > self.limits.budget_bytes:
            return f"{self.name} is full, and --conversation-cache-spill-when-full is reject"
        return ""

    @property
    def used_bytes(self) -> int:
        """Bytes the level's files will take once what is under way is done."""
        return self.level.used_bytes + self._coming_bytes - self._leaving_bytes

    @property
    def _coming_bytes(self) -> int:
        return sum(put.unwritten_bytes for put in self._puts)

    @property
    def _leaving_bytes(self) -> int:
        moving = self.index.bytes_named_by(self.moving, alone=True) if self.moving else 0
        return self.removals.n_bytes + moving

    # --------------------------------------------------------------------------------------------------------- writing

    def begin_put(self, manifest: Manifest, *, whole: bool, born: int = 0, written: Collection[Key] = ()) -> Put:
        """Announce a write: what it names is leased, and room is made. `finish_put` must follow.

        `Put.missing`: segments and checkpoints alike, but for what has no file. `written`: under another ticket.
        """
        sizes = manifest.objects
        missing = frozenset(k for k, n in sizes.items() if n and not (k in self._coming or self.index.holds(k)))
        unwritten = {key: n_bytes for key, n_bytes in sizes.items() if key in missing and key not in written}
        too_large = sum(sizes.values()) > self.limits.budget_bytes and not self.limits.rejects
        put = Put(
            manifest=manifest,
            ticket=self.next_ticket(),
            missing=missing,
            whole=whole,
            born=born,
            unwritten=unwritten,
            guest_bytes=sum(unwritten.values()) if too_large else 0,
        )
        self.counters.oversized += too_large
        self.index.lease(tuple(sizes))
        for key in missing:
            self._coming.begin(key, put.ticket)
            for stage in in_the_way(self.level, self.index, manifest, key, self._unusable.pop(key, None)):
                self.writer.quarantine(key, stage)
        self.make_room(0 if too_large else put.unwritten_bytes)
        self._puts.add(put)
        return put

    def next_ticket(self) -> int:
        if not self._tickets:
            self.writer.remove_files(self.scan.temporary)
        self._tickets += 1
        return self._tickets

    async def finish_put(self, put: Put, reached: int, stop_reason: str) -> PutOutcome:
        """Commit the first `reached` segments, which are written or here already; none of them when `put.whole`.

        With them go the checkpoints up to their end that are here or written, which `Put.unwritten` says. An entry that
        had checkpoints and has none left is not worth keeping.
        """
        outcome = PutOutcome(durable=frozenset(), tokens=0, reason=stop_reason)
        try:
            named = await self._coming.arrived(put, reached)
            reason = stop_reason if named == reached else "a segment it shares with another write was lost"
            lost = await self._coming.lost_checkpoints(put)
            outcome = await self._commit(put, named, reason, lost)
            written = (*put.manifest.keys[named:reached], *put.manifest.checkpoint_keys)
            self._drop_unnamed(key for key in written if key in put.missing and key not in outcome.durable)
        finally:
            self._puts.discard(put)
            for key in put.missing:
                self._coming.end(key, durable=key in outcome.durable)
            self.release(tuple(put.manifest.objects))
            self.make_room(0)
        return outcome

    async def _commit(self, put: Put, named: int, reason: str, lost: Collection[int]) -> PutOutcome:
        """Make the manifest of the first `named` segments durable, without the checkpoints at the positions `lost`."""
        whole = named == len(put.manifest.keys) and not lost
        part = put.manifest.first(named).without_checkpoints(lost) if named else put.manifest
        reason = reason or (f"{len(lost)} of its checkpoints were lost" if lost else "")
        empty = named == 0 or (put.manifest.checkpoints and not part.checkpoints)
        if empty or (put.whole and not whole):
            await asyncio.wrap_future(self.writer.abandon(put.ticket))
            self.health.note()
            return PutOutcome(durable=frozenset(), tokens=0, reason=reason)
        now = self._clock()
        changes = {"serial": self.level.next_serial(), "stamp_s": now, "created_s": put.manifest.created_s or now}
        manifest = msgspec.structs.replace(as_held(self.index, part, but=put.missing), **changes)
        committed = await asyncio.wrap_future(self.writer.commit(put.ticket, manifest))
        self.health.note()
        if not isinstance(committed, Committed):
            if committed.vanished:
                forget_vanished(self.level, self.index, self.counters)
            self._drop_unnamed(committed.left)
            return PutOutcome(durable=frozenset(), tokens=0, reason=committed.reason)
        entry = conversation_of(manifest, committed.manifest_bytes, born=put.born)
        self._record(manifest, entry, cut_short=not whole)
        reason, keys = "" if whole else reason, frozenset(manifest.objects)
        return PutOutcome(durable=keys, tokens=manifest.n_tokens, reason=reason, serial=manifest.serial)

    def release(self, keys: Sequence[Key]) -> None:
        """End a lease; what nothing names any more goes."""
        self.index.release(keys)
        stored = (key for key in keys if self.index.bytes_of(key) or self.index.holds(key))
        unused = (key for key in stored if not self.index.is_leased([key]))
        self._drop_unnamed(key for key in unused if key not in self._coming)

    def _record(self, manifest: Manifest, entry: Conversation, *, cut_short: bool) -> None:
        """Put what became durable into the index, and let go what it supersedes."""
        ids = manifest.token_ids
        for i, (segment, n_bytes) in enumerate(zip(manifest.segments, manifest.file_bytes, strict=True)):
            self.index.add_segment(segment, ids[segment.start : segment.end], n_bytes, manifest.stages_of(i))
        for checkpoint, key in zip(manifest.checkpoints, manifest.checkpoint_keys, strict=True):
            place = manifest.place_of(checkpoint.position)
            self.index.add_checkpoint(key, checkpoint.file_bytes, n_bytes=checkpoint.n_bytes, place=place)
        if not self.limits.is_archive:
            self.supersede(entry, longest=manifest.n_tokens if cut_short else None)
        if not self.limits.is_archive and not cut_short:
            self._compact(entry)
        self.index.add_conversation(entry)
        if not cut_short:
            self.on_recorded(entry)
        if not self.limits.is_archive and self.index.is_outdated(entry, self.limits.checkpoints):
            self.let_go([entry.serial], "superseded")
        if self.limits.keep:
            self.let_go(self.index.oldest_beyond(entry.conversation, self.limits.keep), "superseded")

    async def put_ids(self, manifest: Manifest) -> str:
        """Keep a manifest without its segments; why that failed, or an empty text."""
        manifest = msgspec.structs.replace(manifest, serial=self.level.next_serial(), stamp_s=self._clock())
        committed = await asyncio.wrap_future(self.writer.commit(self.next_ticket(), manifest, ids_only=True))
        self.health.note()
        if not isinstance(committed, Committed):
            return committed.reason
        self.index.add_conversation(conversation_of(manifest, committed.manifest_bytes))
        self.let_go(self.index.oldest_beyond(manifest.conversation, self.limits.keep), "superseded")
        self.make_room(0)
        return ""

    def supersede(self, by: Conversation, *, longest: int | None = None, spare: Collection[int] = ()) -> None:
        """Let go older states of the same conversation. `longest`: spare those of more tokens; and these entries."""
        old = self.index.superseded_by(by.conversation, by.root, by.tokens, longest=longest, born=by.born)
        index, keep = self.index, self.limits.checkpoints
        gone = [s for s in old if s not in spare and not index.outlives(index.conversation(s), by, keep)]
        self.let_go(gone, "superseded")

    def _compact(self, by: Conversation) -> None:
        limit = self.limits.divergence_tokens
        if not limit:
            return
        old = self.index.compacted_by(by.conversation, by.root, by.tokens, limit, born=by.born)
        if old is None:
            self.counters.compaction_unclear += 1
            log.info("%s: a history was rewritten, and which stored conversation it was is unclear: kept", self.name)
            return
        self.let_go(old, "compacted")

    # -------------------------------------------------------------------------------------------------------- room
    def make_room(self, need_bytes: int) -> None:
        """Let the oldest conversations go until `need_bytes` more fit the budget; say so when they cannot."""
        if self.limits.rejects or self.used_bytes + need_bytes <= self.limits.budget_bytes:
            return
        self._drop_quarantined(self.used_bytes + need_bytes - self.limits.budget_bytes)
        plan = self._room().plan(need_bytes)
        self._drop((), plan.loose)
        self.let_go(plan.serials, "budget")
        if plan.short_bytes and need_bytes:
            log.warning("%s: over its budget by %d bytes, in use or unable to leave", self.name, plan.short_bytes)

    def hand_down(self, need_bytes: int) -> None:
        """Let the oldest go until the volume itself has `need_bytes` more, if the level below has space for them."""
        lacking = self.health.lacking_bytes(need_bytes + self._coming_bytes) - self._leaving_bytes
        if lacking <= 0 or self.limits.rejects or self.below is None:
            return
        plan = self._room().plan(self.limits.budget_bytes - self.used_bytes + lacking)
        going = {key for serial in plan.serials for key in self.index.conversation(serial).objects}
        if not plan.short_bytes and self.below.takes(sum(map(self.index.bytes_of, going))):
            self.let_go(plan.serials, "budget")

    def _drop_quarantined(self, n_bytes: int) -> None:
        """What was set aside goes before any sound conversation; counted and logged."""
        gone = first_to_go(self.level.quarantined(), self.removals.files, n_bytes)
        self.counters.quarantined_dropped += len(gone)
        if gone:
            log.warning("%s: %d damaged files, set aside before, make room", self.name, len(gone))
            self.removals.remove_files(gone)

    @property
    def is_over_budget(self) -> bool:
        """Whether it takes more than it may, but for what is beside the budget."""
        return self._room().is_over_budget

    def _room(self) -> Room:
        return Room(
            index=self.index,
            budget_bytes=self.limits.budget_bytes,
            used_bytes=self.used_bytes,
            coming_bytes=sum(put.guest_bytes for put in self._puts),
            moving=self.moving,
            stuck=self.stuck,
            is_last=self.below is None,
        )

    def age_out(self) -> None:
        """Let go what is older than the limit."""
        if not self.limits.max_age_s:
            return
        oldest_s = self._clock() - self.limits.max_age_s
        old = [c for c in self.index.conversations() if c.stamp_s < oldest_s and c.serial not in self.moving]
        self.let_go([c.serial for c in old if not self.index.is_leased(c.objects)], "age")

    def let_go(self, serials: Iterable[int], why: Leaving) -> None:
        """Hand entries that must leave to whoever takes them; those that move already go when they have."""
        leaving = []
        for serial in serials:
            if serial in self.moving:
                self._doomed.setdefault(serial, why)
            elif self.stuck.get(serial) != why:
                self.stuck.pop(serial, None)
                leaving.append(serial)
        if leaving:
            self.on_leaving(self, leaving, why)

    def retry_stuck(self) -> None:
        """Let everything that could not leave try again, and see how the disk is by now."""
        self.health.probe()
        self.removals.retry(lambda key: key in self._coming or self.index.holds(key) or self.index.is_named(key))
        stuck, self.stuck = self.stuck, {}
        for serial, why in stuck.items():
            if why != "budget" and self.index.has_conversation(serial):
                self.let_go([serial], why)
        self.make_room(0)
        self.hand_down(0)

    def remove_now(self, serials: Sequence[int], why: Leaving) -> None:
        """Delete entries at once, counted by reason."""
        self.counters.leave(len(serials), why)
        self._drop(serials, None)

    def begin_leaving(self, serial: int) -> None:
        """An entry is on its way to somewhere else."""
        self.moving.add(serial)

    def end_leaving(self, serial: int, why: Leaving, *, left: bool) -> Leaving | None:
        """It arrived, or stays here until the next tick. What else said meanwhile that it must go, if it arrived."""
        self.moving.discard(serial)
        doomed = self._doomed.pop(serial, None)
        if left:
            return doomed
        if self.index.has_conversation(serial):
            self.stuck[serial] = why
            if doomed is not None:
                self.let_go([serial], doomed)
        return None

    def quarantine_manifest(self, serial: int) -> None:
        """Set aside a manifest that cannot be read."""
        self.counters.quarantined += 1
        self.writer.quarantine_manifest(serial)

    def drop(self, serials: Sequence[int]) -> None:
        """Delete entries whose copy elsewhere is durable, and the segments that only they need."""
        self._drop([serial for serial in serials if self.index.has_conversation(serial)], None)

    def set_aside(self, key: Key, stages: Sequence[int] = ()) -> None:
        """Never serve a bad segment again. `stages`: its damaged files, which are renamed, never deleted."""
        n_bytes = self.index.bytes_of(key)
        self.index.remove_segments([key])
        self._unusable.setdefault(key, [])
        if not stages:
            self.index.note_bytes(key, n_bytes)  # the files stay, and go when their conversations go
            return
        self.counters.quarantined += len(stages)
        renames = [asyncio.wrap_future(self.writer.quarantine(key, stage)) for stage in stages]
        renames[-1].add_done_callback(partial(self._note_rest, key))

    def _note_rest(self, key: Key, _: object) -> None:
        """The sound files of a segment that was set aside stay, and go when its conversations go."""
        rest_bytes = self.level.segment_bytes(key)
        if rest_bytes and not self.index.bytes_of(key) and key not in self._coming:
            self.index.note_bytes(key, rest_bytes)

    def set_aside_checkpoint(self, key: Key, *, damaged: bool) -> None:
        """`set_aside` for a checkpoint."""
        if not damaged:
            self.set_aside(key)
            return
        self.index.remove_segments([key])
        self.counters.quarantined += 1
        self.writer.quarantine_checkpoint(key)

    def _drop(self, serials: Sequence[int], keys: Iterable[Key] | None) -> None:
        """Take manifests and segments out of the index and off the disk. `keys` None: what nothing names any more."""
        manifests = {serial: self.index.conversation(serial).manifest_bytes for serial in serials}
        loose = self.index.remove_conversations(serials)
        gone = loose if keys is None else tuple(keys)
        if not serials and not gone:
            return
        n_bytes = sum(self.index.bytes_of(key) for key in gone)
        self.index.remove_segments(gone)
        self.removals.remove(manifests, gone, n_bytes)

    def _drop_unnamed(self, keys: Iterable[Key]) -> None:
        """Delete what a put wrote in vain; not what was there before and belongs to a stored conversation."""
        self._drop((), [key for key in keys if not self.index.is_named(key)])

    def close(self) -> None:
        """End the threads and release the directory."""
        self.reader.close()
        self.writer.close()
        self.level.close()
