"""Flash attention on or off: a short measurement of this model on this machine decides (ENGINE.md: both ways occur).

Each choice gets a small context of its own whose cells are filled with zero state (time does not depend on the data);
a few one-row decodes and one short read are timed behind it. Bounded to about two seconds on a model of desk size.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from strata.engine.layout import BadState, build, grow_zero, recognise, token_bytes
from strata.engine.llama import UNQUANTISED, Context, ContextShape, Model
from strata.engine.protocol import EngineSettings
from strata.errors import ConfigError, ModelError

_FILL_CELLS = 4096
_FILL_BYTES = 256 << 20
_READ_TOKENS = 64
_TIMED_ROWS = 3
_SLOW_ROW_S = 0.15  # behind such a row, timing a read would take too long
_OFF_MUST_WIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashChoice:
    on: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Seconds of one decoded row and of one short read; infinite for a context that cannot be created."""

    row_s: float
    read_s: float | None


def choose_flash_attention(
    model: Model, settings: EngineSettings, threads: int, remembered: bool | None
) -> FlashChoice:
    """Flag, necessity, memory of an earlier start, or measurement, in this order."""
    quantised_v = settings.kv_v not in UNQUANTISED
    if settings.flash_attention == "off" and quantised_v:
        raise ConfigError(
            f"--kv with a quantised V ({settings.kv_v}) needs flash attention; remove --flash-attention off.",
            field="--flash-attention",
        )
    if settings.flash_attention != "auto":
        return FlashChoice(on=settings.flash_attention == "on", reason="set by flag")
    if quantised_v:
        return FlashChoice(on=True, reason=f"needed by V of type {settings.kv_v}")
    if model.is_recurrent:
        return FlashChoice(on=False, reason="the model has no attention")
    if remembered is not None:
        return FlashChoice(on=remembered, reason="remembered from an earlier start")
    on, off = (_time(model, settings, threads, flash_attention=choice) for choice in (True, False))
    return _decide(on, off)


def _decide(on: _Times, off: _Times) -> FlashChoice:
    """On, unless off is more than a tenth faster over rows and read alike."""
    ratios = [on.row_s / off.row_s]
    text = f"measured: on {1000 * on.row_s:.1f} ms, off {1000 * off.row_s:.1f} ms per token"
    if on.read_s is not None and off.read_s is not None:
        ratios.append(on.read_s / off.read_s)
        text += f"; reading {_READ_TOKENS}: on {1000 * on.read_s:.0f} ms, off {1000 * off.read_s:.0f} ms"
    if math.isinf(on.row_s) or math.isinf(off.row_s):
        return FlashChoice(on=math.isinf(off.row_s), reason="the other setting is not possible with this model")
    return FlashChoice(on=math.prod(ratios) ** (1 / len(ratios)) <= _OFF_MUST_WIN, reason=text)


def _time(model: Model, settings: EngineSettings, threads: int, *, flash_attention: bool) -> _Times:
    shape = ContextShape(
        cells=_FILL_CELLS + 256,
        sequences=2,
        batch=_READ_TOKENS,
        threads=threads,
        flash_attention=flash_attention,
        kv_k=settings.kv_k,
        kv_v=settings.kv_v,
    )
    try:
        context = Context(model, shape)
    except ModelError:
        return _Times(row_s=math.inf, read_s=None)
    try:
        sequence, held = _fill(context)
        rows = [_timed_feed(context, sequence, 1, held + i) for i in range(1 + _TIMED_ROWS)]
        row_s = min(rows[1:])  # the first one touches everything for the first time
        held += len(rows)
        read_s = _timed_feed(context, sequence, _READ_TOKENS, held) if row_s < _SLOW_ROW_S else None
        return _Times(row_s=row_s, read_s=read_s)
    finally:
        context.close()


def _timed_feed(context: Context, sequence: int, n: int, start: int) -> float:
    began = time.perf_counter()
    context.feed(sequence, [0] * n, start)
    return time.perf_counter() - began


def _fill(context: Context) -> tuple[int, int]:
    """Give a sequence a long zero state; returns it and its length. Without a known layout it stays short."""
    probe = 8
    context.feed(0, [0] * probe, 0)
    try:
        state, _ = recognise(context.state(0), context.layout)
    except BadState:
        return 0, probe
    cells = min(_FILL_CELLS, max(512, _FILL_BYTES // max(1, token_bytes(state))))
    if not context.state_set(build(grow_zero(state, cells))):
        context.remove(context.transfer)
        return 0, probe
    context.remove(0)
    return context.transfer, cells
