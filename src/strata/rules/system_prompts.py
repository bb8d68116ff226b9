"""System prompts that many conversations begin with: where one ends, what names it, and which of them go. Pure.

The system prompt of a request is what precedes the first turn opener that is deep enough (SPEC §8). One that is kept is
a variant, named by its exact tokens, the model, the namespace and the key that was declared for it. Several live side
by side; one goes for want of room or by age, never because another has come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from blake3 import blake3

from strata.rules.checkpoints import root_position
from strata.rules.prefix import chain, cuts, opener_positions
from strata.types import Key, Segment, Tokens

_DECLARED_CONTEXT = "strata 2026-11 system prompt declared key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One system prompt. `root`: the key that its segments chain on."""

    root: Key
    tokens: Tokens
    segments: tuple[Segment, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(segment.key for segment in self.segments)

    @property
    def name(self) -> Key:
        """Of nothing else: it commits to all of the tokens and the root."""
        return self.segments[-1].key


def variant_root(root: Key, declared: str) -> Key:
    """The root of the variants under a declared key; without one it is the conversations' own `root`."""
    if not declared:
        return root
    return Key(blake3(root + declared.encode(), derive_key_context=_DECLARED_CONTEXT).digest())


def variant_of(root: Key, declared: str, tokens: Tokens, openers: Collection[int], least: int) -> Variant | None:
    """The system prompt of `tokens`, or None when no turn begins at or behind `least`. It is never all of them."""
    end = root_position(opener_positions(tokens, openers).tolist(), least)
    if end is None:
        return None
    root = variant_root(root, declared)
    return Variant(root=root, tokens=tokens[:end], segments=chain(root, tokens[:end], cuts(end)))


def beyond_count(stamps_s: Iterable[tuple[float, int]], most: int) -> tuple[int, ...]:
    """Of (last use, serial) the serials that are too many, oldest first; none when `most` is 0."""
    ordered = sorted(stamps_s)
    return tuple(serial for _, serial in ordered[: max(0, len(ordered) - most)]) if most else ()
