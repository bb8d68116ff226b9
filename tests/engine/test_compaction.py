"""Rows that move to lower cells: the same bytes, the same tokens, nobody else touched, and really lower."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.conftest import MakeContext
from tests.engine.rig import Rig

from strata.engine.layout import recognise
from strata.engine.llama import Context, Model
from strata.engine.measure import measure_idle_cell
from strata.engine.pool_messages import POOL_IS_FULL
from strata.engine.protocol import Delta, Done, EngineSettings, unpack_tokens
from strata.engine.selftest import self_test
from strata.engine.slots import Slots

TOKENS = (np.arange(900) * 7 % 2000).astype(np.int32)


def slots_of(context: Context, model: Model, limit: int = 4000) -> Slots:
    proof = self_test(model, context, [(0, model.n_layers)])
    context.clear()
    return Slots(context, 3, limit, cuttable=True, format=proof.format, stages=proof.stages)


def feed(slots: Slots, context: Context, slot: int, n: int, start: int = 0) -> None:
    for at in range(start, start + n, 128):
        context.feed(slot, TOKENS[at : min(at + 128, start + n)], at)
    slots.held[slot] = start + n


def cells_of(context: Context, *sequences: int) -> list[int]:
    """The positions of these sequences in the order of their cells; no two of them may hold the same position."""
    for sequence in sequences:
        context.share(sequence, context.transfer, 0, 1 << 20)
    state, _ = recognise(context.state(context.transfer), context.layout)
    context.remove(context.transfer)
    return [int(cell[0]) for cell in state.parts[0].cells]


def canonical(context: Context, slot: int) -> bytes:
    """The rows of a slot by position."""
    state, _ = recognise(context.state(slot), context.layout)
    part = state.parts[0]
    order = np.argsort(part.cells[:, 0])
    tensors = [np.take(t.rows, order, axis=t.cell_axis).tobytes() for t in part.tensors]
    return part.cells[order][:, 0].tobytes() + b"".join(tensors)


@pytest.mark.parametrize("flash_attention", [True, False], ids=["flash", "transposed V"])
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_rows_land_lower_and_are_the_same(
    make_context: MakeContext, models: Callable[[str], Model], flash_attention: bool, kv: str
) -> None:
    if not flash_attention and kv != "f16":
        pytest.skip("a quantised V needs flash attention")
    context = make_context("qwen2vl", cells=2048, flash_attention=flash_attention, kv_k=kv, kv_v=kv)
    slots = slots_of(context, models("qwen2vl"))
    feed(slots, context, 0, 512)
    context.feed(1, TOKENS[:100], 700)  # positions that slot 2 has not, so that the order of their cells shows
    feed(slots, context, 2, 600)
    before, other = canonical(context, 2), canonical(context, 1)
    assert cells_of(context, 1, 2)[0] == 700
    slots.clear(0)
    for start in range(0, 600, 256):
        assert slots.compact(2, start, start + 256) is None
    assert (canonical(context, 2), canonical(context, 1)) == (before, other)
    assert slots.held[2] == context.last_position(2) + 1 == 600
    order = cells_of(context, 1, 2)
    assert order.index(700) >= 512, "the freed cells below slot 1 are used"


def test_a_slot_that_lies_low_stays_low(make_context: MakeContext, models: Callable[[str], Model]) -> None:
    """Its first block goes behind everything and comes back last: at most one block of cells is lost meanwhile."""
    context = make_context("qwen2vl", cells=2048)
    slots = slots_of(context, models("qwen2vl"))
    feed(slots, context, 0, 600)
    for start in (0, 256, 512, 0):
        assert slots.compact(0, start, start + 256) is None
    context.feed(1, TOKENS[:100], 700)
    assert cells_of(context, 0, 1)[-100:] == list(range(700, 800)) or cells_of(context, 0, 1).index(700) >= 344


def test_what_is_refused_changes_nothing(make_context: MakeContext, models: Callable[[str], Model]) -> None:
    context = make_context("qwen2vl", cells=1024)
    slots = slots_of(context, models("qwen2vl"))
    feed(slots, context, 0, 600)
    assert slots.fork(0, 1, 300) is None
    before = canonical(context, 0)
    for slot in (0, 1):
        assert "shares cells" in str(slots.compact(slot, 0, 256))
    slots.clear(1)
    feed(slots, context, 2, 400)
    assert slots.compact(0, 0, 256) == POOL_IS_FULL
    assert canonical(context, 0) == before and slots.compact(0, 600, 700) is None
    with pytest.raises(ValueError, match="not a block"):
        slots.compact(0, 0, 257)


def test_memory_that_cannot_be_cut_is_not_moved(make_context: MakeContext, models: Callable[[str], Model]) -> None:
    context = make_context("lfm2", cells=1024)
    slots = slots_of(context, models("lfm2"))
    feed(slots, context, 0, 100)
    assert "cannot be moved" in str(slots.compact(0, 0, 64))


def test_the_cost_of_an_idle_cell(make_context: MakeContext) -> None:
    context = make_context("smollm2", cells=2048)
    cost_s = measure_idle_cell(context)
    assert cost_s is not None and 0 <= cost_s < 0.001
    assert all(context.last_position(sequence) == -1 for sequence in range(context.shape.sequences))


@pytest.fixture
def plain(tiny_paths: dict[str, Path], runner: asyncio.Runner) -> Iterator[Rig]:
    """Without flash attention what a row gives does not depend on where its cells are."""
    settings = EngineSettings(
        model_path=str(tiny_paths["qwen2vl"]),
        slots=3,
        context=900,
        flash_attention="off",
        read_chunk=64,
        threads=1,
        measure_idle_cells=True,
    )
    rig = Rig(settings, runner, arena_mib=64)
    rig.start()
    yield rig
    rig.close()


def test_a_running_request_writes_the_same_while_its_rows_move(plain: Rig) -> None:
    assert plain.info.idle_cell_s is not None
    undisturbed = plain.generate(TOKENS[:600], slot=2, max_tokens=120, ignore_eos=True)
    plain.clear()
    plain.generate(TOKENS[100:800], slot=0, max_tokens=1)
    plain.generate(TOKENS[50:300], slot=1, max_tokens=1)

    async def moved() -> list[int]:
        written: list[int] = []
        run = plain.run(TOKENS[:600], slot=2, max_tokens=120, ignore_eos=True)
        moves: list[asyncio.Task[Done]] = []
        async for event in run:
            if isinstance(event, Delta):
                written += unpack_tokens(event.tokens).tolist()
                if len(written) == 20:
                    assert (await plain.client.trim(0, 0)).ok
                    moves = [
                        asyncio.create_task(plain.client.compact(slot, start, start + 256))
                        for slot in (1, 2)
                        for start in (0, 256, 512)
                    ]
        assert len(moves) == 6 and all(done.ok for done in await asyncio.gather(*moves))
        return written

    assert plain.do(moved()) == undisturbed.tokens
    after = plain.generate([*TOKENS[50:300], 5], slot=1, keep=250, max_tokens=5)
    plain.clear()
    assert plain.generate([*TOKENS[50:300], 5], slot=1, max_tokens=5).tokens == after.tokens
