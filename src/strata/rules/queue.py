"""Who of those that wait gets the next idle slot (SPEC §9): a pure function of when they came, and what for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

AGED_S = 2.0
"""Who has waited for so long goes before everybody who came later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One that waits since `arrived_s`, for any slot or for just `slot`."""

    arrived_s: float
    slot: int | None = None


def choose_next(waiting: Sequence[Waiting], idle: Collection[int], now_s: float) -> int | None:
    """Which of `waiting` (in order of arrival) goes next, or None when none of them can use an `idle` slot.

    First come, first served; but who can use one slot only goes before those that any will do for, unless they aged.
    """

    def goes_later(one: Waiting) -> bool:
        return one.slot is None and now_s - one.arrived_s < AGED_S

    able = [i for i, one in enumerate(waiting) if idle and (one.slot is None or one.slot in idle)]
    return min(able, key=lambda i: (goes_later(waiting[i]), i), default=None)
