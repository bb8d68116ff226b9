"""The contract between the front process and the engine process, and every message that crosses the pipe.

A frame is a little-endian u32 length and that many bytes of msgpack (one of the tagged structs below). Commands go down
(front -> engine), events come up. Bulk data never crosses the pipe: capture and apply name arena spans.

Token lists travel as bytes: int32, little endian (`pack_tokens`, `unpack_tokens`).

A block in the arena is `[head room][payload][padding]`: the payload starts at `span.offset + EngineInfo.head_room`,
which is a multiple of PAGE, and is what goes to disk. The engine writes and rebuilds the blob's head in the head room.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from strata.types import Span, StageShape, Tokens

MAX_FRAME_BYTES = 256 << 20


def pack_tokens(tokens: Tokens | Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> Tokens:
    """The inverse of `pack_tokens`; a read-only int32 array of shape (len(data) // 4,)."""
    return np.frombuffer(data, dtype="<i4")


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Every message: the tag is the class name."""


# ----------------------------------------------------------------------------------------------- values inside messages


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process needs to load a model and build its one context."""

    model_path: str
    slots: int
    context: int | None = None  # tokens per slot; None = the model's own, capped so that the pool fits memory
    flash_attention: str = "auto"  # "auto" | "on" | "off"
    kv_k: str = "f16"
    kv_v: str = "f16"
    threads: int | None = None
    gpu_layers: int | None = None
    stages: tuple[int, ...] = ()  # layers per stage; empty = one stage with all layers
    turn_token: str = "auto"  # "auto" | "none" | a token id in decimal
    read_chunk: int = 512  # most prompt tokens read in one step


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it is ready."""

    model_name: str
    model_path: str
    fingerprint: bytes  # 32 bytes: model + K/V layout + rope + state version; the identity of every segment
    slots: int
    context: int  # tokens per slot
    context_train: int
    pool_cells: int
    vocab_tokens: int
    kv: str
    flash_attention: bool
    flash_attention_reason: str  # "set by flag", "measured: on 27.1 ms, off 25.0 ms per token", ...
    threads: int
    mode: str  # "segments" | "opaque" (nothing of this model can be cut; parking is off in this version)
    mode_reason: str
    head_room: int  # bytes, a multiple of PAGE
    block_tokens: int  # most tokens in one block
    stages: tuple[StageShape, ...]
    openers: tuple[int, ...]  # token ids that open a turn; empty = none found
    has_chat_template: bool
    load_s: float


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


# ------------------------------------------------------------------------------------------------------------- commands


class Load(_Message, frozen=True):
    """First command: load the model. Events: Loading*, then Ready or LoadFailed."""

    settings: EngineSettings
    # Choice remembered from an earlier run for the same machine and model (None = measure when "auto").
    remembered_flash_attention: bool | None = None


class AttachChunk(_Message, frozen=True):
    """A new arena chunk. Linux: its descriptor was sent just before over the descriptor socket; elsewhere: `name`."""

    chunk: int
    size: int
    name: str | None = None


class Prepare(_Message, frozen=True):
    """Render and tokenise a prompt on the text thread. Event: Prepared or JobFailed.

    Exactly one of `messages_json` (a JSON list of {"role","content",...}; content a string) and `text` is given.
    """

    job: int
    messages_json: bytes | None = None
    text: str | None = None


class Detokenize(_Message, frozen=True):
    """Text of tokens, special tokens included. Event: Detokenized."""

    job: int
    tokens: bytes


class Run(_Message, frozen=True):
    """Read `tokens[keep:]` into `slot`, then generate. Events: Progress*, Delta*, then Finished or RunFailed.

    The slot must hold exactly positions [0, keep) (the engine trims a longer one; fewer is RunFailed "state").
    0 <= keep < len(tokens). Generation ends at end-of-generation, a stop string, `max_tokens`, or `limit` positions.
    """

    request: int
    slot: int
    keep: int
    tokens: bytes
    sampling: Sampling
    max_tokens: int  # >= 0; 0 reads the prompt only and finishes with "length"
    limit: int  # most tokens the sequence may hold
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Cancel(_Message, frozen=True):
    """End a running request at the next step; it finishes with reason "cancelled". Unknown ids are ignored."""

    request: int


class Fork(_Message, frozen=True):
    """Make `target` hold positions [0, n) of `source` (metadata only). `target` loses what it held. Event: Done."""

    job: int
    source: int
    target: int
    n: int


class Trim(_Message, frozen=True):
    """Keep only positions [0, n) of a slot; n = 0 clears it. Event: Done (ok=False when memory cannot be cut there)."""

    job: int
    slot: int
    n: int


class Capture(_Message, frozen=True):
    """Copy the canonical state of positions [start, end) into one span per stage. Event: Done.

    end - start <= EngineInfo.block_tokens. span.length >= head_room + pad_to_page(stage.payload_bytes(end - start)).
    """

    job: int
    slot: int
    start: int
    end: int
    spans: tuple[Span, ...]


class Apply(_Message, frozen=True):
    """Put a captured block (positions [start, end), one span per stage) into a slot. Event: Done.

    Only positions [from_, upto) of it are used. The slot must hold exactly [0, from_) before and holds [0, upto) after,
    or Done.ok is False and the slot is unchanged. The head room of the spans is overwritten.
    `tokens` are the ids of [start, end): models with per-cell token ids need them to rebuild the head.
    """

    job: int
    slot: int
    start: int
    end: int
    from_: int
    upto: int
    spans: tuple[Span, ...]
    tokens: bytes


class Shutdown(_Message, frozen=True):
    """End the process after the current step."""


Command = Load | AttachChunk | Prepare | Detokenize | Run | Cancel | Fork | Trim | Capture | Apply | Shutdown


# --------------------------------------------------------------------------------------------------------------- events


class Loading(_Message, frozen=True):
    """Progress of loading: `stage` is one of "model", "context", "measuring", "self-test"; fraction in [0, 1]."""

    stage: str
    fraction: float


class Ready(_Message, frozen=True):
    info: EngineInfo


class LoadFailed(_Message, frozen=True):
    """The model cannot be served; the engine process ends. `field` is the flag at fault, if one is."""

    message: str
    field: str | None = None


class Prepared(_Message, frozen=True):
    job: int
    tokens: bytes
    render_s: float
    tokenize_s: float


class Detokenized(_Message, frozen=True):
    job: int
    text: str


class JobFailed(_Message, frozen=True):
    """A Prepare, Detokenize, Fork, Trim, Capture or Apply that makes no sense as it is (bad template, bad range).

    `client_fault` tells a request error (a template that rejects the messages: 400) from ours.
    """

    job: int
    message: str
    client_fault: bool = False


class Done(_Message, frozen=True):
    """Outcome of Fork, Trim, Capture, Apply. `held` = tokens the slot holds now. `seconds` = time inside llama.cpp."""

    job: int
    ok: bool
    held: int
    seconds: float = 0.0
    reason: str = ""


class Progress(_Message, frozen=True):
    """Prompt reading: `held` of `total` tokens are in the slot."""

    request: int
    held: int
    total: int


class Delta(_Message, frozen=True):
    """Newly generated tokens (ids) and the text that became certain with them (may be empty)."""

    request: int
    tokens: bytes
    text: str


class Finished(_Message, frozen=True):
    """The last event of a request. `reason`: "stop" | "length" | "cancelled".

    `held`: positions the slot holds: always a prefix of prompt + generated tokens (the last sampled token is not held).
    `stop_string`: which stop string ended it, if one did. `text`: what was still held back and is now certain.
    """

    request: int
    reason: str
    held: int
    timing: Timing
    text: str = ""
    stop_string: str | None = None


class RunFailed(_Message, frozen=True):
    """The request ended with an engine error. `held` = positions the slot still holds.

    `kind`: "state" | "decode" | "internal".
    """

    request: int
    kind: str
    message: str
    held: int


Event = (
    Loading | Ready | LoadFailed | Prepared | Detokenized | JobFailed | Done | Progress | Delta | Finished | RunFailed
)


# -------------------------------------------------------------------------------------------------- what the front sees


class Generation(Protocol):
    """One running request: iterate it for Progress, Delta and at last Finished.

    Raises RunError (an engine error; carries `held`) or EngineGone from the iteration. `cancel()` may be called at any
    time, also after the iteration was abandoned: it ends the request, drains its events and returns Finished.
    """

    def __aiter__(self) -> AsyncIterator[Progress | Delta | Finished]: ...

    async def cancel(self) -> Finished: ...


@runtime_checkable
class Engine(Protocol):
    """The engine as the layers above use it: `engine.client.EngineClient`, or `engine.fake.FakeEngine` in tests.

    Every method raises EngineGone when the process is not there (or dies while the call waits), EngineRefused when
    the engine answers JobFailed, BadRequest when JobFailed.client_fault.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def generation(self) -> int:
        """Counts engine processes: 1 for the first. What a slot held in an older generation is gone."""
        ...

    async def prepare(self, *, messages_json: bytes | None = None, text: str | None = None) -> Prepared: ...

    async def detokenize(self, tokens: Tokens) -> str: ...

    def run(self, command: Run) -> Generation:
        """Send `command` (its `request` number is assigned here) and return the handle of its events."""
        ...

    async def fork(self, source: int, target: int, n: int) -> Done: ...

    async def trim(self, slot: int, n: int) -> Done: ...

    async def capture(self, slot: int, start: int, end: int, spans: tuple[Span, ...]) -> Done: ...

    async def apply(
        self,
        slot: int,
        *,
        start: int,
        end: int,
        from_: int,
        upto: int,
        spans: tuple[Span, ...],
        tokens: Tokens,
    ) -> Done: ...
