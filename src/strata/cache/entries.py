"""What an index knows of one segment, one conversation and one lookup: plain values, of RAM and of every disk level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.types import Key, Segment, StageShape, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSegment:
    """A durable segment of the level. `sort_tokens`: its token ids, big endian, so that bytes sort like tokens.

    `stages`: how its layers are split, here; none for a model without rows.
    """

    segment: Segment
    sort_tokens: bytes
    stages: tuple[StageShape, ...] = ()

    @property
    def key(self) -> Key:
        return self.segment.key

    @property
    def tokens(self) -> Tokens:
        """The segment's own token ids, shape (n_tokens,)."""
        return np.frombuffer(self.sort_tokens, ">u4").astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A durable manifest: the tokens of one conversation and the keys of the segments that hold their K/V.

    `conversation`: its conversation key (SPEC §6). `frontier` 0 = no turn opener. A foreign one (another identity) has
    no tokens and a root that no request of ours has. `born`: the order in which states were parked since the start; 0 =
    before it.
    """

    serial: int
    root: Key
    conversation: bytes
    tokens: Tokens
    frontier: int
    keys: tuple[Key, ...]
    manifest_bytes: int
    stamp_s: float
    born: int = 0
    checkpoints: tuple[tuple[int, Key], ...] = ()
    """Position and key, ascending; those that can be used: `LevelIndex.usable_checkpoints`."""

    @property
    def objects(self) -> tuple[Key, ...]:
        """All that it keeps on the level: segments, then checkpoints."""
        return (*self.keys, *(key for _, key in self.checkpoints))

    @property
    def whole(self) -> tuple[Key, ...]:
        """What must be on a level that is to stand in for this one: the segments, and the deepest checkpoint."""
        return (*self.keys, *(key for _, key in self.checkpoints[-1:]))

    def is_continued_by(self, tokens: Tokens) -> bool:
        """Whether `tokens` contain all of it up to its frontier, which is what a client sends back unchanged."""
        upto = self.frontier or len(self.tokens)
        return upto <= len(tokens) and np.array_equal(self.tokens[:upto], tokens[:upto])

    @classmethod
    def foreign(cls, serial: int, keys: tuple[Key, ...], *, manifest_bytes: int, stamp_s: float) -> Conversation:
        """One of another identity."""
        nothing: dict[str, Any] = {"root": Key(b""), "conversation": b"", "tokens": np.empty(0, np.int32)}
        return cls(serial=serial, keys=keys, manifest_bytes=manifest_bytes, stamp_s=stamp_s, frontier=0, **nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCheckpoint:
    """A durable checkpoint of the level. `n_bytes`: of its payload."""

    key: Key
    position: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest prefix of a prompt that the level holds: apply `path` in order, use positions [0, upto).

    `checkpoint`: of memory that cannot be cut, the one at `upto`, to be applied last.
    """

    path: tuple[HeldSegment, ...]
    upto: int
    checkpoint: HeldCheckpoint | None = None


NO_MATCH = Match(path=(), upto=0)
