"""One pool of cells for all slots, or a stream for each: a short measurement of this model on this machine decides.

In a unified pool every row looks at the cells of all conversations, in a split one only at its own; but there rows of
slots that are not neighbours need a pass over the weights each. Timed are steps of long sequences of zero state in both
kinds, in turns: all of them write, one does, every second one does. Only the choice is made here, nothing is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from strata.engine.layout import BadState, State, build, grow_zero, recognise, token_bytes
from strata.engine.llama import Context, Model
from strata.engine.values import ContextShape, EngineSettings
from strata.errors import ModelError

_MOST_SEQUENCES = 4
_MOST_CELLS = 4096
_MOST_BYTES = 256 << 20
_PROBE_TOKENS = 8
_ROUNDS = 4
_STEPS = 3 * _ROUNDS  # the most that one sequence writes
_SPLIT_MUST_WIN = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChoice:
    split: bool
    reason: str


UNIFIED_OPAQUE = PoolChoice(split=False, reason="this model's state is kept as whole images of a unified pool")


def choose_pool(model: Model, settings: EngineSettings, shape: ContextShape, remembered: bool | None) -> PoolChoice:
    """Flag, necessity, memory of an earlier start, or measurement, in this order.

    `shape`: of a unified pool; its `cells` are the context of one slot.
    """
    if settings.pool == "unified":
        return PoolChoice(split=False, reason="set by flag")
    if settings.slots == 1:
        return PoolChoice(split=False, reason="there is one slot")
    if model.is_recurrent:
        return PoolChoice(split=False, reason="the model has no attention")
    if settings.pool == "split":
        return PoolChoice(split=True, reason="set by flag")
    if settings.pool_cells is not None:
        return PoolChoice(split=False, reason="--pool-cells are for all slots")
    if remembered is not None:
        return PoolChoice(split=remembered, reason="remembered from an earlier start")
    return _measure(model, settings, shape)


def _measure(model: Model, settings: EngineSettings, shape: ContextShape) -> PoolChoice:
    n = min(settings.slots, _MOST_SEQUENCES)
    shape = replace(shape, sequences=n)
    try:
        state = _probe(model, shape)
        filled = min(_MOST_CELLS, shape.cells - _STEPS, _MOST_BYTES // max(1, n * token_bytes(state)))
        if filled < 1:
            return PoolChoice(split=False, reason="the context is too short for a measurement")
        cells = n * -(-(filled + _STEPS) // 256) * 256
        with ExitStack() as opened:
            unified, split = (
                opened.enter_context(closing(Context(model, replace(shape, cells=cells, unified=kind))))
                for kind in (True, False)
            )
            for context in (unified, split):
                _fill(context, n, grow_zero(state, filled))
            steps = {"all": range(n), "one": range(n - 1, n), "every second": range(0, n, 2)}
            return decide({what: _times(unified, split, sequences) for what, sequences in steps.items()})
    except BadState:
        return UNIFIED_OPAQUE
    except ModelError as error:
        return PoolChoice(split=False, reason=f"a split pool was not possible: {error.message}")


def decide(timed: dict[str, tuple[float, float]]) -> PoolChoice:
    """Split when it is more than a twentieth faster over everything timed, each counted alike.

    `timed`: seconds of a step, unified and split, by who writes.
    """
    ratio = math.prod(unified / split for unified, split in timed.values()) ** (1 / len(timed))
    texts = [f"{what} unified {1000 * a:.1f} ms, split {1000 * b:.1f} ms" for what, (a, b) in timed.items()]
    return PoolChoice(split=ratio > _SPLIT_MUST_WIN, reason="measured: " + "; ".join(texts))


def _probe(model: Model, shape: ContextShape) -> State:
    """How a state looks here. Raises BadState."""
    with closing(Context(model, replace(shape, cells=256))) as context:
        context.feed(0, [0] * _PROBE_TOKENS, 0)
        return recognise(context.state(0), context.layout)[0]


def _fill(context: Context, n: int, state: State) -> None:
    blob = build(state, context.streams)
    for sequence in range(n):
        if not context.state_set(blob, sequence):
            raise ModelError("llama.cpp refused a state of zeros")


def _times(unified: Context, split: Context, sequences: Sequence[int]) -> tuple[float, float]:
    """Seconds of the fastest step in which these write, in both: in turns, for a machine that does other things too."""
    steps = [(_step(unified, sequences), _step(split, sequences)) for _ in range(_ROUNDS)]
    return min(a for a, _ in steps[1:]), min(b for _, b in steps[1:])


def _step(context: Context, sequences: Sequence[int]) -> float:
    n = len(sequences)
    context.token[:n] = 0
    context.position[:n] = [context.last_position(sequence) + 1 for sequence in sequences]
    context.sequence[:n] = sequences
    context.want[:n] = 1
    began = time.perf_counter()
    if context.decode(n):
        raise ModelError("llama.cpp could not decode in a measurement")
    return time.perf_counter() - began
