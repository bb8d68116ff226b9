"""The checkpoints of one level: which there are, and which of them lie along a prompt.

A checkpoint is found by the key of the last full segment before it and the number of tokens behind that one, so that a
lookup hashes only the lengths that occur.
"""

from __future__ import annotations

from collections import Counter

from strata.cache.entries import HeldCheckpoint
from strata.rules.prefix import checkpoint_key_at, next_key
from strata.types import SEGMENT_TOKENS, Key, Tokens


class CheckpointIndex:
    """Usable ones only; what they take on disk is counted in the LevelIndex."""

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self._places: dict[Key, tuple[Key, int]] = {}
        self._lengths: dict[Key, Counter[int]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def keys(self) -> set[Key]:
        return set(self._sizes)

    def add(self, key: Key, n_bytes: int, place: tuple[Key, int]) -> None:
        """`n_bytes`: of its payload. `place`: see Manifest.place_of."""
        if key not in self._sizes:
            self._lengths.setdefault(place[0], Counter())[place[1]] += 1
        self._sizes[key], self._places[key] = n_bytes, place

    def discard(self, key: Key) -> None:
        if self._sizes.pop(key, None) is None:
            return
        parent, length = self._places.pop(key)
        self._lengths[parent] -= Counter([length])
        if not self._lengths[parent]:
            del self._lengths[parent]

    def along(self, root: Key, tokens: Tokens) -> tuple[HeldCheckpoint, ...]:
        """Those of prefixes of `tokens`, all of it included, ascending."""
        found: list[HeldCheckpoint] = []
        parent, at = root, 0
        while self._sizes:
            for length in sorted(self._lengths.get(parent, ())):
                if at + length > len(tokens):
                    break
                key = checkpoint_key_at(next_key(parent, tokens[at : at + length]) if length else parent)
                if key in self._sizes:
                    found.append(HeldCheckpoint(key=key, position=at + length, n_bytes=self._sizes[key]))
            if at + SEGMENT_TOKENS > len(tokens):
                break
            parent, at = next_key(parent, tokens[at : at + SEGMENT_TOKENS]), at + SEGMENT_TOKENS
        return tuple(found)
