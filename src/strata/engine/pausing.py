"""Requests that gave way because the pool was full, and whether a step makes sense now. No calls into llama.cpp.

One request pauses at a time: as long as a paused one still holds cells they are about to be freed, so the steps of the
others wait for that (`stalled`) instead of pausing more. Who is paused last of all fails only when no other slot holds
a cell: then nothing that could be freed is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.engine.pool_messages import Paused
from strata.engine.request import Request
from strata.engine.slots import Slots


class Pauses:
    """`waiting`: the paused requests. `stalled`: no step can be made before a command was carried out."""

    def __init__(self, slots: Slots) -> None:
        self.waiting: list[Request] = []
        self.stalled = False
        self._slots = slots

    def __repr__(self) -> str:
        return f"Pauses({self.waiting}, {'stalled' if self.stalled else 'not stalled'})"

    def gives_way(self, active: Sequence[Request]) -> Request | None:
        """After a step found no free cells: the youngest of `active` (in order of arrival); None when all must wait."""
        self.stalled = any(self._slots.held[request.slot] for request in self.waiting)
        return None if self.stalled else active[-1]

    def is_hopeless(self, request: Request) -> bool:
        """Whether `request` fills the pool alone."""
        return not any(held for slot, held in enumerate(self._slots.held) if slot != request.slot)

    def pause(self, request: Request) -> Paused:
        held = self._slots.held[request.slot]
        request.pause(held)
        self.waiting.append(request)
        return Paused(request=request.number, held=held)

    def find(self, number: int) -> Request | None:
        return next((request for request in self.waiting if request.number == number), None)
