"""Capture and apply on contexts in this process: every V layout, stages, extra words, placement; and refusals."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from tests.engine.conftest import MakeContext

from strata.engine.layout import BadState, Bytes, recognise
from strata.engine.llama import Context
from strata.engine.pool_messages import POOL_IS_FULL
from strata.engine.ranges import RangeFormat
from strata.engine.slots import Slots
from strata.types import BLOCK_BYTES, SEGMENT_TOKENS, Tokens, pad_to_page

N = 100
TOKENS: Tokens = ((np.arange(4 * N) * 37 + 5) % 2000).astype(np.int32)
CASES = {
    "f16": ("smollm2", {}),
    "f16 without flash attention": ("smollm2", {"flash_attention": False}),
    "q8_0": ("smollm2", {"kv_k": "q8_0", "kv_v": "q8_0"}),
    "q8_0 K without flash attention": ("smollm2", {"kv_k": "q8_0", "flash_attention": False}),
    "extra words": ("qwen2vl", {}),
    "extra words without flash attention": ("qwen2vl", {"flash_attention": False}),
}
every_case = pytest.mark.parametrize("case", CASES)


class Bench:
    """Slots over a context, with blocks in plain memory."""

    def __init__(self, context: Context, n_stages: int = 1) -> None:
        self.context = context
        context.feed(0, TOKENS[:8], 0)
        state, cells = recognise(context.state(0), context.layout)
        context.clear()
        self.format = RangeFormat.of(state, context.layout, cells)
        n_layers = context.model.n_layers
        edges = [n_layers * i // n_stages for i in range(n_stages + 1)]
        self.stages = self.format.stage_shapes(list(pairwise(edges)))
        self.slots = Slots(context, 3, 400, cuttable=True, format=self.format, stages=self.stages)

    def feed(self, slot: int, n: int) -> None:
        """Let a slot hold TOKENS[:n]."""
        held = self.slots.held[slot]
        self.context.feed(slot, TOKENS[held:n], held)
        self.slots.held[slot] = n

    def spans(self, n: int) -> list[Bytes]:
        sizes = (self.format.head_room + pad_to_page(stage.payload_bytes(n)) for stage in self.stages)
        return [np.full(size, 0xA5, np.uint8) for size in sizes]

    def capture(self, slot: int, start: int, end: int) -> list[Bytes]:
        spans = self.spans(end - start)
        assert self.slots.capture(slot, start, end, spans) is None
        return spans

    def apply(self, slot: int, start: int, end: int, spans: list[Bytes], from_: int, upto: int) -> str | None:
        return self.slots.apply(slot, start, end, from_, upto, spans, TOKENS[start:end])

    def payloads(self, spans: list[Bytes]) -> list[bytes]:
        return [span[self.format.head_room :].tobytes() for span in spans]


@every_case
@pytest.mark.parametrize("n_stages", [1, 3])
def test_bytes_are_equal_after_apply_at_another_place(case: str, n_stages: int, make_context: MakeContext) -> None:
    name, options = CASES[case]
    bench = Bench(make_context(name, **options), n_stages)
    bench.feed(0, N)
    first, second = bench.capture(0, 0, 64), bench.capture(0, 64, N)
    bench.slots.clear(0)
    bench.feed(2, 5)  # the low cells are taken now
    assert bench.apply(1, 0, 64, first, 0, 64) is None
    assert bench.apply(1, 64, N, second, 64, N) is None
    assert bench.slots.held == [0, N, 5]
    assert bench.payloads(bench.capture(1, 0, 64)) == bench.payloads(first)
    assert bench.payloads(bench.capture(1, 64, N)) == bench.payloads(second)
    assert bench.context.last_position(bench.context.transfer) == -1


@every_case
def test_cells_out_of_order_give_the_same_bytes(case: str, make_context: MakeContext) -> None:
    """Four sequences interleaved, then holes filled again: the blob's rows are not in position order."""
    name, options = CASES[case]
    bench = Bench(make_context(name, cells=512, **options), 2)
    bench.feed(0, N)
    blocks = [(at, min(at + 16, N)) for at in range(0, N, 16)]
    captured = {block: bench.capture(0, *block) for block in blocks}
    want = bench.payloads(bench.capture(0, 0, N))
    bench.slots.clear(0)
    for slot in (0, 1, 2):
        for block in blocks:
            assert bench.apply(slot, *block, captured[block], *block) is None
    bench.slots.clear(0)
    bench.slots.trim(1, 30)
    for block in blocks:  # into the holes that slot 0 and the end of slot 1 left
        assert bench.apply(0, *block, captured[block], *block) is None
    for start, end in [(16, 32), (32, 48), *blocks[3:]]:
        from_ = bench.slots.held[1]
        assert bench.apply(1, start, end, captured[start, end], from_, end) is None
    for slot in (0, 1, 2):
        assert bench.payloads(bench.capture(slot, 0, N)) == want


def test_rows_are_permuted_back(make_context: MakeContext) -> None:
    """The permutation itself, on shuffled cells of both V layouts."""
    for flash_attention in (True, False):
        bench = Bench(make_context("qwen2vl", flash_attention=flash_attention))
        bench.feed(0, N)
        (span,) = bench.capture(0, 0, N)
        fmt = bench.format
        body = span[fmt.head_room : fmt.head_room + fmt.body_bytes(N)]
        want = body.copy()
        order = np.array(random.Random(3).sample(range(N), N))
        fmt.reorder(body, order)
        assert not np.array_equal(body, want)
        fmt.reorder(body, np.argsort(order))
        assert np.array_equal(body, want)


@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize(("from_", "upto"), [(0, 1), (0, 40), (17, 64), (20, 21), (63, 64)])
def test_part_of_a_block(n_stages: int, from_: int, upto: int, make_context: MakeContext) -> None:
    bench = Bench(make_context("smollm2"), n_stages)
    bench.feed(0, 64)
    block = bench.capture(0, 0, 64)
    if from_:
        assert bench.slots.fork(0, 1, from_) is None
    assert bench.apply(1, 0, 64, block, from_, upto) is None
    assert bench.slots.held[1] == upto
    assert bench.payloads(bench.capture(1, 0, upto)) == bench.payloads(bench.capture(0, 0, upto))


def test_a_block_is_applied_twice(make_context: MakeContext) -> None:
    """The head room is scratch; the payload is not touched."""
    bench = Bench(make_context("smollm2"))
    bench.feed(0, 64)
    block = bench.capture(0, 0, 64)
    before = bench.payloads(block)
    assert bench.apply(1, 0, 64, block, 0, 64) is None
    assert bench.apply(2, 0, 64, block, 0, 30) is None
    assert bench.payloads(block) == before


def test_padding_is_zero(make_context: MakeContext) -> None:
    bench = Bench(make_context("smollm2"), 2)
    bench.feed(0, 10)
    for span, stage in zip(bench.capture(0, 0, 10), bench.stages, strict=True):
        assert not span[bench.format.head_room + stage.payload_bytes(10) :].any()


# --------------------------------------------------------------------------------------------------- trim, fork, repair


def test_trim_and_fork(make_context: MakeContext) -> None:
    bench = Bench(make_context("smollm2"))
    bench.feed(0, N)
    want = bench.payloads(bench.capture(0, 0, 60))
    assert bench.slots.fork(0, 1, 60) is None
    assert bench.slots.trim(0, 10) is None
    assert bench.slots.held == [10, 60, 0]
    assert bench.payloads(bench.capture(1, 0, 60)) == want
    assert bench.slots.fork(0, 1, 0) is None
    assert bench.slots.held == [10, 0, 0]
    assert bench.slots.trim(0, 11) == "slot 0 holds 10 tokens, not 11"
    assert bench.slots.fork(0, 1, 11) == "slot 0 holds 10 tokens, not 11"
    assert bench.slots.trim(0, 0) is None
    assert bench.context.last_position(0) == -1


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "lfm2_window", "mamba"])
def test_memory_that_cannot_be_cut(name: str, make_context: MakeContext) -> None:
    context = make_context(name)
    slots = Slots(context, 3, 400, cuttable=False)
    context.feed(0, TOKENS[:50], 0)
    slots.held[0] = 50
    before = context.state(0)
    assert slots.trim(0, 49) == "this model's memory cannot be cut from 50 to 49 tokens"
    assert slots.fork(0, 1, 30) == "this model's memory can only be shared whole (50 tokens), not up to 30"
    assert slots.held == [50, 0, 0]
    assert np.array_equal(context.state(0), before)
    assert slots.fork(0, 1, 50) is None
    context.feed(1, TOKENS[50:51], 50)
    assert np.array_equal(context.state(0), before)
    assert slots.trim(0, 0) is None
    assert context.last_position(0) == -1


def test_repair_after_a_failed_decode(make_context: MakeContext) -> None:
    bench = Bench(make_context("smollm2"))
    bench.feed(0, 20)
    bench.context.feed(0, TOKENS[20:30], 20)  # as if some of a failed batch had stayed
    bench.slots.repair(0)
    assert bench.context.last_position(0) == 19 and bench.slots.held[0] == 20


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "lfm2_window", "mamba"])
def test_memory_that_cannot_be_cut_loses_all_with_a_failed_decode(name: str, make_context: MakeContext) -> None:
    """Or nothing, when that changed nothing: never is a slot left with a state of another position than it claims."""
    context = make_context(name)
    slots = Slots(context, 1, 400, cuttable=False)
    context.feed(0, TOKENS[:20], 0)
    slots.held[0] = 20
    before = context.state(0)
    slots.repair(0)
    assert slots.held[0] == 20 and np.array_equal(context.state(0), before)
    context.feed(0, TOKENS[20:30], 20)  # as if some of a failed batch had stayed
    slots.repair(0)
    assert slots.held[0] == 0 and context.last_position(0) == -1


# ------------------------------------------------------------------------------------------------------------- refusals


def test_refusals_leave_the_slot_as_it_was(make_context: MakeContext) -> None:
    bench = Bench(make_context("smollm2"))
    bench.feed(0, 64)
    block = bench.capture(0, 0, 64)
    before = bench.payloads(block)
    assert bench.apply(0, 0, 64, block, 10, 64) == "slot 0 holds 64 tokens, not 10"
    assert bench.apply(1, 0, 64, block, 5, 64) == "slot 1 holds 0 tokens, not 5"
    assert bench.slots.capture(0, 0, 65, bench.spans(65)) == "slot 0 holds 64 tokens, not 65"
    bench.slots.held[1] = 350
    assert bench.slots.apply(1, 350, 401, 350, 401, bench.spans(51), TOKENS[:51]) == "401 tokens exceed the slot's 400"
    bench.slots.held[1] = 0
    damaged = [block[0].copy()]
    damaged[0][bench.format.head_room : bench.format.head_room + 4] = 9  # the type of the first layer's K
    assert bench.apply(1, 0, 64, damaged, 0, 64) == "llama.cpp refused the state of [0, 64)"
    assert bench.slots.held == [64, 0, 0]
    assert bench.context.last_position(1) == bench.context.last_position(bench.context.transfer) == -1
    assert bench.payloads(bench.capture(0, 0, 64)) == before


def test_other_tokens_are_noticed_when_cells_carry_them(make_context: MakeContext) -> None:
    bench = Bench(make_context("qwen2vl"))
    bench.feed(0, 64)
    block = bench.capture(0, 0, 64)
    assert bench.slots.apply(1, 0, 64, 0, 64, block, TOKENS[1:65]) == "the block [0, 64) was captured of other tokens"


def test_a_full_pool_refuses_a_block(make_context: MakeContext) -> None:
    bench = Bench(make_context("qwen2vl", cells=256))
    bench.feed(0, N)
    block = bench.capture(0, 0, N)
    assert bench.apply(1, 0, N, block, 0, N) is None
    assert bench.apply(2, 0, N, block, 0, N) == POOL_IS_FULL
    assert bench.slots.held == [N, N, 0]
    assert bench.payloads(bench.capture(1, 0, N)) == bench.payloads(block)


@pytest.mark.parametrize(
    "arguments", [(3, 0, 10), (-1, 0, 10), (0, -1, 10), (0, 10, 10), (0, 0, 257)], ids=lambda a: str(a)
)
def test_blocks_that_make_no_sense(arguments: tuple[int, int, int], make_context: MakeContext) -> None:
    bench = Bench(make_context("qwen2vl"))
    with pytest.raises(ValueError):
        bench.slots.capture(*arguments, bench.spans(10))


def test_spans_that_make_no_sense(make_context: MakeContext) -> None:
    bench = Bench(make_context("qwen2vl"), 2)
    bench.feed(0, 10)
    good = bench.spans(10)
    for spans in ([], good[:1], good * 2, [good[0], good[1][:-1]]):
        with pytest.raises(ValueError):
            bench.slots.capture(0, 0, 10, spans)
    for from_, upto in ((5, 5), (0, 11), (-1, 4)):
        with pytest.raises(ValueError):
            bench.apply(1, 0, 10, good, from_, upto)
    with pytest.raises(ValueError):
        bench.slots.apply(1, 0, 10, 0, 10, good, TOKENS[:9])


def test_sequences_are_range_checked(make_context: MakeContext) -> None:
    context = make_context("qwen2vl")
    for sequence in (-1, 5, 300):
        for call in (context.last_position, context.remove, context.state_size):
            with pytest.raises(ValueError):
                call(sequence)
        with pytest.raises(ValueError):
            context.share(0, sequence, 0, 1)
    with pytest.raises(ValueError):
        context.decode(0)


# ------------------------------------------------------------------------------------------------------------- geometry


def test_block_geometry(make_context: MakeContext) -> None:
    fmt = Bench(make_context("smollm2")).format
    assert (fmt.token_bytes, fmt.block_tokens, fmt.head_room) == (23040, 256, 4096)
    large = RangeFormat(
        layers=tuple(range(80)),
        k_row_bytes=(2048,) * 80,
        v_row_bytes=(2048,) * 80,
        transposed=False,
        v_element_bytes=(),
        cells=fmt.cells,
    )
    (shape,) = large.stage_shapes([(0, 80)])
    assert shape.payload_bytes(large.block_tokens) <= BLOCK_BYTES
    assert large.block_tokens == 43 and -(-SEGMENT_TOKENS // 43) == 6
    assert large.head_bytes(large.block_tokens) <= large.head_room


def test_stages_follow_the_layers_a_cache_holds(make_context: MakeContext) -> None:
    fmt = RangeFormat(
        layers=(1, 3, 5),
        k_row_bytes=(10, 20, 30),
        v_row_bytes=(1, 2, 3),
        transposed=False,
        v_element_bytes=(),
        cells=Bench(make_context("qwen2vl")).format.cells,
    )
    shapes = fmt.stage_shapes([(0, 1), (1, 4), (4, 6)])  # of which the first holds no rows
    assert [(shape.layer_first, shape.base_bytes, shape.token_bytes) for shape in shapes] == [(1, 48, 45), (4, 24, 45)]
    assert fmt.sections(shapes[0], 2) == (slice(0, 24 + 60), slice(36 + 120, 36 + 120 + 24 + 6))


def test_memory_without_attention_rows_has_no_ranges(make_context: MakeContext) -> None:
    for name in ("lfm2_window", "mamba"):
        context = make_context(name)
        context.feed(0, TOKENS[:5], 0)
        state, cells = recognise(context.state(0), context.layout)
        with pytest.raises(BadState):
            RangeFormat.of(state, context.layout, cells)


@pytest.mark.parametrize("word", [0, 2, 3, 4, 5, 10, -1, -2])
def test_a_head_that_does_not_fit_is_noticed(word: int, make_context: MakeContext) -> None:
    fmt = Bench(make_context("smollm2")).format
    head = np.zeros(fmt.head_bytes(4), np.uint8)
    fmt.write_head(head, 20, None)
    assert fmt.read_head(head, 20) == (None, None)
    head.view("<i4")[word] += 1
    if word == 5:  # the number of sequence ids: llama.cpp checks it
        return
    with pytest.raises(BadState):
        fmt.read_head(head, 20)
