"""In which split of the layers a level holds each segment of a conversation.

A segment's key does not depend on the split that it was written under, so one that is there is never written again: a
conversation that was continued under another split has segments of both.
"""

from __future__ import annotations

from collections.abc import Collection

from strata.cache.state import LevelIndex
from strata.store.format import Manifest
from strata.store.level import Level
from strata.types import Key


def as_held(index: LevelIndex, manifest: Manifest, *, but: Collection[Key] = ()) -> Manifest:
    """`manifest` with every segment in the split that the level holds it in.

    Segments in `but`, and those that it does not hold, stay in the split that the manifest says.
    """
    held = (None if key in but else index.held(key) for key in manifest.keys)
    return manifest.with_splits([manifest.stages_of(i) if one is None else one.stages for i, one in enumerate(held)])


def in_the_way(level: Level, index: LevelIndex, manifest: Manifest, key: Key, unusable: list[int] | None) -> list[int]:
    """The stages whose files must be set aside before a segment of `manifest` is written anew.

    `unusable`: those of a wrong size, of a segment that is known to be lost. What is left of a split into more stages
    would make the new files look incomplete; the others are replaced.
    """
    if unusable is None and not index.bytes_of(key):
        return []
    n_stages = len(manifest.stages_of(manifest.keys.index(key))) if key in manifest.keys else 0
    return sorted({*(unusable or ()), *(stage for stage in level.stages_of(key) if stage >= n_stages)})
