"""Token ranges of attention memory: where everything lies in a blob, and its canonical payload per stage.

A blob of `n` cells is `[head][K of every layer][V of every layer][tail]`. The head (counts and one record per cell) can
be computed, so it is not stored. The tail is what memory that cannot be cut adds (rows of a window, a recurrent cell):
left out of a capture, empty in an apply, and restored by a checkpoint. The payload of a stage is
`[its K][its V][extra: n x 12 bytes, if cells carry any]`, rows by position. With one stage, no extra and no tail it is
the blob behind its head: captured and applied without a copy. Pure numpy; `layout.py` parses whole blobs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from strata.engine.layout import (
    MAGIC,
    TENSOR_HEAD_BYTES,
    BadState,
    Bytes,
    CellFormat,
    Kind,
    Layout,
    Part,
    State,
    Words,
)
from strata.rules.stages import is_split
from strata.types import BLOCK_BYTES, SEGMENT_TOKENS, StageShape, pad_to_page

_EXTRA_WORDS = 3  # x, y, token id
_WORD = 4
_HEAD_WORDS = 6  # magic, sequence id, streams, cells ... v_trans, layers


@dataclass(frozen=True, kw_only=True)
class RangeFormat:
    """Geometry of a plain attention cache: bytes per cell of each layer's K and V, in blob order."""

    layers: tuple[int, ...]
    k_row_bytes: tuple[int, ...]
    v_row_bytes: tuple[int, ...]
    transposed: bool  # V is stored [elements][cells]
    v_element_bytes: tuple[int, ...]  # of a transposed V; else empty
    cells: CellFormat
    tail: bytes = b""  # what follows the body when every other cache is empty
    window_base_bytes: int = 0  # a window that is not empty takes so much more, and ...
    window_token_bytes: int = 0  # ... so much for each of its cells, of which there are at most those of the range
    has_recurrent: bool = False
    heads: tuple[bytes, ...] = ()  # of every K, then of every V: what each payload must begin its tensors with
    n_windows: int = 0

    @classmethod
    def of(cls, state: State, layout: Layout, cells: CellFormat) -> RangeFormat:
        """The geometry shown by a parsed state. Raises BadState when its first cache holds no attention rows."""
        if layout[0].kind is not Kind.ATTENTION or not layout[0].layers or not len(state.parts[0].cells):
            raise BadState("no attention rows in the first cache")
        part, others = state.parts[0], state.parts[1:]
        windows = [other for other in others if other.kind is Kind.ATTENTION]
        tensors = [tensor for window in windows for tensor in window.tensors]
        return cls(
            layers=part.layers,
            k_row_bytes=tuple(t.rows.shape[1] for t in part.first),
            v_row_bytes=tuple(t.rows.nbytes // len(part.cells) for t in part.second),
            transposed=part.transposed,
            v_element_bytes=tuple(t.rows.shape[2] for t in part.second) if part.transposed else (),
            cells=cells,
            tail=b"".join(_empty(other) for other in others),
            window_base_bytes=2 * _WORD * len(windows) + TENSOR_HEAD_BYTES * len(tensors),
            window_token_bytes=sum(_WORD * cells.words for _ in windows)
            + sum(tensor.rows.nbytes // tensor.rows.shape[tensor.cell_axis] for tensor in tensors),
            has_recurrent=any(other.kind is Kind.RECURRENT for other in others),
            heads=tuple(tensor.head for tensor in part.tensors),
            n_windows=len(windows),
        )

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all stages together."""
        return sum(self.k_row_bytes) + sum(self.v_row_bytes) + self._extra_bytes

    @property
    def _extra_bytes(self) -> int:
        return _WORD * _EXTRA_WORDS if self.cells.extra else 0

    @property
    def block_tokens(self) -> int:
        """Most tokens of a block: an even division of a full segment whose payload stays within BLOCK_BYTES."""
        fixed = TENSOR_HEAD_BYTES * (len(self.k_row_bytes) + len(self.v_row_bytes))
        most = max(1, (BLOCK_BYTES - fixed) // self.token_bytes)
        return -(-SEGMENT_TOKENS // -(-SEGMENT_TOKENS // most))

    @property
    def head_room(self) -> int:
        """Bytes kept free in front of a payload, in whole pages: the head of a full block fits."""
        return pad_to_page(self.head_bytes(self.block_tokens))

    def head_bytes(self, n_cells: int) -> int:
        return _WORD * (_HEAD_WORDS + n_cells * self.cells.words)

    def body_bytes(self, n_cells: int) -> int:
        """Bytes of a blob behind its head: every layer's K and V."""
        return self._span(self.k_row_bytes, n_cells) + self._span(self.v_row_bytes, n_cells)

    def most_tail_bytes(self, n_cells: int) -> int:
        """The most that follows the body in a captured blob."""
        return len(self.tail) + self.window_base_bytes + n_cells * self.window_token_bytes

    def tail_in(self, streams: int) -> bytes:
        """`tail` in a context of so many streams: only caches that attend have them, and those come first."""
        empty = struct.pack(f"<{1 + streams}I", streams, *(0 for _ in range(streams)))
        return empty * self.n_windows + self.tail[2 * _WORD * self.n_windows :]

    def fits_tail(self, tail: Bytes) -> bool:
        """Whether what follows a captured body is as expected: nothing recurrent, perhaps rows of a window."""
        if self.window_base_bytes:
            return len(self.tail) <= len(tail)
        return tail.tobytes() == self.tail

    @staticmethod
    def _span(row_bytes: Sequence[int], n_cells: int) -> int:
        return TENSOR_HEAD_BYTES * len(row_bytes) + n_cells * sum(row_bytes)

    # ----------------------------------------------------------------------------------------------------------- stages

    def stage_shapes(self, stages: Sequence[tuple[int, int]]) -> tuple[StageShape, ...]:
        """The payload geometry of each layer range [first, end) that holds rows; the others have no payload."""
        shapes = []
        for first, end in stages:
            held = self.held(first, end)
            if held.start == held.stop:
                continue
            k, v = self.k_row_bytes[held], self.v_row_bytes[held]
            shapes.append(
                StageShape(
                    layer_first=first,
                    layer_end=end,
                    base_bytes=TENSOR_HEAD_BYTES * (len(k) + len(v)),
                    token_bytes=sum(k) + sum(v) + self._extra_bytes,
                )
            )
        return tuple(shapes)

    def is_split(self, stages: Sequence[StageShape]) -> bool:
        """Whether payloads of these stages, in whatever split they were captured, make up the rows of every layer."""
        ranges = [(stage.layer_first, stage.layer_end) for stage in stages]
        return is_split(stages, self.layers) and self.stage_shapes(ranges) == tuple(stages)

    def sections(self, stage: StageShape, n_cells: int) -> tuple[slice, slice]:
        """Where a stage's K and V lie in a blob's body of `n_cells`."""
        held = self.held(stage.layer_first, stage.layer_end)
        k_first = self._span(self.k_row_bytes[: held.start], n_cells)
        k_end = k_first + self._span(self.k_row_bytes[held], n_cells)
        v_first = self._span(self.k_row_bytes, n_cells) + self._span(self.v_row_bytes[: held.start], n_cells)
        v_end = v_first + self._span(self.v_row_bytes[held], n_cells)
        return slice(k_first, k_end), slice(v_first, v_end)

    def held(self, first: int, end: int) -> slice:
        """Indices of this cache's layers that lie in [first, end)."""
        below = sum(layer < first for layer in self.layers)
        return slice(below, below + sum(first <= layer < end for layer in self.layers))

    # ------------------------------------------------------------------------------------------------------------ heads

    def write_head(self, head: Bytes, start: int, extra: Words | None) -> None:
        """Fill `head` for cells at consecutive positions from `start`; `extra` is (cells, 3) when cells carry it."""
        words, n_cells = self._words(head)
        words[:] = self._head(n_cells, start)
        if self.cells.extra:
            if extra is None:
                raise BadState("cells of this model carry extra coordinates")
            words[4:-2].reshape(n_cells, self.cells.words)[:, 2:5] = extra

    def _words(self, head: Bytes) -> tuple[Words, int]:
        words = head.view("<i4")
        return words, (len(words) - _HEAD_WORDS) // self.cells.words

    def _head(self, n_cells: int, start: int) -> Words:
        """The head of cells at consecutive positions from `start`, their extra words 0."""
        at_zero, is_position = _head_at_zero(n_cells, self.cells.words, self.transposed, len(self.layers))
        return at_zero + is_position * np.int32(start)

    def read_head(self, head: Bytes, start: int) -> tuple[NDArray[np.intp] | None, Words | None]:
        """Check the head of a captured range from position `start`.

        Returns the order that sorts its rows by position (None when they are sorted) and its extra words, sorted.
        Raises BadState when it is not exactly one cell for each position.
        """
        words, n_cells = self._words(head)
        same = words == self._head(n_cells, start)
        same[1] = True  # the sequence it was taken from
        same[4:-2].reshape(n_cells, self.cells.words)[:, -1] = True
        if same.all() and not self.cells.extra:
            return None, None
        if not same[[0, 2, 3]].all():
            raise BadState(f"not a state of {n_cells} cells")
        if not same[-2:].all():
            raise BadState(f"V layout {words[-2]} or layer count {words[-1]} differ from those at start")
        cells = words[4:-2].reshape(n_cells, self.cells.words)
        positions = np.arange(start, start + n_cells)
        order = None
        if not np.array_equal(cells[:, 0], positions):
            order = np.argsort(cells[:, 0], kind="stable")
            cells = cells[order]
            if not np.array_equal(cells[:, 0], positions):
                raise BadState(f"cells are not exactly the positions [{start}, {start + n_cells})")
        return order, cells[:, 2:5].copy() if self.cells.extra else None

    def reorder(self, body: Bytes, order: NDArray[np.intp]) -> None:
        """Permute the rows of every layer in place, so that row i is what row order[i] was."""
        n_cells, at = len(order), 0
        for row_bytes in self.k_row_bytes:
            at = self._permute(body, at, (n_cells, row_bytes), order)
        for i, row_bytes in enumerate(self.v_row_bytes):
            if self.transposed:
                element_bytes = self.v_element_bytes[i]
                at = self._permute(body, at, (row_bytes // element_bytes, n_cells, element_bytes), order)
            else:
                at = self._permute(body, at, (n_cells, row_bytes), order)

    @staticmethod
    def _permute(body: Bytes, at: int, shape: tuple[int, ...], order: NDArray[np.intp]) -> int:
        at += TENSOR_HEAD_BYTES
        end = at + int(np.prod(shape))
        rows = body[at:end].reshape(shape)
        rows[:] = np.take(rows, order, axis=len(shape) - 2)
        return end


@lru_cache(maxsize=8)
def _head_at_zero(n_cells: int, cell_words: int, transposed: bool, n_layers: int) -> tuple[Words, Words]:
    """A blob's head for positions [0, n_cells), and 1 where a position is written in it, else 0."""
    words = np.zeros(_HEAD_WORDS + n_cells * cell_words, "<i4")
    words[:4] = np.array([MAGIC, 0, 1, n_cells], "<u4").view("<i4")
    words[-2:] = (transposed, n_layers)
    cells = words[4:-2].reshape(n_cells, cell_words)
    cells[:, 0] = np.arange(n_cells)
    cells[:, 1] = 1
    is_position = np.zeros_like(words)
    is_position[4:-2:cell_words] = 1
    return words, is_position


def _empty(part: Part) -> bytes:
    """`part` without cells, as it is in a blob."""
    if part.kind is Kind.ATTENTION:
        return struct.pack("<II", 1, 0)
    heads = b"".join(tensor.head for tensor in part.tensors)
    return struct.pack("<III", 0, part.transposed, part.n_layers) + heads
