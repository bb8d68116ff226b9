"""Memory for a checkpoint on its way out of the engine, admitted by the rule that places parks (rules/placement.py).

Where that says RAM, its blocks are the RAM level's and stay there when its turn is parked. Where it says disk, they
wait in blocks that pass through: half of what parks may have at most, so that rows always find some. What does not fit
there is written at once, through two blocks. The copies that the engine makes of a large one meanwhile are counted too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from strata.cache.admission import Admission
from strata.cache.blocks import BlockPool
from strata.cache.disk import DiskLevel
from strata.cache.kept import Kept
from strata.cache.ram import RamLevel
from strata.cache.streaming import AHEAD
from strata.rules.eviction import NOTHING_TO_EVICT, Eviction
from strata.rules.placement import Destination, ParkFacts, Placement, allocation_failed, place_park
from strata.types import BLOCK_BYTES, Key, Span, pad_to_page


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One span per block. `stays`: of the RAM level, which counts them as promised until it has the checkpoint."""

    spans: tuple[Span, ...]
    stays: bool

    @property
    def arena_bytes(self) -> int:
        return sum(span.length for span in self.spans)


class Through(Enum):
    """No memory to wait in."""

    AT_ONCE = "written while its turn runs"


class CheckpointRoom:
    """Hands memory out, and takes back what was not used. `ram` and `disk` (the write level): None when off."""

    def __init__(
        self, *, pool: BlockPool, ram: RamLevel | None, disk: DiskLevel | None, admission: Admission, kept: Kept
    ) -> None:
        self._pool = pool
        self._ram = ram
        self._disk = disk
        self._admission = admission
        self._kept = kept
        self._waiting_bytes = 0

    def __repr__(self) -> str:
        return f"CheckpointRoom({self._waiting_bytes} bytes wait)"

    def lengths(self, n_bytes: int) -> tuple[int, ...]:
        """Arena bytes of the blocks of a checkpoint."""
        room = self._pool.head_room
        return tuple(room + pad_to_page(min(BLOCK_BYTES, n_bytes - at)) for at in range(0, n_bytes, BLOCK_BYTES))

    def take(self, n_bytes: int, keys: Collection[Key]) -> Room | Through | str:
        """Memory for a checkpoint of `n_bytes`, or why there is none. `keys`: what its conversation has in RAM."""
        lengths = self.lengths(n_bytes)
        waits = self._waiting_bytes + sum(lengths) <= self._pool.park_bytes // 2
        in_engine = 2 * n_bytes if n_bytes > BLOCK_BYTES else 0  # what llama.cpp gives, and its canonical form
        passing = sum(lengths) if waits else sum(lengths[:AHEAD])
        facts, plan = self._facts(sum(lengths), passing, in_engine, keys)
        placed = place_park(facts)
        if placed.destination is Destination.RAM:
            spans = self._of_ram(lengths, placed, plan, keys)
            if spans is not None:
                return Room(spans=spans, stays=True)
            placed = allocation_failed(facts, placed)
        if placed.destination not in (Destination.DISK, Destination.DISK_TRANSIENT):
            return str(placed.reason)
        self._evict(placed.evict_bytes, keys)
        spans = self._pool.try_take(lengths, "park") if waits else None
        if spans is None:
            return Through.AT_ONCE
        room = Room(spans=spans, stays=False)
        self._waiting_bytes += room.arena_bytes
        return room

    def _facts(
        self, n_bytes: int, passing_bytes: int, in_engine_bytes: int, keys: Collection[Key]
    ) -> tuple[ParkFacts, Eviction]:
        ram, disk = self._ram, self._disk
        plan = ram.room_for_bytes(n_bytes, keys) if ram is not None else NOTHING_TO_EVICT
        facts = self._admission.facts(
            ram_need_bytes=n_bytes + in_engine_bytes,
            transient_need_bytes=passing_bytes + in_engine_bytes,
            evictable_bytes=ram.evictable_bytes(tuple(keys)) if ram is not None else 0,
            fits_budget=ram is not None and not plan.short_bytes,
            disk_usable=disk is not None and (disk.health.usable or ram is None),
            provisional=False,
            durable_below=False,
            mirror_parks=True,
        )
        return facts, plan

    def _of_ram(
        self, lengths: tuple[int, ...], placed: Placement, plan: Eviction, keys: Collection[Key]
    ) -> tuple[Span, ...] | None:
        assert self._ram is not None, "placed in RAM without a RAM level"
        self._kept.evict(plan)
        self._evict(placed.evict_bytes - plan.freed_bytes, keys)
        spans = self._pool.try_take(lengths, "ram")
        if spans is not None:
            self._ram.promise(sum(span.length for span in spans))
        return spans

    def _evict(self, n_bytes: int, keys: Collection[Key]) -> None:
        if n_bytes > 0 and self._ram is not None:
            self._kept.evict(self._ram.plan_to_free(n_bytes, tuple(keys)))

    async def copy(self, spans: tuple[Span, ...]) -> Room | None:
        """The same bytes once more, in blocks that pass through and belong to the caller. None: there is no room."""
        copied = self._pool.try_take(tuple(span.length for span in spans), "park")
        if copied is None:
            return None
        await asyncio.to_thread(self._pool.copy, spans, copied)
        return Room(spans=copied, stays=False)

    def to_ram(self, room: Room) -> None:
        """Its spans belong to the RAM level from now on."""
        self.handed_on(room)
        self._pool.stay(room.spans)

    def handed_on(self, room: Room) -> None:
        """Its spans belong to somebody else from now on."""
        if room.stays:
            assert self._ram is not None, "memory of a RAM level that is off"
            self._ram.promise(-room.arena_bytes)
        else:
            self._waiting_bytes -= room.arena_bytes

    def give_back(self, room: Room) -> None:
        """It is not needed."""
        self.handed_on(room)
        self._pool.give_back(room.spans)
