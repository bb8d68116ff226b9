"""The conversation cache: look up a prompt, restore it into a slot, park a slot's state. One disk level.

Owns the index (event loop only, no locks), the level with its writer and reader threads, and the arena blocks they use.
It decides nothing about slots, and makes no request wait for a disk write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.cache.parking import Parking, ParkJob, ParkPlan
from strata.cache.restoring import BadSegment, Restored, Restoring
from strata.cache.state import Conversation, LevelIndex, Match
from strata.cache.story import Story
from strata.engine.protocol import Engine, pack_tokens
from strata.rules import prefix
from strata.store.arena import Arena
from strata.store.format import Manifest, segment_file_bytes
from strata.store.level import Level
from strata.store.reader import Reader
from strata.store.writer import Committed, Writer
from strata.types import MIB, Key, Segment, Tokens

log = logging.getLogger("strata.cache")

RESTORE_RESERVE_BYTES = 96 * MIB
"""Arena bytes that parks leave to restores: the read-ahead window of the largest blocks, with head room."""
NEWEST_SHOWN = 50
"""Conversations and events listed in the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Budget of the level, and the weakest hit that is accepted (SPEC §2)."""

    budget_bytes: int
    similarity: float = 0.0
    n_min: int = 0


class ConversationCache:
    """Conversations of one engine on one level."""

    def __init__(
        self,
        *,
        engine: Engine,
        arena: Arena,
        level: Level,
        limits: CacheLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Scans the level. Raises OSError when its directory cannot be listed."""
        self.index = LevelIndex()
        self.counters = CacheCounters()
        self.story = Story()
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._level = level
        self._scan = level.scan(engine.info.fingerprint)
        self._blocks = BlockPool(arena, reserve_bytes=min(RESTORE_RESERVE_BYTES, arena.limit_bytes // 2))
        self._writer = Writer(level)
        self._reader = Reader(level)
        self._tickets = 0
        self._parks: set[Parking] = set()
        # Segments that a park is writing: its ticket, and whether they became durable.
        self._coming: dict[Key, tuple[int, asyncio.Future[bool]]] = {}
        self._unusable: dict[Key, list[int]] = {}  # stages of segments whose files have a wrong size
        self._dropping_bytes = 0
        self._load()

    def __repr__(self) -> str:
        return f"ConversationCache({self._level!r}, {self.index!r})"

    def _load(self) -> None:
        """Fill the index from the scan. Stale manifests serve up to their gap; foreign ones only age and take space."""
        for key, files in self._scan.segments.items():
            self.index.note_bytes(key, files.allocated_bytes)
        for stored in self._scan.manifests:
            self._load_manifest(stored.manifest, stored.allocated_bytes)
        for stale in self._scan.stale:
            log.warning("%s: manifest %d is stale: %s; it is kept", self._level.name, stale.serial, stale.reason)
            if stale.manifest is not None and stale.manifest.identity == self._engine.info.fingerprint:
                self._load_manifest(stale.manifest, stale.allocated_bytes)
        for foreign in self._scan.foreign:
            entry = Conversation(
                serial=foreign.serial,
                root=Key(b""),
                conversation=b"",
                tokens=np.empty(0, np.int32),
                frontier=0,
                keys=foreign.keys,
                manifest_bytes=foreign.allocated_bytes,
                stamp_s=foreign.stamp_s,
            )
            self.index.add_conversation(entry)

    def _load_manifest(self, manifest: Manifest, allocated_bytes: int) -> None:
        ids, n_stages = manifest.token_ids, len(manifest.stages)
        for segment, expected in zip(manifest.segments, manifest.file_bytes, strict=True):
            files = self._scan.segments.get(segment.key)
            if files is None:
                continue
            if len(files.sizes) != n_stages or sum(size for _, size in files.sizes) != expected:
                self._unusable[segment.key] = [stage for stage, _ in files.sizes]
                continue
            self.index.add_segment(segment, ids[segment.start : segment.end], files.allocated_bytes)
        self.index.add_conversation(_conversation(manifest, allocated_bytes))

    # ------------------------------------------------------------------------------------------------------ look up

    def lookup(self, root: Key, tokens: Tokens, *, beyond: int) -> Match | None:
        """The longest stored prefix of `tokens`, of at least `beyond` tokens and accepted by the hit rules (SPEC §2).

        Changes only the counters.
        """
        match = self.index.lookup(root, tokens)
        strong = match.upto >= self._limits.n_min and match.upto > self._limits.similarity * len(tokens)
        hit = strong and match.upto >= beyond
        self.counters.lookups += 1
        self.counters.disk_hits += hit
        self.counters.disk_misses += not hit
        return match if hit else None

    # ------------------------------------------------------------------------------------------------------ restore

    async def restore(self, slot: int, match: Match, keep: int) -> Restored:
        """Bring `slot`, which holds exactly [0, keep), up to `match.upto`, or as far as the files are sound."""
        keys = [held.key for held in match.path]
        self.index.lease(keys)
        try:
            restoring = Restoring(engine=self._engine, reader=self._reader, blocks=self._blocks, slot=slot)
            restored = await restoring.run(match, keep)
        finally:
            self.index.release(keys)
        self.counters.restores += restored.held > keep
        self.counters.restored_tokens += restored.held - keep
        self.counters.restored_bytes += restored.n_bytes
        self.counters.restore_s += restored.seconds
        if restored.bad is not None:
            self.counters.restore_failures += 1
            self._set_aside(restored.bad)
        return restored

    def _set_aside(self, bad: BadSegment) -> None:
        """Never serve a bad segment again; a damaged file is renamed, never deleted."""
        where = bad.key.hex()[:12]
        log.warning("segment %s: %s; the conversation is restored up to it and read from there", where, bad.reason)
        n_bytes = self.index.bytes_of(bad.key)
        self.index.remove_segments([bad.key])
        if not bad.damaged:
            self.index.note_bytes(bad.key, n_bytes)  # the file stays, and goes when its conversations go
        if bad.damaged and bad.stage is not None:
            self.counters.quarantined += 1
            self._writer.quarantine(bad.key, bad.stage)

    # --------------------------------------------------------------------------------------------------------- park

    def begin_park(self, job: ParkJob) -> Parking | None:
        """A park of the job's state, its segments leased; None when the level has all of it already.

        `finish_park` must follow.
        """
        segments = prefix.chain(job.root, job.tokens, prefix.cuts(len(job.tokens), job.frontier))
        keys = [segment.key for segment in segments]
        if not keys or self.index.stores(keys):
            self.counters.park_skipped += 1
            return None
        missing = frozenset(key for key in keys if not self.index.holds(key) and key not in self._coming)
        if not self._tickets:
            self._writer.remove_temporaries(self._scan)
        self._tickets += 1
        plan = ParkPlan(job=job, ticket=self._tickets, segments=segments, missing=missing)
        parking = Parking(plan, engine=self._engine, blocks=self._blocks, writer=self._writer, counters=self.counters)
        self.index.lease(keys)
        for key in missing:
            self._coming[key] = self._tickets, asyncio.get_running_loop().create_future()
            for stage in self._unusable.pop(key, ()):
                self._writer.quarantine(key, stage)
        self._make_room(parking.unwritten_bytes)
        self._parks.add(parking)
        return parking

    async def finish_park(self, parking: Parking) -> bool:
        """Capture, write, commit; True when all of the state is durable, not only a prefix of it."""
        plan, durable = parking.plan, frozenset[Key]()
        try:
            captured = await parking.capture()
            reached = await self._arrived(plan, captured)
            reason = parking.stop_reason if reached == captured else "a segment it shares with another park was lost"
            durable = await self._commit(plan, reached, reason)
            # The ticket may have written more than the manifest names.
            self._drop_unnamed(s.key for s in plan.segments[reached:captured] if s.key in plan.missing)
        finally:
            self._parks.discard(parking)
            self.index.release(s.key for s in plan.segments)
            for key in plan.missing:
                self._coming.pop(key)[1].set_result(key in durable)
            self._make_room(0)
        return len(durable) == len(plan.segments)

    async def _arrived(self, plan: ParkPlan, reached: int) -> int:
        """How many of the captured segments can be named: those that other parks write must have become durable.

        Waits for parks that began earlier only: a segment that was lost meanwhile may be coming again from a later one,
        which may be waiting for this one.
        """
        for i, segment in enumerate(plan.segments[:reached]):
            if segment.key in plan.missing:
                continue
            ticket, coming = self._coming.get(segment.key, (plan.ticket, None))
            if coming is not None and ticket < plan.ticket:
                await asyncio.shield(coming)
            if not self.index.holds(segment.key):
                return i
        return reached

    async def _commit(self, plan: ParkPlan, reached: int, stop_reason: str) -> frozenset[Key]:
        """Make the manifest of the first `reached` segments durable; the keys it names, or none when it failed."""
        job = plan.job
        if reached == 0:
            await asyncio.wrap_future(self._writer.abandon(plan.ticket))
            self._park_failed(job, stop_reason)
            return frozenset()
        manifest = self._manifest(job, plan.segments[:reached])
        outcome = await asyncio.wrap_future(self._writer.commit(plan.ticket, manifest))
        if not isinstance(outcome, Committed):
            self._drop_unnamed(outcome.left)
            self._park_failed(job, outcome.reason)
            return frozenset()
        cut_short = reached < len(plan.segments)
        self._record(job, manifest, outcome.manifest_bytes, cut_short=cut_short)
        note = f", cut short: {stop_reason}" if cut_short else ""
        detail = f"{manifest.n_tokens} of {len(job.tokens)} tokens, slot {job.slot} -> {self._level.name}{note}"
        self.story.tell(self._clock(), job.conversation, "park", detail)
        return frozenset(manifest.keys)

    def _record(self, job: ParkJob, manifest: Manifest, manifest_bytes: int, *, cut_short: bool) -> None:
        """Put what became durable into the index, and drop what it supersedes."""
        ids = manifest.token_ids
        for segment, n_bytes in zip(manifest.segments, manifest.file_bytes, strict=True):
            self.index.add_segment(segment, ids[segment.start : segment.end], n_bytes)
        longest = manifest.n_tokens if cut_short else None
        old = self.index.superseded_by(job.conversation, job.root, ids, longest=longest)
        self.index.add_conversation(_conversation(manifest, manifest_bytes))
        self._drop(old, None)
        self.counters.superseded += len(old)
        self.counters.park_cut_short += cut_short
        self.counters.parked_disk += 1
        self.counters.parked_tokens += manifest.n_tokens

    def _park_failed(self, job: ParkJob, reason: str) -> None:
        self.counters.park_failed += 1
        log.warning("park of %d tokens failed: %s; what was durable before still is", len(job.tokens), reason)
        self.story.tell(self._clock(), job.conversation, "discard", f"{len(job.tokens)} tokens: {reason}")

    def _manifest(self, job: ParkJob, segments: Sequence[Segment]) -> Manifest:
        info, upto, now = self._engine.info, segments[-1].end, self._clock()
        sizes = (
            sum(segment_file_bytes(shape, s.start, s.end, info.block_tokens) for shape in info.stages) for s in segments
        )
        return Manifest(
            serial=self._level.next_serial(),
            identity=info.fingerprint,
            root=job.root,
            conversation=job.conversation,
            tokens=pack_tokens(job.tokens[:upto]),
            frontier=job.frontier if job.frontier is not None and job.frontier <= upto else None,
            cuts=tuple(s.end for s in segments),
            keys=tuple(s.key for s in segments),
            file_bytes=tuple(sizes),
            stages=info.stages,
            block_tokens=info.block_tokens,
            model_name=info.model_name,
            created_s=now,
            stamp_s=now,
        )

    # ------------------------------------------------------------------------------------------------------- budget

    @property
    def used_bytes(self) -> int:
        """Bytes the level's files will take once what is under way is done."""
        coming = sum(parking.unwritten_bytes for parking in self._parks)
        return self._level.used_bytes + coming - self._dropping_bytes

    def _make_room(self, need_bytes: int) -> None:
        """Delete the oldest conversations until `need_bytes` more fit the budget; say so when they cannot."""
        budget_bytes = self._limits.budget_bytes
        plan = self.index.plan_eviction(used_bytes=self.used_bytes, need_bytes=need_bytes, budget_bytes=budget_bytes)
        for serial in plan.serials:
            gone = self.index.conversation(serial)
            detail = f"{len(gone.tokens)} tokens: the oldest of a level over its budget"
            self.story.tell(self._clock(), gone.conversation, "delete", detail)
        self._drop(plan.serials, plan.keys)
        self.counters.disk_evictions += len(plan.serials)
        if plan.short_bytes and need_bytes:
            self.counters.oversized += 1
            message = "%s: %d MiB over its budget of %d MiB: what is left is in use or alone larger than the budget"
            log.warning(message, self._level.name, plan.short_bytes // MIB + 1, budget_bytes // MIB)

    def _drop(self, serials: Sequence[int], keys: Iterable[Key] | None) -> None:
        """Take manifests and segments out of the index and off the disk. `keys` None: what nothing names any more."""
        n_bytes = sum(self.index.conversation(serial).manifest_bytes for serial in serials)
        loose = self.index.remove_conversations(serials)
        gone = loose if keys is None else tuple(keys)
        if not serials and not gone:
            return
        n_bytes += sum(self.index.bytes_of(key) for key in gone)
        self.index.remove_segments(gone)
        self._dropping_bytes += n_bytes
        asyncio.wrap_future(self._writer.drop(serials, gone)).add_done_callback(partial(self._dropped, n_bytes))

    def _drop_unnamed(self, keys: Iterable[Key]) -> None:
        """Delete what a park wrote in vain; not what was there before and belongs to a stored conversation."""
        self._drop((), [key for key in keys if not self.index.is_named(key)])

    def _dropped(self, n_bytes: int, _: object) -> None:
        self._dropping_bytes -= n_bytes

    # ------------------------------------------------------------------------------------------------------ shutting

    @property
    def conversation_count(self) -> int:
        return len(self.index.conversations())

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the writer has nothing left; False when the limit passed first."""
        return await asyncio.to_thread(self._writer.flush, timeout_s)

    def close(self) -> None:
        """End the threads and release the directory."""
        self._reader.close()
        self._writer.close()
        self._level.close()

    def status(self) -> dict[str, object]:
        """What the level holds now, for /v1/status: no text, no token, no client's key."""
        writes = self._writer.statistics()
        newest = sorted(self.index.conversations(), key=lambda c: (c.stamp_s, c.serial))[-NEWEST_SHOWN:]
        found = ("manifests", "foreign", "stale", "orphans", "temporary", "bad", "other")
        return {
            "name": self._level.name,
            "folder": str(self._level.root),
            "budget_bytes": self._limits.budget_bytes,
            "used_bytes": self._level.used_bytes,
            "free_bytes": self._level.free_bytes(),
            "conversations": len(self.index.conversations()),
            "segments": self.index.segment_count(),
            "parks_under_way": len(self._parks),
            "writer": {"state": self._writer.state, "bytes_written": writes.bytes_written, "failures": writes.failures},
            "scan": {name: len(getattr(self._scan, name)) for name in found},
            "counters": self.counters.as_dict(),
            "newest": [
                {
                    "conversation": c.conversation.hex()[:12],
                    "serial": c.serial,
                    "tokens": len(c.tokens),
                    "written_s": c.stamp_s,
                }
                for c in reversed(newest)
            ],
            "story": [asdict(event) for event in self.story.events()[-NEWEST_SHOWN:]],
        }


def _conversation(manifest: Manifest, manifest_bytes: int) -> Conversation:
    return Conversation(
        serial=manifest.serial,
        root=manifest.root,
        conversation=manifest.conversation,
        tokens=manifest.token_ids,
        frontier=manifest.frontier or 0,
        keys=manifest.keys,
        manifest_bytes=manifest_bytes,
        stamp_s=manifest.stamp_s,
    )
