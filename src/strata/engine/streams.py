"""The slots of a split pool: each has a stream of cells of its own, and its state moves only as a whole.

llama.cpp copies no part of a sequence from one stream to another (it would abort). So a capture takes the whole state
of its slot once and hands its blocks out of that; applied blocks are gathered, and put into the slot when something
first needs them there (`settle`). A fork is a copy. The blocks are the same as those of a unified pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from strata.engine.images import Image, Piece, build_image, check_heads, read_image, take
from strata.engine.layout import BadState, Bytes
from strata.engine.llama import Context
from strata.engine.ranges import RangeFormat
from strata.engine.slots import Refusal, Slots
from strata.types import MIB, StageShape, Tokens, pad_to_page

_KEPT_BYTES = 256 * MIB
"""Memory of the last state that is kept for the next one: the first touch costs most."""
_WAITING_BYTES = 512 * MIB
"""States whose blocks are not all handed out may take so much together; beyond it only the newest stays."""


@dataclass(slots=True, kw_only=True)
class _Taken:
    """The rows of a slot as they were. `valid`: of how many positions it still holds the same."""

    blob: Bytes
    image: Image
    valid: int


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """What was applied to a slot behind the positions [0, below) that llama.cpp holds."""

    below: int
    pieces: list[Piece] = field(default_factory=list)


class StreamSlots(Slots):
    """See `Slots`. `held` counts what was applied, whether it has settled or not."""

    def __init__(self, context: Context, count: int, limit: int, **options: Any) -> None:
        super().__init__(context, count, limit, **options)
        self._arriving: dict[int, _Arriving] = {}
        self._taken: dict[int, _Taken] = {}
        self._memory: Bytes = np.empty(0, np.uint8)

    # --------------------------------------------------------------------------------------------------------- metadata

    def trim(self, slot: int, n: int) -> Refusal:
        self.check(slot)
        if not n:
            self._arriving.pop(slot, None)
        refusal = self.settle(slot) or super().trim(slot, n)
        self._forget_behind(slot)
        return refusal

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self._arriving.pop(slot, None)
        self._forget_behind(slot)

    def note_held(self, slot: int, n: int) -> None:
        super().note_held(slot, n)
        self._forget_behind(slot)

    def _forget_behind(self, slot: int) -> None:
        """What was taken of positions that the slot holds no more is not what it may hold there later."""
        taken = self._taken.get(slot)
        if taken is not None:
            taken.valid = min(taken.valid, self.held[slot])
            if not taken.valid:
                self._let_go(slot)

    def fork(self, source: int, target: int, n: int) -> Refusal:
        self.check(source)
        return self.settle(source) or super().fork(source, target, n)

    def copy(self, source: int, target: int, n: int) -> None:
        """Give an empty slot positions [0, n) of another one, by copying all that it holds."""
        context = self._context
        if self._no_room(context.state_size(source)):
            return
        if context.state_set(context.state(source), target) and n < self.held[source]:
            context.remove(target, n)

    def compact(self, slot: int, start: int, end: int) -> Refusal:
        self.check(slot)
        return "a split pool needs no compaction: no slot's rows lie in another's way"

    # ---------------------------------------------------------------------------------------------------------- capture

    def capture(self, slot: int, start: int, end: int, spans: Sequence[Bytes]) -> Refusal:
        fmt, n = self._checked_block(slot, start, end, spans, self._stages)
        refusal = self.settle(slot)
        if refusal is not None:
            return refusal
        if end > self.held[slot]:
            return f"slot {slot} holds {self.held[slot]} tokens, not {end}"
        taken = self._taken.get(slot)
        if taken is None or taken.valid < end:
            self._let_go(slot)
            read = self._read(fmt, slot, self.held[slot])
            if isinstance(read, str):
                return read
            taken = self._taken[slot] = read
            self._bound(slot)
        for stage, span in zip(self._stages, spans, strict=True):
            payload_bytes = stage.payload_bytes(n)
            take(fmt, taken.image, stage, start, end, span[fmt.head_room : fmt.head_room + payload_bytes])
            span[fmt.head_room + payload_bytes : fmt.head_room + pad_to_page(payload_bytes)] = 0
        if end == taken.image.n:
            self._let_go(slot)
        return None

    def _read(self, fmt: RangeFormat, slot: int, n: int) -> _Taken | str:
        """The rows of positions [0, n), which must be all that llama.cpp holds of the slot."""
        size = self._context.state_size(slot)
        blob, self._memory = self._memory, np.empty(0, np.uint8)
        if len(blob) < size:
            if reason := self._no_room(size):
                return reason
            blob = np.empty(size, np.uint8)
        got = self._context.state_get(slot, blob[:size])
        try:
            image = read_image(fmt, blob[:got], n, self._context.streams)
        except BadState as error:
            return f"the state of slot {slot} is not usable: {error}"
        return _Taken(blob=blob, image=image, valid=n)

    def _bound(self, newest: int) -> None:
        for slot in [slot for slot in self._taken if slot != newest]:
            if sum(len(taken.blob) for taken in self._taken.values()) > _WAITING_BYTES:
                self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        taken = self._taken.pop(slot, None)
        if taken is not None and len(self._memory) < len(taken.blob) <= _KEPT_BYTES:
            self._memory = taken.blob

    @staticmethod
    def _no_room(n_bytes: int) -> str:
        """Why so much memory is not taken; empty when it may be."""
        available = int(psutil.virtual_memory().available)
        if n_bytes < available:
            return ""
        return (
            f"a split pool copies whole conversations: {n_bytes // MIB} MiB, and {available // MIB} MiB are available"
        )

    # ------------------------------------------------------------------------------------------------------------ apply

    def apply(
        self,
        slot: int,
        start: int,
        end: int,
        from_: int,
        upto: int,
        spans: Sequence[Bytes],
        tokens: Tokens,
        stages: Sequence[StageShape] = (),
    ) -> Refusal:
        stages = tuple(stages or self._stages)
        found = self._block_to_apply(slot, start, end, from_, upto, spans, tokens, stages)
        if isinstance(found, str):
            return found
        fmt, n, extra = found
        payloads = [
            span[fmt.head_room : fmt.head_room + stage.payload_bytes(n)]
            for stage, span in zip(stages, spans, strict=True)
        ]
        try:  # now, because nothing may be wrong with it later
            for stage, payload in zip(stages, payloads, strict=True):
                check_heads(fmt, stage, payload, n)
        except BadState as error:
            return f"the block [{start}, {end}) cannot be used: {error}"
        piece = Piece(
            start=start,
            n=n,
            first=from_,
            upto=upto,
            stages=stages,
            payloads=tuple(payload.copy() for payload in payloads),
            extra=extra,
        )
        self._arriving.setdefault(slot, _Arriving(below=from_)).pieces.append(piece)
        self.held[slot] = upto
        if fmt.tail:
            self.bare.add(slot)
        return None

    def settle(self, slot: int) -> Refusal:
        """Put what was applied into the slot. Refused, the slot is empty."""
        self.check(slot)
        arriving = self._arriving.pop(slot, None)
        fmt = self._format
        if arriving is None or fmt is None:
            return None
        below = self._read(fmt, slot, arriving.below) if arriving.below else None
        if isinstance(below, str):
            self.clear(slot)
            return below
        n, context = self.held[slot], self._context
        blob = build_image(fmt, below.image if below is not None else None, arriving.pieces, context.streams)
        context.remove(slot)  # caches that get nothing would keep what they have
        if not context.state_set(blob, slot) or (not fmt.tail and context.last_position(slot) != n - 1):
            self.clear(slot)
            return f"llama.cpp refused the state of [0, {n})"
        return None


def slots_of(context: Context, count: int, limit: int, **options: Any) -> Slots:
    """The slots of a context, of whichever kind its pool is."""
    kind = StreamSlots if context.streams > 1 else Slots
    return kind(context, count, limit, **options)
