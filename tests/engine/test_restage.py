"""Rows captured under one layer split become those of another, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from strata.engine.layout import BadState, Bytes
from strata.engine.protocol import EngineSettings
from strata.engine.restage import LayerRange, restage
from strata.engine.startup import load
from strata.types import pad_to_page

N = 90
TOKENS = ((np.arange(N) * 37 + 5) % 2000).astype(np.int32)
SPLITS: dict[str, list[tuple[int, ...]]] = {
    "qwen2vl": [(5,), (2, 3), (1, 1, 3)],
    "gemma3": [(7,), (2, 5), (1, 5, 1)],
    "qwen35": [(8,), (3, 5), (1, 3, 4)],
    "lfm2": [(6,), (3, 3), (2, 2, 2)],
}


def captured(path: Path, stages: tuple[int, ...], **options: object) -> tuple[list[Bytes], list[LayerRange], list[int]]:
    """Payloads, their stages and the layers that have rows."""
    settings = EngineSettings(
        model_path=str(path), slots=1, context=256, flash_attention="on", threads=1, stages=stages
    )
    served = load(msgspec.structs.replace(settings, **options), None, lambda stage, done: None)
    served.context.feed(0, TOKENS, 0)
    served.slots.held[0] = N
    room, shapes = served.info.head_room, served.info.stages
    spans = [np.zeros(room + pad_to_page(shape.payload_bytes(N)), np.uint8) for shape in shapes]
    assert served.slots.capture(0, 0, N, spans) is None
    served.context.close()
    payloads = [span[room : room + shape.payload_bytes(N)] for span, shape in zip(spans, shapes, strict=True)]
    return payloads, [(shape.layer_first, shape.layer_end) for shape in shapes], list(served.info.row_layers)


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("options", [{}, {"flash_attention": "off"}, {"kv_k": "q8_0", "kv_v": "q8_0"}], ids=str)
def test_every_split_becomes_every_other(name: str, options: dict[str, object], tiny_paths: dict[str, Path]) -> None:
    known = [captured(tiny_paths[name], stages, **options) for stages in SPLITS[name]]
    for payloads, have, layers in known:
        for expected, want, _ in known:
            made = restage(payloads, have, want, n_tokens=N, row_layers=layers)
            assert [one.tobytes() for one in made] == [one.tobytes() for one in expected]


def test_what_does_not_fit_is_refused(tiny_paths: dict[str, Path]) -> None:
    payloads, have, layers = captured(tiny_paths["qwen2vl"], (2, 3))

    def refused(payloads: Sequence[Bytes], have: Sequence[LayerRange], want: Sequence[LayerRange], n: int = N) -> None:
        with pytest.raises(BadState):
            restage(payloads, have, want, n_tokens=n, row_layers=layers)

    one: list[LayerRange] = [(0, 5)]
    refused(payloads, have, one, N - 1)
    refused(payloads, have, [(0, 4)])
    refused(payloads, have, [(0, 3), (2, 5)])
    refused(payloads, [(0, 3), (3, 5)], one)
    refused([payloads[0][:-1], payloads[1]], have, one)
    refused([payloads[0][:5], payloads[1]], have, one)
    other = payloads[1].copy()
    other[-4] ^= 1  # the token id of the last cell
    refused([payloads[0], other], have, one)


def test_rows_without_v() -> None:
    """A model that keeps only K (MLA)."""
    heads = [np.frombuffer(b"\1\0\0\0" + (8).to_bytes(8, "little"), np.uint8)] * 2
    rows = [np.arange(24, dtype=np.uint8), np.arange(100, 124, dtype=np.uint8)]
    whole = np.concatenate([heads[0], rows[0], heads[1], rows[1]])
    parts = restage([whole], [(0, 2)], [(0, 1), (1, 2)], n_tokens=3, row_layers=[0, 1])
    assert [len(part) for part in parts] == [36, 36]
    (again,) = restage(parts, [(0, 1), (1, 2)], [(0, 2)], n_tokens=3, row_layers=[0, 1])
    assert np.array_equal(again, whole)
