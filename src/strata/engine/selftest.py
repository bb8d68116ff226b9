"""Can this model's memory be kept in segments? Decided by a round trip on the loaded model, not by its name.

Reads a few tokens, captures them, splits and joins the state, applies it at another place of the pool and captures it
again: the bytes must be equal. Memory that cannot be cut at any token (sliding window, recurrent, hybrid) is called
"opaque" in this version, and so is every failure, with its reason. The context is empty afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from strata.engine.layout import BadState, Bytes, Layout, State, build, join, recognise, split
from strata.engine.llama import Context, Model
from strata.engine.ranges import RangeFormat
from strata.engine.slots import Slots
from strata.types import StageShape, pad_to_page

_TOKENS = 24
_OTHER_TOKENS = 3
LayerRange = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found. `format` and `stages` belong to mode "segments"; `transposed_v` is known whenever V is."""

    mode: str
    reason: str
    transposed_v: bool
    format: RangeFormat | None = None
    stages: tuple[StageShape, ...] = ()


def is_cuttable(model: Model) -> bool:
    """Whether a sequence can be shortened to, and shared up to, any position (the window cache is kept whole)."""
    return not (model.is_recurrent or model.is_hybrid)


def self_test(model: Model, context: Context, stages: Sequence[LayerRange]) -> Proof:
    """Prove the round trip on an empty context; leaves it empty. Raises ModelError when the model cannot decode."""
    try:
        return _test(model, context, stages)
    finally:
        context.clear()


def _test(model: Model, context: Context, stages: Sequence[LayerRange]) -> Proof:
    tokens = (np.arange(_TOKENS + _OTHER_TOKENS, dtype=np.int64) * 7919 + 11) % model.vocabulary.n_tokens
    context.feed(0, tokens[:_TOKENS].astype(np.int32), 0)
    blob = context.state(0)
    try:
        state, cells = recognise(blob, context.layout)
    except BadState as error:
        return Proof(mode="opaque", reason=f"the layout of its state is not known: {error}", transposed_v=False)
    transposed = any(part.transposed for part in state.parts)
    thirds = _thirds(model.n_layers)
    if not np.array_equal(build(join(split(state, thirds))), blob):
        return Proof(mode="opaque", reason="its state cannot be split by layers", transposed_v=transposed)
    kind = _not_in_segments(model, context.layout)
    if kind is not None:
        return Proof(mode="opaque", reason=kind, transposed_v=transposed)
    fmt = RangeFormat.of(state, context.layout, cells)
    reason = _round_trip(context, state, fmt, thirds, tokens.astype(np.int32))
    if reason is not None:
        return Proof(mode="opaque", reason=f"the self-test failed: {reason}", transposed_v=transposed)
    return Proof(
        mode="segments",
        reason=f"round trip of {_TOKENS} tokens in {len(thirds)} stages gave equal bytes",
        transposed_v=transposed,
        format=fmt,
        stages=fmt.stage_shapes(stages),
    )


def _not_in_segments(model: Model, layout: Layout) -> str | None:
    """Why this kind of memory is not kept in segments; None for plain attention."""
    if model.is_recurrent:
        return "recurrent memory can only be resumed at checkpoints, which this version does not take"
    if model.is_hybrid:
        return "hybrid memory can only be resumed at checkpoints, which this version does not take"
    if len(layout) != 1:
        return "sliding-window memory can only be resumed at checkpoints, which this version does not take"
    return None


def _thirds(n_layers: int) -> list[LayerRange]:
    return list(pairwise(sorted({0, n_layers // 3, 2 * n_layers // 3, n_layers})))


def _round_trip(
    context: Context, state: State, fmt: RangeFormat, thirds: Sequence[LayerRange], tokens: np.ndarray
) -> str | None:
    """Capture whole and in thirds, apply the thirds elsewhere, capture again; what differed, or None."""
    shapes, whole_shape = fmt.stage_shapes(thirds), fmt.stage_shapes([(0, thirds[-1][1])])
    whole = Slots(context, 1, _TOKENS, cuttable=True, format=fmt, stages=whole_shape)
    parted = Slots(context, 1, _TOKENS, cuttable=True, format=fmt, stages=shapes)
    whole.held[0] = parted.held[0] = _TOKENS
    before, pieces, after = (_spans(fmt, s) for s in (whole_shape, shapes, whole_shape))
    refusal = whole.capture(0, 0, _TOKENS, before) or parted.capture(0, 0, _TOKENS, pieces)
    if refusal is not None:
        return refusal
    context.clear()
    parted.held[0] = whole.held[0] = 0
    context.feed(context.transfer - 1, tokens[_TOKENS:], 0)  # the first cells are taken: the state lands elsewhere
    refusal = parted.apply(0, 0, _TOKENS, 0, _TOKENS, pieces, tokens[:_TOKENS])
    if refusal is not None:
        return refusal
    whole.held[0] = _TOKENS
    refusal = whole.capture(0, 0, _TOKENS, after)
    if refusal is not None:
        return refusal
    same = np.array_equal(before[0][fmt.head_room :], after[0][fmt.head_room :])
    return None if same else "captured bytes differ after they were applied"


def _spans(fmt: RangeFormat, shapes: Sequence[StageShape]) -> list[Bytes]:
    return [np.zeros(fmt.head_room + pad_to_page(shape.payload_bytes(_TOKENS)), np.uint8) for shape in shapes]
