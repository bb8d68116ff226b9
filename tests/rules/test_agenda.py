"""The batch agenda, case by case: SPEC §9's worked examples in cases/agenda.json, and the properties behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.rules.agenda import (
    Knobs,
    Reading,
    Turn,
    choose_read,
    chunk_tokens,
    owed_after,
    plan_timed_turn,
    plan_turn,
    read_tokens,
    share_out,
)

CASES = json.loads((Path(__file__).parent / "cases" / "agenda.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_worked_examples(case: dict[str, Any]) -> None:
    """Turn after turn: [decode, read] each."""
    knobs = Knobs(enabled=True, **case.get("knobs", {}))
    starved, turns = case.get("starved", 0), []
    for _ in case["turns"]:
        turn = plan_turn(active=case["active"], full=case.get("full", 512), knobs=knobs, starved=starved)
        starved = turn.starved
        turns.append([turn.decode, turn.read])
    assert turns == case["turns"]


@pytest.mark.parametrize(
    ("full", "chunk", "expected"), [(512, 512, 512), (512, 0, 512), (512, -1, 512), (512, 64, 64), (64, 512, 64)]
)
def test_chunk(full: int, chunk: int, expected: int) -> None:
    assert chunk_tokens(full, chunk) == expected


@pytest.mark.parametrize(
    ("active", "chunk", "budget", "expected"),
    [(0, 512, 1, 512), (4, 512, 520, 512), (8, 512, 520, 512), (8, 512, 100, 92), (20, 512, 100, 92), (8, 512, 8, 0)],
)
def test_read_budget(active: int, chunk: int, budget: int, expected: int) -> None:
    assert read_tokens(active=active, chunk=chunk, budget=budget) == expected


@given(
    active=st.integers(0, 20),
    full=st.integers(1, 4096),
    chunk=st.integers(-5, 4096),
    budget=st.integers(0, 4096),
    age=st.integers(0, 9),
)
def test_a_read_never_starves_for_longer_than_its_age(
    active: int, full: int, chunk: int, budget: int, age: int
) -> None:
    knobs = Knobs(enabled=True, chunk=chunk, budget=budget, age=age)
    starved, without = 0, 0
    for _ in range(40):
        turn = plan_turn(active=active, full=full, knobs=knobs, starved=starved)
        assert 1 <= turn.read <= full
        assert turn.decode == (active > 0) or (not turn.decode and turn.read == chunk_tokens(full, chunk))
        without = without + 1 if turn.read == 1 else 0
        assert age == 0 or full == 1 or chunk == 1 or budget - min(8, active) == 1 or without <= age
        starved = turn.starved


# ----------------------------------------------------------------------------------------------------------------- time


def test_writing_gets_its_share_of_the_time() -> None:
    """Reads of 2 s, rows of 0.1 s, half of the time each."""
    knobs, owed_s, spent = Knobs(), 0.0, {True: 0.0, False: 0.0}
    for _ in range(200):
        turn = plan_timed_turn(active=3, full=512, knobs=knobs, owed_s=owed_s)
        assert turn.read == (0 if turn.decode else 512)
        seconds = 0.1 if turn.decode else 2.0
        spent[turn.decode] += seconds
        owed_s = owed_after(turn, seconds=seconds, active=3, knobs=knobs, owed_s=owed_s)
    assert spent[True] == pytest.approx(spent[False], rel=0.15)


@pytest.mark.parametrize(("share", "owed"), [(0.0, 0.0), (0.5, 2.0), (0.75, 6.0)])
def test_the_share_can_be_set(share: float, owed: float) -> None:
    read = Turn(decode=False, read=512, starved=0)
    knobs = Knobs(decode_share=share)
    assert owed_after(read, seconds=2.0, active=1, knobs=knobs, owed_s=0.0) == pytest.approx(owed)
    assert owed_after(read, seconds=2.0, active=0, knobs=knobs, owed_s=9.0) == 0.0


def test_an_explicit_share_wins_over_the_budget() -> None:
    assert Knobs(enabled=True, decode_share=0.5).by_time and Knobs().by_time and not Knobs(enabled=True).by_time
    knobs = Knobs(enabled=True, decode_share=0.5, chunk=64)
    assert plan_timed_turn(active=2, full=512, knobs=knobs, owed_s=0.0) == Turn(decode=False, read=64, starved=0)
    assert plan_timed_turn(active=2, full=512, knobs=Knobs(chunk=64), owed_s=0.0).read == 512
    assert plan_timed_turn(active=0, full=512, knobs=knobs, owed_s=5.0).read == 64


# ---------------------------------------------------------------------------------------------------------------- order


def test_reads_are_first_come_first_served() -> None:
    assert choose_read([Reading(request=1, left=500), Reading(request=2, left=300)], 32) == (0, {})


def test_a_long_read_gives_way_to_one_at_most_half_as_long() -> None:
    assert choose_read([Reading(request=1, left=600), Reading(request=2, left=300)], 32) == (1, {1: 2})
    assert choose_read([Reading(request=1, left=599), Reading(request=2, left=300)], 32) == (0, {})


def test_it_gives_way_only_so_often() -> None:
    tired = Reading(request=1, left=6000, gave_way_to=frozenset({2, 3}))
    assert choose_read([tired, Reading(request=9, left=10)], 2) == (0, {})
    assert choose_read([tired, Reading(request=9, left=10)], 32) == (1, {1: 9})
    assert choose_read([tired, Reading(request=3, left=10)], 2) == (1, {1: 3})  # it has been counted
    assert (Knobs().most_yields, Knobs(enabled=True).most_yields) == (2, 32)


def test_the_shortest_of_many_goes_first() -> None:
    reads = [Reading(request=i, left=left) for i, left in enumerate((6000, 2000, 1500, 900))]
    assert choose_read(reads, 32) == (3, {0: 1, 1: 3})


def test_the_rest_of_a_batch_goes_to_the_next() -> None:
    assert share_out(512, [100, 300, 900, 50]) == [100, 300, 112, 0]
    assert share_out(1, [5, 5]) == [1, 0]
