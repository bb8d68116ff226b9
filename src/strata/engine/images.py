"""Rows of whole-sequence states: how a split pool's sequence becomes blocks, and blocks a sequence.

llama.cpp hands the state of a sequence out, and takes one in, only as a whole when the pool is split (ENGINE.md §7). An
`Image` is the rows of such a state; `take` copies a block's payload out of it, `build_image` puts blocks together to a
state. The payloads are those of `ranges.py`, so which kind of pool wrote them does not show. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.engine.layout import MAGIC, TENSOR_HEAD_BYTES, BadState, Bytes, Words
from strata.engine.ranges import RangeFormat
from strata.types import StageShape

_WORD = 4
_STREAMS_AT, _COUNTS_AT = 2, 3  # words of a blob: magic, sequence, streams, cells of each stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The rows of positions [0, n). `body`: every layer's K, then V. `order` sorts them, None: they are sorted."""

    n: int
    body: Bytes
    order: NDArray[np.intp] | None
    extra: Words | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows [first, upto) of a block that begins at `start`: the payload of each stage, without padding."""

    start: int
    n: int
    first: int
    upto: int
    stages: tuple[StageShape, ...]
    payloads: tuple[Bytes, ...]
    extra: Words | None

    @property
    def rows(self) -> slice:
        """The rows of the block that are used."""
        return slice(self.first - self.start, self.upto - self.start)


def image_bytes(fmt: RangeFormat, n: int, streams: int) -> int:
    """Bytes of a state of `n` cells up to the end of its rows' cache."""
    return fmt.head_bytes(n) + fmt.body_bytes(n) + _WORD * (streams - 1)


def read_image(fmt: RangeFormat, blob: Bytes, n: int, streams: int) -> Image:
    """The rows of positions [0, n) in the state of a sequence; `blob` is changed. Raises BadState."""
    if len(blob) < image_bytes(fmt, n, streams):
        raise BadState(f"a state of {len(blob)} bytes for {n} tokens")
    words = blob[: _WORD * (_COUNTS_AT + streams)].view("<i4")
    stream = next((i for i in range(streams) if words[_COUNTS_AT + i]), 0)
    if words[0] != np.uint32(MAGIC).astype(np.int32) or words[_STREAMS_AT] != streams:
        raise BadState(f"not a state of {streams} streams")
    at = _WORD * stream
    head = blob[at : at + fmt.head_bytes(n)]
    body_at = at + len(head)
    # The head as it is without the empty streams before this one.
    head.view("<i4")[:_COUNTS_AT] = np.array([MAGIC, 0, 1], "<u4").view("<i4")
    order, extra = fmt.read_head(head, 0)
    return Image(n=n, body=blob[body_at : body_at + fmt.body_bytes(n)], order=order, extra=extra)


def take(fmt: RangeFormat, image: Image, stage: StageShape, start: int, end: int, payload: Bytes) -> None:
    """Write the payload of positions [start, end) of one stage."""
    rows: slice | NDArray[np.intp] = slice(start, end) if image.order is None else image.order[start:end]
    whole = list(_tensors(fmt, image.body, image.n, _every(fmt)))
    for index, head, target in _tensors(fmt, payload, end - start, _of_stage(fmt, stage)):
        head[:] = whole[index][1]
        target[:] = whole[index][2][rows]
    if image.extra is not None:
        payload[len(payload) - image.extra[start:end].nbytes :] = image.extra[start:end].view(np.uint8).reshape(-1)


def check_heads(fmt: RangeFormat, stage: StageShape, payload: Bytes, n: int) -> None:
    """Raises BadState unless a payload of `n` cells holds the tensors that this model has."""
    for index, head, _ in _tensors(fmt, payload, n, _of_stage(fmt, stage)):
        if head.tobytes() != fmt.heads[index]:
            raise BadState("its tensors are not those of this model")


def build_image(fmt: RangeFormat, below: Image | None, pieces: list[Piece], streams: int) -> Bytes:
    """The state of what `below` holds and the pieces behind it, its other caches empty. `pieces` is emptied.

    Each piece is let go as soon as it was copied: together they may be as large as the state.
    """
    n_below = below.n if below is not None else 0
    n = pieces[-1].upto
    head_bytes, body_bytes = fmt.head_bytes(n), fmt.body_bytes(n)
    tail = bytes(_WORD * (streams - 1)) + fmt.tail_in(streams)
    blob = np.empty(head_bytes + body_bytes + len(tail), np.uint8)
    body = blob[head_bytes : head_bytes + body_bytes]
    extra = np.zeros((n, 3), "<i4") if fmt.cells.extra else None
    whole = list(_tensors(fmt, body, n, _every(fmt)))
    for index, head, _ in whole:
        head[:] = np.frombuffer(fmt.heads[index], np.uint8)
    if below is not None:
        for index, _, source in _tensors(fmt, below.body, below.n, _every(fmt)):
            whole[index][2][:n_below] = source if below.order is None else source[below.order]
        if extra is not None and below.extra is not None:
            extra[:n_below] = below.extra
    while pieces:
        _put(fmt, pieces.pop(0), whole, extra)
    fmt.write_head(blob[:head_bytes], 0, extra)
    blob[: _WORD * _COUNTS_AT].view("<i4")[_STREAMS_AT] = streams
    blob[head_bytes + body_bytes :] = np.frombuffer(tail, np.uint8)
    return blob


def _put(fmt: RangeFormat, piece: Piece, whole: Sequence[tuple[int, Bytes, Bytes]], extra: Words | None) -> None:
    for stage, payload in zip(piece.stages, piece.payloads, strict=True):
        for index, _, source in _tensors(fmt, payload, piece.n, _of_stage(fmt, stage)):
            whole[index][2][piece.first : piece.upto] = source[piece.rows]
    if extra is not None and piece.extra is not None:
        extra[piece.first : piece.upto] = piece.extra[piece.rows]


# -------------------------------------------------------------------------------------------------------------- tensors


def _every(fmt: RangeFormat) -> range:
    """All tensors by number: K of each layer, then V of each."""
    return range(len(fmt.k_row_bytes) + len(fmt.v_row_bytes))


def _of_stage(fmt: RangeFormat, stage: StageShape) -> list[int]:
    held, n_k = fmt.held(stage.layer_first, stage.layer_end), len(fmt.k_row_bytes)
    return [*range(n_k)[held], *range(n_k, n_k + len(fmt.v_row_bytes))[held]]


def _tensors(
    fmt: RangeFormat, buffer: Bytes, n_cells: int, numbers: Sequence[int]
) -> Iterator[tuple[int, Bytes, Bytes]]:
    """Number, head and rows of tensors that lie one behind another; the first axis of rows is the cells."""
    at, n_k = 0, len(fmt.k_row_bytes)
    for number in numbers:
        row_bytes = fmt.k_row_bytes[number] if number < n_k else fmt.v_row_bytes[number - n_k]
        rows_at, at = at + TENSOR_HEAD_BYTES, at + TENSOR_HEAD_BYTES + n_cells * row_bytes
        rows = buffer[rows_at:at]
        if number >= n_k and fmt.transposed:
            element_bytes = fmt.v_element_bytes[number - n_k]
            rows = rows.reshape(row_bytes // element_bytes, n_cells, element_bytes).swapaxes(0, 1)
        else:
            rows = rows.reshape(n_cells, row_bytes)
        yield number, buffer[rows_at - TENSOR_HEAD_BYTES : rows_at], rows
