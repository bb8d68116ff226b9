"""Which layers make a stage: a split of the layers by proportions, and whether stages are a split of given layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from strata.types import StageShape

MOST_PARTS = 16
"""Of a split: the devices that llama.cpp knows at most."""
LayerRange = tuple[int, int]
"""Layers [first, end)."""


def layer_ranges(split: Sequence[float], n_layers: int, *, first: int = 0) -> tuple[LayerRange, ...]:
    """The layers of each part of `split` that gets any, in order; all of them in one without a split.

    As llama.cpp hands layers to devices (`load_tensors` of llama-model.cpp, in the same 32-bit arithmetic): it counts
    the output as one more layer behind the others. `first` is the first layer that goes to a device; those before it,
    which stay in main memory, belong to the first part that gets layers. `split` holds numbers from 0, not all 0.
    """
    if not split:
        return ((0, n_layers),)
    bounds = np.cumsum(np.asarray(split, np.float32), dtype=np.float32)
    places = np.maximum(np.arange(n_layers) - first, 0).astype(np.float32) / np.float32(n_layers + 1 - first)
    parts = np.searchsorted(bounds / bounds[-1], places, side="right")
    return tuple(pairwise([0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), n_layers]))


def is_split(stages: Sequence[StageShape], layers: Sequence[int]) -> bool:
    """Whether the stages, in their order, hold each of `layers` (ascending) once."""
    held = [layer for stage in stages for layer in layers if stage.layer_first <= layer < stage.layer_end]
    return held == list(layers)
