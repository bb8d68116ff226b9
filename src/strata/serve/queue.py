"""The queue for a slot: who waits, since when, in which place; its limits and counts.

Who goes next is decided in rules/queue.py; which slot they get, in slots.py. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from strata.errors import Busy, WaitedTooLong
from strata.rules.queue import Waiting, choose_next
from strata.rules.slots import Seat

_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """`most` may wait; 0: whoever finds no idle slot is refused. Nobody waits for longer than `wait_s`; 0: no limit."""

    most: int = 256
    wait_s: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place in the queue, from 1, of `total` that wait."""

    position: int
    total: int


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One that waits for a slot. `only`: the one slot that will do; `choose`: its seat, once there is an idle slot.

    `seat`: what it got; the slot is marked busy. `news`: set when it got one, or its place may have changed.
    """

    arrived_s: float
    doing: str
    choose: Callable[[], Seat]
    only: int | None = None
    seat: Seat | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __repr__(self) -> str:
        return f"Ticket({self.doing}, {self.seat or 'waits'})"


class Queue:
    """All that wait, in order of arrival."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._tickets: list[Ticket] = []
        self._refused = self._timed_out = self._left = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __repr__(self) -> str:
        return f"Queue({len(self)} wait)"

    def enter(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)
        self._tell()

    def check_room(self, ticket: Ticket) -> None:
        """Raises Busy, and lets `ticket` go, when it has to wait and too many wait already."""
        if ticket.seat is not None or len(self) <= self._limits.most:
            return
        self._remove(ticket)
        self._refused += 1
        raise Busy(
            f"no slot is idle, and {len(self)} requests wait for one already (--max-queued-requests "
            f"{self._limits.most}); send it again later",
            retry_after_s=_RETRY_AFTER_S,
        )

    def next(self, idle: Collection[int]) -> Ticket | None:
        """Who goes next, taken out of the queue; None when nobody that waits can use an idle slot."""
        waiting = [Waiting(arrived_s=ticket.arrived_s, slot=ticket.only) for ticket in self._tickets]
        chosen = choose_next(waiting, idle, self._clock())
        if chosen is None:
            return None
        ticket = self._tickets.pop(chosen)
        self._tell()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Its client is gone."""
        if ticket in self._tickets:
            self._remove(ticket)
            self._left += 1

    def place(self, ticket: Ticket) -> Place:
        return Place(position=self._tickets.index(ticket) + 1, total=len(self))

    async def wait_for_news(self, ticket: Ticket) -> None:
        """Until `ticket` has a seat, or its place may have changed. Raises WaitedTooLong, and lets it go."""
        ticket.news.clear()
        limit_s = self._limits.wait_s
        left_s = limit_s - (self._clock() - ticket.arrived_s) if limit_s else None
        try:
            async with asyncio.timeout(left_s):
                await ticket.news.wait()
        except TimeoutError:
            if ticket.seat is not None:
                return
            self._remove(ticket)
            self._timed_out += 1
            raise WaitedTooLong(
                f"no slot became idle within {limit_s:g} s (--queue-timeout-s); send it again later",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    def _remove(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)
        self._tell()

    def _tell(self) -> None:
        for ticket in self._tickets:
            ticket.news.set()

    def status(self) -> dict[str, object]:
        """For /v1/status. Counts since the start: refused as too many waited, waited too long, left by themselves."""
        oldest = min((ticket.arrived_s for ticket in self._tickets), default=None)
        return {
            "waiting": len(self),
            "most": self._limits.most,
            "wait_limit_s": self._limits.wait_s or None,
            "longest_wait_s": None if oldest is None else round(self._clock() - oldest, 3),
            "refused": self._refused,
            "timed_out": self._timed_out,
            "left": self._left,
        }
