"""The slots of the engine as the front knows them: what each holds, who uses it, and the queue for an idle one.

Owned by the event loop. What a slot holds is only ever claimed after the engine said so; a slot that is being changed
claims no more than what surely stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from strata.cache.parking import Parking
from strata.cache.prompt_writing import PromptWriting
from strata.rules.prefix import shared_prefix
from strata.rules.slots import Seat, SlotView, choose_seat
from strata.serve.queue import Place, Queue, QueueLimits, Ticket
from strata.types import Key, Tokens

LEAST_FORK_TOKENS = 32
"""Shared prefixes below this are read again: it costs no more than finding them."""

ResumePoint = Callable[[Key, Tokens], int]

NOTHING: Tokens = np.empty(0, np.int32)


@dataclass(slots=True, kw_only=True)
class Slot:
    """One slot. `root`: whose conversation it holds; `frontier`: the last turn opener of its prompt, 0 = none.

    `owed`: what it holds is to be kept when it leaves; `provisional`: it is of a cancelled request, so only if that
    costs nothing. `parkings`: parks that still capture from it; `writings`: of system prompts.
    `doing`: for people: "idle", "preparing", "reading", "ready" (the whole prompt is read), "active" (it writes),
    "waiting for room", "making room", "saving", "restoring", "erasing".
    `came_from`: what its next request reuses in it is called this in that one's report: "live" or "session".
    """

    index: int
    root: Key | None = None
    tokens: Tokens = field(default_factory=lambda: NOTHING)
    frontier: int = 0
    busy: bool = False
    owed: bool = False
    provisional: bool = False
    parkings: set[Parking] = field(default_factory=set)
    writings: set[PromptWriting] = field(default_factory=set)
    last_used_s: float = 0.0
    doing: str = "idle"
    total: int = 0
    came_from: str = "live"

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.doing}, {len(self.tokens)} tokens, {'owed' if self.owed else 'owes nothing'})"

    def view(self, root: Key, prompt: Tokens, *, kept: bool, resume_point: ResumePoint | None = None) -> SlotView:
        """What this slot offers to a request for `prompt`. `kept`: what it holds lies elsewhere too.

        `resume_point`: of memory that cannot be cut. Such a slot offers all that it holds, or else a stored checkpoint.
        """
        shared = min(shared_prefix(self.tokens, prompt), len(prompt) - 1) if self.root == root else 0
        forkable = shared
        if resume_point is not None:
            is_whole = shared == len(self.tokens)
            forkable = shared if is_whole and not self.busy else 0
            shared = shared if is_whole or not shared else resume_point(root, prompt[: shared + 1])
        return SlotView(
            index=self.index,
            idle=not self.busy,
            held=len(self.tokens),
            shared=shared,
            frontier=self.frontier,
            parked=(kept or not self.owed) and not self.parkings,
            last_used_s=self.last_used_s,
            forkable=forkable,
        )

    def forget(self) -> None:
        """The slot holds nothing (any more)."""
        self.root, self.tokens, self.frontier = None, NOTHING, 0
        self.owed = self.provisional = False
        self.came_from = "live"

    async def give_way(self, keep: int) -> None:
        """Let parks take what they still can out of the slot behind `keep` before it changes; no wait for the disk."""
        captures: list[Parking | PromptWriting] = [*self.parkings, *self.writings]
        reaching = [one for one in captures if one.reach > keep]
        await asyncio.gather(*(one.give_way() for one in reaching))


class Slots:
    """All slots, and the queue of the requests that wait for one."""

    def __init__(
        self,
        n: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_kept: Callable[[int], bool] = lambda _: False,
        limits: QueueLimits | None = None,
    ) -> None:
        """`is_kept`: whether what a slot holds is kept outside the engine too."""
        self.all = tuple(Slot(index=i) for i in range(n))
        self.is_kept = is_kept
        self.resume_point: ResumePoint | None = None
        """Of memory that cannot be cut: see ConversationCache.resume_point."""
        self.queue = Queue(limits or QueueLimits(), clock)
        self._clock = clock

    def __repr__(self) -> str:
        return f"Slots({list(self.all)}, {self.waiting} waiting)"

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def enter(self, root: Key, prompt: Tokens, *, reuse: bool) -> Ticket:
        """A slot for a request, marked busy, or a place in the queue: `wait`, and then take the slot with `seated`.

        `reuse` False: start from nothing. Raises Busy when too many wait.
        """

        def choose() -> Seat:
            views = [
                slot.view(root, prompt, kept=self.is_kept(slot.index), resume_point=self.resume_point)
                for slot in self.all
            ]
            seat = choose_seat(views, least_fork=LEAST_FORK_TOKENS)
            assert seat is not None, "it is a request's turn though no slot is idle"
            return seat if reuse else Seat(slot=seat.slot, keep=0)

        return self._enter(Ticket(arrived_s=self._clock(), doing="preparing", choose=choose))

    async def wait(self, ticket: Ticket) -> AsyncGenerator[Place, None]:
        """Until the ticket has a seat: its place in the queue, each time that changes. Raises WaitedTooLong.

        Closed early or cancelled, it leaves the queue, and passes on the slot that it may have got.
        """
        shown: Place | None = None
        is_seated = False
        try:
            while ticket.seat is None:
                place = self.queue.place(ticket)
                if place != shown:
                    shown = place
                    yield place
                else:
                    await self.queue.wait_for_news(ticket)
            is_seated = True
        finally:
            if not is_seated:
                self._give_up(ticket)

    def seated(self, ticket: Ticket) -> tuple[Slot, Seat]:
        """The slot of a ticket that waits no more, and what of the live slots its request starts from."""
        assert ticket.seat is not None, f"{ticket} has no seat"
        return self.all[ticket.seat.slot], ticket.seat

    async def take_one(self, slot: Slot, doing: str) -> None:
        """Just this slot, marked busy; waits until its request has ended. Raises Busy and WaitedTooLong."""
        seat = Seat(slot=slot.index, keep=0)
        ticket = self._enter(Ticket(arrived_s=self._clock(), doing=doing, choose=lambda: seat, only=slot.index))
        async with aclosing(self.wait(ticket)) as places:
            async for _ in places:
                pass

    def borrow(self, slot: Slot, doing: str) -> bool:
        """Mark an idle slot busy for our own purposes; False when it is busy. Nobody that waits can use an idle one."""
        if slot.busy:
            return False
        slot.busy, slot.doing = True, doing
        return True

    def give_back(self, slot: Slot) -> None:
        """The request in this slot has ended."""
        slot.last_used_s = self._clock()
        self._free(slot)

    def _enter(self, ticket: Ticket) -> Ticket:
        self.queue.enter(ticket)
        self._serve()
        self.queue.check_room(ticket)
        return ticket

    def _give_up(self, ticket: Ticket) -> None:
        self.queue.leave(ticket)
        if ticket.seat is not None:
            self._free(self.all[ticket.seat.slot])

    def _free(self, slot: Slot) -> None:
        slot.busy, slot.doing = False, "idle"
        self._serve()

    def _serve(self) -> None:
        """Give idle slots to those that wait."""
        while ticket := self.queue.next([slot.index for slot in self.all if not slot.busy]):
            ticket.seat = ticket.choose()
            slot = self.all[ticket.seat.slot]
            slot.busy, slot.doing = True, ticket.doing
            ticket.news.set()

    def forget_all(self) -> None:
        """The engine is a new one: no slot holds anything."""
        for slot in self.all:
            slot.forget()
