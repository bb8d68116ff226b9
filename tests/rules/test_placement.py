"""The park decision: SPEC §4's table as golden cases, the lines it must log, and what holds for all facts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata.rules.placement import (
    Destination,
    DiskAdmission,
    Floor,
    ParkFacts,
    Reason,
    admit,
    after_capture,
    allocation_failed,
    disk_placement,
    place_park,
    resolve_auto,
    skip_line,
    transient_line,
    writer_refused,
)
from strata.types import MIB

CASES = json.loads((Path(__file__).parent / "cases" / "placement.json").read_text(encoding="utf-8"))
USUAL = ParkFacts(**CASES["unless said"])
ROWS = range(1, 20)


def cases(kind):
    return [pytest.param(case, id=f"row {case['row']}: {case['why']}") for case in CASES[kind]]


def check(case, placed):
    destination, counted, *more = case["then"]
    assert (placed.destination, placed.counted) == (destination, tuple(counted))
    assert placed.mirror == ("mirror" in more)
    assert placed.evict_bytes == sum(item for item in more if isinstance(item, int))
    reasons = [item for item in more if isinstance(item, str) and item != "mirror"]
    assert [placed.reason] == (reasons or [None])


@pytest.mark.parametrize("case", cases("park"))
def test_park(case):
    check(case, place_park(replace(USUAL, **case["when"])))


@pytest.mark.parametrize("case", cases("after capture"))
def test_after_capture(case):
    check(case, after_capture(replace(USUAL, **case["when"])))


@pytest.mark.parametrize("case", cases("allocation failed"))
def test_allocation_failed(case):
    facts = replace(USUAL, **case["when"])
    check(case, allocation_failed(facts, place_park(facts)))


@pytest.mark.parametrize("case", cases("writer refused"))
def test_writer_refused(case):
    facts = replace(USUAL, **case["when"])
    check(case, writer_refused(facts, place_park(facts)))


def test_every_row_of_the_table_has_cases():
    assert {case["row"] for kind in CASES if kind != "unless said" for case in CASES[kind]} == set(ROWS)


def test_admission_at_the_byte():
    assert admit(50, 100, 150)
    assert not admit(50, 100, 149)
    assert admit(0, 0, 0)
    assert not admit(0, 0, None)


@pytest.mark.parametrize(
    ("available", "disk", "target"),
    [(900, True, "ram"), (899, True, "disk"), (None, True, "disk"), (899, False, "ram"), (None, False, "ram")],
)
def test_auto(available, disk, target):
    assert target == resolve_auto(
        available_bytes=available,
        disk_usable=disk,
        slots=4,
        bytes_per_token=2,
        context_tokens=100,
        parking_floor_bytes=100,
    )


# ----------------------------------------------------------------------------------------------------------- the lines

DESK = replace(
    USUAL,
    ram_need_bytes=1600 * MIB,
    transient_need_bytes=32 * MIB,
    parking_floor_bytes=2560 * MIB,
    transient_floor_bytes=512 * MIB,
)


def test_the_line_of_a_discard():
    placed = place_park(replace(DESK, disk_usable=False, available_bytes=4159 * MIB + 1))
    assert skip_line(placed, evicted=2, still_parked=3, discards=28) == (
        "skip parking (physical RAM admission: need 1600 MiB + floor 2560 MiB, available 4159 MiB; "
        "evicted 2, 3 still parked) discards=28"
    )


def test_the_line_of_a_discard_names_the_floor_that_was_tried_last():
    placed = place_park(replace(DESK, available_bytes=543 * MIB))
    assert skip_line(placed, evicted=0, still_parked=0, discards=1) == (
        "skip parking (physical RAM admission: need 32 MiB + floor 512 MiB, available 543 MiB; "
        "evicted 0, 0 still parked) discards=1"
    )


def test_the_line_of_a_discard_without_telemetry():
    line = skip_line(place_park(replace(DESK, available_bytes=None)), evicted=0, still_parked=1, discards=1)
    assert line == (
        "skip parking (physical RAM admission: need 1600 MiB + floor 2560 MiB, telemetry unavailable; "
        "evicted 0, 1 still parked) discards=1"
    )


def test_a_discard_without_a_shortage_does_not_blame_the_memory():
    placed = place_park(replace(DESK, disk_usable=False, fits_budget=False, available_bytes=99999 * MIB))
    assert skip_line(placed, evicted=0, still_parked=0, discards=1) == (
        "skip parking (no room in the RAM budget, no disk to go to: need 1600 MiB; "
        "evicted 0, 0 still parked) discards=1"
    )


def test_the_line_of_a_park_that_passes_through():
    placed = place_park(replace(DESK, available_bytes=600 * MIB))
    assert transient_line(placed) == "park to disk under the transient RAM floor (need 32 plus 512 MiB, not 2560 MiB)"


def test_a_part_of_a_mib_shows_as_needed_and_not_as_available():
    placed = place_park(replace(DESK, disk_usable=False, ram_need_bytes=1, available_bytes=2560 * MIB))
    assert "need 1 MiB + floor 2560 MiB, available 2560 MiB" in skip_line(placed, evicted=0, still_parked=0, discards=1)


# ------------------------------------------------------------------------------------------------- disk reads and saves


def read(available, *, transient=512 * MIB):
    return disk_placement(
        what="conversation",
        need_bytes=32 * MIB,
        available_bytes=available,
        parking_floor_bytes=2560 * MIB,
        transient_floor_bytes=transient,
    )


def test_a_disk_read_under_each_floor_and_one_byte_less():
    under_transient = DiskAdmission(
        floor=Floor.TRANSIENT,
        line="conversation hit under the transient RAM floor (need 32 plus 512 MiB, not 2560 MiB)",
    )
    assert read(2592 * MIB) == DiskAdmission(floor=Floor.PARKING, line="")
    assert read(2592 * MIB - 1) == read(544 * MIB) == under_transient
    assert read(544 * MIB - 1).floor is None
    assert read(32 * MIB, transient=0).floor is Floor.TRANSIENT
    assert read(32 * MIB - 1, transient=0).floor is None
    assert read(2592 * MIB - 1, transient=9999 * MIB).floor is None


def test_what_a_refused_read_says():
    assert read(543 * MIB).line == (
        "conversation refused (physical RAM admission: need 32 MiB + floor 512 MiB, available 543 MiB)"
    )
    assert read(None).line == (
        "conversation refused (physical RAM admission: need 32 MiB + floor 512 MiB, telemetry unavailable)"
    )


@pytest.mark.parametrize(
    ("available", "admitted", "counted"),
    [
        (9999 * MIB, True, "disk_hits"),
        (600 * MIB, True, "disk_hits_transient"),
        (0, False, "disk_hits_refused"),
        (None, False, "disk_hits_refused"),
    ],
)
def test_what_a_disk_read_counts(available, admitted, counted):
    assert (read(available).admitted, read(available).counted) == (admitted, counted)


# -------------------------------------------------------------------------------------------------------- for all facts

some_bytes = st.integers(0, 300)
park_facts = st.builds(
    ParkFacts,
    target=st.sampled_from(["ram", "disk"]),
    disk_usable=st.booleans(),
    fits_budget=st.booleans(),
    ram_need_bytes=some_bytes,
    transient_need_bytes=st.integers(0, 40),
    available_bytes=st.none() | some_bytes,
    evictable_bytes=some_bytes,
    parking_floor_bytes=some_bytes,
    transient_floor_bytes=some_bytes,
    mirror_parks=st.booleans(),
    provisional=st.booleans(),
    nothing_new=st.booleans(),
    durable_below=st.booleans(),
)
owed_facts = park_facts.map(lambda f: replace(f, provisional=False, nothing_new=False, durable_below=False))
RANK = {
    Destination.RAM: 3,
    Destination.DISK: 2,
    Destination.DISK_TRANSIENT: 1,
    Destination.DISCARD: 0,
}


def disk_takes(facts, extra=0):
    """Whether some floor admits the state on its way to disk, with `extra` bytes more available."""
    if facts.available_bytes is None or not facts.disk_usable:
        return False
    available = facts.available_bytes + extra
    floor = min(facts.transient_floor_bytes, facts.parking_floor_bytes)
    return available - facts.transient_need_bytes - floor >= 0


def ram_takes(facts, extra=0):
    if facts.available_bytes is None or not facts.fits_budget:
        return False
    return facts.available_bytes + extra - facts.ram_need_bytes - facts.parking_floor_bytes >= 0


@given(owed_facts)
def test_discards_only_if_no_floor_holds_even_after_evicting(facts):
    ram_is_open = facts.target == "ram" or not facts.disk_usable
    could = disk_takes(facts, facts.evictable_bytes) or (ram_is_open and ram_takes(facts, facts.evictable_bytes))
    assert (place_park(facts).destination is Destination.DISCARD) == (not could)


@given(owed_facts)
def test_ram_before_disk_before_discard(facts):
    placed = place_park(facts)
    if facts.target == "ram" and ram_takes(facts, facts.evictable_bytes):
        assert placed.destination is Destination.RAM
    elif disk_takes(facts):
        assert placed.destination in (Destination.DISK, Destination.DISK_TRANSIENT)
    if placed.destination is Destination.RAM and facts.disk_usable:
        assert facts.target == "ram"


@given(owed_facts, st.integers(0, 200))
def test_more_memory_never_makes_it_worse(facts, more):
    facts = replace(facts, available_bytes=facts.available_bytes or 0)
    less, richer = place_park(facts), place_park(replace(facts, available_bytes=facts.available_bytes + more))
    assert RANK[richer.destination] >= RANK[less.destination]
    if richer.destination == less.destination:
        assert richer.evict_bytes <= less.evict_bytes


@given(park_facts)
def test_a_park_evicts_only_what_it_needs_and_only_what_there_is(facts):
    placed = place_park(facts)
    assert 0 <= placed.evict_bytes <= facts.evictable_bytes
    if placed.evict_bytes:
        assert facts.available_bytes + placed.evict_bytes == placed.need_bytes + placed.floor_bytes
    if placed.destination in (Destination.DISK, Destination.DISK_TRANSIENT) and disk_takes(facts):
        assert placed.evict_bytes == 0
    if placed.destination not in (Destination.RAM, Destination.DISK, Destination.DISK_TRANSIENT):
        assert placed.evict_bytes == 0


@given(park_facts)
def test_what_goes_is_explained_and_counted_once(facts):
    placed = place_park(facts)
    assert len(placed.counted) <= 1
    assert (placed.reason is not None) == (placed.destination in (Destination.DISCARD, Destination.DROP))
    assert (placed.counted == ("discards",)) == (placed.destination is Destination.DISCARD)
    assert not placed.mirror or (placed.destination is Destination.RAM and facts.disk_usable)
    if placed.destination is Destination.DISCARD:
        assert not (facts.provisional or facts.durable_below or facts.nothing_new)
        assert (placed.reason is Reason.TELEMETRY) == (facts.available_bytes is None)


@given(park_facts)
def test_a_cancelled_request_never_touches_the_disk(facts):
    facts = replace(facts, provisional=True, nothing_new=False)
    for placed in (place_park(facts), after_capture(facts), allocation_failed(facts, place_park(facts))):
        assert placed.destination in (Destination.RAM, Destination.DROP)
        assert (placed.mirror, placed.counted, placed.evict_bytes) == (False, (), 0)


@given(owed_facts)
@example(replace(USUAL, evictable_bytes=10))
def test_a_capture_that_was_admitted_may_stay_while_the_memory_it_took_is_all_that_changed(facts):
    placed = place_park(facts)
    if placed.destination is Destination.RAM:
        after = facts.available_bytes + placed.evict_bytes - facts.ram_need_bytes
        now = after_capture(replace(facts, target="ram", available_bytes=after))
        assert (now.destination, now.evict_bytes) == (Destination.RAM, 0)


@given(some_bytes, st.none() | some_bytes, some_bytes, some_bytes)
def test_a_disk_read_is_refused_only_if_no_floor_holds(need, available, parking, transient):
    got = disk_placement(
        what="segment",
        need_bytes=need,
        available_bytes=available,
        parking_floor_bytes=parking,
        transient_floor_bytes=transient,
    )
    assert got.admitted == (admit(need, parking, available) or admit(need, min(transient, parking), available))
    assert (got.line == "") == (got.floor is Floor.PARKING)
