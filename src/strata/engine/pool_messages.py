"""Messages about the cells of the pool: who gives way when it is full, and compaction. Part of the contract.

When a step finds no free cells, nothing of it was done. The youngest running request pauses (Paused) and keeps its
slot as it is; the others go on, or wait until cells are free. The front answers every Paused with commands that free
cells (of idle slots, or of the paused one), and then Resume or Cancel: it holds the policy (serve/pool.py).
"""

from __future__ import annotations

from strata.engine.values import Message

POOL_IS_FULL = "the K/V pool has no free cells left"
"""The reason of a Done whose Apply found no cells, and the message of a request that fills the pool alone."""


class Resume(Message, frozen=True):
    """Go on with a paused request whose slot holds exactly positions [0, keep) of its prompt and what it wrote.

    The rest of those tokens is read again, then it writes on: sampler, penalties and unfinished text are as they were.
    The engine trims a longer slot; one that holds fewer is RunFailed "state". An unknown request is ignored.
    """

    request: int
    slot: int
    keep: int


class Compact(Message, frozen=True):
    """Put the rows [start, end) of a slot, as far as it holds them, into the first free cells. Event: Done.

    The bytes of the state stay the same, also of a slot whose request runs; a refusal (the pool is full, or the slot
    shares cells with another) changes nothing. At most EngineInfo.block_tokens positions; mode "segments" only.
    """

    job: int
    slot: int
    start: int
    end: int


class Paused(Message, frozen=True):
    """The request stands still until Resume or Cancel; its slot holds `held` positions and may be changed meanwhile."""

    request: int
    held: int
