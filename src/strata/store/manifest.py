"""The manifest of a stored conversation: pure encode and decode.

A manifest is `magic, version, body length, xxh3-128 of the body, body`; the body is msgpack. Version 1 had no
checkpoints; it is still read. Version 3 adds segments that were written under other splits of the layers than the
manifest; one without such is still written as version 2.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from strata.errors import DamagedFile
from strata.rules import prefix
from strata.store.checkpoint_header import MAX_CHECKPOINT_BYTES, checkpoint_file_bytes
from strata.store.encoding import MAX_TOKENS, check_preamble, check_shape, digest, require
from strata.store.names import MAX_SERIAL, MAX_STAGES
from strata.store.segment_header import segment_file_bytes
from strata.types import MIB, SEGMENT_TOKENS, Key, Segment, StageShape, Tokens

MANIFEST_VERSION = 3
MAX_MANIFEST_BYTES = 256 * MIB
MAX_NAME_CHARS = 1024
MAX_CHECKPOINTS = 4096
MAX_SPLITS = 255

_MAGIC = b"strata-m"
_HEAD = struct.Struct("<8sQQ16s")  # magic, version, body length, digest of the body
_CHECKPOINT = np.dtype([("position", "<u4"), ("n_bytes", "<u8")])


class CheckpointEntry(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that the conversation has: at `position`, with a payload of `n_bytes`."""

    position: int
    n_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of its file."""
        return checkpoint_file_bytes(self.n_bytes)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One stored conversation: what it holds, under which identity, and the keys of its segments.

    Without stages (a model without rows) the segments have keys but no files: checkpoints are all there is. The files
    of a segment may be older than the manifest, and of another split of the layers: `stages_of` says which.
    """

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
    checkpoints: tuple[CheckpointEntry, ...] = ()  # ascending by position
    other_splits: tuple[tuple[StageShape, ...], ...] = ()
    splits: tuple[int, ...] = ()  # one per cut: 0 = `stages`, n = other_splits[n - 1]; empty: all of them 0

    def __repr__(self) -> str:
        parts = f"{len(self.keys)} segments, {len(self.stages)} stages, {len(self.checkpoints)} checkpoints"
        return f"Manifest({self.serial}, {self.n_tokens} tokens, {parts})"

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

    def stages_of(self, index: int) -> tuple[StageShape, ...]:
        """The stages of the files of segment `index`."""
        split = self.splits[index] if self.splits else 0
        return self.other_splits[split - 1] if split else self.stages

    def with_splits(self, stages: Sequence[tuple[StageShape, ...]]) -> Manifest:
        """The same, of segments whose files have these stages: one entry per segment."""
        if all(own == self.stages_of(i) for i, own in enumerate(stages)):
            return self
        known = tuple(dict.fromkeys((self.stages, *stages)))
        starts = (0, *self.cuts)
        sizes = (
            sum(segment_file_bytes(shape, start, end, self.block_tokens) for shape in own)
            for own, start, end in zip(stages, starts, self.cuts, strict=False)
        )
        return msgspec.structs.replace(
            self,
            other_splits=known[1:],
            splits=tuple(map(known.index, stages)) if known[1:] else (),
            file_bytes=tuple(sizes),
        )

    @property
    def checkpoint_keys(self) -> tuple[Key, ...]:
        """One per checkpoint: rules.prefix.checkpoint_key of its position. Hashes less than a segment for each."""
        return tuple(prefix.checkpoint_key_at(self._chain_key(entry.position)) for entry in self.checkpoints)

    def _chain_key(self, position: int) -> Key:
        """The key that `chain(root, tokens[:position], cuts(position))` ends with."""
        key, length = self.place_of(position)
        return prefix.next_key(key, self.token_ids[position - length : position]) if length else key

    def place_of(self, position: int) -> tuple[Key, int]:
        """The key of the last full segment that ends at or before `position`, or the root; the tokens behind it."""
        full, length = divmod(position, SEGMENT_TOKENS)
        return self.keys[full - 1] if full else self.root, length

    @property
    def objects(self) -> dict[Key, int]:
        """All that it names, and what the files of each have in bytes: segments in order, then checkpoints."""
        sizes = (*self.file_bytes, *(entry.file_bytes for entry in self.checkpoints))
        return dict(zip((*self.keys, *self.checkpoint_keys), sizes, strict=True))

    def without_checkpoints(self, positions: Collection[int]) -> Manifest:
        """The same without the checkpoints at these positions."""
        left = tuple(entry for entry in self.checkpoints if entry.position not in positions)
        return self if len(left) == len(self.checkpoints) else msgspec.structs.replace(self, checkpoints=left)

    def first(self, n_segments: int) -> Manifest:
        """The manifest of the first `n_segments` alone, with the checkpoints up to their end."""
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
            checkpoints=tuple(entry for entry in self.checkpoints if entry.position <= end),
            splits=self.splits[:n_segments],
        )


class _BodyV1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class _BodyV2(_BodyV1, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checkpoints: bytes  # u32 position and u64 size each


class _BodyV3(_BodyV2, frozen=True, kw_only=True, forbid_unknown_fields=True):
    other_splits: tuple[tuple[StageShape, ...], ...]
    splits: bytes  # u8 each


_BODIES: dict[int, type[_BodyV1]] = {1: _BodyV1, 2: _BodyV2, 3: _BodyV3}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest. Raises DamagedFile for one that `decode_manifest` would refuse."""
    _check_manifest(manifest)
    columns = {
        "cuts": np.asarray(manifest.cuts, dtype="<u4").tobytes(),
        "keys": b"".join(manifest.keys),
        "file_bytes": np.asarray(manifest.file_bytes, dtype="<u8").tobytes(),
        "checkpoints": np.array([(c.position, c.n_bytes) for c in manifest.checkpoints], _CHECKPOINT).tobytes(),
    }
    fields = {**msgspec.structs.asdict(manifest), **columns, "splits": bytes(manifest.splits)}
    version = 3 if manifest.other_splits else 2
    kind = _BODIES[version]
    body = msgspec.msgpack.encode(kind(**{name: fields[name] for name in kind.__struct_fields__}))
    head = _HEAD.pack(_MAGIC, version, len(body), digest(body))
    require(len(head) + len(body) <= MAX_MANIFEST_BYTES, "length", f"manifest above {MAX_MANIFEST_BYTES} bytes")
    return head + body


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of `encode_manifest`. Raises DamagedFile naming the field at fault."""
    version = check_preamble(data, _MAGIC, MANIFEST_VERSION, _HEAD.size)
    _, _, length, expected = _HEAD.unpack_from(data)
    actual = len(data) - _HEAD.size
    require(length == actual, "length", f"says {length} bytes, {actual} are there")
    body = memoryview(data)[_HEAD.size :]
    require(digest(body) == expected, "checksum", "the content does not match it")
    try:
        raw = msgspec.msgpack.decode(body, type=_BODIES[version])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedFile(f"body: {error}", field=_field_of(str(error))) from error
    packed = raw.checkpoints if isinstance(raw, _BodyV2) else b""
    most = MAX_CHECKPOINTS * _CHECKPOINT.itemsize
    require(len(packed) <= most, "checkpoints", f"{len(packed)} bytes of entries, more than {most}")
    for name, size, width in (
        ("cuts", len(raw.cuts), 4),
        ("keys", len(raw.keys), prefix.KEY_BYTES),
        ("file_bytes", len(raw.file_bytes), 8),
        ("checkpoints", len(packed), _CHECKPOINT.itemsize),
    ):
        require(size % width == 0, name, f"{size} bytes are not a whole number of {width}-byte items")
    keys = (Key(raw.keys[i : i + prefix.KEY_BYTES]) for i in range(0, len(raw.keys), prefix.KEY_BYTES))
    columns = {
        "cuts": tuple(np.frombuffer(raw.cuts, "<u4").tolist()),
        "keys": tuple(keys),
        "file_bytes": tuple(np.frombuffer(raw.file_bytes, "<u8").tolist()),
        "checkpoints": tuple(CheckpointEntry(*row) for row in np.frombuffer(packed, _CHECKPOINT).tolist()),
    }
    if isinstance(raw, _BodyV3):
        columns["splits"] = tuple(raw.splits)
    manifest = Manifest(**{**msgspec.structs.asdict(raw), **columns})
    _check_manifest(manifest)
    return manifest


def _field_of(message: str) -> str:
    """The field that a msgspec error speaks of; "body" when it names none."""
    found = re.search(r"\$\.(\w+)|field `(\w+)`", message)
    return (found[1] or found[2]) if found else "body"


def _check_manifest(m: Manifest) -> None:
    require(0 < m.serial <= MAX_SERIAL, "serial", f"{m.serial} is out of range")
    for name in ("identity", "root", "conversation"):
        require(len(getattr(m, name)) == prefix.KEY_BYTES, name, f"not {prefix.KEY_BYTES} bytes")
    require(len(m.model_name) <= MAX_NAME_CHARS, "model_name", f"longer than {MAX_NAME_CHARS} characters")
    for name in ("created_s", "stamp_s"):
        require(math.isfinite(getattr(m, name)) and getattr(m, name) >= 0, name, "not a time")
    require(len(m.tokens) % 4 == 0 and 0 < m.n_tokens <= MAX_TOKENS, "tokens", f"{len(m.tokens)} bytes of int32")
    require(m.frontier is None or 0 < m.frontier <= m.n_tokens, "frontier", f"{m.frontier} of {m.n_tokens} tokens")
    require(bool(m.stages or m.checkpoints), "stages", "neither stages nor checkpoints")
    _check_stages(m.stages, "stages")
    _check_splits(m)
    rows = 0 < m.block_tokens <= MAX_TOKENS if m.stages else m.block_tokens == 0
    require(rows, "block_tokens", f"{m.block_tokens} is out of range for {len(m.stages)} stages")
    require(m.cuts == prefix.cuts(m.n_tokens, m.frontier), "cuts", "not those of these tokens and this frontier")
    require(len(m.keys) == len(m.cuts), "keys", f"{len(m.keys)} keys for {len(m.cuts)} cuts")
    chain = prefix.chain(m.root, m.token_ids, m.cuts)
    require(m.keys == tuple(s.key for s in chain), "keys", "not the hash chain of these tokens")
    sizes = tuple(
        sum(segment_file_bytes(shape, s.start, s.end, m.block_tokens) for shape in m.stages_of(i))
        for i, s in enumerate(chain)
    )
    require(m.file_bytes == sizes, "file_bytes", "not the sizes that these segments have")
    require(len(m.checkpoints) <= MAX_CHECKPOINTS, "checkpoints", f"{len(m.checkpoints)}, at most {MAX_CHECKPOINTS}")
    for entry in m.checkpoints:
        require(0 < entry.position <= m.n_tokens, "checkpoints", f"position {entry.position} of {m.n_tokens} tokens")
        require(0 < entry.n_bytes <= MAX_CHECKPOINT_BYTES, "checkpoints", f"one of {entry.n_bytes} bytes")
    ascending = all(a.position < b.position for a, b in pairwise(m.checkpoints))
    require(ascending, "checkpoints", "their positions do not ascend")


def _check_stages(stages: Sequence[StageShape], field: str) -> None:
    """Those of one split: they ascend by layers; layers without rows lie in none."""
    require(len(stages) <= MAX_STAGES, field, f"{len(stages)} stages")
    for i, shape in enumerate(stages):
        check_shape(shape, field)
        first = stages[i - 1].layer_end if i else 0
        require(shape.layer_first >= first, field, f"stage {i} starts at layer {shape.layer_first}, before {first}")


def _check_splits(m: Manifest) -> None:
    others = m.other_splits
    require(len(others) <= MAX_SPLITS, "other_splits", f"{len(others)}, at most {MAX_SPLITS}")
    for stages in others:
        require(bool(stages and m.stages), "other_splits", "one without stages")
        _check_stages(stages, "other_splits")
    n_splits = len(m.keys) if others else 0
    require(len(m.splits) == n_splits, "splits", f"{len(m.splits)} instead of {n_splits}")
    require(max(m.splits, default=0) <= len(others), "splits", f"there are {len(others)} other splits")
