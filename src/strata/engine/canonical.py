"""The canonical form of a state: attention cells by position, sequence ids zeroed. Equal content has equal bytes.

Where rows lie in order already, as they nearly always do, none is moved: a checkpoint may be hundreds of megabytes, and
the engine's thread has other slots waiting. Pure numpy; `layout.py` parses and builds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata.engine.layout import Bytes, Kind, Part, State, Tensor, build


def canonical(state: State, first: int = 0) -> State:
    """The same state with attention cells by position and sequence ids zeroed: equal content, equal bytes.

    Attention cells below position `first` are left out.
    """
    return State(sequence=0, parts=tuple(_ordered(part, first) for part in state.parts))


def canonical_blob(blob: Bytes, found: State, wanted: State) -> Bytes:
    """`build(wanted)`, the canonical form of what was `found` in `blob`: in place when nothing has to move."""
    if any(old.first is not new.first or old.streams > 1 for old, new in zip(found.parts, wanted.parts, strict=True)):
        return build(wanted)
    blob[4:8] = 0  # the sequence
    for part in wanted.parts:
        cells = part.cells.astype("<i4").view(np.uint8).reshape(-1)
        blob[part.cells_at : part.cells_at + len(cells)] = cells
    return blob


def _ordered(part: Part, first: int) -> Part:
    part = replace(part, streams=1)
    if part.kind is Kind.RECURRENT or not len(part.cells):
        return part
    order = np.argsort(part.cells[:, 0], kind="stable")
    order = order[part.cells[order, 0] >= first]
    cells = part.cells[order]
    cells[:, -1] = 0
    if np.array_equal(order, np.arange(len(part.cells))):  # as usual: nothing to permute
        return replace(part, cells=cells)
    return replace(part, cells=cells, first=_take(part.first, order), second=_take(part.second, order))


def _take(tensors: tuple[Tensor, ...], order: NDArray[np.intp]) -> tuple[Tensor, ...]:
    return tuple(replace(t, rows=np.take(t.rows, order, axis=t.cell_axis)) for t in tensors)
