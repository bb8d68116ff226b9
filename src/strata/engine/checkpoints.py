"""Checkpoints: the part of a sequence's memory that cannot be cut (recurrent, sliding window), at one position.

`CheckpointFormat` is pure: the canonical payload of a checkpoint, how large it is, and whether given bytes are one.
`Checkpoints` holds deferred copies in spare sequences (metadata only, so a running slot is not delayed; a split pool
shares nothing, so there it copies at once), hands their payload out and puts one into a slot. Where the layout of a
model's state is not known, a checkpoint is the whole image of a sequence: the same calls, without rows and without a
check of the contents beyond the first word. Chunked windows (Llama 4) are refused at capture. Which positions deserve a
checkpoint is decided by the front.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from strata.engine.canonical import canonical, canonical_blob
from strata.engine.layout import (
    MAGIC,
    BadState,
    Bytes,
    CellFormat,
    Kind,
    Layout,
    Part,
    State,
    build,
    parse,
)
from strata.engine.llama import Context
from strata.engine.slots import Refusal, Slots
from strata.types import BLOCK_BYTES, MIB, pad_to_page

_WORD = 4
_KEPT_BYTES = 256 * MIB
"""Memory of the last capture that is kept for the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFormat:
    """One cache of a checkpoint: what must be equal in every one, and bytes without and per attention cell."""

    kind: Kind
    heads: tuple[bytes, ...]
    n_layers: int
    transposed: bool
    base_bytes: int
    cell_bytes: int

    @classmethod
    def of(cls, part: Part) -> PartFormat:
        is_window = part.kind is Kind.ATTENTION
        rows = sum(tensor.rows.nbytes for tensor in part.tensors) // len(part.cells)
        heads = tuple(tensor.head for tensor in part.tensors)
        counts = _WORD * (4 if is_window else 3)  # (streams,) cells, v_trans, layers
        cell_bytes = rows + _WORD * part.cells.shape[1]
        return cls(
            kind=part.kind,
            heads=heads,
            n_layers=part.n_layers,
            transposed=part.transposed,
            base_bytes=counts + sum(map(len, heads)) + (0 if is_window else cell_bytes),
            cell_bytes=cell_bytes if is_window else 0,
        )

    def check(self, part: Part, first: int, position: int) -> None:
        if (tuple(t.head for t in part.tensors), part.n_layers, part.transposed, part.streams) != (
            self.heads,
            self.n_layers,
            self.transposed,
            1,
        ):
            raise BadState(f"its {self.kind.value} tensors are not those of this model")
        expected = np.arange(first, position) if self.kind is Kind.ATTENTION else np.array([position - 1])
        if not np.array_equal(part.cells[:, 0], expected):
            raise BadState(f"its {self.kind.value} cells are not those of position {position}")
        if part.cells[:, -1].any():
            raise BadState("its cells name a sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """`window`: tokens a sliding window spans, 0 without one. `layout` None: a checkpoint is the whole image."""

    layout: Layout | None
    cells: CellFormat
    window: int = 0
    parts: tuple[PartFormat, ...] = ()
    image_base_bytes: int = 0
    image_token_bytes: int = 0

    @property
    def is_image(self) -> bool:
        return self.layout is None

    @classmethod
    def of(cls, blob: Bytes, layout: Layout, cells: CellFormat, *, window: int) -> CheckpointFormat:
        """The format shown by a checkpoint blob. Raises BadState."""
        state = parse(blob, layout, cells, checkpoint=True)
        if not state.parts or any(not len(part.cells) for part in state.parts):
            raise BadState("a checkpoint without cells")
        parts = tuple(PartFormat.of(part) for part in state.parts)
        slides = any(part.kind is Kind.ATTENTION for part in parts)
        return cls(layout=layout, cells=cells, window=window if slides else 0, parts=parts)

    def first(self, position: int) -> int:
        """The lowest attention position that going on at `position` needs from its checkpoint."""
        if self.is_image:
            return 0
        return max(0, position - self.window + 1) if self.window else position - 1

    def payload_bytes(self, position: int) -> int:
        """Bytes of the payload at `position`; of an image, about."""
        if self.is_image:
            return self.image_base_bytes + position * self.image_token_bytes
        cells = position - self.first(position)
        return 2 * _WORD + sum(part.base_bytes + cells * part.cell_bytes for part in self.parts)

    def payload(self, blob: Bytes, position: int) -> Bytes:
        """The canonical payload of a checkpoint taken at `position`. Raises BadState when it lacks something.

        It is `blob` itself, changed, unless its rows must be put in order: it may be too large to be there twice.
        """
        if self.layout is None:
            blob[_WORD : 2 * _WORD] = 0  # the sequence it was taken from
            return blob
        found = parse(blob, self.layout, self.cells, checkpoint=True)
        wanted = canonical(found, self.first(position))
        self._check(wanted, position)
        return canonical_blob(blob, found, wanted)

    def blob(self, payload: Bytes, streams: int) -> Bytes:
        """A checked payload as a context of so many streams takes it."""
        if self.layout is None or streams == 1:
            return payload
        return build(parse(payload, self.layout, self.cells, checkpoint=True), streams)

    def check(self, payload: Bytes, position: int) -> None:
        """Raises BadState unless `payload` is a canonical checkpoint of `position`."""
        if self.layout is None:
            if payload[:_WORD].tobytes() != MAGIC.to_bytes(_WORD, "little"):
                raise BadState("it does not begin like a state")
            return
        self._check(parse(payload, self.layout, self.cells, checkpoint=True), position)

    def _check(self, state: State, position: int) -> None:
        if state.sequence:
            raise BadState("it names a sequence")
        for fmt, part in zip(self.parts, state.parts, strict=True):
            fmt.check(part, self.first(position), position)


@dataclass(slots=True, kw_only=True)
class Pending:
    """A deferred copy: a spare sequence that shares what `position` needs. `payload` while blocks are handed out.

    In a split pool the payload is there from the start, and the number of the sequence only counts.
    """

    sequence: int
    position: int
    payload_bytes: int
    payload: Bytes | None = None


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """A checkpoint whose blocks come in one by one."""

    position: int
    payload: Bytes
    filled: int = field(default=0)


class Checkpoints:
    """The checkpoints of one context. `spares`: sequence ids that belong to nobody else; of a split pool, any."""

    def __init__(self, context: Context, slots: Slots, fmt: CheckpointFormat, *, spares: range, head_room: int) -> None:
        self.pending: dict[int, Pending] = {}
        """What is held, by checkpoint id. Ids are never used twice."""
        self._context = context
        self._is_split = context.streams > 1
        self._slots = slots
        self._format = fmt
        self._free = list(spares)
        self._head_room = head_room
        self._ids = 0
        self._arriving: dict[int, _Arriving] = {}
        self._memory: Bytes | None = None

    # ------------------------------------------------------------------------------------------------- hold and release

    def hold(self, slot: int) -> int | str:
        """A deferred copy of what `slot` holds now; its id, or why there is none."""
        refusal = self._slots.settle(slot)
        if refusal is not None:
            return refusal
        position = self._slots.held[slot]
        if not position or slot in self._slots.bare:
            return f"slot {slot} holds nothing that can be resumed"
        if not self._free:
            return "no spare sequence: capture or release a checkpoint first"
        sequence = self._free.pop()
        held = self._copy(slot, position, sequence) if self._is_split else self._share(slot, position, sequence)
        if isinstance(held, str):
            self._free.append(sequence)
            return held
        self._ids += 1
        self.pending[self._ids] = held
        return self._ids

    def _share(self, slot: int, position: int, sequence: int) -> Pending | str:
        self._context.share(slot, sequence, self._format.first(position), position)
        if self._context.last_position(sequence) != position - 1:
            self._context.remove(sequence)
            return f"slot {slot} could not be shared at {position}"
        size = self._format.payload_bytes(position)
        if self._format.is_image:
            size = self._context.state_size(sequence)
        return Pending(sequence=sequence, position=position, payload_bytes=size)

    def _copy(self, slot: int, position: int, number: int) -> Pending | str:
        try:
            payload = self._format.payload(self._context.state(slot, checkpoint=True), position)
        except BadState as error:
            return f"the checkpoint at {position} is not usable: {error}"
        return Pending(sequence=number, position=position, payload_bytes=len(payload), payload=payload)

    def release(self, checkpoint: int) -> Refusal:
        held = self.pending.pop(checkpoint, None)
        if held is None:
            return f"checkpoint {checkpoint} is not held"
        if not self._is_split:
            self._context.remove(held.sequence)
        self._free.append(held.sequence)
        return None

    def capture(self, checkpoint: int, offset: int, span: Bytes) -> Refusal:
        """Write the block of the payload at `offset` into a span."""
        held = self.pending.get(checkpoint)
        if held is None:
            return f"checkpoint {checkpoint} is not held"
        n = self._checked_block(offset, held.payload_bytes, span)
        if held.payload is None:
            blob = self._state(held)
            try:
                payload = self._format.payload(blob, held.position)
            except BadState as error:
                return f"the checkpoint at {held.position} is not usable: {error}"
            if len(payload) != held.payload_bytes:
                return f"the checkpoint at {held.position} has {len(payload)} bytes, not {held.payload_bytes}"
            held.payload = payload
        room = self._head_room
        span[room : room + n] = held.payload[offset : offset + n]
        span[room + n : room + pad_to_page(n)] = 0
        if offset + n == held.payload_bytes and not self._is_split:
            self._keep(held)  # it can be made again while the checkpoint is held
        return None

    def _state(self, held: Pending) -> Bytes:
        """The blob of what is held, in memory that was touched before, if there is any: the first touch costs most."""
        partial = not self._format.is_image
        size = self._context.state_size(held.sequence, checkpoint=partial)
        memory, self._memory = self._memory, None
        if memory is None or len(memory) < size:
            memory = np.empty(size, np.uint8)
        return memory[: self._context.state_get(held.sequence, memory[:size], checkpoint=partial)]

    def _keep(self, held: Pending) -> None:
        """Keep the memory of a payload that was handed out for the next one, unless it is large."""
        payload, held.payload = held.payload, None
        if payload is not None and len(payload) <= _KEPT_BYTES:
            self._memory = payload

    def _checked_block(self, offset: int, total: int, span: Bytes) -> int:
        """Payload bytes of the block at `offset`. ValueError when there is none, or the span is too small."""
        if offset % BLOCK_BYTES or not 0 <= offset < total:
            raise ValueError(f"{offset} is not where a block of a checkpoint of {total} bytes begins")
        n = min(BLOCK_BYTES, total - offset)
        if len(span) < self._head_room + pad_to_page(n):
            raise ValueError(f"a span of {len(span)} bytes where {self._head_room + pad_to_page(n)} are needed")
        return n

    # ------------------------------------------------------------------------------------------------------------ apply

    def apply(self, slot: int, position: int, offset: int, total: int, span: Bytes) -> Refusal:
        """Take the block at `offset`; with the last one, make `slot` hold exactly [0, position)."""
        self._slots.check(slot)
        if not 0 < position <= self._slots.limit:
            raise ValueError(f"position {position} does not lie in a slot of {self._slots.limit}")
        if not 0 < total <= self.most_bytes:
            raise ValueError(f"a checkpoint of {total} bytes; at most {self.most_bytes}")
        n = self._checked_block(offset, total, span)
        piece = span[self._head_room : self._head_room + n]
        if n == total:
            return self._put(slot, position, piece)
        if not offset:
            self._arriving[slot] = _Arriving(position=position, payload=np.empty(total, np.uint8))
        arriving = self._arriving.get(slot)
        if arriving is None or (arriving.position, len(arriving.payload), arriving.filled) != (position, total, offset):
            self.forget(slot)
            return f"the block at {offset} does not follow the one before it"
        arriving.payload[offset : offset + n] = piece
        arriving.filled += n
        if arriving.filled < total:
            return None
        self.forget(slot)
        return self._put(slot, position, arriving.payload)

    @property
    def most_bytes(self) -> int:
        """The most a checkpoint takes."""
        return self._format.payload_bytes(self._slots.limit)

    def forget(self, slot: int) -> None:
        """Drop the blocks that arrived for a slot."""
        self._arriving.pop(slot, None)

    def _put(self, slot: int, position: int, payload: Bytes) -> Refusal:
        """Rows come first, the checkpoint last (ENGINE.md §0.7). Refused before llama.cpp: the slot is as it was."""
        slots = self._slots
        try:
            self._format.check(payload, position)
        except BadState as error:
            return f"the checkpoint at {position} is not usable: {error}"
        refusal = slots.settle(slot)
        if refusal is not None:
            return refusal
        held = slots.held[slot]
        if slots.has_rows and held < position:
            return f"slot {slot} holds the rows of {held} tokens, not {position}"
        if not slots.has_rows:
            slots.clear(slot)
        return self._set(slot, payload, position, held)

    def _set(self, slot: int, payload: Bytes, position: int, held: int) -> Refusal:
        """Put a checkpoint behind the rows of a slot that holds `held`; what lies behind it goes."""
        slots, context = self._slots, self._context
        blob = self._format.blob(payload, context.streams)
        taken = context.state_set(blob, slot, checkpoint=not self._format.is_image)
        if taken and slots.has_rows and held > position:
            taken = context.remove(slot, position)
        if not (taken and slots.is_proved(slot, position)):
            slots.clear(slot)
            return f"llama.cpp refused the checkpoint at {position}"
        slots.note_held(slot, position)
        return None

    # ------------------------------------------------------------------------------------------------------------- fork

    def fork(self, checkpoint: int, source: int, target: int) -> Refusal:
        """Let `target` hold what `source` held when the checkpoint was taken; `source` must still hold those rows."""
        held = self.pending.get(checkpoint)
        if held is None:
            return f"checkpoint {checkpoint} is not held"
        slots, context, position = self._slots, self._context, held.position
        slots.check(source)
        slots.check(target)
        if source == target:
            raise ValueError(f"slot {source} cannot be forked into itself")
        if slots.has_rows and slots.held[source] < position:
            return f"slot {source} holds {slots.held[source]} tokens, not {position}"
        slots.clear(target)
        if self._is_split:
            assert held.payload is not None, "it was copied when it was held"
            if slots.has_rows:
                slots.copy(source, target, slots.held[source])
            return self._set(target, held.payload, position, slots.held[source])
        first = self._format.first(position)
        if slots.has_rows and first:
            context.share(source, target, 0, first)
        context.share(held.sequence, target, first, position)
        if not slots.is_proved(target, position):
            slots.clear(target)
            return f"slot {target} did not take {position} tokens of slot {source}"
        slots.held[target] = position
        return None
