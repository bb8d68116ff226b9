"""Small conversations with payloads that follow from their keys, and the ways to store and verify them.

Covers what the tests of the store share. It goes through the public operations of `Level` only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from blake3 import blake3

from strata.rules import prefix
from strata.store.format import (
    CheckpointEntry,
    CheckpointHeader,
    FileHeader,
    Manifest,
    SegmentHeader,
    plan_checkpoint,
    plan_segment,
    segment_file_bytes,
)
from strata.store.fs import aligned_buffer
from strata.store.level import Level, PendingFile
from strata.types import PAGE, Key, Segment, StageShape, pad_to_page

IDENTITY = bytes(range(32))
OTHER_IDENTITY = bytes(32)
ROOT = prefix.root_key(IDENTITY, "")
STAGES = (
    StageShape(layer_first=0, layer_end=2, base_bytes=24, token_bytes=52),
    StageShape(layer_first=2, layer_end=3, base_bytes=0, token_bytes=100),
)
BLOCK_TOKENS = 100


def conversation(
    serial: int,
    n_tokens: int = 300,
    *,
    seed: int = 1,
    shared: int = 0,
    frontier: int | None = None,
    stamp_s: float = 100.0,
    identity: bytes = IDENTITY,
    stages: tuple[StageShape, ...] = STAGES,
    block_tokens: int = BLOCK_TOKENS,
    checkpoints: Iterable[tuple[int, int]] = (),
) -> Manifest:
    """A manifest of `n_tokens` random tokens; the first `shared` are the same whatever the seed.

    `checkpoints`: positions and sizes. Without `stages` there are no blocks of rows either.
    """
    tokens = np.random.default_rng(seed).integers(0, 50_000, n_tokens).astype("<i4")
    tokens[:shared] = np.arange(shared)
    ends = prefix.cuts(n_tokens, frontier)
    segments = prefix.chain(ROOT, tokens, ends)
    return Manifest(
        serial=serial,
        identity=identity,
        root=ROOT,
        conversation=prefix.conversation_key(ROOT, tokens, ()),
        tokens=tokens.tobytes(),
        frontier=frontier,
        cuts=ends,
        keys=tuple(segment.key for segment in segments),
        file_bytes=tuple(
            sum(segment_file_bytes(shape, s.start, s.end, block_tokens) for shape in stages) for s in segments
        ),
        stages=stages,
        block_tokens=block_tokens if stages else 0,
        model_name="sample model",
        created_s=50.0,
        stamp_s=stamp_s,
        checkpoints=tuple(CheckpointEntry(position, n_bytes) for position, n_bytes in checkpoints),
    )


def payload(header: FileHeader, block: int, length: int) -> bytes:
    """What the block of a file holds: follows from its place alone."""
    stage = header.stage if isinstance(header, SegmentHeader) else 255
    seed = header.key + bytes((stage, block))
    return blake3(seed).digest(length=length) if length else b""


def plans(manifest: Manifest, segment: Segment) -> list[SegmentHeader]:
    """The planned headers of one segment, one per stage."""
    n = len(manifest.stages)
    return [
        plan_segment(segment, stage=i, n_stages=n, shape=shape, block_tokens=manifest.block_tokens)
        for i, shape in enumerate(manifest.stages)
    ]


def checkpoint_plans(manifest: Manifest) -> list[CheckpointHeader]:
    """The planned headers of its checkpoints, in blocks of one page."""
    pairs = zip(manifest.checkpoints, manifest.checkpoint_keys, strict=True)
    return [plan_checkpoint(key, entry.position, entry.n_bytes, block_bytes=PAGE) for entry, key in pairs]


def payloads(header: FileHeader) -> tuple[memoryview, ...]:
    """The payloads of a planned file in aligned, padded memory whose padding is not clean."""
    views = []
    for i, block in enumerate(header.blocks):
        view = aligned_buffer(pad_to_page(block.length))
        view[:] = b"\xaa" * len(view)
        view[: block.length] = payload(header, i, block.length)
        views.append(view)
    return tuple(views)


def write_segments(level: Level, manifest: Manifest, without: Iterable[Key] = ()) -> list[PendingFile]:
    """Write all segments and checkpoints of a conversation but some, under temporary names."""
    skipped = set(without)
    segments = (header for segment in manifest.segments for header in plans(manifest, segment))
    headers = (*segments, *checkpoint_plans(manifest))
    return [level.write_segment(header, payloads(header)) for header in headers if header.key not in skipped]


def put(level: Level, manifest: Manifest, without: Iterable[Key] = ()) -> int:
    """Store a conversation, in the right order; returns what the manifest takes on disk."""
    pending = write_segments(level, manifest, without)
    try:
        level.publish(pending)
        return level.put_manifest(manifest)
    except BaseException:
        level.discard(pending)
        raise


def verify(level: Level, manifest: Manifest) -> None:
    """Read every block of a conversation; AssertionError, DamagedFile or OSError when anything is not as stored."""
    for segment in manifest.segments:
        for planned in plans(manifest, segment):
            header = level.read_header(segment.key, planned.stage)
            assert header.same_geometry(planned)
            verify_blocks(level, header)
    for entry, key in zip(manifest.checkpoints, manifest.checkpoint_keys, strict=True):
        checkpoint = level.read_checkpoint_header(key)
        assert (checkpoint.position, checkpoint.n_bytes) == (entry.position, entry.n_bytes)
        verify_blocks(level, checkpoint)


def verify_blocks(level: Level, header: FileHeader) -> None:
    """Read every block of a file; like `verify`."""
    for i, block in enumerate(header.blocks):
        view = aligned_buffer(pad_to_page(block.length))
        level.read_block(header, i, view)
        assert view[: block.length] == payload(header, i, block.length)
        assert not any(view[block.length :])


def serials(level: Level) -> list[int]:
    """The serials of the whole conversations of our identity, oldest stamp first."""
    return [stored.manifest.serial for stored in level.scan(IDENTITY).manifests]


def files_below(root: Path) -> dict[str, bytes]:
    """Every regular file of a real directory but the lock, with its content."""
    found = (path for path in root.rglob("*") if path.is_file() and path.name != "strata.lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}
