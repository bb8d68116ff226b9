"""The header of a segment file: one stage of one segment. Pure encode and decode."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from strata.rules import prefix
from strata.store.encoding import (
    DIGEST_BYTES,
    MAX_TOKENS,
    NO_DIGEST,
    check_shape,
    is_zero,
    open_page,
    require,
    seal_page,
)
from strata.store.file_header import are_digested, digested
from strata.store.names import MAX_STAGES, segment_path
from strata.types import BLOCK_BYTES, PAGE, SEGMENT_TOKENS, Key, Segment, StageShape, pad_to_page

SEGMENT_VERSION = 1
MAX_BLOCKS = 64

_MAGIC = b"strata-s"
_FIELDS = struct.Struct("<32s32sIIIIQQQQQ")  # see _pack
_BLOCK = struct.Struct("<QQQQ16s")  # start, tokens, offset, length, digest of the payload


class BlockEntry(msgspec.Struct, frozen=True, array_like=True):
    """One block: tokens [start, start + n_tokens), `length` payload bytes at `offset` of the file, their xxh3-128."""

    start: int
    n_tokens: int
    offset: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.n_tokens


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What one segment file says of itself: one stage of one segment."""

    key: Key
    parent: Key
    stage: int
    n_stages: int
    shape: StageShape
    start: int
    end: int
    blocks: tuple[BlockEntry, ...]

    def __repr__(self) -> str:
        where = f"stage {self.stage}/{self.n_stages}, tokens [{self.start}, {self.end}), {len(self.blocks)} blocks"
        return f"SegmentHeader({self.key.hex()[:12]}, {where})"

    @property
    def path(self) -> str:
        """Relative to the level's directory."""
        return segment_path(self.key, self.stage)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.blocks[-1].offset + pad_to_page(self.blocks[-1].length)

    @property
    def has_digests(self) -> bool:
        """Whether the digests of its blocks are filled in."""
        return are_digested(self.blocks)

    def with_digests(self, digests: Sequence[bytes]) -> SegmentHeader:
        """The same header, with the digests of its blocks filled in."""
        return msgspec.structs.replace(self, blocks=digested(self.blocks, digests))

    def encode(self) -> bytes:
        """Exactly one page: `encode_header`."""
        return encode_header(self)

    def same_geometry(self, other: SegmentHeader) -> bool:
        """Whether both describe the same segment in the same layout, whatever the digests."""
        return self.with_digests([NO_DIGEST] * len(self.blocks)) == other.with_digests([NO_DIGEST] * len(other.blocks))


def plan_segment(segment: Segment, *, stage: int, n_stages: int, shape: StageShape, block_tokens: int) -> SegmentHeader:
    """The header that the file of `segment` and `stage` has, with the digests still zero."""
    blocks, offset = [], PAGE
    for start, end in prefix.blocks(segment.start, segment.end, block_tokens):
        length = shape.payload_bytes(end - start)
        blocks.append(BlockEntry(start, end - start, offset, length, NO_DIGEST))
        offset += pad_to_page(length)
    return SegmentHeader(
        key=segment.key,
        parent=segment.parent,
        stage=stage,
        n_stages=n_stages,
        shape=shape,
        start=segment.start,
        end=segment.end,
        blocks=tuple(blocks),
    )


def segment_file_bytes(shape: StageShape, start: int, end: int, block_tokens: int) -> int:
    """Size of the file of one stage of the segment [start, end)."""
    return _file_bytes(shape, end - start, block_tokens)


@lru_cache(maxsize=4096)
def _file_bytes(shape: StageShape, n_tokens: int, block_tokens: int) -> int:
    full, rest = divmod(n_tokens, block_tokens)
    size = PAGE + full * pad_to_page(shape.payload_bytes(block_tokens))
    return size + pad_to_page(shape.payload_bytes(rest)) if rest else size


def encode_header(header: SegmentHeader) -> bytes:
    """Exactly one page. Raises DamagedFile for a header that `decode_header` would refuse."""
    _check(header)
    table = (_BLOCK.pack(b.start, b.n_tokens, b.offset, b.length, b.digest) for b in header.blocks)
    return seal_page(_MAGIC, SEGMENT_VERSION, _pack(header) + b"".join(table))


def decode_header(page: bytes | memoryview) -> SegmentHeader:
    """The inverse of `encode_header`. Raises DamagedFile naming the field at fault."""
    content = open_page(page, _MAGIC, SEGMENT_VERSION)
    key, parent, stage, n_stages, first, last, base, per_token, start, end, n_blocks = _FIELDS.unpack_from(content)
    require(0 < n_blocks <= MAX_BLOCKS, "blocks", f"{n_blocks} blocks")
    table_end = _FIELDS.size + n_blocks * _BLOCK.size
    require(is_zero(content[table_end:]), "padding", "not zero")
    header = SegmentHeader(
        key=Key(key),
        parent=Key(parent),
        stage=stage,
        n_stages=n_stages,
        shape=StageShape(layer_first=first, layer_end=last, base_bytes=base, token_bytes=per_token),
        start=start,
        end=end,
        blocks=tuple(BlockEntry(*row) for row in _BLOCK.iter_unpack(content[_FIELDS.size : table_end])),
    )
    _check(header)
    return header


def _pack(h: SegmentHeader) -> bytes:
    shape = h.shape
    layers, sizes = (shape.layer_first, shape.layer_end), (shape.base_bytes, shape.token_bytes)
    return _FIELDS.pack(h.key, h.parent, h.stage, h.n_stages, *layers, *sizes, h.start, h.end, len(h.blocks))


def _check(h: SegmentHeader) -> None:
    for name in ("key", "parent"):
        require(len(getattr(h, name)) == prefix.KEY_BYTES, name, f"not {prefix.KEY_BYTES} bytes")
    require(0 < h.n_stages <= MAX_STAGES, "n_stages", f"{h.n_stages} stages")
    require(0 <= h.stage < h.n_stages, "stage", f"stage {h.stage} of {h.n_stages}")
    check_shape(h.shape, "shape")
    require(0 <= h.start < MAX_TOKENS, "start", f"token {h.start}")
    require(h.start < h.end <= h.start + SEGMENT_TOKENS, "end", f"tokens [{h.start}, {h.end})")
    require(0 < len(h.blocks) <= MAX_BLOCKS, "blocks", f"{len(h.blocks)} blocks")
    at, offset = h.start, PAGE
    for i, block in enumerate(h.blocks):
        require(
            block.start == at and block.n_tokens > 0, "blocks.start", f"block {i} starts at {block.start}, not {at}"
        )
        require(block.offset == offset, "blocks.offset", f"block {i} at byte {block.offset}, not {offset}")
        length = h.shape.payload_bytes(block.n_tokens)
        require(block.length == length, "blocks.length", f"block {i} has {block.length} bytes, not {length}")
        most = max(BLOCK_BYTES, h.shape.payload_bytes(1))
        require(length <= most, "blocks.length", f"block {i} has {length} bytes, more than {most}")
        require(len(block.digest) == DIGEST_BYTES, "blocks.digest", f"block {i}: not {DIGEST_BYTES} bytes")
        at, offset = block.end, offset + pad_to_page(length)
    require(at == h.end, "blocks", f"they end at token {at}, not {h.end}")
