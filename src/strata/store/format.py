"""Layout of manifests and segment headers: pure encode and decode.

Covers what the bytes mean and every check that can be made on them without reading another file. It does no I/O, does
not look at payloads (their digests are in the header, `level.py` compares them), and does not know what is stored.

A manifest is `magic, version, body length, xxh3-128 of the body, body`; the body is msgpack. A segment file is one page
of header and then its blocks, each padded with zeros to whole pages. All integers are little endian. Whatever fails a
check raises DamagedFile, whose `field` names the culprit; nothing is allocated for a length before it was bounded.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
import xxhash

from strata.errors import DamagedFile
from strata.rules import prefix
from strata.store.names import MAX_SERIAL, MAX_STAGES
from strata.types import BLOCK_BYTES, MIB, PAGE, SEGMENT_TOKENS, Key, Segment, StageShape, Tokens, pad_to_page

MANIFEST_VERSION = 1
SEGMENT_VERSION = 1
MAX_MANIFEST_BYTES = 256 * MIB
MAX_TOKENS = 1 << 24
MAX_BLOCKS = 64
MAX_LAYERS = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 30
MAX_NAME_CHARS = 1024

_MANIFEST_MAGIC = b"strata-m"
_SEGMENT_MAGIC = b"strata-s"
_MANIFEST_HEAD = struct.Struct("<8sQQ16s")  # magic, version, body length, digest of the body
_PREAMBLE = struct.Struct("<8sQ")  # magic, version
_SEGMENT_FIELDS = struct.Struct("<32s32sIIIIQQQQQ")  # behind the preamble; see _pack_header
_BLOCK = struct.Struct("<QQQQ16s")  # start, tokens, offset, length, digest of the payload
_DIGEST_BYTES = 16
_NO_DIGEST = bytes(_DIGEST_BYTES)


def digest(data: bytes | memoryview) -> bytes:
    """xxh3-128: the checksum of blocks, headers and manifests."""
    return xxhash.xxh3_128_digest(data)


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise DamagedFile(f"{field}: {problem}", field=field)


# ------------------------------------------------------------------------------------------------------------ manifests


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One stored conversation: what it holds, under which identity, and the keys of its segments."""

    serial: int
    identity: bytes  # 32 bytes: the engine's fingerprint
    root: Key
    conversation: bytes  # 32 bytes: rules.prefix.conversation_key
    tokens: bytes  # int32, little endian
    frontier: int | None
    cuts: tuple[int, ...]  # ends of the segments
    keys: tuple[Key, ...]  # one per cut
    file_bytes: tuple[int, ...]  # one per cut: size of the segment's files, all stages together
    stages: tuple[StageShape, ...]
    block_tokens: int
    model_name: str
    created_s: float
    stamp_s: float

    def __repr__(self) -> str:
        return f"Manifest({self.serial}, {self.n_tokens} tokens, {len(self.keys)} segments, {len(self.stages)} stages)"

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def token_ids(self) -> Tokens:
        """The tokens as a read-only array of shape (n_tokens,)."""
        return np.frombuffer(self.tokens, dtype="<i4")

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments with their ranges, from the stored keys."""
        parents, starts = (self.root, *self.keys), (0, *self.cuts)
        return tuple(
            Segment(key=key, parent=parent, start=start, end=end)
            for key, parent, start, end in zip(self.keys, parents, starts, self.cuts, strict=False)
        )

    def first(self, n_segments: int) -> Manifest:
        """The manifest of the first `n_segments` alone."""
        if n_segments == len(self.keys):
            return self
        end = self.cuts[n_segments - 1]
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[: 4 * end],
            frontier=self.frontier if self.frontier is not None and self.frontier <= end else None,
            cuts=self.cuts[:n_segments],
            keys=self.keys[:n_segments],
            file_bytes=self.file_bytes[:n_segments],
        )


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest as stored: the long columns are packed, so that decoding one costs no object per segment."""

    serial: int
    identity: bytes
    root: bytes
    conversation: bytes
    tokens: bytes
    frontier: int | None
    cuts: bytes  # u32 each
    keys: bytes  # 32 bytes each
    file_bytes: bytes  # u64 each
    stages: tuple[StageShape, ...]
    block_tokens: int
    model_name: str
    created_s: float
    stamp_s: float


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest. Raises DamagedFile for one that `decode_manifest` would refuse."""
    _check_manifest(manifest)
    columns = {
        "cuts": np.asarray(manifest.cuts, dtype="<u4").tobytes(),
        "keys": b"".join(manifest.keys),
        "file_bytes": np.asarray(manifest.file_bytes, dtype="<u8").tobytes(),
    }
    body = msgspec.msgpack.encode(_Body(**{**msgspec.structs.asdict(manifest), **columns}))
    head = _MANIFEST_HEAD.pack(_MANIFEST_MAGIC, MANIFEST_VERSION, len(body), digest(body))
    _require(len(head) + len(body) <= MAX_MANIFEST_BYTES, "length", f"manifest above {MAX_MANIFEST_BYTES} bytes")
    return head + body


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of `encode_manifest`. Raises DamagedFile naming the field at fault."""
    _check_preamble(data, _MANIFEST_MAGIC, MANIFEST_VERSION, _MANIFEST_HEAD.size)
    _, _, length, expected = _MANIFEST_HEAD.unpack_from(data)
    actual = len(data) - _MANIFEST_HEAD.size
    _require(length == actual, "length", f"says {length} bytes, {actual} are there")
    body = memoryview(data)[_MANIFEST_HEAD.size :]
    _require(digest(body) == expected, "checksum", "the content does not match it")
    try:
        raw = msgspec.msgpack.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedFile(f"body: {error}", field=_field_of(str(error))) from error
    for name, width in (("cuts", 4), ("keys", prefix.KEY_BYTES), ("file_bytes", 8)):
        size = len(getattr(raw, name))
        _require(size % width == 0, name, f"{size} bytes are not a whole number of {width}-byte items")
    keys = (Key(raw.keys[i : i + prefix.KEY_BYTES]) for i in range(0, len(raw.keys), prefix.KEY_BYTES))
    columns = {
        "cuts": tuple(np.frombuffer(raw.cuts, "<u4").tolist()),
        "keys": tuple(keys),
        "file_bytes": tuple(np.frombuffer(raw.file_bytes, "<u8").tolist()),
    }
    manifest = Manifest(**{**msgspec.structs.asdict(raw), **columns})
    _check_manifest(manifest)
    return manifest


def _field_of(message: str) -> str:
    """The field that a msgspec error speaks of; "body" when it names none."""
    found = re.search(r"\$\.(\w+)|field `(\w+)`", message)
    return (found[1] or found[2]) if found else "body"


def _check_preamble(data: bytes | memoryview, magic: bytes, version: int, least: int) -> None:
    _require(len(data) >= least, "length", f"only {len(data)} bytes, at least {least} expected")
    found_magic, found_version = _PREAMBLE.unpack_from(data)
    _require(found_magic == magic, "magic", f"{found_magic!r} instead of {magic!r}")
    if found_version > version:
        problem = (
            f"{found_version} is newer than this Strata knows ({version}); use the Strata that wrote it, or a later one"
        )
        _require(False, "version", problem)
    _require(found_version == version, "version", f"{found_version} instead of {version}")


def _check_manifest(m: Manifest) -> None:
    _require(0 < m.serial <= MAX_SERIAL, "serial", f"{m.serial} is out of range")
    for name in ("identity", "root", "conversation"):
        _require(len(getattr(m, name)) == prefix.KEY_BYTES, name, f"not {prefix.KEY_BYTES} bytes")
    _require(len(m.model_name) <= MAX_NAME_CHARS, "model_name", f"longer than {MAX_NAME_CHARS} characters")
    for name in ("created_s", "stamp_s"):
        _require(math.isfinite(getattr(m, name)) and getattr(m, name) >= 0, name, "not a time")
    _require(len(m.tokens) % 4 == 0 and 0 < m.n_tokens <= MAX_TOKENS, "tokens", f"{len(m.tokens)} bytes of int32")
    _require(m.frontier is None or 0 < m.frontier <= m.n_tokens, "frontier", f"{m.frontier} of {m.n_tokens} tokens")
    _require(0 < len(m.stages) <= MAX_STAGES, "stages", f"{len(m.stages)} stages")
    for i, shape in enumerate(m.stages):
        _check_shape(shape, "stages")
        first = m.stages[i - 1].layer_end if i else shape.layer_first
        _require(shape.layer_first == first, "stages", f"stage {i} starts at layer {shape.layer_first}, not {first}")
    _require(0 < m.block_tokens <= MAX_TOKENS, "block_tokens", f"{m.block_tokens} is out of range")
    _require(m.cuts == prefix.cuts(m.n_tokens, m.frontier), "cuts", "not those of these tokens and this frontier")
    _require(len(m.keys) == len(m.cuts), "keys", f"{len(m.keys)} keys for {len(m.cuts)} cuts")
    chain = prefix.chain(m.root, m.token_ids, m.cuts)
    _require(m.keys == tuple(s.key for s in chain), "keys", "not the hash chain of these tokens")
    sizes = tuple(sum(segment_file_bytes(shape, s.start, s.end, m.block_tokens) for shape in m.stages) for s in chain)
    _require(m.file_bytes == sizes, "file_bytes", "not the sizes that these segments have")


def _check_shape(shape: StageShape, field: str) -> None:
    _require(0 <= shape.layer_first < shape.layer_end <= MAX_LAYERS, field, f"layers of {shape}")
    sane = 0 <= shape.base_bytes <= MAX_PAYLOAD_BYTES and 0 < shape.token_bytes <= MAX_PAYLOAD_BYTES
    _require(sane, field, f"sizes of {shape}")


# ------------------------------------------------------------------------------------------------------ segment headers


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
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.blocks[-1].offset + pad_to_page(self.blocks[-1].length)

    @property
    def has_digests(self) -> bool:
        """Whether the digests of its blocks are filled in."""
        return all(block.digest != _NO_DIGEST for block in self.blocks)

    def with_digests(self, digests: Sequence[bytes]) -> SegmentHeader:
        """The same header, with the digests of its blocks filled in."""
        entries = zip(self.blocks, digests, strict=True)
        blocks = tuple(msgspec.structs.replace(block, digest=value) for block, value in entries)
        return msgspec.structs.replace(self, blocks=blocks)

    def same_geometry(self, other: SegmentHeader) -> bool:
        """Whether both describe the same segment in the same layout, whatever the digests."""
        return self.with_digests([_NO_DIGEST] * len(self.blocks)) == other.with_digests(
            [_NO_DIGEST] * len(other.blocks)
        )


def plan_segment(segment: Segment, *, stage: int, n_stages: int, shape: StageShape, block_tokens: int) -> SegmentHeader:
    """The header that the file of `segment` and `stage` has, with the digests still zero."""
    blocks, offset = [], PAGE
    for start, end in prefix.blocks(segment.start, segment.end, block_tokens):
        length = shape.payload_bytes(end - start)
        blocks.append(BlockEntry(start, end - start, offset, length, _NO_DIGEST))
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
    _check_header(header)
    packed = [_PREAMBLE.pack(_SEGMENT_MAGIC, SEGMENT_VERSION), _pack_header(header)]
    packed += [_BLOCK.pack(b.start, b.n_tokens, b.offset, b.length, b.digest) for b in header.blocks]
    content = b"".join(packed).ljust(PAGE - _DIGEST_BYTES, b"\0")
    return content + digest(content)


def decode_header(page: bytes | memoryview) -> SegmentHeader:
    """The inverse of `encode_header`. Raises DamagedFile naming the field at fault."""
    _check_preamble(page, _SEGMENT_MAGIC, SEGMENT_VERSION, PAGE)
    _require(len(page) == PAGE, "length", f"{len(page)} bytes instead of {PAGE}")
    content = bytes(page[: PAGE - _DIGEST_BYTES])
    _require(digest(content) == bytes(page[PAGE - _DIGEST_BYTES :]), "checksum", "the header does not match it")
    key, parent, stage, n_stages, first, last, base, per_token, start, end, n_blocks = _SEGMENT_FIELDS.unpack_from(
        content, _PREAMBLE.size
    )
    _require(0 < n_blocks <= MAX_BLOCKS, "blocks", f"{n_blocks} blocks")
    table_at = _PREAMBLE.size + _SEGMENT_FIELDS.size
    table_end = table_at + n_blocks * _BLOCK.size
    _require(not any(content[table_end:]), "padding", "not zero")
    header = SegmentHeader(
        key=Key(key),
        parent=Key(parent),
        stage=stage,
        n_stages=n_stages,
        shape=StageShape(layer_first=first, layer_end=last, base_bytes=base, token_bytes=per_token),
        start=start,
        end=end,
        blocks=tuple(BlockEntry(*row) for row in _BLOCK.iter_unpack(content[table_at:table_end])),
    )
    _check_header(header)
    return header


def _pack_header(h: SegmentHeader) -> bytes:
    shape = h.shape
    layers, sizes = (shape.layer_first, shape.layer_end), (shape.base_bytes, shape.token_bytes)
    return _SEGMENT_FIELDS.pack(h.key, h.parent, h.stage, h.n_stages, *layers, *sizes, h.start, h.end, len(h.blocks))


def _check_header(h: SegmentHeader) -> None:
    for name in ("key", "parent"):
        _require(len(getattr(h, name)) == prefix.KEY_BYTES, name, f"not {prefix.KEY_BYTES} bytes")
    _require(0 < h.n_stages <= MAX_STAGES, "n_stages", f"{h.n_stages} stages")
    _require(0 <= h.stage < h.n_stages, "stage", f"stage {h.stage} of {h.n_stages}")
    _check_shape(h.shape, "shape")
    _require(0 <= h.start < MAX_TOKENS, "start", f"token {h.start}")
    _require(h.start < h.end <= h.start + SEGMENT_TOKENS, "end", f"tokens [{h.start}, {h.end})")
    _require(0 < len(h.blocks) <= MAX_BLOCKS, "blocks", f"{len(h.blocks)} blocks")
    at, offset = h.start, PAGE
    for i, block in enumerate(h.blocks):
        _require(
            block.start == at and block.n_tokens > 0, "blocks.start", f"block {i} starts at {block.start}, not {at}"
        )
        _require(block.offset == offset, "blocks.offset", f"block {i} at byte {block.offset}, not {offset}")
        length = h.shape.payload_bytes(block.n_tokens)
        _require(block.length == length, "blocks.length", f"block {i} has {block.length} bytes, not {length}")
        most = max(BLOCK_BYTES, h.shape.payload_bytes(1))
        _require(length <= most, "blocks.length", f"block {i} has {length} bytes, more than {most}")
        _require(len(block.digest) == _DIGEST_BYTES, "blocks.digest", f"block {i}: not {_DIGEST_BYTES} bytes")
        at, offset = block.end, offset + pad_to_page(length)
    _require(at == h.end, "blocks", f"they end at token {at}, not {h.end}")
