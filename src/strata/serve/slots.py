"""The slots of the engine as the front knows them: what each holds, who uses it, and the queue for an idle one.

Owned by the event loop. What a slot holds is only ever claimed after the engine said so; a slot that is being changed
claims no more than what surely stays.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strata.cache.parking import Parking
from strata.cache.prompt_writing import PromptWriting
from strata.errors import Busy
from strata.rules.prefix import shared_prefix
from strata.rules.slots import Seat, SlotView, choose_seat
from strata.types import Key, Tokens

LEAST_FORK_TOKENS = 32
"""Shared prefixes below this are read again: it costs no more than finding them."""
MOST_WAITING = 256
"""Requests that may wait for a slot; more are refused."""

ResumePoint = Callable[[Key, Tokens], int]

NOTHING: Tokens = np.empty(0, np.int32)


@dataclass(slots=True, kw_only=True)
class Slot:
    """One slot. `root`: whose conversation it holds; `frontier`: the last turn opener of its prompt, 0 = none.

    `owed`: what it holds is to be kept when it leaves; `provisional`: it is of a cancelled request, so only if that
    costs nothing. `parkings`: parks that still capture from it; `writings`: of system prompts.
    `doing`: for people: "idle", "preparing", "reading", "writing", "saving", "restoring", "erasing".
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
    """All slots, and the requests that wait for one, first come first served."""

    def __init__(
        self, n: int, clock: Callable[[], float] = time.monotonic, *, is_kept: Callable[[int], bool] = lambda _: False
    ) -> None:
        """`is_kept`: whether what a slot holds is kept outside the engine too."""
        self.all = tuple(Slot(index=i) for i in range(n))
        self.is_kept = is_kept
        self.resume_point: ResumePoint | None = None
        """Of memory that cannot be cut: see ConversationCache.resume_point."""
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._promised = 0  # idle slots that belong to requests which were woken and have not run yet
        self._waiting_for: dict[int, deque[asyncio.Future[None]]] = {slot.index: deque() for slot in self.all}

    def __repr__(self) -> str:
        return f"Slots({list(self.all)}, {len(self._waiting)} waiting)"

    @property
    def waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._waiting_for.values()))

    @property
    def _spare(self) -> int:
        """Idle slots that nobody was promised."""
        return sum(not slot.busy for slot in self.all) - self._promised

    async def take(self, root: Key, prompt: Tokens, *, reuse: bool) -> tuple[Slot, Seat]:
        """The slot for a request, marked busy, and what of the live slots it starts from.

        `reuse` False: start from nothing. Raises Busy when too many wait.
        """
        if self._waiting or self._spare <= 0:
            await self._wait()
        views = [
            slot.view(root, prompt, kept=self.is_kept(slot.index), resume_point=self.resume_point) for slot in self.all
        ]
        seat = choose_seat(views, least_fork=LEAST_FORK_TOKENS)
        assert seat is not None, "a request was woken though no slot is idle"
        slot = self.all[seat.slot]
        slot.busy, slot.doing = True, "preparing"
        if not reuse:
            seat = Seat(slot=slot.index, keep=0)
        return slot, seat

    async def take_one(self, slot: Slot, doing: str) -> None:
        """Just this slot, marked busy; waits until its request has ended. Raises Busy when too many wait."""
        queue = self._waiting_for[slot.index]
        if not slot.busy and self._spare > 0 and not queue:
            slot.busy, slot.doing = True, doing
            return
        self._check_queue()
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(slot)
            elif turn in queue:
                queue.remove(turn)
            raise
        slot.doing = doing

    def _check_queue(self) -> None:
        if self.waiting >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} requests wait for a slot already; send it again later", retry_after_s=5)

    async def _wait(self) -> None:
        self._check_queue()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._promised -= 1
                self._wake()  # the slot was ours: pass it on
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise
        self._promised -= 1

    def give_back(self, slot: Slot) -> None:
        """The request in this slot has ended."""
        slot.busy, slot.doing, slot.last_used_s = False, "idle", self._clock()
        self._wake()

    def _wake(self) -> None:
        # Who waits for just one slot goes first: no other can serve them. They get it at once, already marked busy.
        for slot in self.all:
            queue = self._waiting_for[slot.index]
            while queue and not slot.busy and self._spare > 0:
                turn = queue.popleft()
                if not turn.done():
                    slot.busy = True
                    turn.set_result(None)
        while self._waiting and self._spare > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._promised += 1
                return

    def forget_all(self) -> None:
        """The engine is a new one: no slot holds anything."""
        for slot in self.all:
            slot.forget()
