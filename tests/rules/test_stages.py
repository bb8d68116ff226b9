"""Layers to stages: the same layers as llama.cpp hands to each device, and every layer once."""

from __future__ import annotations

import bisect
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.rules.stages import MOST_PARTS, is_split, layer_ranges
from strata.types import StageShape


def as_llama_cpp(split: list[float], n_layers: int, n_gpu_layers: int) -> list[int | None]:
    """The device of each layer by `load_tensors` of llama-model.cpp, step by step; None: main memory."""
    total, bounds = np.float32(0), []
    for share in split:
        total += np.float32(share)
        bounds.append(total)
    bounds = [bound / total for bound in bounds]
    first = max(n_layers + 1 - n_gpu_layers, 0)
    on_devices = min(n_gpu_layers, n_layers + 1)
    return [
        None if layer < first else bisect.bisect_right(bounds, np.float32(layer - first) / np.float32(on_devices))
        for layer in range(n_layers)
    ]


@given(
    split=st.lists(st.integers(0, 40) | st.floats(0, 9, width=32), min_size=1, max_size=MOST_PARTS).filter(any),
    n_layers=st.integers(1, 200),
    data=st.data(),
)
def test_each_part_gets_the_layers_that_llama_cpp_gives_its_device(split, n_layers, data) -> None:
    n_gpu_layers = data.draw(st.integers(1, n_layers + 1))
    devices = as_llama_cpp(split, n_layers, n_gpu_layers)
    ranges = layer_ranges(split, n_layers, first=n_layers + 1 - n_gpu_layers)
    assert [layer for first, end in ranges for layer in range(first, end)] == list(range(n_layers))
    of_layer = [i for i, (first, end) in enumerate(ranges) for _ in range(first, end)]
    for (part, device), (next_part, next_device) in pairwise(zip(of_layer, devices, strict=True)):
        assert (part == next_part) == (device == next_device or device is None)


@pytest.mark.parametrize(
    ("split", "n_layers", "ranges"),
    [
        ((), 30, [(0, 30)]),
        ((1,), 30, [(0, 30)]),
        ((1, 1), 30, [(0, 16), (16, 30)]),
        ((1, 1, 2), 30, [(0, 8), (8, 16), (16, 30)]),
        ((1, 1, 1), 29, [(0, 10), (10, 20), (20, 29)]),
        ((0, 3, 0, 1), 7, [(0, 6), (6, 7)]),
        ((1000, 1), 30, [(0, 30)]),
        ((1, 1000), 30, [(0, 1), (1, 30)]),
    ],
)
def test_examples(split, n_layers, ranges) -> None:
    assert list(layer_ranges(split, n_layers)) == ranges


def test_layers_in_main_memory_belong_to_the_first_part() -> None:
    assert layer_ranges((1, 1), 30, first=11) == ((0, 21), (21, 30))
    assert layer_ranges((0, 1), 30, first=30) == ((0, 30),)


@pytest.mark.parametrize(
    ("ranges", "holds"),
    [
        ([(0, 8)], True),
        ([(3, 4), (7, 8)], True),
        ([(0, 5), (5, 8)], True),
        ([(0, 7)], False),
        ([(0, 5), (6, 7)], False),
        ([(0, 4), (3, 8)], False),
        ([(4, 8), (0, 4)], False),
        ([], False),
    ],
)
def test_stages_are_a_split_when_they_hold_each_layer_once(ranges, holds) -> None:
    stages = [StageShape(layer_first=first, layer_end=end, base_bytes=0, token_bytes=1) for first, end in ranges]
    assert is_split(stages, (3, 7)) == holds
