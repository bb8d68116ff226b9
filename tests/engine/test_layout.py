"""The blob parser on real blobs of every memory type, and on damaged ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.conftest import MakeContext

from strata.engine.canonical import canonical, canonical_blob
from strata.engine.layout import (
    BadState,
    Bytes,
    Cache,
    CellFormat,
    Kind,
    Layout,
    build,
    discover_layout,
    grow_zero,
    join,
    parse,
    recognise,
    split,
    token_bytes,
)
from strata.engine.llama import Context

CASES = {
    "plain": ("smollm2", {}),
    "plain, transposed V": ("smollm2", {"flash_attention": False}),
    "plain q8_0": ("smollm2", {"kv_k": "q8_0", "kv_v": "q8_0"}),
    "plain q4_0 K, transposed f16 V": ("smollm2", {"flash_attention": False, "kv_k": "q4_0"}),
    "plain, extra words": ("qwen2vl", {}),
    "plain, extra words, transposed V": ("qwen2vl", {"flash_attention": False}),
    "sliding window": ("gemma3", {}),
    "hybrid": ("qwen35", {}),
    "hybrid, transposed V": ("qwen35", {"flash_attention": False}),
    "hybrid convolution": ("lfm2", {}),
    "hybrid window": ("lfm2_window", {}),
    "recurrent": ("mamba", {}),
}
N = 40
every_memory = pytest.mark.parametrize("case", CASES)


def context_for(case: str, make_context: MakeContext) -> Context:
    name, options = CASES[case]
    return make_context(name, **options)


def held_state(context: Context, n: int = N, sequence: int = 0) -> Bytes:
    context.feed(sequence, (np.arange(n) * 37 + 5) % 2000, 0)
    return context.state(sequence)


@every_memory
def test_a_blob_is_parsed_and_built_again(case: str, make_context: MakeContext) -> None:
    context = context_for(case, make_context)
    blob = held_state(context)
    state, fmt = recognise(blob, context.layout)
    assert np.array_equal(build(state), blob)
    assert fmt.extra == (CASES[case][0] in ("qwen2vl", "qwen35"))
    for part, cache in zip(state.parts, context.layout, strict=True):
        assert part.kind is cache.kind and part.layers == cache.layers
        if part.kind is Kind.ATTENTION:
            assert sorted(part.cells[:, 0]) == list(range(N))


@every_memory
@pytest.mark.parametrize("n_stages", [1, 3])
def test_split_and_join_are_exact(case: str, n_stages: int, make_context: MakeContext) -> None:
    context = context_for(case, make_context)
    blob = held_state(context)
    state, fmt = recognise(blob, context.layout)
    n_layers = context.model.n_layers
    edges = [n_layers * i // n_stages for i in range(n_stages + 1)]
    pieces = split(state, list(pairwise(edges)))
    assert np.array_equal(build(join(pieces)), blob)
    for piece in pieces:  # each is a legal state of the shorter model
        layout: Layout = tuple(Cache(kind=part.kind, layers=part.layers) for part in piece.parts)
        assert np.array_equal(build(parse(build(piece), layout, fmt)), build(piece))


@every_memory
def test_canonical_bytes_do_not_depend_on_where_the_cells_lie(case: str, make_context: MakeContext) -> None:
    context = context_for(case, make_context)
    blob = held_state(context)
    found = recognise(blob, context.layout)[0]
    first = build(canonical(found))
    context.remove(0)
    context.feed(1, [3] * 7, 0)
    assert context.state_set(blob)
    moved = context.state(context.transfer)
    assert np.array_equal(build(canonical(recognise(moved, context.layout)[0])), first)
    in_place = canonical_blob(blob, found, canonical(found))
    assert in_place is blob and np.array_equal(in_place, first)


@every_memory
def test_rows_out_of_order_are_sorted(case: str, make_context: MakeContext) -> None:
    context = context_for(case, make_context)
    state, fmt = recognise(held_state(context), context.layout)
    ordered = canonical(state)
    blob = _reversed(build(ordered), context.layout, fmt)
    backwards = parse(blob, context.layout, fmt)
    assert np.array_equal(build(canonical(backwards)), build(ordered))
    assert np.array_equal(canonical_blob(blob, backwards, canonical(backwards)), build(ordered))


def _reversed(blob: Bytes, layout: Layout, fmt: CellFormat) -> Bytes:
    """The same state with its attention cells in the opposite order."""
    state = parse(blob.copy(), layout, fmt)
    parts = []
    for part in state.parts:
        if part.kind is Kind.ATTENTION:
            part = replace(part, cells=part.cells[::-1])
            for tensor in part.tensors:
                tensor.rows[:] = np.flip(tensor.rows, tensor.cell_axis).copy()
        parts.append(part)
    return build(replace(state, parts=tuple(parts)))


@every_memory
def test_a_checkpoint_is_parsed(case: str, make_context: MakeContext) -> None:
    context = context_for(case, make_context)
    whole = held_state(context)
    _, fmt = recognise(whole, context.layout)
    blob = np.empty(len(whole), np.uint8)
    blob = blob[: context.state_get(0, blob, checkpoint=True)]
    state = parse(blob, context.layout, fmt, checkpoint=True)
    assert np.array_equal(build(state), blob)
    kinds = [cache.kind for cache in context.layout]
    assert len(state.parts) == (len(kinds) if len(kinds) == 1 else len(kinds) - 1)


@every_memory
def test_a_state_grown_with_zeros_is_accepted(case: str, make_context: MakeContext) -> None:
    context = context_for(case, make_context)
    state, _ = recognise(held_state(context), context.layout)
    context.remove(0)
    assert context.state_set(build(grow_zero(state, 500)))
    context.feed(context.transfer, [1], 500)


def test_token_bytes_count_every_attention_row(make_context: MakeContext) -> None:
    context = make_context("smollm2")
    assert token_bytes(recognise(held_state(context), context.layout)[0]) == 30 * 2 * 192 * 2


# ------------------------------------------------------------------------------------------------------------ discovery


def test_layout_is_read_from_the_log() -> None:
    lines = [
        "llama_kv_cache: layer   0: filtered",
        "llama_kv_cache: layer   1: dev = CPU",
        "llama_kv_cache: size =    1.00 MiB",
        "llama_kv_cache: layer   0: dev = CPU",
        "llama_kv_cache: layer   1: filtered",
        "llama_kv_cache: size =    1.00 MiB",
        "llama_memory_recurrent, layer   0: dev = CPU",
        "llama_memory_recurrent: layer   1: skipped",
        "something else",
    ]
    assert discover_layout(lines) == (
        Cache(kind=Kind.ATTENTION, layers=(1,)),
        Cache(kind=Kind.ATTENTION, layers=(0,)),
        Cache(kind=Kind.RECURRENT, layers=(0,)),
    )


def test_no_lines_no_layout() -> None:
    assert discover_layout([]) == ()


# -------------------------------------------------------------------------------------------------------- damaged blobs


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen35", "lfm2_window", "mamba"])
def test_every_shortened_and_lengthened_blob_is_refused(name: str, make_context: MakeContext) -> None:
    context = make_context(name)
    blob = held_state(context, 3)
    _, fmt = recognise(blob, context.layout)
    for n in {*range(0, len(blob), max(1, len(blob) // 200)), *range(60), len(blob) - 1}:
        with pytest.raises(BadState):
            parse(blob[:n], context.layout, fmt)
    with pytest.raises(BadState):
        parse(np.concatenate([blob, np.zeros(1, np.uint8)]), context.layout, fmt)


@pytest.mark.parametrize("name", ["qwen2vl", "qwen35", "mamba"])
@settings(
    max_examples=150, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_damaged_numbers_are_bounded(name: str, make_context: MakeContext, data: st.DataObject) -> None:
    """Any word overwritten with any value: BadState or a parse, never another error, never a huge allocation."""
    blob, layout, fmt = _small_state(name, make_context)
    damaged = blob.copy()
    at = data.draw(st.integers(0, min(len(blob) - 4, 600)))
    damaged[at : at + 4] = np.frombuffer(data.draw(st.binary(min_size=4, max_size=4)), np.uint8)
    try:
        state = parse(damaged, layout, fmt)
    except BadState:
        return
    assert sum(tensor.rows.nbytes for part in state.parts for tensor in part.tensors) <= len(damaged)


_SMALL: dict[str, tuple[Bytes, Layout, CellFormat]] = {}


def _small_state(name: str, make_context: MakeContext) -> tuple[Bytes, Layout, CellFormat]:
    if name not in _SMALL:
        context = make_context(name)
        blob = held_state(context, 2)
        _SMALL[name] = (blob, context.layout, recognise(blob, context.layout)[1])
    return _SMALL[name]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    layout = (Cache(kind=Kind.ATTENTION, layers=(0, 1)), Cache(kind=Kind.RECURRENT, layers=(2,)))
    with pytest.raises(BadState):
        recognise(np.frombuffer(data, np.uint8), layout)


def test_stages_of_different_cells_are_not_joined(make_context: MakeContext) -> None:
    context = make_context("qwen2vl")
    few, _ = recognise(held_state(context, 3), context.layout)
    many, _ = recognise(held_state(context, 4, sequence=1), context.layout)
    with pytest.raises(BadState):
        join([split(few, [(0, 2)])[0], split(many, [(2, 5)])[0]])
