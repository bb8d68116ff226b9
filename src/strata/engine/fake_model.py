"""What the fake engine serves: the text of its tokens, the states of its positions, and what it says of itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from blake3 import blake3

from strata.engine.values import EngineInfo
from strata.types import PAGE, SEGMENT_TOKENS, StageShape, Tokens

OPENER, END, FIRST_BYTE = 1, 2, 10
LAYERS = 12  # of which every stage holds the same states
STATE_BYTES = 32
BASE_BYTES = 24


def next_state(state: bytes, token: int) -> bytes:
    return blake3(state + int(token).to_bytes(4, "little", signed=True)).digest()


def text_tokens(text: str) -> Tokens:
    return (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + FIRST_BYTE).astype(np.int32)


def fake_info(
    *, slots: int, context: int, stages: int, memory: str = "segments", checkpoint_bytes: int = 0
) -> EngineInfo:
    if memory in ("recurrent", "opaque"):
        stages = 0
    edges = [LAYERS * i // stages for i in range(stages + 1)] if stages else []
    shapes = (
        StageShape(layer_first=first, layer_end=end, base_bytes=BASE_BYTES, token_bytes=STATE_BYTES)
        for first, end in pairwise(edges)
    )
    return EngineInfo(
        model_name="fake",
        model_path="fake.gguf",
        fingerprint=b"f" * 32,
        slots=slots,
        context=context,
        context_train=context,
        pool_cells=slots * context,
        room_cells=slots * context,
        vocab_tokens=FIRST_BYTE + 256,
        kv="f16",
        flash_attention=True,
        flash_attention_reason="set by flag",
        threads=1,
        mode="checkpoints" if memory == "recurrent" else memory,
        mode_reason="fake",
        head_room=PAGE,
        block_tokens=SEGMENT_TOKENS if stages else 0,
        stages=tuple(shapes),
        openers=(OPENER,),
        has_chat_template=True,
        load_s=0.0,
        cuttable=memory == "segments",
        checkpoint_bytes=0 if memory == "segments" else checkpoint_bytes,
        spare_checkpoints=0 if memory == "segments" else slots + 2,
        row_layers=tuple(range(LAYERS)) if stages else (),
    )


def turn(text: str) -> Tokens:
    return np.concatenate([[OPENER], text_tokens(text), [END]]).astype(np.int32)
