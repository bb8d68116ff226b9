"""What is in a level's directory: a walk, and its reading as manifests, segments and checkpoints.

Covers recognising every file by name and kind, decoding the manifests, and telling whole conversations from stale,
foreign and orphaned ones. It never changes anything on disk, and does not open the files of segments and checkpoints:
their headers and digests are checked when they are read.

A conversation is whole while its segments are: a lost checkpoint costs the positions up to the one before it, so it is
listed and the rest is served. Only when it has lost every checkpoint is it stale: a model that takes checkpoints can
resume nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strata.errors import DamagedFile
from strata.store.filesystem import LOCK_NAME, Entry, Filesystem
from strata.store.format import MAX_MANIFEST_BYTES, Manifest, decode_manifest, segment_file_bytes
from strata.store.names import (
    CHOICES_NAME,
    FOREIGN_FOLDERS,
    is_quarantined,
    is_temporary,
    parse_checkpoint_path,
    parse_manifest_name,
    parse_segment_path,
    serial_in,
)
from strata.types import Key, StageShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A level's files by path relative to its directory, and the directories that bear a file's name."""

    files: Mapping[str, Entry]
    misplaced: tuple[str, ...]

    @property
    def used_bytes(self) -> int:
        """What `du` counts for these files."""
        return sum(entry.allocated_bytes for entry in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFiles:
    """The files of one segment: (stage, size) in order, and what they take on disk."""

    sizes: tuple[tuple[int, int], ...]
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """The file of one checkpoint."""

    size: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCheckpoint:
    """A checkpoint that a manifest of this identity names and that cannot be used."""

    serial: int
    position: int
    key: Key
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A conversation of this identity that is whole, but for checkpoints that were lost; by names and sizes alone."""

    manifest: Manifest
    allocated_bytes: int  # of the manifest file alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A conversation of another identity: no hit, but it takes space and may be dropped like any other."""

    serial: int
    stamp_s: float
    keys: tuple[Key, ...]  # of segments, then of checkpoints
    allocated_bytes: int  # of the manifest file alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A manifest that cannot be served whole. `manifest` is None when it could not be decoded."""

    serial: int
    reason: str
    manifest: Manifest | None
    allocated_bytes: int  # of the manifest file alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a level's directory held when it was scanned."""

    manifests: tuple[Stored, ...]  # oldest stamp first, ties by serial
    foreign: tuple[Foreign, ...]  # in the same order
    stale: tuple[Stale, ...]  # by serial
    segments: Mapping[Key, SegmentFiles]
    splits: Mapping[Key, tuple[StageShape, ...]]  # how the layers of each whole segment are split
    checkpoints: Mapping[Key, CheckpointFile]
    lost_checkpoints: tuple[LostCheckpoint, ...]  # of whole and stale conversations alike
    orphans: tuple[Key, ...]  # segments and checkpoints that no readable manifest names
    temporary: tuple[str, ...]  # paths relative to the level's directory, as in the next two
    bad: tuple[str, ...]
    other: tuple[str, ...]
    used_bytes: int

    def __repr__(self) -> str:
        what = ("manifests", "foreign", "stale", "segments", "checkpoints", "lost_checkpoints", "orphans")
        counts = (f"{name} {len(getattr(self, name))}" for name in (*what, "temporary", "bad", "other"))
        return f"Scan({', '.join(counts)}, {self.used_bytes} bytes)"


def walk(fs: Filesystem, root: Path) -> Walk:
    """List every file below `root`, not following links and without the archive and the system prompts there.

    Names that vanish meanwhile are left out.
    """
    files: dict[str, Entry] = {}
    misplaced: list[str] = []
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            entries = fs.entries(root / below)
        except FileNotFoundError:
            continue
        for entry in entries:
            path = below + entry.name
            if entry.kind != "dir":
                files[path] = entry
                continue
            if path in FOREIGN_FOLDERS:
                continue
            waiting.append(path + "/")
            if parse_manifest_name(path) or parse_segment_path(path) or parse_checkpoint_path(path):
                misplaced.append(path)
    return Walk(files=files, misplaced=tuple(misplaced))


def read_scan(fs: Filesystem, root: Path, found: Walk, identity: bytes) -> Scan:
    """Sort what a walk found: see `Scan`. Reads the manifests, nothing else."""
    groups = _group(found)
    segments = _segment_files(found, groups.segments)
    reads = {path: _read_manifest(fs, root / path, serial_in(path)) for path in groups.manifests}
    splits = _splits([read for read in reads.values() if isinstance(read, Manifest)], segments)
    checkpoints = {key: _checkpoint_file(found.files[path]) for key, path in groups.checkpoints}
    manifests: list[Stored] = []
    foreign: list[Foreign] = []
    stale: list[Stale] = []
    lost: list[LostCheckpoint] = []
    named: set[Key] = set()
    for path, read in reads.items():
        serial, allocated = serial_in(path), found.files[path].allocated_bytes
        if isinstance(read, str):
            stale.append(Stale(serial=serial, reason=read, manifest=None, allocated_bytes=allocated))
            continue
        checkpoint_keys = read.checkpoint_keys
        named.update(read.keys, checkpoint_keys)
        lost_here = _lost_checkpoints(read, checkpoint_keys, checkpoints)
        problem = _incomplete(read, segments, splits, lost_here)
        lost.extend(lost_here if read.identity == identity else ())
        if problem:
            stale.append(Stale(serial=serial, reason=problem, manifest=read, allocated_bytes=allocated))
        elif read.identity != identity:
            keys = (*read.keys, *checkpoint_keys)
            foreign.append(Foreign(serial=serial, stamp_s=read.stamp_s, keys=keys, allocated_bytes=allocated))
        else:
            manifests.append(Stored(manifest=read, allocated_bytes=allocated))
    return Scan(
        manifests=tuple(sorted(manifests, key=lambda stored: (stored.manifest.stamp_s, stored.manifest.serial))),
        foreign=tuple(sorted(foreign, key=lambda entry: (entry.stamp_s, entry.serial))),
        stale=tuple(sorted(stale, key=lambda entry: entry.serial)),
        segments=segments,
        splits=splits,
        checkpoints=checkpoints,
        lost_checkpoints=tuple(sorted(lost, key=lambda one: (one.serial, one.position))),
        orphans=tuple(sorted((segments.keys() | checkpoints.keys()) - named)),
        temporary=tuple(groups.temporary),
        bad=tuple(groups.bad),
        other=tuple(groups.other),
        used_bytes=found.used_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Paths by what their names say they are."""

    manifests: list[str] = field(default_factory=list)
    segments: list[tuple[Key, int, str]] = field(default_factory=list)
    checkpoints: list[tuple[Key, str]] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def _group(found: Walk) -> _Groups:
    groups = _Groups()
    groups.other.extend(found.misplaced)
    for path, entry in found.files.items():
        segment = parse_segment_path(path)
        if segment is not None and entry.kind == "file":
            groups.segments.append((*segment, path))
        elif (checkpoint := parse_checkpoint_path(path)) is not None and entry.kind == "file":
            groups.checkpoints.append((checkpoint, path))
        elif parse_manifest_name(path):
            groups.manifests.append(path)
        elif is_temporary(path):
            groups.temporary.append(path)
        elif is_quarantined(path):
            groups.bad.append(path)
        elif path not in (LOCK_NAME, CHOICES_NAME):
            groups.other.append(path)
    return groups


def _segment_files(found: Walk, segments: Sequence[tuple[Key, int, str]]) -> dict[Key, SegmentFiles]:
    files: dict[Key, list[tuple[int, Entry]]] = {}
    for key, stage, path in segments:
        files.setdefault(key, []).append((stage, found.files[path]))
    result = {}
    for key, stages in files.items():
        sizes = tuple(sorted((stage, entry.size) for stage, entry in stages))
        result[key] = SegmentFiles(sizes=sizes, allocated_bytes=sum(entry.allocated_bytes for _, entry in stages))
    return result


def _splits(manifests: Sequence[Manifest], segments: Mapping[Key, SegmentFiles]) -> dict[Key, tuple[StageShape, ...]]:
    """The split of each segment whose files have the names and sizes that a manifest says.

    A segment that was lost may have been written anew under another split. Then manifests that are older say the one
    before: the newest is asked first.
    """
    splits: dict[Key, tuple[StageShape, ...]] = {}
    for manifest in sorted(manifests, key=lambda manifest: manifest.serial, reverse=True):
        for i, segment in enumerate(manifest.segments):
            files, stages = segments.get(segment.key), manifest.stages_of(i)
            if files is None or segment.key in splits:
                continue
            sizes = (segment_file_bytes(shape, segment.start, segment.end, manifest.block_tokens) for shape in stages)
            if files.sizes == tuple(enumerate(sizes)):
                splits[segment.key] = stages
    return splits


def _checkpoint_file(entry: Entry) -> CheckpointFile:
    return CheckpointFile(size=entry.size, allocated_bytes=entry.allocated_bytes)


def _read_manifest(fs: Filesystem, path: Path, serial: int) -> Manifest | str:
    """The manifest, or why it cannot be used."""
    try:
        manifest = decode_manifest(fs.read(path, MAX_MANIFEST_BYTES))
    except (DamagedFile, OSError) as error:
        return str(error)
    if manifest.serial != serial:
        return f"serial: the file is named {serial}, its content says {manifest.serial}"
    return manifest


def _lost_checkpoints(
    manifest: Manifest, keys: Sequence[Key], files: Mapping[Key, CheckpointFile]
) -> tuple[LostCheckpoint, ...]:
    lost: list[LostCheckpoint] = []
    for entry, key in zip(manifest.checkpoints, keys, strict=True):
        file = files.get(key)
        if file is None or file.size != entry.file_bytes:
            reason = "is missing" if file is None else f"has {file.size} bytes instead of {entry.file_bytes}"
            lost.append(LostCheckpoint(serial=manifest.serial, position=entry.position, key=key, reason=reason))
    return tuple(lost)


def _incomplete(
    manifest: Manifest,
    segments: Mapping[Key, SegmentFiles],
    splits: Mapping[Key, tuple[StageShape, ...]],
    lost_checkpoints: Sequence[LostCheckpoint],
) -> str:
    """Why a manifest cannot be served whole; empty when it can, but for some of its checkpoints."""
    for i, key in enumerate(manifest.keys if manifest.stages else ()):
        if key not in splits:
            problem = "has the wrong size or number of stages" if key in segments else "is missing"
            return f"segment {i} of {len(manifest.keys)} {problem}"
    if manifest.checkpoints and len(lost_checkpoints) == len(manifest.checkpoints):
        last = lost_checkpoints[-1]
        return f"no checkpoint of it can be used; the last, at {last.position}, {last.reason}"
    return ""
