"""llama.cpp's sequence-state blobs: find their layout, parse them, split and join by layer range, order their cells.

Covers every memory type whose blob is made of attention and recurrent caches in sequence: plain attention (V rows or
transposed V), sliding window, hybrid, recurrent, hybrid with sliding window, and cells with extra coordinates (M-RoPE).
Format: ENGINE.md §2; the parser must consume a blob exactly, so it checks itself. Pure numpy over views, nothing copied
but permuted rows. Not covered: caches with further parts (DSA and the like), which fail to parse; the fast path for
token ranges of plain attention is `ranges.py`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.int32]

MAGIC = 0xAF143CD8
TENSOR_HEAD_BYTES = 12
_MAX_LAYERS = 4096
_MAX_ROW_BYTES = 1 << 30
_TYPES = 64  # ggml type ids lie below this
_MAX_STREAMS = 256


class BadState(ValueError):
    """The bytes are not a sequence state of the expected layout."""


class Kind(Enum):
    ATTENTION = "attention"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One cache of a context, with the model layers it holds, in blob order."""

    kind: Kind
    layers: tuple[int, ...]


Layout = tuple[Cache, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFormat:
    """What a blob does not say of itself: do cells carry extra words (x, y, token id), and is there a V part."""

    extra: bool
    has_v: bool = True

    @property
    def words(self) -> int:
        """int32 words per cell: position, number of sequence ids (1), [x, y, token id], sequence id."""
        return 6 if self.extra else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One layer's share of one kind (K, V, R or S): its 12-byte head as in the blob, and its rows.

    `rows` is (cells, row bytes); of a transposed V it is (elements, cells, element bytes) and `cell_axis` is 1.
    """

    head: bytes
    rows: Bytes
    cell_axis: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One cache's share of a state. `first` holds K (or R) and `second` V (or S), one tensor per layer.

    `cells`: int32 (cells, words). `n_layers`: the layer count the blob states: of a recurrent part it counts all
    layers of the model (or of the stage), not only recurrent ones. `cells_at`: where the cells begin in the blob.
    """

    kind: Kind
    layers: tuple[int, ...]
    cells: Words
    n_layers: int
    transposed: bool
    first: tuple[Tensor, ...]
    second: tuple[Tensor, ...]
    cells_at: int = 0
    streams: int = 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.first + self.second


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A parsed blob; arrays are views of it."""

    sequence: int
    parts: tuple[Part, ...]


# ------------------------------------------------------------------------------------------------------------ discovery

_ATTENTION_LINE = re.compile(r"llama_kv_cache: layer +(\d+): (dev|filtered|reus|shar)")
_ATTENTION_END = "llama_kv_cache: size"
_RECURRENT_LINE = re.compile(r"llama_memory_recurrent[,:] layer +(\d+): (dev|skipped)")


def discover_layout(lines: Iterable[str]) -> Layout:
    """The caches of a context and their layers, in blob order, from the debug log of its creation (ENGINE.md §2)."""
    found: list[tuple[Kind, list[int]]] = []
    open_kind: Kind | None = None
    for line in lines:
        kind = Kind.ATTENTION
        match = _ATTENTION_LINE.match(line)
        if match is None:
            kind = Kind.RECURRENT
            match = _RECURRENT_LINE.match(line)
        if match is not None:
            if kind is not open_kind:
                found.append((kind, []))
                open_kind = kind
            if match.group(2) == "dev":
                found[-1][1].append(int(match.group(1)))
        elif line.startswith(_ATTENTION_END):
            open_kind = None
    return tuple(Cache(kind=kind, layers=tuple(layers)) for kind, layers in found)


def in_checkpoint(layout: Layout) -> tuple[bool, ...]:
    """Which caches LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY writes: sliding window and recurrent; of plain attention, all."""
    kinds = [cache.kind for cache in layout]
    if kinds == [Kind.ATTENTION]:
        return (True,)
    has_window = kinds[:2] == [Kind.ATTENTION, Kind.ATTENTION]
    return tuple(kind is Kind.RECURRENT or (has_window and i == 1) for i, kind in enumerate(kinds))


# -------------------------------------------------------------------------------------------------------------- parsing


class _Reader:
    """Takes fields off a blob, never beyond its end."""

    def __init__(self, blob: Bytes) -> None:
        self._blob = blob
        self._at = 0

    @property
    def at(self) -> int:
        return self._at

    @property
    def left(self) -> int:
        return len(self._blob) - self._at

    def take(self, n_bytes: int) -> Bytes:
        if not 0 <= n_bytes <= self.left:
            raise BadState(f"needs {n_bytes} bytes at {self._at}, {self.left} are left")
        self._at += n_bytes
        return self._blob[self._at - n_bytes : self._at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4).tobytes(), "little")

    def words(self, rows: int, columns: int) -> Words:
        data = self.take(4 * rows * columns)
        return np.frombuffer(data.tobytes(), "<i4").reshape(rows, columns)


def _tensor(reader: _Reader, n_cells: int, *, transposed: bool) -> Tensor:
    head = reader.take(TENSOR_HEAD_BYTES).tobytes()
    type_id = int.from_bytes(head[:4], "little", signed=True)
    if not 0 <= type_id < _TYPES:
        raise BadState(f"tensor type {type_id}")
    if transposed:
        element_bytes, elements = struct.unpack_from("<II", head, 4)
        if element_bytes > 64 or element_bytes * elements > _MAX_ROW_BYTES:
            raise BadState(f"V of {elements} elements of {element_bytes} bytes")
        rows = reader.take(element_bytes * elements * n_cells).reshape(elements, n_cells, element_bytes)
        return Tensor(head=head, rows=rows, cell_axis=1)
    (row_bytes,) = struct.unpack_from("<Q", head, 4)
    if row_bytes > _MAX_ROW_BYTES:
        raise BadState(f"row of {row_bytes} bytes")
    return Tensor(head=head, rows=reader.take(row_bytes * n_cells).reshape(n_cells, row_bytes))


def _tensors(reader: _Reader, count: int, n_cells: int, *, transposed: bool = False) -> tuple[Tensor, ...]:
    return tuple(_tensor(reader, n_cells, transposed=transposed) for _ in range(count))


def _attention(reader: _Reader, layers: tuple[int, ...], fmt: CellFormat) -> Part:
    streams = reader.u32()
    if not 1 <= streams <= _MAX_STREAMS:
        raise BadState(f"{streams} streams")
    cells = reader.words(0, fmt.words)
    part = Part(kind=Kind.ATTENTION, layers=layers, cells=cells, n_layers=0, transposed=False, first=(), second=())
    for _ in range(streams):
        n_cells = reader.u32()
        if n_cells and len(part.cells):
            raise BadState("one sequence in two streams")
        part = _stream(reader, layers, fmt, n_cells) if n_cells else part
    return replace(part, streams=streams)


def _stream(reader: _Reader, layers: tuple[int, ...], fmt: CellFormat, n_cells: int) -> Part:
    """The cells of the one stream that has any."""
    cells_at = reader.at
    cells = reader.words(n_cells, fmt.words)
    if (cells[:, 0] < 0).any() or (cells[:, 1] != 1).any():
        raise BadState("a cell without a position or with other than one sequence id")
    v_trans, n_layers = reader.u32(), reader.u32()
    if v_trans > 1 or n_layers != len(layers):
        raise BadState(f"v_trans {v_trans}, {n_layers} layers where {len(layers)} are held")
    first = _tensors(reader, n_layers, n_cells)
    second = _tensors(reader, n_layers if fmt.has_v else 0, n_cells, transposed=bool(v_trans))
    return Part(
        kind=Kind.ATTENTION,
        layers=layers,
        cells=cells,
        n_layers=n_layers,
        transposed=bool(v_trans),
        first=first,
        second=second,
        cells_at=cells_at,
    )


def _recurrent(reader: _Reader, layers: tuple[int, ...]) -> Part:
    n_cells = reader.u32()
    cells_at = reader.at
    cells = reader.words(n_cells, 2)
    if (cells[:, 1] != 0).any():
        raise BadState("a recurrent cell with sequence ids")
    s_trans, n_layers = reader.u32(), reader.u32()
    if s_trans or n_layers > _MAX_LAYERS:
        raise BadState(f"s_trans {s_trans}, {n_layers} layers")
    first = _tensors(reader, len(layers), n_cells)
    second = _tensors(reader, len(layers), n_cells)
    return Part(
        kind=Kind.RECURRENT,
        layers=layers,
        cells=cells,
        n_layers=n_layers,
        transposed=False,
        first=first,
        second=second,
        cells_at=cells_at,
    )


def parse(blob: Bytes, layout: Layout, fmt: CellFormat, *, checkpoint: bool = False) -> State:
    """The parts of `blob`; `checkpoint` when it was taken with PARTIAL_ONLY. Raises BadState unless it fits exactly."""
    reader = _Reader(blob)
    magic = reader.u32()
    if magic != MAGIC:
        raise BadState(f"magic {magic:#x}")
    sequence = int.from_bytes(reader.take(4).tobytes(), "little", signed=True)
    wanted = in_checkpoint(layout) if checkpoint else (True,) * len(layout)
    parts = tuple(
        _attention(reader, cache.layers, fmt) if cache.kind is Kind.ATTENTION else _recurrent(reader, cache.layers)
        for cache, want in zip(layout, wanted, strict=True)
        if want
    )
    if reader.left:
        raise BadState(f"{reader.left} bytes behind the last part")
    return State(sequence=sequence, parts=parts)


def recognise(blob: Bytes, layout: Layout) -> tuple[State, CellFormat]:
    """Parse `blob` under the one cell format that fits. Raises BadState when none or several fit attention cells."""
    fits: list[tuple[State, CellFormat]] = []
    for fmt in (CellFormat(extra=e, has_v=v) for v in (True, False) for e in (False, True)):
        try:
            state = parse(blob, layout, fmt)
        except BadState:
            continue
        fits.append((state, fmt))
        if not any(part.kind is Kind.ATTENTION and len(part.cells) for part in state.parts):
            break
    if len(fits) != 1:
        raise BadState(f"{len(fits)} readings of a state of {len(blob)} bytes with {len(layout)} caches")
    return fits[0]


def token_bytes(state: State) -> int:
    """Bytes of attention rows per token, over all caches that hold cells."""
    attention = (part for part in state.parts if part.kind is Kind.ATTENTION and len(part.cells))
    return sum(tensor.rows.nbytes // len(part.cells) for part in attention for tensor in part.tensors)


# ------------------------------------------------------------------------------------------------------------- building


def build(state: State, streams: int = 1) -> Bytes:
    """The blob of `state` for a context of so many streams: the inverse of `parse`. Rows are copied once.

    The cells stand in the first stream: llama.cpp puts them into that of the sequence they are for.
    """
    out: list[bytes | Bytes] = [struct.pack("<Ii", MAGIC, state.sequence)]
    for part in state.parts:
        n_cells = len(part.cells)
        if part.kind is Kind.ATTENTION:
            out.append(struct.pack("<II", streams, n_cells))
        else:
            out.append(struct.pack("<I", n_cells))
        if n_cells or part.kind is Kind.RECURRENT:
            out.append(part.cells.astype("<i4").tobytes())
            out.append(struct.pack("<II", part.transposed, part.n_layers))
            for tensor in part.tensors:
                out += (tensor.head, tensor.rows)
        if part.kind is Kind.ATTENTION:
            out.append(bytes(4 * (streams - 1)))  # the other streams are empty
    return _joined(out)


def _joined(pieces: Sequence[bytes | Bytes]) -> Bytes:
    arrays = [np.frombuffer(p, np.uint8) if isinstance(p, bytes) else p.reshape(-1) for p in pieces]
    return np.concatenate(arrays)


# ------------------------------------------------------------------------------------------------------- split and join


def split(state: State, stages: Sequence[tuple[int, int]]) -> tuple[State, ...]:
    """One state per layer range [first, end): each is itself a legal state of the shorter model."""
    return tuple(
        State(sequence=state.sequence, parts=tuple(_cut(part, first, end) for part in state.parts))
        for first, end in stages
    )


def _cut(part: Part, first: int, end: int) -> Part:
    held = [i for i, layer in enumerate(part.layers) if first <= layer < end]
    empty = part.kind is Kind.ATTENTION and not len(part.cells)
    n_layers = end - first if part.kind is Kind.RECURRENT else 0 if empty else len(held)
    return replace(
        part,
        layers=tuple(part.layers[i] for i in held),
        n_layers=n_layers,
        first=tuple(part.first[i] for i in held if part.first),
        second=tuple(part.second[i] for i in held if part.second),
    )


def join(pieces: Sequence[State]) -> State:
    """The inverse of `split`, pieces in stage order. Raises BadState when their cells differ."""
    columns = list(zip(*(piece.parts for piece in pieces), strict=True))
    return State(sequence=pieces[0].sequence, parts=tuple(_merge(parts) for parts in columns))


def _merge(parts: Sequence[Part]) -> Part:
    if any(not np.array_equal(part.cells, parts[0].cells) for part in parts):
        raise BadState("stages of different cells")
    return replace(
        parts[0],
        layers=tuple(layer for part in parts for layer in part.layers),
        n_layers=sum(part.n_layers for part in parts),
        first=tuple(tensor for part in parts for tensor in part.first),
        second=tuple(tensor for part in parts for tensor in part.second),
    )


def grow_zero(state: State, n_cells: int) -> State:
    """`state` with its attention parts replaced by zero rows at positions [0, n_cells): for timing, not for use."""
    return replace(state, parts=tuple(_zero(part, n_cells) for part in state.parts))


def _zero(part: Part, n_cells: int) -> Part:
    if part.kind is Kind.RECURRENT:
        cells = part.cells.copy()
        cells[:, 0] = n_cells - 1
        return replace(part, cells=cells)
    if not len(part.cells):
        return part
    cells = np.zeros((n_cells, part.cells.shape[1]), np.int32)
    cells[:, 0] = np.arange(n_cells)
    cells[:, 1] = 1
    return replace(part, cells=cells, first=_zeros(part.first, n_cells), second=_zeros(part.second, n_cells))


def _zeros(tensors: tuple[Tensor, ...], n_cells: int) -> tuple[Tensor, ...]:
    def shape(tensor: Tensor) -> tuple[int, ...]:
        return tuple(n_cells if axis == tensor.cell_axis else n for axis, n in enumerate(tensor.rows.shape))

    return tuple(replace(t, rows=np.zeros(shape(t), np.uint8)) for t in tensors)
