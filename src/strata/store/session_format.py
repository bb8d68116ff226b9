"""Layout of a portable session file: one conversation with everything that is needed to go on with it, in one file.

    page 0    head: version, sizes and counts, K/V types; its own digest
    then      the manifest, as a level's (format.py)
    then      the blocks: range after range of tokens, of each range one block per stage
    then      the blocks of a checkpoint of the last position, for memory that cannot be cut (none in this version)
    then      the table: one xxh3-128 per block
    last page foot: the digests of head, manifest and table, the size of the file; its own digest

Every part starts at a page and is padded with zeros. Where a block lies and how long it is follows from the manifest,
so the table holds digests only; it comes last, because a file is written in one pass. Pure: encode, decode, and every
check that needs no other file. What fails one raises DamagedFile, whose `field` names the culprit; lengths and counts
are bounded before anything is allocated for them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from strata.errors import DamagedFile
from strata.rules import prefix
from strata.store.format import MAX_MANIFEST_BYTES, Manifest, digest
from strata.types import BLOCK_BYTES, PAGE, SEGMENT_TOKENS, pad_to_page

SESSION_VERSION = 1
MAX_SESSION_BLOCKS = 1 << 20
MAX_CHECKPOINT_BYTES = 1 << 36
MAX_KV_BYTES = 64
DIGEST_BYTES = 16

_HEAD_MAGIC = b"strata-p"
_FOOT_MAGIC = b"strata-q"
_HEAD = struct.Struct("<8sQQQQQ64s")  # magic, version, manifest bytes, blocks, checkpoint bytes, file bytes, K/V types
_FOOT = struct.Struct("<8sQ16s16s16s")  # magic, file bytes, digests of head page, manifest and table
_MANIFEST_BYTES_PER_TOKEN = 4
_MANIFEST_BYTES_PER_SEGMENT = 4 + prefix.KEY_BYTES + 8
_MANIFEST_BYTES_BESIDE = 64 << 10


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise DamagedFile(f"{field}: {problem}", field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHead:
    """The first page. `kv`: the K/V types, for people; whether they fit is told by the manifest's identity."""

    manifest_bytes: int
    n_blocks: int
    checkpoint_bytes: int
    file_bytes: int
    kv: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFoot:
    """The last page: it commits to everything but the blocks, and the table to those."""

    file_bytes: int
    head_digest: bytes
    manifest_digest: bytes
    table_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBlock:
    """`length` bytes of payload at `offset` of the file, padded with zeros to whole pages."""

    offset: int
    length: int

    @property
    def padded(self) -> int:
        return pad_to_page(self.length)


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """Where everything lies in the file of one conversation. Get one from `plan_session`."""

    manifest: Manifest
    manifest_bytes: int
    kv: str
    checkpoint_bytes: int

    def __repr__(self) -> str:
        return f"SessionPlan({self.manifest!r}, {self.n_blocks} blocks, {self.file_bytes} bytes)"

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The token ranges that the blocks of rows hold, in order."""
        m = self.manifest
        starts = (0, *m.cuts[:-1])
        return tuple(r for a, b in zip(starts, m.cuts, strict=True) for r in prefix.blocks(a, b, m.block_tokens))

    @cached_property
    def blocks(self) -> tuple[SessionBlock, ...]:
        """Every block in the order of the file: of each range one per stage, then the checkpoint's."""
        offset, blocks = PAGE + pad_to_page(self.manifest_bytes), []
        for length in self._lengths():
            blocks.append(SessionBlock(offset=offset, length=length))
            offset += pad_to_page(length)
        return tuple(blocks)

    def _lengths(self) -> Iterator[int]:
        for start, end in self.ranges:
            for shape in self.manifest.stages:
                yield shape.payload_bytes(end - start)
        for at in range(0, self.checkpoint_bytes, BLOCK_BYTES):
            yield min(BLOCK_BYTES, self.checkpoint_bytes - at)

    def blocks_of(self, index: int) -> range:
        """The numbers of the blocks of `ranges[index]`, one per stage."""
        n_stages = len(self.manifest.stages)
        return range(index * n_stages, (index + 1) * n_stages)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)

    @property
    def table_offset(self) -> int:
        return self.blocks[-1].offset + self.blocks[-1].padded

    @property
    def table_bytes(self) -> int:
        return self.n_blocks * DIGEST_BYTES

    @property
    def foot_offset(self) -> int:
        return self.table_offset + pad_to_page(self.table_bytes)

    @property
    def file_bytes(self) -> int:
        return self.foot_offset + PAGE


def most_manifest_bytes(most_tokens: int) -> int:
    """No manifest of at most `most_tokens` tokens is longer: what may be read before anything of it is known."""
    segments = most_tokens // SEGMENT_TOKENS + 2
    beside = segments * _MANIFEST_BYTES_PER_SEGMENT + _MANIFEST_BYTES_BESIDE
    return min(MAX_MANIFEST_BYTES, most_tokens * _MANIFEST_BYTES_PER_TOKEN + beside)


def plan_session(manifest: Manifest, *, manifest_bytes: int, kv: str, checkpoint_bytes: int = 0) -> SessionPlan:
    """The layout of a session of a valid manifest of `manifest_bytes`. DamagedFile when it would have too many or too
    large blocks."""
    _require(0 <= checkpoint_bytes <= MAX_CHECKPOINT_BYTES, "checkpoint_bytes", f"{checkpoint_bytes} is out of range")
    _require(0 < len(kv.encode()) <= MAX_KV_BYTES and kv.isprintable(), "kv", "no name of K/V types")
    _require(not manifest.other_splits, "other_splits", "all blocks of a session have the same stages")
    most_tokens = min(manifest.block_tokens, SEGMENT_TOKENS, manifest.n_tokens)
    for shape in manifest.stages:
        length = shape.payload_bytes(most_tokens)
        _require(length <= BLOCK_BYTES, "block_tokens", f"a block has {length} bytes, more than {BLOCK_BYTES}")
    starts = (0, *manifest.cuts[:-1])
    n_ranges = sum(-(-(b - a) // manifest.block_tokens) for a, b in zip(starts, manifest.cuts, strict=True))
    n_blocks = n_ranges * len(manifest.stages) + -(-checkpoint_bytes // BLOCK_BYTES)
    _require(n_blocks <= MAX_SESSION_BLOCKS, "blocks", f"{n_blocks} blocks, more than {MAX_SESSION_BLOCKS}")
    return SessionPlan(manifest=manifest, manifest_bytes=manifest_bytes, kv=kv, checkpoint_bytes=checkpoint_bytes)


# --------------------------------------------------------------------------------------------------------- first page


def encode_head(plan: SessionPlan) -> bytes:
    """Exactly one page."""
    sizes = (plan.manifest_bytes, plan.n_blocks, plan.checkpoint_bytes, plan.file_bytes)
    return _sealed(_HEAD.pack(_HEAD_MAGIC, SESSION_VERSION, *sizes, plan.kv.encode()))


def decode_head(page: bytes | memoryview) -> SessionHead:
    """The inverse of `encode_head`. Every number is in range afterwards; whether they fit is for `check_head`."""
    content = _unsealed(page, _HEAD_MAGIC, _HEAD.size, "head")
    _, version, manifest_bytes, n_blocks, checkpoint_bytes, file_bytes, kv = _HEAD.unpack_from(content)
    problem = f"{version} instead of {SESSION_VERSION}"
    if version > SESSION_VERSION:
        problem = f"{version} is newer than this Strata knows ({SESSION_VERSION}); use the Strata that wrote it"
    _require(version == SESSION_VERSION, "version", problem)
    _require(0 < manifest_bytes <= MAX_MANIFEST_BYTES, "manifest_bytes", f"{manifest_bytes} is out of range")
    _require(0 < n_blocks <= MAX_SESSION_BLOCKS, "blocks", f"{n_blocks} is out of range")
    _require(checkpoint_bytes <= MAX_CHECKPOINT_BYTES, "checkpoint_bytes", f"{checkpoint_bytes} is out of range")
    name = kv.rstrip(b"\0")
    _require(name.isascii() and name.decode("ascii", "replace").isprintable() and bool(name), "kv", "no name")
    return SessionHead(
        manifest_bytes=manifest_bytes,
        n_blocks=n_blocks,
        checkpoint_bytes=checkpoint_bytes,
        file_bytes=file_bytes,
        kv=name.decode(),
    )


def check_head(head: SessionHead, plan: SessionPlan) -> None:
    """Raises DamagedFile when the numbers of the head are not those that follow from the manifest."""
    _require(head.n_blocks == plan.n_blocks, "blocks", f"{head.n_blocks} instead of {plan.n_blocks}")
    _require(head.file_bytes == plan.file_bytes, "file_bytes", f"{head.file_bytes} instead of {plan.file_bytes}")


# ---------------------------------------------------------------------------------------------------------- last page


def encode_table(digests: Sequence[bytes]) -> bytes:
    return b"".join(digests)


def decode_table(table: bytes) -> tuple[bytes, ...]:
    return tuple(table[at : at + DIGEST_BYTES] for at in range(0, len(table), DIGEST_BYTES))


def encode_foot(*, file_bytes: int, head: bytes, manifest: bytes, table: bytes) -> bytes:
    """Exactly one page, of the head page, the encoded manifest and the table as they lie in the file, unpadded."""
    return _sealed(_FOOT.pack(_FOOT_MAGIC, file_bytes, digest(head), digest(manifest), digest(table)))


def decode_foot(page: bytes | memoryview) -> SessionFoot:
    content = _unsealed(page, _FOOT_MAGIC, _FOOT.size, "foot")
    _, file_bytes, head, manifest, table = _FOOT.unpack_from(content)
    return SessionFoot(file_bytes=file_bytes, head_digest=head, manifest_digest=manifest, table_digest=table)


def _sealed(fields: bytes) -> bytes:
    content = fields.ljust(PAGE - DIGEST_BYTES, b"\0")
    return content + digest(content)


def _unsealed(page: bytes | memoryview, magic: bytes, fields: int, part: str) -> bytes:
    _require(len(page) == PAGE, part, f"{len(page)} bytes instead of {PAGE}")
    content = bytes(page[: PAGE - DIGEST_BYTES])
    _require(content.startswith(magic), "magic", f"{content[:8]!r} instead of {magic!r}: no session of Strata")
    _require(digest(content) == bytes(page[PAGE - DIGEST_BYTES :]), "checksum", f"the {part} does not match it")
    _require(not any(content[fields:]), "padding", f"of the {part} is not zero")
    return content
