"""Which slot a request gets, and what of the live slots it can start from: a pure function of what the slots hold.

A request continues in place where it extends (or rewrites only the last reply of) what an idle slot holds. Otherwise it
takes the slot whose loss costs least and, if any slot shares a longer prefix, forks that prefix inside the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """What one slot offers to one request.

    `held`: tokens it holds. `shared`: leading tokens it has in common with the request's prompt (0 across namespaces),
    never all of the prompt. `forkable`: those that another slot can take over. `frontier`: the last turn opener of what
    it holds, 0 when unknown. `parked`: what it holds is durable elsewhere or owes nothing.
    """

    index: int
    idle: bool
    held: int
    shared: int
    frontier: int
    parked: bool
    last_used_s: float
    forkable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The slot to use; `keep` of its own tokens stay, or `keep` tokens are forked from slot `fork_from`."""

    slot: int
    keep: int
    fork_from: int | None = None


def choose_seat(slots: Sequence[SlotView], *, least_fork: int) -> Seat | None:
    """The best seat among the idle slots, or None. Forks of fewer than `least_fork` tokens are not worth it."""
    idle = [slot for slot in slots if slot.idle]
    if not idle:
        return None
    own = [slot for slot in idle if continues(slot)]
    longest = max(slots, key=lambda s: (s.forkable, s.idle))
    if own:
        best = max(own, key=lambda s: (s.shared, s.last_used_s))
        if best.shared >= longest.forkable:
            return Seat(slot=best.index, keep=best.shared)
    source = longest.index if longest.forkable >= least_fork else None
    taken = min(idle, key=lambda s: (s.held > 0, not s.parked, s.index == source, s.last_used_s))
    if source is not None and taken.shared < longest.forkable:
        return Seat(slot=taken.index, keep=longest.forkable, fork_from=source)
    return Seat(slot=taken.index, keep=taken.shared)


def continues(slot: SlotView) -> bool:
    """True when the request goes on with what the slot holds, but for the reply behind its last turn opener."""
    return slot.shared > 0 and slot.shared >= (slot.frontier or slot.held)
