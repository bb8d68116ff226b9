"""Where a park goes, and room for it: decides by the facts of this moment, evicts what that takes, and begins it.

The decision itself is rules/placement.py; what a park does then is parking.py.
"""

from __future__ import annotations

from strata.cache.capturing import segment_lengths
from strata.cache.disk import DiskLevel
from strata.cache.parking import Desk, Parking, ParkJob, give_up
from strata.cache.spilling import Spiller
from strata.cache.writing import file_bytes, transient_need_bytes
from strata.rules import prefix
from strata.rules.eviction import NOTHING_TO_EVICT, Eviction
from strata.rules.placement import Destination, ParkFacts, place_park
from strata.types import Key, Segment


class Placing:
    """Begins parks. `spiller`: writes what RAM cannot keep, also when it does not mirror every park."""

    def __init__(self, desk: Desk, spiller: Spiller | None) -> None:
        self._desk = desk
        self._spiller = spiller
        self._begun = 0

    def __repr__(self) -> str:
        return f"Placing({self._begun} begun)"

    def begin(self, job: ParkJob) -> Parking | None:
        """A park of the job's state; `Parking.run` must follow. None: nothing to do, or no way to do it."""
        desk = self._desk
        segments = prefix.chain(job.root, job.tokens, prefix.cuts(len(job.tokens), job.frontier))
        keys = tuple(segment.key for segment in segments)
        whole, coming = keys, keys
        if keys and desk.taker is not None:
            whole = (*keys, prefix.checkpoint_key(job.root, job.tokens, len(job.tokens)))
            there = desk.ram.index.checkpoints_along(job.root, job.tokens) if desk.ram is not None else ()
            coming = (*keys, *(checkpoint.key for checkpoint in there))
        if keys:
            desk.kept.live[job.slot] = whole
        disk = self._write_level(job, segments)
        if not keys or self._is_kept_already(job, whole, disk):
            desk.counters.skipped += 1
            return None
        self._begun += 1
        refusal = self._refusal(job, segments, disk)
        facts, room = self._facts(job, segments, whole, coming, None if refusal else disk)
        placed = place_park(facts)
        if placed.destination in (Destination.DISCARD, Destination.DROP):
            if refusal and placed.destination is Destination.DISCARD and disk is not None:
                desk.counters.refused += 1
                disk.counters.rejected += disk.limits.rejects
            give_up(desk, job, placed, refusal)
            return None
        freed_bytes = 0
        if placed.destination is Destination.RAM:
            desk.kept.evict(room)
            freed_bytes = room.freed_bytes
        if placed.evict_bytes > freed_bytes and desk.ram is not None:
            desk.kept.evict(desk.ram.plan_to_free(placed.evict_bytes - freed_bytes, coming))
        if placed.destination is not Destination.RAM and self._spiller is not None:
            self._spiller.offer_oldest(desk.kept.only_in_ram(), facts.ram_need_bytes)
        return Parking(job, segments, whole, facts, placed, desk, disk=disk, born=self._begun)

    def _write_level(self, job: ParkJob, segments: tuple[Segment, ...]) -> DiskLevel | None:
        """Where it is written to, if it is. Checkpoints that are written already are on the write level."""
        levels = self._desk.levels
        if any(one.ticket for one in job.checkpoints):
            return levels.first
        rows = {segment.key: file_bytes(self._desk.engine, segment) for segment in segments}
        return levels.choose(rows | {one.key: one.n_bytes for one in job.checkpoints})

    def _is_kept_already(self, job: ParkJob, keys: tuple[Key, ...], disk: DiskLevel | None) -> bool:
        """Nothing new since the last durable copy; or RAM has it, and it is written from there."""
        desk = self._desk
        if disk is not None and disk.index.stores(keys):
            return True
        if desk.ram is None or not desk.ram.index.stores(keys):
            return False
        promoted = None if job.provisional else desk.ram.promote(keys)
        if promoted is not None and desk.spiller is not None:
            desk.spiller.offer(promoted)
        return True

    def _facts(
        self,
        job: ParkJob,
        segments: tuple[Segment, ...],
        whole: tuple[Key, ...],
        coming: tuple[Key, ...],
        disk: DiskLevel | None,
    ) -> tuple[ParkFacts, Eviction]:
        """`coming`: what it will name in RAM. `disk`: the level that it may be written to.

        A checkpoint of its end is admitted by itself, once its size is known.
        """
        desk, keys = self._desk, tuple(segment.key for segment in segments)
        ram = desk.ram
        sizes = {s.key: sum(map(sum, segment_lengths(desk.engine, s))) for s in segments}
        ram_need = sum(n for key, n in sizes.items() if ram is None or not ram.index.holds(key))
        ram_need += sum(one.room.arena_bytes for one in job.checkpoints if one.room is not None)
        to_write = frozenset(key for key in keys if disk is None or not disk.index.holds(key))
        room, fits, evictable_bytes = NOTHING_TO_EVICT, False, 0
        if ram is not None:
            old = ram.superseded_by(
                job.conversation, job.root, job.tokens, born=self._begun, provisional=job.provisional
            )
            room = ram.room_for(ram_need, coming, supersedes=old, provisional=job.provisional)
            fits, evictable_bytes = ram.fits(room, supersedes=old), ram.evictable_bytes(coming)
        fits = fits and not any(one.ticket for one in job.checkpoints)  # some of it is on disk already
        facts = desk.admission.facts(
            ram_need_bytes=ram_need,
            transient_need_bytes=transient_need_bytes(desk.engine, desk.pool, segments, to_write),
            evictable_bytes=evictable_bytes,
            fits_budget=fits,
            disk_usable=disk is not None and (disk.health.usable or ram is None),
            provisional=job.provisional,
            durable_below=desk.kept.anywhere(whole),
            mirror_parks=desk.mirror,
        )
        return facts, room

    def _refusal(self, job: ParkJob, segments: tuple[Segment, ...], disk: DiskLevel | None) -> str:
        """Why the level does not take them."""
        desk = self._desk
        if disk is None:
            return ""
        missing = (s for s in segments if not disk.index.holds(s.key))
        rows = sum(sum(map(sum, segment_lengths(desk.engine, s))) for s in missing)
        n_bytes = rows + sum(one.n_bytes for one in job.checkpoints if not disk.index.holds(one.key))
        return disk.refuses(n_bytes) or disk.health.no_space_for(n_bytes)
