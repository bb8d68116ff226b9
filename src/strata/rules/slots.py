"""Which slot a request gets, and what of the live slots it can start from: a pure function of what the slots hold.

A request continues in place where it extends (or rewrites only the last reply of) what an idle slot holds. Otherwise it
takes the slot whose loss costs least and, if any slot shares a longer prefix, forks that prefix inside the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

HALF_LIFE_S = 600.0
"""A conversation that was idle for so much longer than another is taken to be half as likely to go on."""
PARKED_HALVINGS = 4
"""What is parked costs so many halvings less to lose: bringing it back takes about a sixteenth of reading it."""
SIMILAR_HALVINGS = 2
"""Losses of which none is more than four times another are alike: then the least recently used goes."""


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
    taken = _gives_way(idle, source, newest_s=max(slot.last_used_s for slot in slots))
    if source is not None and taken.shared < longest.forkable:
        return Seat(slot=taken.index, keep=longest.forkable, fork_from=source)
    return Seat(slot=taken.index, keep=taken.shared)


def continues(slot: SlotView) -> bool:
    """True when the request goes on with what the slot holds, but for the reply behind its last turn opener."""
    return slot.shared > 0 and slot.shared >= (slot.frontier or slot.held)


def _gives_way(idle: Sequence[SlotView], source: int | None, *, newest_s: float) -> SlotView:
    """The slot that a request takes: an empty one; else the oldest of those whose loss costs little.

    The source of a fork stays as it is, if there is another.
    """
    empty = [slot for slot in idle if not slot.held]
    others = empty or [slot for slot in idle if slot.index != source] or idle
    least = min(_loss(slot, newest_s) for slot in others)
    cheap = [slot for slot in others if _loss(slot, newest_s) <= least + SIMILAR_HALVINGS]
    return min(cheap, key=lambda slot: slot.last_used_s)


def _loss(slot: SlotView, newest_s: float) -> float:
    """What it costs to lose what the slot holds and the request does not share, as a power of two.

    Tokens that may have to be read again: a long conversation does not go for the sake of a title or a summary, until
    it has been idle for long.
    """
    age_s = newest_s - slot.last_used_s
    return log2(1 + slot.held - slot.shared) - age_s / HALF_LIFE_S - PARKED_HALVINGS * slot.parked
