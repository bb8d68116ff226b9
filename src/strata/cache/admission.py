"""Physical memory, asked for every park and every read from disk: the facts that rules/placement.py decides on.

Covers what is available (the system's and the container's, and what the arena holds idle), the two floors, the parking
target, and the counting of what was decided. It moves no state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.rules.placement import DiskAdmission, Floor, ParkFacts, Target, disk_placement

log = logging.getLogger("strata.cache")

Memory = Callable[[], int | None]
"""Bytes available to this process; None = unknown (store/memory.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Bytes that must stay free: behind a copy that stays in RAM, and behind one that only passes through."""

    parking_bytes: int
    transient_bytes: int


class Admission:
    """The one place that asks how much memory there is."""

    def __init__(
        self, *, memory: Memory, floors: Floors, target: Target, pool: BlockPool, counters: CacheCounters
    ) -> None:
        self.target: Target = target
        self.floors = floors
        self._memory = memory
        self._pool = pool
        self._counters = counters
        self.promised_bytes: Callable[[], int] = lambda: 0
        """What parks that were admitted before will still take."""

    def available_bytes(self) -> int | None:
        """What can be taken: the system's free memory and what the arena holds already without using it."""
        available = self._memory()
        return None if available is None else available + self._pool.idle_bytes - self.promised_bytes()

    def facts(
        self,
        *,
        ram_need_bytes: int,
        transient_need_bytes: int,
        evictable_bytes: int,
        fits_budget: bool,
        disk_usable: bool,
        provisional: bool,
        durable_below: bool,
        mirror_parks: bool,
    ) -> ParkFacts:
        """The facts of one park, with the memory there is now."""
        return ParkFacts(
            target=self.target,
            disk_usable=disk_usable,
            fits_budget=fits_budget,
            ram_need_bytes=ram_need_bytes,
            transient_need_bytes=transient_need_bytes,
            available_bytes=self.available_bytes(),
            evictable_bytes=evictable_bytes,
            parking_floor_bytes=self.floors.parking_bytes,
            transient_floor_bytes=self.floors.transient_bytes,
            mirror_parks=mirror_parks,
            provisional=provisional,
            durable_below=durable_below,
        )

    def read(self, what: str, need_bytes: int, *, counted: bool = True) -> DiskAdmission:
        """May a stored prefix be read from disk, through `need_bytes` of blocks? Logged, and counted once a hit."""
        admission = disk_placement(
            what=what,
            need_bytes=need_bytes,
            available_bytes=self.available_bytes(),
            parking_floor_bytes=self.floors.parking_bytes,
            transient_floor_bytes=self.floors.transient_bytes,
        )
        if counted:
            self._counters.disk_hits += admission.floor is Floor.PARKING
            self._counters.disk_hits_transient += admission.floor is Floor.TRANSIENT
            self._counters.disk_hits_refused += admission.floor is None
        if admission.line:
            log.log(logging.INFO if admission.admitted else logging.WARNING, "%s", admission.line)
        return admission
