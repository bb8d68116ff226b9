"""What the engine is told once, what it says of itself, and the values inside its messages.

Plain structs without behaviour; `protocol.py` has the messages and offers what of this belongs to the contract.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from strata.types import StageShape


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Every message: the tag is the class name."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process needs to load a model and build its one context."""

    model_path: str
    slots: int
    context: int | None = None  # tokens per slot; None = the model's own, capped so that the pool fits memory
    pool: str = "unified"  # "auto" | "unified" | "split": a stream of cells for each slot
    pool_cells: int | None = None  # tokens of all slots together; None = slots x context
    flash_attention: str = "auto"  # "auto" | "on" | "off"
    kv_k: str = "f16"
    kv_v: str = "f16"
    threads: int | None = None
    gpu_layers: int | None = None
    layer_split: tuple[float, ...] = ()  # proportions of a split of the layers (rules/stages.py); empty = one stage
    turn_token: str = "auto"  # "auto" | "none" | a token id in decimal
    read_chunk: int = 512  # a full batch: most prompt tokens read in one step
    swa_full: bool = True  # sliding-window layers keep every token; False: only a window, which is much smaller
    spare_checkpoints: int | None = None  # checkpoints that may wait at once; None = slots + 2, 0 where none are needed
    measure_idle_cells: bool = False  # at start: what the cells of idle conversations cost the others
    # The batch agenda (rules/agenda.py, SPEC §9)
    agenda: bool = False  # STRATA_BATCH_AGENDA
    agenda_chunk: int = 512  # STRATA_BATCH_AGENDA_CHUNK
    agenda_budget: int = 520  # STRATA_BATCH_AGENDA_BUDGET
    agenda_age: int = 4  # STRATA_BATCH_AGENDA_AGE
    decode_share: float | None = (
        None  # STRATA_BATCH_DECODE_SHARE when set (wins over the budget); None = 0.5, agenda off
    )


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of an earlier start for the same machine and model; None: to be measured, if the settings say auto."""

    flash_attention: bool | None = None
    split_pool: bool | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it is ready."""

    model_name: str
    model_path: str
    fingerprint: bytes  # 32 bytes: model + K/V layout + rope + state version; the identity of every segment
    slots: int
    context: int  # tokens per slot
    context_train: int
    pool_cells: int  # of the context, a margin included
    room_cells: int  # tokens that all slots together may hold; context <= room_cells
    vocab_tokens: int
    kv: str
    flash_attention: bool
    flash_attention_reason: str  # "set by flag", "measured: on 27.1 ms, off 25.0 ms per token", ...
    threads: int
    # "segments": rows can be cut anywhere. "checkpoints": rows, if `stages` has any, plus a checkpoint at each position
    # that can be resumed. "opaque": the layout is not known; a checkpoint is the whole image, there are no rows.
    mode: str
    mode_reason: str
    head_room: int  # bytes, a multiple of PAGE
    block_tokens: int  # most tokens in one block
    stages: tuple[StageShape, ...]  # those of the split that have rows
    openers: tuple[int, ...]  # token ids that open a turn; empty = none found
    has_chat_template: bool
    load_s: float
    cuttable: bool = True  # False: a slot can only be resumed, trimmed or forked whole or at a checkpoint
    checkpoint_bytes: int = (
        0  # the most one takes (at `context` tokens); 0 in mode "segments", or when none can be taken
    )
    spare_checkpoints: int = 0  # how many may be held at once, by all slots together
    idle_cell_s: float | None = None  # seconds that a cell of an idle slot costs each row; None = not measured
    row_layers: tuple[int, ...] = ()  # the layers that have rows: stages of another split must hold each once
    pool: str = "unified"  # or "split": nothing is shared between slots, and rows move with their whole sequence
    pool_reason: str = ""  # "set by flag", "measured: ...", ...


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's sampler chain. temperature <= 0 is greedy."""

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    seed: int | None = None
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished request cost inside the engine, in seconds."""

    read_s: float
    read_tokens: int
    write_s: float
    write_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShape:
    """What a context is built for.

    `sequences`: slots, spares, one that stays empty, the transfer sequence; of a pool that is not `unified`, slots.
    """

    cells: int
    sequences: int
    batch: int
    threads: int
    flash_attention: bool
    kv_k: str = "f16"
    kv_v: str = "f16"
    swa_full: bool = True
    unified: bool = True


class Ping(Message, frozen=True):
    """Asks the engine process for a Pong, whatever it is doing."""


class Pong(Message, frozen=True):
    """The process runs; says nothing about its engine thread."""


class Steps(Message, frozen=True):
    """All steps of this process so far, told whenever a request ends: their seconds in llama.cpp, and outside it."""

    count: int = 0
    rows: int = 0
    inside_s: float = 0.0
    outside_s: float = 0.0
