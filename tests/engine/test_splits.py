"""Blocks captured under one layer split and applied under another: the engine then holds the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from strata.engine.layout import Bytes
from strata.engine.protocol import EngineSettings, Remembered
from strata.engine.startup import Served, load
from strata.types import StageShape, Tokens, pad_to_page

N = 90
TOKENS: Tokens = ((np.arange(N) * 37 + 5) % 2000).astype(np.int32)
SPLITS = [(), (1, 1), (1, 1, 2), (3, 0, 1, 1, 1)]
VARIANTS: dict[str, dict[str, object]] = {
    "flash attention": {},
    "none": {"flash_attention": "off"},
    "q8_0": {"kv_k": "q8_0", "kv_v": "q8_0"},
}
MakeServed = Callable[..., Served]


@pytest.fixture
def serve(tiny_paths: dict[str, Path]) -> Iterator[MakeServed]:
    opened: list[Served] = []

    def make(name: str, split: tuple[float, ...], **options: object) -> Served:
        settings = EngineSettings(
            model_path=str(tiny_paths[name]),
            slots=2,
            context=256,
            flash_attention="on",
            threads=1,
            layer_split=split,
        )
        opened.append(load(msgspec.structs.replace(settings, **options), Remembered(), lambda stage, done: None))
        return opened[-1]

    yield make
    for one in opened:
        one.context.close()


def captured(served: Served, slot: int) -> list[Bytes]:
    sizes = (pad_to_page(shape.payload_bytes(N)) for shape in served.info.stages)
    spans = [np.full(served.info.head_room + size, 0xA5, np.uint8) for size in sizes]
    assert served.slots.capture(slot, 0, N, spans) is None
    return spans


def payloads(served: Served, slot: int) -> list[bytes]:
    return [span[served.info.head_room :].tobytes() for span in captured(served, slot)]


@pytest.mark.parametrize("name", ["qwen2vl", "gemma3", "qwen35", "lfm2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_split_is_applied_under_every_other(name: str, variant: str, serve: MakeServed) -> None:
    engines = [serve(name, split, **VARIANTS[variant]) for split in SPLITS]
    assert max(len(one.info.stages) for one in engines) >= min(3, len(engines[0].info.row_layers))
    for one in engines:
        one.context.feed(0, TOKENS, 0)
        one.slots.held[0] = N
    for one in engines:
        spans = captured(one, 0)
        for other in engines:
            other.slots.clear(1)
            assert other.slots.apply(1, 0, N, 0, N, spans, TOKENS, one.info.stages) is None
            assert other.slots.held[1] == N
            assert payloads(other, 1) == payloads(other, 0)


def test_a_stage_without_attention_layers_has_no_files(serve: MakeServed) -> None:
    info = serve("qwen35", (1, 1, 1, 1, 1, 1, 1, 1)).info
    assert info.row_layers == (3, 7) and info.mode == "checkpoints"
    assert [(stage.layer_first, stage.layer_end) for stage in info.stages] == [(3, 4), (7, 8)]
    assert all(stage.base_bytes and stage.token_bytes for stage in info.stages)


def test_stages_that_are_no_split_of_the_model_are_refused(serve: MakeServed) -> None:
    one = serve("qwen2vl", (1, 1))
    one.context.feed(0, TOKENS, 0)
    one.slots.held[0] = N
    spans = captured(one, 0)
    first, second = one.info.stages
    wrong: list[tuple[StageShape, ...]] = [
        (first,),
        (second, first),
        (first, first),
        (first, msgspec.structs.replace(second, layer_end=4)),
        (first, msgspec.structs.replace(second, token_bytes=second.token_bytes + 1)),
        (msgspec.structs.replace(first, base_bytes=0), second),
    ]
    for stages in wrong:
        assert "not a split" in str(one.slots.apply(1, 0, N, 0, N, spans, TOKENS, stages))
        assert one.slots.held[1] == 0
    moved = (msgspec.structs.replace(first, layer_end=9), second)
    assert "not a split" in str(one.slots.apply(1, 0, N, 0, N, spans, TOKENS, moved))
    assert one.slots.apply(1, 0, N, 0, N, spans, TOKENS) is None
