"""From the agenda's rules to the rows of the next step: who writes, who reads how much, measured as it goes.

Keeps what the rules need from one step to the next (the age of a starved read, the time owed to writing, who overtook
whom) and the pace: seconds per prompt token, by which a step's share of reading is bounded in time. How a step is
decoded is `loop.py`'s concern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from strata.engine.request import Request
from strata.engine.values import EngineSettings
from strata.rules.agenda import (
    Knobs,
    Reading,
    Turn,
    choose_read,
    owed_after,
    plan_timed_turn,
    plan_turn,
    share_out,
)

_BESIDE_WRITING_S = 0.25  # a chunk may delay the next token of those that write for about so long (agenda on) ...
_LEAST_BESIDE = 16  # ... but a pass over the weights shall not be for fewer tokens, and chunks are multiples of it
_READING_S = 0.5  # so long others wait to begin, move a block, or leave; a CPU reads no faster in longer chunks ...
_LEAST = 64  # ... but slower in shorter ones
_BY_TIME_S = 4.0  # agenda off: full batches, and writing gets as much time behind them. A step that can be stopped
_STEP = 32  # chunks with nobody beside are multiples of this: matrix kernels like it
_COUNTS = 16  # a read of fewer tokens says little about the pace

Part = tuple[Request, int]
"""A request and its rows in a step: 1 when it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step. `turn` is None when nothing is waiting to be read."""

    parts: tuple[Part, ...]
    turn: Turn | None
    read_tokens: int = 0


def knobs_of(settings: EngineSettings) -> Knobs:
    return Knobs(
        enabled=settings.agenda,
        chunk=settings.agenda_chunk,
        budget=settings.agenda_budget,
        age=settings.agenda_age,
        decode_share=settings.decode_share,
    )


def _by_slot(parts: Iterable[Part]) -> tuple[Part, ...]:
    """In a split pool rows of neighbouring slots share a pass over the weights, but only in this order."""
    return tuple(sorted(parts, key=lambda part: part[0].slot))


class Turns:
    """`token_s`: seconds per prompt token to begin with. `rows`: of one pass over the weights."""

    def __init__(self, knobs: Knobs, *, full: int, rows: int, token_s: float, stoppable: bool) -> None:
        self.token_s = token_s
        self._knobs = knobs
        self._full = full
        self._rows = rows
        self._stoppable = stoppable
        self._starved = 0
        self._owed_s = 0.0
        self._gave_way: dict[int, frozenset[int]] = {}

    def plan(self, active: Sequence[Request], held: Callable[[int], int]) -> Plan:
        """The next step of the requests in order of arrival; `held`: tokens a slot holds."""
        writing = [request for request in active if request.is_writing]
        reading = [request for request in active if not request.is_writing]
        rows = _by_slot((request, 1) for request in writing)
        if not reading:
            self._starved, self._owed_s = 0, 0.0
            self._gave_way.clear()
            return Plan(parts=rows, turn=None)
        full = self._full_batch(len(writing))
        if self._knobs.by_time:
            turn = plan_timed_turn(active=len(writing), full=full, knobs=self._knobs, owed_s=self._owed_s)
        else:
            turn = plan_turn(active=len(writing), full=full, knobs=self._knobs, starved=self._starved)
        if not turn.decode:
            rows = ()
        # rows and chunk together fill one physical batch, so a step is one pass over the weights
        room = max(1, self._rows - len(rows))
        reads = self._reads(reading, held, min(turn.read, room)) if turn.read else ()
        return Plan(parts=(*rows, *reads), turn=turn, read_tokens=sum(n for _, n in reads))

    def _full_batch(self, writing: int) -> int:
        """Tokens of a full batch, as far as time allows one."""
        beside = writing > 0 and not self._knobs.by_time
        limit_s = _BESIDE_WRITING_S if beside else _READING_S
        if writing and self._knobs.by_time and self._stoppable:
            limit_s = _BY_TIME_S
        step, least = (_LEAST_BESIDE, _LEAST_BESIDE) if beside else (_STEP, _LEAST)
        return min(self._full, max(int(limit_s / max(self.token_s, 1e-9)) // step * step, least))

    def _reads(self, reading: Sequence[Request], held: Callable[[int], int], read: int) -> tuple[Part, ...]:
        """Share `read` tokens out; each request only up to where it must stop next."""
        left = list(reading)
        ordered: list[Request] = []
        while left:
            views = [
                Reading(
                    request=request.number,
                    left=len(request.tokens) - held(request.slot),
                    gave_way_to=self._gave_way.get(request.number, frozenset()),
                )
                for request in left
            ]
            index, gave_way = choose_read(views, self._knobs.most_yields)
            if not ordered:  # who comes second in the same batch has not overtaken anybody
                for first, other in gave_way.items():
                    self._gave_way[first] = self._gave_way.get(first, frozenset()) | {other}
            ordered.append(left.pop(index))
        shares = share_out(read, [request.next_stop(held(request.slot)) - held(request.slot) for request in ordered])
        return _by_slot((request, n) for request, n in zip(ordered, shares, strict=True) if n)

    def done(self, plan: Plan, seconds: float, writing: int) -> None:
        """A step was decoded in `seconds`; `writing`: requests that wrote or could have."""
        if plan.turn is None:
            return
        self._starved = plan.turn.starved
        self.spent(plan, seconds, writing)
        if plan.read_tokens >= _COUNTS:
            self.token_s = (self.token_s + seconds / plan.read_tokens) / 2

    def spent(self, plan: Plan, seconds: float, writing: int) -> None:
        """A step took `seconds`, also when it was stopped: writing is owed its share of them."""
        if plan.turn is not None and self._knobs.by_time:
            self._owed_s = owed_after(
                plan.turn, seconds=seconds, active=writing, knobs=self._knobs, owed_s=self._owed_s
            )
