"""Every message that crosses the pipe between the front process and the engine process.

A frame is a little-endian u32 length and that many bytes of msgpack (one of the tagged structs below). Commands go down
(front -> engine), events come up. Token lists travel as bytes: int32, little endian (`pack_tokens`, `unpack_tokens`).
Bulk data never crosses the pipe: capture and apply name arena spans.

A block in the arena is `[head room][payload][padding]`: the payload starts at `span.offset + EngineInfo.head_room`,
which is a multiple of PAGE, and is what goes to disk. The engine writes and rebuilds the blob's head in the head room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.engine.checkpoint_messages import ApplyCheckpoint, CaptureCheckpoint, Held, Hold, ReleaseCheckpoint
from strata.engine.pool_messages import Compact, Paused, Resume
from strata.engine.values import EngineInfo, EngineSettings, Message, Ping, Pong, Remembered, Sampling, Steps, Timing
from strata.types import Span, StageShape, Tokens

# All messages can be imported from here; these are defined elsewhere.
__all__ = [
    "ApplyCheckpoint",
    "CaptureCheckpoint",
    "Compact",
    "EngineInfo",
    "EngineSettings",
    "Held",
    "Hold",
    "Paused",
    "Ping",
    "Pong",
    "ReleaseCheckpoint",
    "Remembered",
    "Resume",
    "Sampling",
    "Steps",
    "Timing",
]

MAX_FRAME_BYTES = 256 << 20


def pack_tokens(tokens: Tokens | Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> Tokens:
    """The inverse of `pack_tokens`; a read-only int32 array of shape (len(data) // 4,)."""
    return np.frombuffer(data, dtype="<i4")


# ------------------------------------------------------------------------------------------------------------- commands


class Load(Message, frozen=True):
    """First command: load the model. Events: Loading*, then Ready or LoadFailed."""

    settings: EngineSettings
    remembered: Remembered = Remembered()


class AttachChunk(Message, frozen=True):
    """A new arena chunk. Linux: its descriptor was sent just before over the descriptor socket; elsewhere: `name`."""

    chunk: int
    size: int
    name: str | None = None


class Prepare(Message, frozen=True):
    """Render and tokenise a prompt on the text thread. Event: Prepared or JobFailed.

    Exactly one of `messages_json` (a JSON list of {"role","content",...}; content a string) and `text` is given.
    `owner`: the namespace whose recent prompts may save work, and which remembers this one; None: neither.
    """

    job: int
    messages_json: bytes | None = None
    text: str | None = None
    owner: str | None = None


class Detokenize(Message, frozen=True):
    """Text of tokens, special tokens included. Event: Detokenized."""

    job: int
    tokens: bytes


class Run(Message, frozen=True):
    """Read `tokens[keep:]` into `slot`, then generate. Events: Progress*, Delta*, then Finished or RunFailed;
    between them Paused, when the pool is full (pool_messages.py).

    The slot must hold exactly positions [0, keep) (the engine trims a longer one; fewer is RunFailed "state", and so is
    a trim that this memory refuses: apply a checkpoint first). 0 <= keep < len(tokens). Generation ends at
    end-of-generation, a stop string, `max_tokens`, or `limit` positions.

    `checkpoints`: positions in [max(keep, 1), len(tokens)], ascending. Reading stops exactly at each, and a deferred
    copy is made there (metadata only); event: Held. `hold_end`: one more when the request ends, of what the slot holds
    then; its Held comes before Finished (not before RunFailed). Both are ignored in mode "segments".
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
    checkpoints: tuple[int, ...] = ()
    hold_end: bool = False


class Cancel(Message, frozen=True):
    """End a running request; it finishes with reason "cancelled". Unknown ids are ignored.

    Attention memory: a step that reads its prompt is stopped at once. Other memory: after the step, which is short.
    """

    request: int


class Fork(Message, frozen=True):
    """Make `target` hold positions [0, n) of `source` (metadata only; a copy in a split pool). `target` loses what it
    held. Event: Done.

    Memory that cannot be cut is forked whole (n = what `source` holds) or at a held `checkpoint`, whose position n must
    be and whose rows `source` must still hold. A sliding window may be forked anywhere while its rows are there.
    """

    job: int
    source: int
    target: int
    n: int
    checkpoint: int | None = None


class Trim(Message, frozen=True):
    """Keep only positions [0, n) of a slot; n = 0 clears it. Event: Done (ok=False when memory cannot be cut there).

    Where it cannot be cut, applying the checkpoint at n to the slot does the same: its rows [0, n) stay.
    """

    job: int
    slot: int
    n: int


class Capture(Message, frozen=True):
    """Copy the canonical state of positions [start, end) into one span per stage. Event: Done.

    end - start <= EngineInfo.block_tokens. span.length >= head_room + pad_to_page(stage.payload_bytes(end - start)).
    """

    job: int
    slot: int
    start: int
    end: int
    spans: tuple[Span, ...]


class Apply(Message, frozen=True):
    """Put a captured block (positions [start, end), one span per stage) into a slot. Event: Done.

    `stages`: of the split that it was captured in, whichever that was; empty: EngineInfo.stages.
    Only positions [from_, upto) of it are used. The slot must hold exactly [0, from_) before and holds [0, upto) after,
    or Done.ok is False and the slot is unchanged. The head room of the spans is overwritten.
    In mode "checkpoints" the slot is not usable afterwards until ApplyCheckpoint at a position <= upto.
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
    stages: tuple[StageShape, ...] = ()


class Shutdown(Message, frozen=True):
    """End the process after the current step."""


CheckpointCommand = Hold | CaptureCheckpoint | ReleaseCheckpoint | ApplyCheckpoint
SlotJob = Fork | Trim | Capture | Apply | Compact | CheckpointCommand
"""Commands about slots that are answered with Done or JobFailed."""

Command = Load | AttachChunk | Prepare | Detokenize | Run | Resume | Cancel | SlotJob | Shutdown | Ping


# --------------------------------------------------------------------------------------------------------------- events


class Loading(Message, frozen=True):
    """Progress of loading: `stage` is one of "model", "context", "measuring", "self-test"; fraction in [0, 1]."""

    stage: str
    fraction: float


class Ready(Message, frozen=True):
    info: EngineInfo


class LoadFailed(Message, frozen=True):
    """The model cannot be served; the engine process ends. `field` is the flag at fault, if one is."""

    message: str
    field: str | None = None


class Prepared(Message, frozen=True):
    """`reused`: tokens that an earlier prompt of the same owner gave."""

    job: int
    tokens: bytes
    render_s: float
    tokenize_s: float
    reused: int = 0


class Detokenized(Message, frozen=True):
    job: int
    text: str


class JobFailed(Message, frozen=True):
    """A Prepare, Detokenize or slot job that makes no sense as it is (bad template, bad range).

    `client_fault` tells a request error (a template that rejects the messages: 400) from ours.
    """

    job: int
    message: str
    client_fault: bool = False


class Done(Message, frozen=True):
    """Outcome of a slot job. `held` = tokens the slot holds now. `seconds` = time inside llama.cpp.

    Of a Hold, CaptureCheckpoint and ReleaseCheckpoint `held` is the checkpoint's position.
    """

    job: int
    ok: bool
    held: int
    seconds: float = 0.0
    reason: str = ""
    checkpoint: int = 0  # of a Hold: the id; ids begin at 1 and are not used twice by one engine process
    payload_bytes: int = 0  # of a Hold


class Progress(Message, frozen=True):
    """Prompt reading: `held` of `total` tokens are in the slot."""

    request: int
    held: int
    total: int


class Delta(Message, frozen=True):
    """Newly generated tokens (ids) and the text that became certain with them (may be empty)."""

    request: int
    tokens: bytes
    text: str


class Finished(Message, frozen=True):
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


class RunFailed(Message, frozen=True):
    """The request ended with an engine error. `held` = positions the slot still holds.

    `kind`: "state" | "decode" | "internal".
    """

    request: int
    kind: str
    message: str
    held: int


Event = (
    Loading
    | Ready
    | LoadFailed
    | Prepared
    | Detokenized
    | JobFailed
    | Done
    | Held
    | Paused
    | Progress
    | Delta
    | Finished
    | RunFailed
    | Steps
    | Pong
)
