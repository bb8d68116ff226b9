"""Unified or split: who decides, by which numbers, and that it is measured on every kind of memory."""

from __future__ import annotations

import msgspec
import pytest
from tests.engine.conftest import MakeContext

from strata.engine.pool_choice import PoolChoice, choose_pool, decide
from strata.engine.protocol import EngineSettings

AUTO = EngineSettings(model_path="", slots=3, context=600, pool="auto")


@pytest.mark.parametrize(
    ("everybody", "one", "every_second", "split"),
    [
        ((158, 144), (70, 42), (90, 70), True),  # SmolLM2 behind 2,000 tokens
        ((100, 100), (50, 50), (60, 60), False),
        ((105, 100), (52, 50), (63, 60), False),
        ((106, 100), (53, 50), (64, 60), True),
        ((161.8, 129.5), (46.7, 42.7), (80.6, 86.2), True),  # measured with 2,048 tokens each
        ((105, 100), (70, 60), (60, 110), False),  # rows that are not neighbours take two passes
    ],
)
def test_split_if_it_is_clearly_faster(
    everybody: tuple[float, float], one: tuple[float, float], every_second: tuple[float, float], split: bool
) -> None:
    assert decide({"all": everybody, "one": one, "every second": every_second}).split is split


def test_the_reason_carries_the_numbers() -> None:
    reason = decide({"all": (0.158, 0.1441), "one": (0.07, 0.042)}).reason
    assert reason == "measured: all unified 158.0 ms, split 144.1 ms; one unified 70.0 ms, split 42.0 ms"


def test_who_decides(make_context: MakeContext) -> None:
    context = make_context("qwen2vl")

    def choice(remembered: bool | None = None, **options: object) -> PoolChoice:
        return choose_pool(context.model, msgspec.structs.replace(AUTO, **options), context.shape, remembered)

    assert choice(True, pool="unified") == PoolChoice(split=False, reason="set by flag")
    assert choice(False, pool="split") == PoolChoice(split=True, reason="set by flag")
    assert choice(True) == PoolChoice(split=True, reason="remembered from an earlier start")
    assert choice(True, slots=1, pool="split") == PoolChoice(split=False, reason="there is one slot")
    assert choice(True, pool_cells=700) == PoolChoice(split=False, reason="--pool-cells are for all slots")
    assert choice().reason.startswith("measured: all unified ")
    recurrent = make_context("mamba")
    assert choose_pool(recurrent.model, AUTO, recurrent.shape, True).reason == "the model has no attention"


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen35", "lfm2_window"])
@pytest.mark.parametrize("slots", [2, 6])
def test_it_is_measured_on_every_kind_of_memory(name: str, slots: int, make_context: MakeContext) -> None:
    context = make_context(name, cells=512)
    settings = msgspec.structs.replace(AUTO, slots=slots)
    choice = choose_pool(context.model, settings, context.shape, None)
    assert choice.reason.startswith("measured: all unified ") and "every second" in choice.reason


def test_a_context_of_a_few_tokens_is_not_measured(make_context: MakeContext) -> None:
    context = make_context("qwen2vl", cells=256)
    shape = context.shape.__class__(cells=8, sequences=2, batch=64, threads=1, flash_attention=True)
    assert "too short" in choose_pool(context.model, AUTO, shape, None).reason
