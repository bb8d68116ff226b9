"""The header of a checkpoint file: pure encode and decode.

A checkpoint has one payload, whatever the stages, cut into blocks of `block_bytes` (the last one is shorter). The page
holds their digests alone: lengths and offsets follow from the size, so that it has room for 3.5 GiB.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from strata.rules import prefix
from strata.store.encoding import DIGEST_BYTES, MAX_TOKENS, NO_DIGEST, is_zero, open_page, require, seal_page
from strata.store.file_header import are_digested, digested
from strata.store.names import checkpoint_path
from strata.types import BLOCK_BYTES, PAGE, Key, pad_to_page

CHECKPOINT_VERSION = 1
MAX_CHECKPOINT_BLOCKS = 224
MAX_CHECKPOINT_BYTES = MAX_CHECKPOINT_BLOCKS * BLOCK_BYTES

_MAGIC = b"strata-c"
_FIELDS = struct.Struct("<32sQQQQ")  # key, position, payload bytes, bytes of a full block, blocks


class CheckpointBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block: `length` payload bytes at `offset` of the file, their xxh3-128."""

    offset: int
    length: int
    digest: bytes


class CheckpointHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint file says of itself."""

    key: Key
    position: int
    n_bytes: int
    block_bytes: int
    blocks: tuple[CheckpointBlock, ...]

    def __repr__(self) -> str:
        what = f"position {self.position}, {self.n_bytes} bytes, {len(self.blocks)} blocks"
        return f"CheckpointHeader({self.key.hex()[:12]}, {what})"

    @property
    def path(self) -> str:
        """Relative to the level's directory."""
        return checkpoint_path(self.key)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return checkpoint_file_bytes(self.n_bytes)

    @property
    def has_digests(self) -> bool:
        """Whether the digests of its blocks are filled in."""
        return are_digested(self.blocks)

    def with_digests(self, digests: Sequence[bytes]) -> CheckpointHeader:
        """The same header, with the digests of its blocks filled in."""
        return msgspec.structs.replace(self, blocks=digested(self.blocks, digests))

    def encode(self) -> bytes:
        """Exactly one page. Raises DamagedFile for a header that `decode_checkpoint_header` would refuse."""
        _check(self)
        fields = _FIELDS.pack(self.key, self.position, self.n_bytes, self.block_bytes, len(self.blocks))
        return seal_page(_MAGIC, CHECKPOINT_VERSION, fields + b"".join(block.digest for block in self.blocks))


def plan_checkpoint(key: Key, position: int, n_bytes: int, *, block_bytes: int = BLOCK_BYTES) -> CheckpointHeader:
    """The header that the file of a checkpoint has, with the digests still zero. `key`: rules.prefix.checkpoint_key.

    Raises DamagedFile for a size that no checkpoint file can have.
    """
    _check_size(n_bytes, block_bytes)
    blocks = tuple(
        CheckpointBlock(PAGE + at, min(block_bytes, n_bytes - at), NO_DIGEST) for at in range(0, n_bytes, block_bytes)
    )
    return CheckpointHeader(key=key, position=position, n_bytes=n_bytes, block_bytes=block_bytes, blocks=blocks)


def checkpoint_file_bytes(n_bytes: int) -> int:
    """Size of the file of a checkpoint whose payload has `n_bytes`."""
    return PAGE + pad_to_page(n_bytes)


def decode_checkpoint_header(page: bytes | memoryview) -> CheckpointHeader:
    """The inverse of `CheckpointHeader.encode`. Raises DamagedFile naming the field at fault."""
    content = open_page(page, _MAGIC, CHECKPOINT_VERSION)
    key, position, n_bytes, block_bytes, n_blocks = _FIELDS.unpack_from(content)
    require(0 < n_blocks <= MAX_CHECKPOINT_BLOCKS, "blocks", f"{n_blocks} blocks")
    end = _FIELDS.size + n_blocks * DIGEST_BYTES
    require(is_zero(content[end:]), "padding", "not zero")
    planned = plan_checkpoint(Key(key), position, n_bytes, block_bytes=block_bytes)
    require(n_blocks == len(planned.blocks), "blocks", f"{n_blocks} blocks for {n_bytes} bytes")
    header = planned.with_digests([content[at : at + DIGEST_BYTES] for at in range(_FIELDS.size, end, DIGEST_BYTES)])
    _check(header)
    return header


def _check_size(n_bytes: int, block_bytes: int) -> None:
    whole = 0 < block_bytes <= BLOCK_BYTES and block_bytes % PAGE == 0
    require(whole, "block_bytes", f"{block_bytes} bytes, not whole pages up to {BLOCK_BYTES}")
    most = MAX_CHECKPOINT_BLOCKS * block_bytes
    require(0 < n_bytes <= most, "n_bytes", f"{n_bytes} bytes, at most {most} in blocks of {block_bytes}")


def _check(h: CheckpointHeader) -> None:
    require(len(h.key) == prefix.KEY_BYTES, "key", f"not {prefix.KEY_BYTES} bytes")
    require(0 < h.position <= MAX_TOKENS, "position", f"token {h.position}")
    planned = plan_checkpoint(h.key, h.position, h.n_bytes, block_bytes=h.block_bytes)
    require(len(h.blocks) == len(planned.blocks), "blocks", f"{len(h.blocks)} blocks for {h.n_bytes} bytes")
    for i, (block, right) in enumerate(zip(h.blocks, planned.blocks, strict=True)):
        require(block.offset == right.offset, "blocks.offset", f"block {i} at byte {block.offset}")
        require(block.length == right.length, "blocks.length", f"block {i} has {block.length} bytes")
        require(len(block.digest) == DIGEST_BYTES, "blocks.digest", f"block {i}: not {DIGEST_BYTES} bytes")
