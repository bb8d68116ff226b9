"""Who of those that wait goes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata.rules.queue import AGED_S, Waiting, choose_next

NOW_S = 100.0


def came(ago_s: float, slot: int | None = None) -> Waiting:
    return Waiting(arrived_s=NOW_S - ago_s, slot=slot)


def test_first_come_first_served() -> None:
    assert choose_next([came(1.5), came(1), came(0)], [0, 1], NOW_S) == 0
    assert choose_next([came(5), came(4), came(0)], [1], NOW_S) == 0
    assert choose_next([came(1, 0), came(0.5, 0)], [0], NOW_S) == 0


def test_nobody_goes_without_an_idle_slot_of_theirs() -> None:
    assert choose_next([], [0], NOW_S) is None
    assert choose_next([came(9), came(9, 1)], [], NOW_S) is None
    assert choose_next([came(9, 1), came(8, 1)], [0, 2], NOW_S) is None
    assert choose_next([came(9, 1), came(1)], [0], NOW_S) == 1


def test_who_can_use_one_slot_only_goes_before_newcomers_but_not_before_the_aged() -> None:
    assert choose_next([came(1.9), came(0, 3)], [3], NOW_S) == 1
    assert choose_next([came(AGED_S), came(0, 3)], [3], NOW_S) == 0
    assert choose_next([came(AGED_S, 3), came(AGED_S)], [3], NOW_S) == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.none() | st.integers(0, 3)), max_size=8), st.sets(st.integers(0, 3)))
def test_nobody_passes_an_aged_one_that_could_go(waits: list[tuple[float, int | None]], idle: set[int]) -> None:
    waiting = [came(ago_s, slot) for ago_s, slot in sorted(waits, key=lambda wait: -wait[0])]
    chosen = choose_next(waiting, idle, NOW_S)
    able = [i for i, one in enumerate(waiting) if idle and (one.slot is None or one.slot in idle)]
    assert (chosen is None) == (able == [])
    if chosen is not None:
        assert chosen in able
        assert all(waiting[i].slot is None and NOW_S - waiting[i].arrived_s < AGED_S for i in able if i < chosen)
