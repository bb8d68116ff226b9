"""Where a state goes, by the memory there is: every park, and every read from or save to disk, is decided here.

Covers SPEC §3 and §4: the two floors, RAM or disk or neither, what is counted and the lines the log must show. The
caller brings the facts, does what the placement says and counts what it names. Not here: which entries an eviction
takes, which disk level is written, and whether a level has room for a state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from strata.types import MIB

Target = Literal["ram", "disk"]


class Destination(StrEnum):
    """SKIP: there was nothing to do. DROP: the state goes, but nothing was owed or a durable copy exists."""

    RAM = "ram"
    DISK = "disk"
    DISK_TRANSIENT = "disk_transient"
    DISCARD = "discard"
    SKIP = "skip"
    DROP = "drop"


class Floor(StrEnum):
    """Which floor admitted something."""

    PARKING = "parking"
    TRANSIENT = "transient"


class Reason(StrEnum):
    """Why a state is kept nowhere."""

    MEMORY = "physical RAM admission"
    TELEMETRY = "telemetry unavailable"
    BUDGET = "no room in the RAM budget, no disk to go to"
    ALLOCATION = "allocation failed"
    WRITER = "the disk refused it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkFacts:
    """What the decision about one park depends on. Sizes in bytes; floors are what must stay free afterwards.

    `target`: after "auto" is resolved. `disk_usable`: a disk level should take it. `mirror_parks`:
    every RAM park is also written (--conversation-cache-spill-on park). `fits_budget`: of the RAM level, after what its
    own budget evicts. `ram_need_bytes`: the segments RAM lacks. `transient_need_bytes`: the blocks a disk-bound park
    holds at once. `available_bytes`: None = unknown. `evictable_bytes`: what the RAM level could give back at once.
    `provisional`: of a cancelled request. `durable_below`: this very state has a durable copy already.
    """

    target: Target
    disk_usable: bool
    fits_budget: bool
    ram_need_bytes: int
    transient_need_bytes: int
    available_bytes: int | None
    evictable_bytes: int
    parking_floor_bytes: int
    transient_floor_bytes: int
    mirror_parks: bool = True
    provisional: bool = False
    nothing_new: bool = False
    durable_below: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What to do with a state. First evict `evict_bytes` from RAM; `mirror`: also hand it to the writer.

    `counted`: the counters that move by one. `reason`: why it is kept nowhere. `need_bytes`, `available_bytes` and the
    floors are the ones the decision was made with; `floor_bytes` is the one that admitted or last refused it.
    """

    destination: Destination
    counted: tuple[str, ...] = ()
    mirror: bool = False
    evict_bytes: int = 0
    reason: Reason | None = None
    need_bytes: int = 0
    available_bytes: int | None = None
    floor_bytes: int = 0
    parking_floor_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskAdmission:
    """Whether a disk read or save of `what` may go on, under which floor, and the line for the log ("" = none)."""

    floor: Floor | None
    line: str

    @property
    def admitted(self) -> bool:
        return self.floor is not None

    @property
    def counted(self) -> str:
        """The counter of a read."""
        if self.floor is None:
            return "disk_hits_refused"
        return "disk_hits" if self.floor is Floor.PARKING else "disk_hits_transient"


# ------------------------------------------------------------------------------------------------------- the decisions


def admit(need_bytes: int, floor_bytes: int, available_bytes: int | None) -> bool:
    """True when `need_bytes` can be taken and `floor_bytes` stay free. Unknown memory admits nothing."""
    return available_bytes is not None and available_bytes >= need_bytes + floor_bytes


def resolve_auto(
    *,
    available_bytes: int | None,
    disk_usable: bool,
    slots: int,
    bytes_per_token: int,
    context_tokens: int,
    parking_floor_bytes: int,
) -> Target:
    """What the parking target "auto" means here, asked once, after the arena and the model are resident.

    Disk when RAM could not hold every slot's full context above the floor. Unknown memory counts as too little: what
    goes to disk needs a few blocks only. Without a disk it is RAM, as for an explicit "disk".
    """
    full_bytes = slots * bytes_per_token * context_tokens
    return "disk" if disk_usable and not admit(full_bytes, parking_floor_bytes, available_bytes) else "ram"


def place_park(facts: ParkFacts) -> Placement:
    """SPEC §4's table, rows 1 to 15 and 19: RAM, else disk, else a counted discard.

    RAM entries are evicted where that makes the parking floor reachable, and otherwise only for a state that no floor
    admits as things are; then as few bytes as the transient floor misses.
    """
    if facts.nothing_new:
        return Placement(destination=Destination.SKIP, counted=("skipped",))
    if facts.available_bytes is None:
        return _kept_nowhere(facts, Reason.TELEMETRY, facts.ram_need_bytes, facts.parking_floor_bytes)
    to_disk = facts.disk_usable and not facts.provisional
    if facts.target == "disk" and to_disk:
        return _place_on_disk(facts, facts.available_bytes, through_ram=False)
    if facts.fits_budget:
        need_bytes, floor_bytes = facts.ram_need_bytes, facts.parking_floor_bytes
        evict_bytes = _missing(need_bytes, floor_bytes, facts.available_bytes)
        # Nothing is owed to a cancelled request, so no other conversation gives way for it.
        if evict_bytes <= (0 if facts.provisional else facts.evictable_bytes):
            return Placement(
                destination=Destination.RAM,
                counted=() if facts.provisional else ("parked_ram",),
                mirror=to_disk and facts.mirror_parks,
                evict_bytes=evict_bytes,
                need_bytes=need_bytes,
                available_bytes=facts.available_bytes,
                floor_bytes=floor_bytes,
                parking_floor_bytes=floor_bytes,
            )
    if to_disk:
        return _place_on_disk(facts, facts.available_bytes, through_ram=True)
    reason = Reason.MEMORY if facts.fits_budget else Reason.BUDGET
    return _kept_nowhere(facts, reason, facts.ram_need_bytes, facts.parking_floor_bytes)


def after_capture(facts: ParkFacts) -> Placement:
    """Row 16: a RAM park is captured and `facts` are taken anew; may it stay? Replaces the placement before it.

    The state holds its memory already, so it needs nothing more, in RAM or on its way to disk. DISK_TRANSIENT: the
    captured blocks go to the writer and are then free. DISCARD and DROP: they are freed.
    """
    return place_park(replace(facts, target="ram", ram_need_bytes=0, transient_need_bytes=0, nothing_new=False))


def allocation_failed(facts: ParkFacts, placed: Placement) -> Placement:
    """Row 17: there was no memory for what `place_park` admitted. A RAM park may still pass through to disk."""
    disk_is_left = placed.destination is Destination.RAM and facts.disk_usable and not facts.provisional
    if disk_is_left and facts.available_bytes is not None:
        return _place_on_disk(facts, facts.available_bytes, through_ram=True)
    return _kept_nowhere(facts, Reason.ALLOCATION, placed.need_bytes, placed.floor_bytes)


def writer_refused(facts: ParkFacts, placed: Placement) -> Placement:
    """Row 18: the writer did not take, or could not write, what it was handed. A copy in RAM stays where it is."""
    if placed.destination is Destination.RAM:
        return replace(placed, counted=("refused",), mirror=False, evict_bytes=0)
    lost = _kept_nowhere(facts, Reason.WRITER, placed.need_bytes, placed.floor_bytes)
    return replace(lost, counted=("refused", *lost.counted))


def disk_placement(
    *, what: str, need_bytes: int, available_bytes: int | None, parking_floor_bytes: int, transient_floor_bytes: int
) -> DiskAdmission:
    """The same rule for every disk read and save: parking floor, else transient floor, else refused."""
    floor = _disk_floor(need_bytes, available_bytes, parking_floor_bytes, transient_floor_bytes)
    transient_floor_bytes = min(transient_floor_bytes, parking_floor_bytes)
    if floor is Floor.PARKING:
        line = ""
    elif floor is Floor.TRANSIENT:
        line = f"{what} hit {_under_transient(need_bytes, transient_floor_bytes, parking_floor_bytes)}"
    else:
        line = f"{what} refused ({_admission(need_bytes, transient_floor_bytes, available_bytes)})"
    return DiskAdmission(floor=floor, line=line)


# ---------------------------------------------------------------------------------------------------- lines of the log


def transient_line(placed: Placement) -> str:
    """What the log says of a park that is only passing through."""
    return f"park to disk {_under_transient(placed.need_bytes, placed.floor_bytes, placed.parking_floor_bytes)}"


def skip_line(placed: Placement, *, evicted: int, still_parked: int, discards: int) -> str:
    """What the log says of a discard; `evicted` entries went for it, `discards` is the counter after it."""
    if placed.reason in (Reason.MEMORY, Reason.TELEMETRY):
        why = _admission(placed.need_bytes, placed.floor_bytes, placed.available_bytes)
    else:
        why = f"{placed.reason}: need {_mib_up(placed.need_bytes)} MiB"
    return f"skip parking ({why}; evicted {evicted}, {still_parked} still parked) discards={discards}"


def _admission(need_bytes: int, floor_bytes: int, available_bytes: int | None) -> str:
    there_is = "telemetry unavailable" if available_bytes is None else f"available {available_bytes // MIB} MiB"
    return f"physical RAM admission: need {_mib_up(need_bytes)} MiB + floor {_mib_up(floor_bytes)} MiB, {there_is}"


def _under_transient(need_bytes: int, transient_floor_bytes: int, parking_floor_bytes: int) -> str:
    floors = f"{_mib_up(transient_floor_bytes)} MiB, not {_mib_up(parking_floor_bytes)} MiB"
    return f"under the transient RAM floor (need {_mib_up(need_bytes)} plus {floors})"


def _mib_up(n_bytes: int) -> int:
    # Needs and floors up, what is available down: a refusal never looks as if the numbers would have fitted.
    return -(-n_bytes // MIB)


# ----------------------------------------------------------------------------------------------------------- the parts


def _missing(need_bytes: int, floor_bytes: int, available_bytes: int) -> int:
    return max(0, need_bytes + floor_bytes - available_bytes)


def _disk_floor(
    need_bytes: int, available_bytes: int | None, parking_floor_bytes: int, transient_floor_bytes: int
) -> Floor | None:
    if admit(need_bytes, parking_floor_bytes, available_bytes):
        return Floor.PARKING
    return Floor.TRANSIENT if admit(need_bytes, transient_floor_bytes, available_bytes) else None


def _place_on_disk(facts: ParkFacts, available_bytes: int, *, through_ram: bool) -> Placement:
    """Rows 9 to 11, and 3, 4, 6, 7 for a state that RAM was meant to keep: those count as transient under any floor."""
    need_bytes, parking = facts.transient_need_bytes, facts.parking_floor_bytes
    transient = min(facts.transient_floor_bytes, parking)
    evict_bytes = _missing(need_bytes, transient, available_bytes)
    if evict_bytes > facts.evictable_bytes:
        return _kept_nowhere(facts, Reason.MEMORY, need_bytes, transient)
    keeps_parking = _disk_floor(need_bytes, available_bytes + evict_bytes, parking, transient) is Floor.PARKING
    plain = keeps_parking and not through_ram
    return Placement(
        destination=Destination.DISK if plain else Destination.DISK_TRANSIENT,
        counted=("parked_disk",) if plain else ("parked_disk_transient",),
        evict_bytes=evict_bytes,
        need_bytes=need_bytes,
        available_bytes=available_bytes,
        floor_bytes=parking if plain else transient,
        parking_floor_bytes=parking,
    )


def _kept_nowhere(facts: ParkFacts, reason: Reason, need_bytes: int, floor_bytes: int) -> Placement:
    nothing_lost = facts.provisional or facts.durable_below
    return Placement(
        destination=Destination.DROP if nothing_lost else Destination.DISCARD,
        counted=() if nothing_lost else ("discards",),
        reason=reason,
        need_bytes=need_bytes,
        available_bytes=facts.available_bytes,
        floor_bytes=floor_bytes,
        parking_floor_bytes=facts.parking_floor_bytes,
    )
