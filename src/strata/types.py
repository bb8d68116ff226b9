"""The nouns that every layer shares: plain values, no behaviour beyond arithmetic on themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token ids of a sequence, in order: shape (n,), int32."""

Key = NewType("Key", bytes)
"""32 bytes of BLAKE3: the name of a segment; commits to the identity, the namespace and every token up to its end."""

KIB = 1 << 10
MIB = 1 << 20
SEGMENT_TOKENS = 256
"""Tokens in a full segment; the multiples of this are the fixed cuts (DESIGN §3)."""
BLOCK_BYTES = 16 * MIB
"""Most payload bytes in one block: the unit of capture, checksum, I/O and apply."""
PAGE = 4096
"""Alignment in memory and on disk of everything O_DIRECT touches."""


def pad_to_page(n_bytes: int) -> int:
    """The next multiple of PAGE that holds `n_bytes`."""
    return -(-n_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The K/V of tokens [start, end) of a sequence; `key` chains on `parent` (the root key for the first)."""

    key: Key
    parent: Key
    start: int
    end: int

    @property
    def n_tokens(self) -> int:
        return self.end - self.start


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A place in the arena: `length` bytes at `offset` of `chunk`. Offset and length are multiples of PAGE."""

    chunk: int
    offset: int
    length: int


class StageShape(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous range of layers [layer_first, layer_end) and the size of its canonical payload.

    The payload of `n` tokens is exactly `base_bytes + n * token_bytes` bytes.
    """

    layer_first: int
    layer_end: int
    base_bytes: int
    token_bytes: int

    def payload_bytes(self, n_tokens: int) -> int:
        return self.base_bytes + n_tokens * self.token_bytes
