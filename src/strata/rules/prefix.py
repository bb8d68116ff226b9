"""Turn openers, cuts, chained keys and shared prefixes: pure functions of token ids.

A sequence is cut at every multiple of SEGMENT_TOKENS, then at the frontier if it lies behind the last multiple, then at
its end (DESIGN §3). Segment keys chain: key i = BLAKE3(key i-1, token ids, image keys); the root is the identity.
Token ids are hashed as little-endian int32 behind their count, so no two lists share an encoding. The key of a
checkpoint follows from the chain key at its position, under a context of its own: it is never a segment's key.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from blake3 import blake3

from strata.types import SEGMENT_TOKENS, Key, Segment, Tokens

KEY_BYTES = 32
_ROOT_CONTEXT = "strata 2026-11 segment root"
_CHECKPOINT_CONTEXT = "strata 2026-11 checkpoint key"
_CONVERSATION_CONTEXT = "strata 2026-11 conversation key"
CONVERSATION_FALLBACK_TOKENS = 4096


def frontier(tokens: Tokens, openers: Collection[int]) -> int | None:
    """Position of the last turn opener, or None when there is none behind position 0.

    The cut is on the opener token itself: the role behind it may differ after an identical history.
    """
    at = opener_positions(tokens, openers)
    return int(at[-1]) if at.size else None


def opener_positions(tokens: Tokens, openers: Collection[int]) -> Tokens:
    """Positions > 0 that hold a turn opener, ascending."""
    if not openers or len(tokens) < 2:
        return np.empty(0, np.int32)
    found = np.flatnonzero(np.isin(tokens[1:], np.fromiter(openers, np.int32))) + 1
    return found.astype(np.int32)


def cuts(n_tokens: int, frontier: int | None = None) -> tuple[int, ...]:
    """Ends of the segments of a sequence of `n_tokens`, ascending; the last is `n_tokens`. Empty for no tokens."""
    if n_tokens <= 0:
        return ()
    ends = list(range(SEGMENT_TOKENS, n_tokens + 1, SEGMENT_TOKENS))
    last_multiple = ends[-1] if ends else 0
    if frontier is not None and last_multiple < frontier < n_tokens:
        ends.append(frontier)
    if last_multiple < n_tokens:
        ends.append(n_tokens)
    return tuple(ends)


def root_key(fingerprint: bytes, namespace: str) -> Key:
    """The key before token 0: commits to the engine's fingerprint and the namespace, framed by their lengths."""
    hasher = blake3(derive_key_context=_ROOT_CONTEXT)
    for field in (fingerprint, namespace.encode()):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return Key(hasher.digest())


def next_key(parent: Key, tokens: Tokens, images: Sequence[bytes] = ()) -> Key:
    """The key of the segment `tokens` behind `parent`. `images`: keys of the images that lie in it, in order."""
    ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    hasher = blake3(parent)
    hasher.update((len(ids) // 4).to_bytes(8, "little"))
    hasher.update(ids)
    for image in images:
        hasher.update(len(image).to_bytes(8, "little"))
        hasher.update(image)
    return Key(hasher.digest())


def chain(root: Key, tokens: Tokens, ends: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of `tokens` for the ascending cuts `ends`, with their chained keys."""
    segments: list[Segment] = []
    parent, start = root, 0
    for end in ends:
        key = next_key(parent, tokens[start:end])
        segments.append(Segment(key=key, parent=parent, start=start, end=end))
        parent, start = key, end
    return tuple(segments)


def checkpoint_key(root: Key, tokens: Tokens, position: int) -> Key:
    """The key of the checkpoint at `position` of `tokens`: commits to tokens[:position] and the root, to nothing else.

    ValueError unless 0 < position <= len(tokens).
    """
    if not 0 < position <= len(tokens):
        raise ValueError(f"no checkpoint at position {position} of {len(tokens)} tokens")
    return checkpoint_key_at(chain(root, tokens[:position], cuts(position))[-1].key)


def checkpoint_key_at(chain_key: Key) -> Key:
    """The same for who walks the chain already: `chain_key` is the last of `chain(root, tokens[:p], cuts(p))`.

    That is the full segments up to the last multiple, then one piece up to p. A piece that chains on a frontier's
    piece has another key, and so no checkpoint.
    """
    return Key(blake3(chain_key, derive_key_context=_CHECKPOINT_CONTEXT).digest())


def checkpoint_place(root: Key, tokens: Tokens, position: int) -> tuple[Key, int]:
    """Where an index finds it: the key of the last full segment up to `position`, or the root; the tokens behind it."""
    length = position % SEGMENT_TOKENS
    full = chain(root, tokens, cuts(position - length))
    return full[-1].key if full else root, length


def shared_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that `a` and `b` have in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def conversation_key(root: Key, tokens: Tokens, openers: Collection[int]) -> bytes:
    """Hash of everything before the third turn opener; without three openers, of the first 4096 tokens (SPEC §6)."""
    at = (
        [0, *opener_positions(tokens, openers)]
        if len(tokens) and int(tokens[0]) in openers
        else opener_positions(tokens, openers)
    )
    end = int(at[2]) if len(at) > 2 else CONVERSATION_FALLBACK_TOKENS
    head = np.ascontiguousarray(tokens[:end], dtype="<i4").tobytes()
    return blake3(root + head, derive_key_context=_CONVERSATION_CONTEXT).digest()


def blocks(start: int, end: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
    """The token ranges of a segment's blocks: at most `block_tokens` each, in order; none of 0, which has no rows."""
    if not block_tokens:
        return ()
    return tuple((a, min(a + block_tokens, end)) for a in range(start, end, block_tokens))
