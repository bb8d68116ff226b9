"""The messages about checkpoints: hold one, capture it block by block, release it, apply one.

Part of the contract in `protocol.py`, which offers them too. Memory that cannot be cut (`EngineInfo.cuttable` False) is
kept as rows plus a checkpoint, or in mode "opaque" as a checkpoint alone, by the same messages.

To park at position p: Held(p) of a run (or Hold of an idle slot), Capture of the rows up to p, CaptureCheckpoint for
each block, ReleaseCheckpoint. To restore at p: Trim(slot, 0) or whatever prefix the slot already holds, Apply of the
rows up to p or further, then ApplyCheckpoint for each block; the Done of the last one is the proof.
"""

from __future__ import annotations

from strata.engine.values import Message
from strata.types import Span


class Hold(Message, frozen=True):
    """Make a deferred copy of what cannot be cut of a slot, as it stands now (metadata only; an idle slot or not).

    Event: Done with `checkpoint` (its id), `payload_bytes` and `held` (its position); ok=False when the slot holds
    nothing that can be resumed, or no spare is left (`EngineInfo.spare_checkpoints`).
    """

    job: int
    slot: int


class CaptureCheckpoint(Message, frozen=True):
    """Copy the block at `offset` of a held checkpoint's canonical payload into a span. Event: Done.

    Blocks begin at multiples of BLOCK_BYTES; each is min(BLOCK_BYTES, payload_bytes - offset) long and lies in its span
    like rows do: behind the head room, padded with zeros to a page. A checkpoint has one payload, not one per stage.
    The first block costs the copy of the whole state inside the engine; the others are cheap. Any number of times.
    """

    job: int
    checkpoint: int
    offset: int
    span: Span


class ReleaseCheckpoint(Message, frozen=True):
    """Give a held checkpoint's spare back. Event: Done (ok=False when it is not held)."""

    job: int
    checkpoint: int


class ApplyCheckpoint(Message, frozen=True):
    """Put a checkpoint's payload of `total` bytes into a slot, block by block in order. Event: Done, for each block.

    With the last block the slot holds exactly [0, position) and can go on. Before that it must hold the rows [0, n)
    with n >= position (where there are rows at all): rows first, checkpoint last. Also how a slot is rewound.
    ok=False: a payload that is not a checkpoint of `position`, or too few rows, leaves the slot as it was; one that
    llama.cpp refuses leaves it empty (`held` tells). Other slots are never touched.
    """

    job: int
    slot: int
    position: int
    offset: int
    total: int
    span: Span


class Held(Message, frozen=True):
    """A running request reached a position of `Run.checkpoints`, or its end: a deferred copy is held.

    Capture and release it soon: spares are few, and it keeps pool cells alive. `checkpoint` 0: none could be made
    (`reason` says why: no spare was left), reading went on, and this position cannot be resumed.
    """

    request: int
    position: int
    checkpoint: int
    payload_bytes: int = 0
    reason: str = ""
