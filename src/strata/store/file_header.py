"""What the header of a payload file is to a level, whatever kind of file: where it lies, its blocks, its page.

Covers the contract that segment and checkpoint headers fulfil, and what they share. A payload file is one page of
header and then its blocks, each padded with zeros to whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import msgspec

from strata.store.encoding import NO_DIGEST
from strata.types import Key


class Block(Protocol):
    """`length` payload bytes at `offset` of the file, and their xxh3-128."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def digest(self) -> bytes: ...


class FileHeader(Protocol):
    """What a payload file says of itself."""

    @property
    def key(self) -> Key: ...
    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def path(self) -> str:
        """Where the file lies, relative to the level's directory, with forward slashes."""

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""

    @property
    def has_digests(self) -> bool:
        """Whether the digests of its blocks are filled in."""

    def with_digests(self, digests: Sequence[bytes]) -> Self:
        """The same header, with the digests of its blocks filled in."""

    def encode(self) -> bytes:
        """Exactly one page. Raises DamagedFile for a header that its decoder would refuse."""


B = TypeVar("B", bound=msgspec.Struct)


def are_digested(blocks: Sequence[Block]) -> bool:
    return all(block.digest != NO_DIGEST for block in blocks)


def digested(blocks: Sequence[B], digests: Sequence[bytes]) -> tuple[B, ...]:
    """The blocks with these digests; ValueError when their numbers differ."""
    pairs = zip(blocks, digests, strict=True)
    return tuple(msgspec.structs.replace(block, digest=value) for block, value in pairs)
