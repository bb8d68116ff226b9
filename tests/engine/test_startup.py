"""Modes of every kind of memory, context size, flash attention, and settings that reach llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.engine.conftest import MakeContext

from strata.engine import measure, startup
from strata.engine.llama import Context, Model
from strata.engine.measure import FlashChoice, Times, choose_flash_attention, decide
from strata.engine.protocol import EngineSettings, Remembered
from strata.engine.startup import Served, load
from strata.engine.values import ContextShape
from strata.errors import ModelError

Serve = Callable[..., Served]
QUIET = {"context": 512, "flash_attention": "on", "threads": 1}


@pytest.fixture
def served(tiny_paths: dict[str, Path]) -> Iterator[Serve]:
    """Load a tiny model; its context is closed after the test."""
    opened: list[Served] = []

    def serve(name: str, **options: object) -> Served:
        settings = EngineSettings(model_path=str(tiny_paths[name]), slots=2)
        settings = msgspec.structs.replace(settings, **{**QUIET, **options})
        opened.append(load(settings, Remembered(), lambda stage, done: None))
        return opened[-1]

    yield serve
    for one in opened:
        one.context.close()


@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [
        ("qwen2vl", "segments", "gave equal bytes"),
        ("gemma3", "checkpoints", "sliding window"),
        ("qwen35", "checkpoints", "hybrid"),
        ("lfm2", "checkpoints", "hybrid"),
        ("lfm2_window", "checkpoints", "hybrid"),
        ("mamba", "checkpoints", "recurrent"),
    ],
)
@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_the_mode_of_every_kind_of_memory(
    name: str, mode: str, reason: str, flash_attention: str, served: Serve
) -> None:
    info = served(name, flash_attention=flash_attention).info
    assert info.mode == mode and reason in info.mode_reason
    assert info.cuttable == (mode == "segments") == (info.checkpoint_bytes == 0) == (info.spare_checkpoints == 0)
    has_rows = name not in ("mamba", "lfm2_window")  # of the latter every layer that attends slides
    assert bool(info.stages) == bool(info.block_tokens) == bool(info.row_layers) == has_rows


def test_the_self_test_leaves_nothing_behind(served: Serve) -> None:
    one = served("qwen2vl")
    assert [one.context.last_position(i) for i in range(4)] == [-1] * 4
    assert one.slots.held == [0, 0]


def test_the_identity_does_not_depend_on_slots_threads_context_or_stages(served: Serve) -> None:
    plain = served("qwen2vl").info.fingerprint
    for options in ({"slots": 4}, {"threads": 2}, {"context": 1024}, {"layer_split": (2, 3)}, {"read_chunk": 64}):
        assert served("qwen2vl", **options).info.fingerprint == plain
    assert served("qwen2vl", flash_attention="off").info.fingerprint != plain  # V is stored the other way


def test_the_pool_holds_every_slot_and_a_block(served: Serve) -> None:
    info = served("qwen2vl", slots=3, context=700).info
    assert info.context == 700 and info.pool_cells >= 3 * 700 + info.block_tokens


def test_the_default_context_is_the_models_own(served: Serve) -> None:
    assert served("qwen2vl", context=None).info.context == 4096
    assert served("mamba", context=None).info.context == 4096


def test_the_default_context_fits_the_ram(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_physical_ram", lambda: 4 * 2 * 1280 * 1000)
    assert served("qwen2vl", context=None).info.context == 768  # 1000 tokens of 1280 bytes, in steps of 256
    monkeypatch.setattr(startup, "_physical_ram", lambda: 1)
    assert served("qwen2vl", context=None).info.context == 256


def test_turn_tokens(served: Serve) -> None:
    assert served("qwen2vl", turn_token="none").info.openers == ()
    assert served("qwen2vl", turn_token="17").info.openers == (17,)
    assert served("qwen2vl").info.openers == (1,)


# ------------------------------------------------------------------------------------------------------ flash attention


Measured = tuple[float, float | None, float | None, float | None]


def times(row_ms: float, beside_ms: float | None, turn_ms: float | None, read_ms: float | None) -> Times:
    def seconds(ms: float | None) -> float | None:
        return None if ms is None else ms / 1000

    return Times(row_s=row_ms / 1000, beside_s=seconds(beside_ms), turn_s=seconds(turn_ms), read_s=seconds(read_ms))


@pytest.mark.parametrize(
    ("on", "off", "choice"),
    [
        ((20, None, 90, 300), (20, None, 90, 300), True),
        ((22, None, 90, 300), (20, None, 90, 300), True),
        ((25, None, 120, 300), (20, None, 90, 300), False),
        ((27, None, 100, 330), (25, None, 90, 470), True),
        ((74, None, 100, 200), (28, None, 90, 190), False),
        ((500, None, None, None), (400, None, None, None), False),
        ((430, None, None, None), (400, None, None, None), True),
        ((30.2, 9.3, 440, 805), (22.5, 24.5, 170, 1100), True),  # slower alone, but other slots pay less for its cells
        ((30.2, None, 440, 805), (22.5, None, 170, 1100), False),
    ],
)
def test_on_unless_off_is_clearly_faster(on: Measured, off: Measured, choice: bool) -> None:
    assert decide(times(*on), times(*off), 128).on is choice


def test_the_reason_carries_the_numbers() -> None:
    reason = decide(times(27.14, 9, 160, 330), times(25, 24, 95, 470), 64).reason
    assert reason == (
        "measured: per token on 27.1 ms, off 25.0 ms; beside it on 9.0 ms, off 24.0 ms; "
        "reading 16 on 160.0 ms, off 95.0 ms; reading 64 on 330.0 ms, off 470.0 ms"
    )


def test_who_decides(make_context: MakeContext) -> None:
    model, recurrent = make_context("qwen2vl").model, make_context("mamba").model
    auto = EngineSettings(model_path="", slots=1)
    assert choose_flash_attention(model, auto, 1, False) == FlashChoice(
        on=False, reason="remembered from an earlier start"
    )
    off = msgspec.structs.replace(auto, flash_attention="off")
    assert choose_flash_attention(model, off, 1, True) == FlashChoice(on=False, reason="set by flag")
    quantised = msgspec.structs.replace(auto, kv_v="q8_0")
    assert choose_flash_attention(model, quantised, 1, False) == FlashChoice(on=True, reason="needed by V of type q8_0")
    assert not choose_flash_attention(recurrent, auto, 1, None).on


@pytest.mark.parametrize("name", ["qwen2vl", "gemma3", "qwen35", "lfm2_window"])
def test_it_is_measured_on_every_kind_of_memory(name: str, make_context: MakeContext) -> None:
    model = make_context(name).model
    choice = choose_flash_attention(model, EngineSettings(model_path="", slots=2), 1, None)
    assert choice.reason.startswith("measured: per token on ")


def test_a_setting_that_is_not_possible(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_context("qwen2vl").model

    def context(model: Model, shape: ContextShape) -> Context:
        if shape.flash_attention:
            raise ModelError("no")
        return Context(model, shape)

    monkeypatch.setattr(measure, "Context", context)
    choice = choose_flash_attention(model, EngineSettings(model_path="", slots=1), 1, None)
    assert choice == FlashChoice(on=False, reason="this model can only run with flash attention off")
