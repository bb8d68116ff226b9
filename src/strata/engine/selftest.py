"""How can this model's memory be kept? Decided by a round trip on the loaded model, not by its name.

Reads a few tokens, captures their rows (whole and in three stages) and a checkpoint where cutting is not possible,
applies both at another place of the pool and captures again: all bytes must be equal. The outcome is a mode: "segments"
(rows, cut anywhere), "checkpoints" (rows, if there are any, and a checkpoint wherever one resumes) or "opaque" (the
layout is not known, or the round trip failed: the whole image of a sequence per position). The context is empty
afterwards. Not covered: what only shows after hundreds of tokens (a window that moves on); tests do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from strata.engine.checkpoints import CheckpointFormat, Checkpoints
from strata.engine.layout import BadState, Bytes, CellFormat, Kind, Layout, State, build, join, recognise, split
from strata.engine.llama import Context, Model
from strata.engine.ranges import RangeFormat
from strata.engine.slots import Slots
from strata.engine.streams import slots_of
from strata.rules.stages import LayerRange
from strata.types import BLOCK_BYTES, PAGE, StageShape, pad_to_page

_TOKENS = 24
_OTHER_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found. `format` and `stages`: how rows are moved, if there are any. `checkpoint`: how checkpoints are.

    `checkpoint` is None where rows suffice (mode "segments"), or where nothing at all can be kept (mode "opaque").
    """

    mode: str
    reason: str
    transposed_v: bool
    cut_window: int = 0  # how much must be left behind a cut of a sliding window; 0: any cut is fine, or none is
    format: RangeFormat | None = None
    stages: tuple[StageShape, ...] = ()
    checkpoint: CheckpointFormat | None = None

    @property
    def head_room(self) -> int:
        return self.format.head_room if self.format else PAGE


def is_cuttable(model: Model) -> bool:
    """Whether a sequence can be shortened at all (a sliding window limits how far)."""
    return not (model.is_recurrent or model.is_hybrid)


def self_test(model: Model, context: Context, stages: Sequence[LayerRange]) -> Proof:
    """Prove the round trip on an empty context; leaves it empty. Raises ModelError when the model cannot decode."""
    try:
        return _test(model, context, stages)
    finally:
        context.clear()


def _test(model: Model, context: Context, stages: Sequence[LayerRange]) -> Proof:
    every = (np.arange(_TOKENS + _OTHER_TOKENS, dtype=np.int64) * 7919 + 11) % model.vocabulary.n_tokens
    tokens = every.astype(np.int32)
    context.feed(0, tokens[:_TOKENS], 0)
    blob = context.state(0)
    try:
        state, cells = recognise(blob, context.layout)
    except BadState as error:
        return _image(context, tokens, f"the layout of its state is not known: {error}", transposed=False)
    transposed = any(part.transposed for part in state.parts)
    thirds = _thirds(model.n_layers)
    if not np.array_equal(build(join(split(state, thirds)), context.streams), blob):
        return _image(context, tokens, "its state cannot be split by layers", transposed=transposed)
    window = model.sliding_window if _slides(context.layout) else 0
    cut_window = 0 if model.is_hybrid else window  # hybrid memory is never cut, window or not
    try:
        rows = _rows(state, context.layout, cells)
        checkpoint = _checkpoint(context, cells, window)
        reason = _Trip(context, rows, checkpoint, thirds, cut_window).go(tokens)
    except BadState as error:
        reason = str(error)
    if reason is not None:
        return _image(context, tokens, f"the self-test failed: {reason}", transposed=transposed)
    return Proof(
        mode="segments" if checkpoint is None else "checkpoints",
        reason=f"{_kind(model, context.layout)}: round trip of {_TOKENS} tokens "
        f"in {len(thirds)} stages gave equal bytes",
        transposed_v=transposed,
        cut_window=cut_window,
        format=rows,
        stages=rows.stage_shapes(stages) if rows else (),
        checkpoint=checkpoint,
    )


def _slides(layout: Layout) -> bool:
    return len(layout) > 1 and layout[1].kind is Kind.ATTENTION


def _kind(model: Model, layout: Layout) -> str:
    if model.is_recurrent:
        return "recurrent memory"
    window = " with a sliding window" if _slides(layout) else ""
    if model.is_hybrid:
        return f"hybrid memory{window}"
    return f"attention{window}"


def _thirds(n_layers: int) -> list[LayerRange]:
    return list(pairwise(sorted({0, n_layers // 3, 2 * n_layers // 3, n_layers})))


def _rows(state: State, layout: Layout, cells: CellFormat) -> RangeFormat | None:
    """How rows are moved; None for memory without any (recurrent, or every layer that attends slides)."""
    first = layout[0]
    return RangeFormat.of(state, layout, cells) if first.kind is Kind.ATTENTION and first.layers else None


def _checkpoint(context: Context, cells: CellFormat, window: int) -> CheckpointFormat | None:
    """How checkpoints are taken; None for plain attention. The context holds some tokens in sequence 0."""
    if len(context.layout) == 1 and context.layout[0].kind is Kind.ATTENTION:
        return None
    return CheckpointFormat.of(context.state(0, checkpoint=True), context.layout, cells, window=window)


class _Trip:
    """The round trip. The context holds the first tokens in sequence 0 before it, and other things after it."""

    def __init__(
        self,
        context: Context,
        rows: RangeFormat | None,
        checkpoint: CheckpointFormat | None,
        thirds: Sequence[LayerRange],
        window: int = 0,
    ) -> None:
        self._context = context
        self._rows = rows
        self._head_room = rows.head_room if rows else PAGE
        # plain attention does not use the empty sequence; other memory has a spare one; streams are those of slots
        unused = context.empty if checkpoint is None else context.empty - 1
        self._other = unused if context.streams == 1 else 1
        one = [(0, thirds[-1][1])]
        shapes = [rows.stage_shapes(ranges) if rows else () for ranges in (one, thirds)]
        self._whole, self._parted = (
            slots_of(context, 1, _TOKENS, cuttable=True, window=window, format=rows, stages=stages) for stages in shapes
        )
        self._shapes = shapes
        self._checkpoints = None
        if checkpoint is not None:
            spares = range(self._other, self._other + 1)
            self._checkpoints = Checkpoints(context, self._parted, checkpoint, spares=spares, head_room=self._head_room)

    def go(self, tokens: np.ndarray) -> str | None:
        """What differed or was refused, or None."""
        one, thirds = self._shapes
        self._hold(_TOKENS)
        before, pieces, after = self._spans(one), self._spans(thirds), self._spans(one)
        refusal = self._capture(self._whole, before) or self._capture(self._parted, pieces)
        saved = self._take()
        if refusal or isinstance(saved, str):
            return refusal or str(saved)
        self._context.clear()
        self._hold(0)
        # the first cells are taken: the state lands elsewhere
        self._context.feed(self._other, tokens[_TOKENS:], 0)
        if self._rows:
            refusal = self._parted.apply(0, 0, _TOKENS, 0, _TOKENS, pieces, tokens[:_TOKENS])
            refusal = refusal or self._parted.settle(0)
        refusal = refusal or self._put(saved)
        if refusal:
            return refusal
        self._context.remove(self._other)
        self._hold(_TOKENS)
        refusal = self._capture(self._whole, after)
        again = self._take()
        if refusal or isinstance(again, str):
            return refusal or str(again)
        room = self._head_room
        same = all(np.array_equal(a[room:], b[room:]) for a, b in zip([*before, *saved], [*after, *again], strict=True))
        return None if same else "captured bytes differ after they were applied"

    def _hold(self, n: int) -> None:
        self._whole.held[0] = self._parted.held[0] = n

    def _spans(self, shapes: Sequence[StageShape]) -> list[Bytes]:
        return [np.zeros(self._head_room + pad_to_page(shape.payload_bytes(_TOKENS)), np.uint8) for shape in shapes]

    def _capture(self, slots: Slots, spans: Sequence[Bytes]) -> str | None:
        return slots.capture(0, 0, _TOKENS, spans) if self._rows else None

    def _take(self) -> list[Bytes] | str:
        """The checkpoint of sequence 0 in blocks; none where none is needed; or why not."""
        if self._checkpoints is None:
            return []
        held = self._checkpoints.hold(0)
        if isinstance(held, str):
            return held
        self._total = self._checkpoints.pending[held].payload_bytes
        spans = []
        for offset in range(0, self._total, BLOCK_BYTES):
            n = min(BLOCK_BYTES, self._total - offset)
            spans.append(np.zeros(self._head_room + pad_to_page(n), np.uint8))
            refusal = self._checkpoints.capture(held, offset, spans[-1])
            if refusal is not None:
                return refusal
        self._checkpoints.release(held)
        return spans

    def _put(self, spans: Sequence[Bytes]) -> str | None:
        if self._checkpoints is None:
            return None
        for i, span in enumerate(spans):
            refusal = self._checkpoints.apply(0, _TOKENS, i * BLOCK_BYTES, self._total, span)
            if refusal is not None:
                return refusal
        return None


def _image(context: Context, tokens: np.ndarray, why: str, *, transposed: bool) -> Proof:
    """Mode "opaque": can a whole image go out and in? `why` says what kept it from more."""
    context.clear()
    context.feed(0, tokens[:_TOKENS], 0)
    size = context.state_size(0)
    context.feed(0, tokens[_TOKENS:], _TOKENS)
    per_token = -(-(context.state_size(0) - size) // _OTHER_TOKENS)
    context.clear()
    context.feed(0, tokens[:_TOKENS], 0)
    fmt = CheckpointFormat(
        layout=None, cells=CellFormat(extra=False), image_base_bytes=size, image_token_bytes=per_token
    )
    refusal = _Trip(context, None, fmt, [(0, 1)]).go(tokens)
    if refusal is not None:
        reason = f"{why}; nor can its whole image be applied: {refusal}"
        return Proof(mode="opaque", reason=reason, transposed_v=transposed)
    return Proof(mode="opaque", reason=why, transposed_v=transposed, checkpoint=fmt)
