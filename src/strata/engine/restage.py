"""Payloads of rows written under one layer split, made over for another: a pure function of bytes.

A segment's key does not depend on the split, so a directory written with another `--layer-split` is readable: the
headers of its files name the layer range of each stage. Payloads describe themselves (each tensor has a head with its
row size), so nothing but the ranges, the number of tokens and `EngineInfo.row_layers` is needed. One call is one block
of rows; into how many blocks a segment is cut does not depend on the split. Checkpoints have no stages.
Not checked: the rows themselves (the store's checksums do that) and whether the model is the same (its key does).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.engine.layout import TENSOR_HEAD_BYTES, BadState, Bytes

_EXTRA_BYTES = 12  # x, y and token id of a cell

LayerRange = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's tensors, heads included. `v` is empty for models that keep no V."""

    k: Bytes
    v: Bytes


def restage(
    payloads: Sequence[Bytes],
    have: Sequence[LayerRange],
    want: Sequence[LayerRange],
    *,
    n_tokens: int,
    row_layers: Sequence[int],
) -> list[Bytes]:
    """The payloads of the stages `want` for the same `n_tokens` whose stages `have` hold `payloads` (no padding).

    Ranges are [first layer, end) in layer order; both must cover all of `row_layers`. Raises BadState when the bytes
    are not such payloads.
    """
    _check(have, row_layers)
    _check(want, row_layers)
    layers: dict[int, _Layer] = {}
    extras: list[Bytes] = []
    for payload, stage in zip(payloads, have, strict=True):
        held = _held(stage, row_layers)
        found, extra = _parse(payload, len(held), n_tokens)
        layers.update(zip(held, found, strict=True))
        extras.append(extra)
    if any(not np.array_equal(extra, extras[0]) for extra in extras):
        raise BadState("stages whose cells differ")
    return [_build([layers[layer] for layer in _held(stage, row_layers)], extras[0]) for stage in want]


def _check(stages: Sequence[LayerRange], row_layers: Sequence[int]) -> None:
    covered = [layer for stage in stages for layer in _held(stage, row_layers)]
    if covered != list(row_layers):
        raise BadState(f"stages {list(stages)} do not hold the layers {list(row_layers)} once each")


def _held(stage: LayerRange, row_layers: Sequence[int]) -> list[int]:
    return [layer for layer in row_layers if stage[0] <= layer < stage[1]]


def _build(layers: Sequence[_Layer], extra: Bytes) -> Bytes:
    return np.concatenate([*(layer.k for layer in layers), *(layer.v for layer in layers), extra])


def _parse(payload: Bytes, n_layers: int, n_tokens: int) -> tuple[list[_Layer], Bytes]:
    """A stage's layers, and the cells' extra words behind them (empty, or 12 bytes a token)."""
    readings = [
        found
        for per_layer in ((2, 1) if n_layers else (0,))
        for extra_bytes in (0, _EXTRA_BYTES * n_tokens)
        if (found := _read(payload, per_layer, n_layers, n_tokens, extra_bytes)) is not None
    ]
    if len(readings) != 1:
        raise BadState(f"{len(payload)} bytes are not the rows of {n_tokens} tokens in {n_layers} layers")
    return readings[0]


def _read(
    payload: Bytes, per_layer: int, n_layers: int, n_tokens: int, extra_bytes: int
) -> tuple[list[_Layer], Bytes] | None:
    """The payload with so many tensors per layer and so much behind them; None when it does not fit exactly."""
    tensors, at, end = [], 0, len(payload) - extra_bytes
    for _ in range(per_layer * n_layers):
        if at + TENSOR_HEAD_BYTES > end:
            return None
        next_at = at + TENSOR_HEAD_BYTES + n_tokens * _row_bytes(payload[at : at + TENSOR_HEAD_BYTES])
        tensors.append(payload[at:next_at])
        at = next_at
    if at != end:
        return None
    empty = payload[:0]
    first, second = tensors[:n_layers], tensors[n_layers:] or [empty] * n_layers
    return [_Layer(k=k, v=v) for k, v in zip(first, second, strict=True)], payload[end:]


def _row_bytes(head: Bytes) -> int:
    """Bytes of one token in a tensor: a u64, or of a transposed V the u32 element size and the u32 element count."""
    low, high = struct.unpack_from("<II", head.tobytes(), 4)
    return int(low * high if high else low)
