"""Scan -> index: what a level's directory held when it was opened. Reads and changes no file."""

from __future__ import annotations

import logging

from strata.cache.entries import Conversation
from strata.cache.state import LevelIndex
from strata.store.format import Manifest
from strata.store.scan import Scan, SegmentFiles
from strata.types import Key

log = logging.getLogger("strata.cache")

NO_FILES = SegmentFiles(sizes=(), allocated_bytes=0)
"""Those of a segment without stages."""


def load(index: LevelIndex, scan: Scan, identity: bytes, *, name: str, is_archive: bool) -> dict[Key, list[int]]:
    """Fill the index of the level `name`. Stale manifests serve up to their gap; foreign ones only age and take space.

    Gives the segments that cannot be used because their files have a wrong size, with the stages that are there. An
    archive may keep manifests without their segments.
    """
    unusable: dict[Key, list[int]] = {}
    for key, files in scan.segments.items():
        index.note_bytes(key, files.allocated_bytes)
    for key, file in scan.checkpoints.items():
        index.note_bytes(key, file.allocated_bytes)
    for lost in scan.lost_checkpoints if not is_archive else ():
        log.warning("%s: manifest %d: its checkpoint at %d %s", name, lost.serial, lost.position, lost.reason)
    for stored in scan.manifests:
        unusable |= _load_manifest(index, scan, stored.manifest, stored.allocated_bytes)
    for stale in scan.stale:
        if not is_archive:
            log.warning("%s: manifest %d is stale: %s; it is kept", name, stale.serial, stale.reason)
        if stale.manifest is not None and stale.manifest.identity == identity:
            unusable |= _load_manifest(index, scan, stale.manifest, stale.allocated_bytes)
    if scan.foreign:
        log.warning(
            "%s: %d conversations belong to another model, K/V type or flash attention: they are kept, and not used",
            name,
            len(scan.foreign),
        )
    for foreign in scan.foreign:
        index.add_conversation(
            Conversation.foreign(
                foreign.serial, foreign.keys, manifest_bytes=foreign.allocated_bytes, stamp_s=foreign.stamp_s
            )
        )
    return unusable


def _load_manifest(index: LevelIndex, scan: Scan, manifest: Manifest, allocated_bytes: int) -> dict[Key, list[int]]:
    ids = manifest.token_ids
    unusable: dict[Key, list[int]] = {}
    for segment in manifest.segments:
        files = scan.segments.get(segment.key) if manifest.stages else NO_FILES
        if files is None:
            continue
        stages = scan.splits.get(segment.key) if manifest.stages else ()
        if stages is None:
            unusable[segment.key] = [stage for stage, _ in files.sizes]
            continue
        index.add_segment(segment, ids[segment.start : segment.end], files.allocated_bytes, stages)
    for entry, key in zip(manifest.checkpoints, manifest.checkpoint_keys, strict=True):
        file = scan.checkpoints.get(key)
        if file is not None and file.size == entry.file_bytes:
            place = manifest.place_of(entry.position)
            index.add_checkpoint(key, file.allocated_bytes, n_bytes=entry.n_bytes, place=place)
    index.add_conversation(conversation_of(manifest, allocated_bytes))
    return unusable


def conversation_of(manifest: Manifest, manifest_bytes: int, *, born: int = 0) -> Conversation:
    """A stored manifest as the index knows it."""
    return Conversation(
        serial=manifest.serial,
        root=manifest.root,
        conversation=manifest.conversation,
        tokens=manifest.token_ids,
        frontier=manifest.frontier or 0,
        keys=manifest.keys,
        manifest_bytes=manifest_bytes,
        stamp_s=manifest.stamp_s,
        checkpoints=tuple(zip((c.position for c in manifest.checkpoints), manifest.checkpoint_keys, strict=True)),
        born=born,
    )
