"""Flash attention on or off: a short measurement of this model on this machine decides (ENGINE.md: both ways occur).

Each choice gets a small context of its own whose cells are filled with zero state (time does not depend on the data).
Timed are: rows behind the filled cells, rows of another sequence beside them (what a unified pool costs the others),
the few new tokens of a returning turn, and a longer read. Bounded to about two seconds on a model of desk size. Only
the choice is made here, nothing is kept.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from strata.engine.layout import BadState, build, grow_zero, recognise, token_bytes
from strata.engine.llama import UNQUANTISED, Context, Model
from strata.engine.values import ContextShape, EngineSettings
from strata.errors import ConfigError, ModelError

_FILL_CELLS = 4096
_FILL_BYTES = 256 << 20
_PROBE_TOKENS = 8
_TIMED_ROWS = 3
_READ_TOKENS = ((0.04, 128), (0.08, 64), (0.15, 32))
"""(seconds of a row below which, tokens of the timed read): a slow model reads less, a very slow one nothing."""
_TURN_TOKENS = 16
"""What a conversation that comes back has to read: llama.cpp's flash attention takes another path below 64 rows."""
_OFF_MUST_WIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashChoice:
    on: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds with one setting. `beside_s` is None with one slot, the other two when a read would take too long."""

    row_s: float
    beside_s: float | None
    turn_s: float | None
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
    return _measure(model, settings, threads)


def _measure(model: Model, settings: EngineSettings, threads: int) -> FlashChoice:
    on, read_tokens = _time(model, settings, threads, None, flash_attention=True)
    off, _ = _time(model, settings, threads, read_tokens, flash_attention=False)
    if on is None or off is None:
        possible = "off" if on is None else "on"
        return FlashChoice(on=on is not None, reason=f"this model can only run with flash attention {possible}")
    return decide(on, off, read_tokens)


def decide(on: Times, off: Times, read_tokens: int) -> FlashChoice:
    """On, unless off is more than a tenth faster over everything timed, each counted alike."""
    pairs = [
        ("per token", on.row_s, off.row_s),
        ("beside it", on.beside_s, off.beside_s),
        (f"reading {_TURN_TOKENS}", on.turn_s, off.turn_s),
        (f"reading {read_tokens}", on.read_s, off.read_s),
    ]
    timed = [(what, a, b) for what, a, b in pairs if a is not None and b is not None]
    texts = [f"{what} on {1000 * a:.1f} ms, off {1000 * b:.1f} ms" for what, a, b in timed]
    ratio = math.prod(a / b for _, a, b in timed) ** (1 / len(timed))
    return FlashChoice(on=ratio <= _OFF_MUST_WIN, reason="measured: " + "; ".join(texts))


def _time(
    model: Model, settings: EngineSettings, threads: int, read_tokens: int | None, *, flash_attention: bool
) -> tuple[Times | None, int]:
    """Times with one setting (None: it is not possible), and how many tokens were read for them.

    `read_tokens` None: choose by the speed of a row.
    """
    shape = ContextShape(
        cells=_FILL_CELLS + 256,
        sequences=2,
        batch=max(tokens for _, tokens in _READ_TOKENS),
        threads=threads,
        flash_attention=flash_attention,
        kv_k=settings.kv_k,
        kv_v=settings.kv_v,
    )
    try:
        context = Context(model, shape)
    except ModelError:
        return None, 0
    try:
        filled, held = _fill(context)
        row_s = _rows(context, filled, held)
        if read_tokens is None:
            read_tokens = next((tokens for below_s, tokens in _READ_TOKENS if row_s < below_s), 0)
        beside_s = _rows(context, 1 - filled, 0) if settings.slots > 1 else None
        context.remove(1 - filled)
        turn_s = read_s = None
        if read_tokens:
            at = held + _TIMED_ROWS + 1
            turn_s = _feed(context, filled, _TURN_TOKENS, at)
            read_s = _feed(context, filled, read_tokens, at + _TURN_TOKENS)
        return Times(row_s=row_s, beside_s=beside_s, turn_s=turn_s, read_s=read_s), read_tokens
    finally:
        context.close()


def _rows(context: Context, sequence: int, held: int) -> float:
    """Seconds of the fastest of some rows; one more before them touches everything for the first time."""
    return min([_feed(context, sequence, 1, held + i) for i in range(1 + _TIMED_ROWS)][1:])


def _feed(context: Context, sequence: int, n: int, start: int) -> float:
    began = time.perf_counter()
    context.feed(sequence, [0] * n, start)
    return time.perf_counter() - began


def measure_idle_cell(context: Context) -> float | None:
    """Seconds that each cell of an idle sequence below costs a row of another one; None when it cannot be measured.

    Not what a short row beside it pays: with flash attention on a CPU the threads share out the cells, so a long
    sequence that lies above an idle one is left to one of them. Leaves the context empty.
    """
    most_cells = context.cells // 2 - 2 * (_TIMED_ROWS + _PROBE_TOKENS)
    own, n_cells = _fill(context, most_cells)
    if own != context.transfer:
        context.clear()
        return None
    alone_s = _rows(context, own, n_cells)
    context.clear()
    _fill(context, most_cells)
    context.share(own, 0, 0, n_cells)
    context.remove(own)
    _fill(context, most_cells, probe=1)
    beside_s = _rows(context, own, n_cells)
    context.clear()
    return max(0.0, beside_s - alone_s) / n_cells


def _fill(context: Context, most_cells: int = _FILL_CELLS, *, probe: int = 0) -> tuple[int, int]:
    """Give a sequence a long zero state; returns it and its length. Without a known layout it stays short.

    `probe`: an empty sequence, which shows how a state looks here.
    """
    context.feed(probe, [0] * _PROBE_TOKENS, 0)
    try:
        state, _ = recognise(context.state(probe), context.layout)
    except BadState:
        return probe, _PROBE_TOKENS
    cells = min(_FILL_CELLS, most_cells, max(512, _FILL_BYTES // max(1, token_bytes(state))))
    if not context.state_set(build(grow_zero(state, cells))):
        context.remove(context.transfer)
        return probe, _PROBE_TOKENS
    context.remove(probe)
    return context.transfer, cells
