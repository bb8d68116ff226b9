"""In which split of the layers a level holds each segment of a conversation.

A segment's key does not depend on the split that it was written under, so one that is there is never written again
(docs/decisions/): a conversation that was continued under another split has segments of both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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


def in_the_way(level: Level, index: LevelIndex, key: Key, n_stages: int, unusable: Sequence[int]) -> list[int]:
    """The stages whose files must be set aside before the segment is written anew in `n_stages` files.

    `unusable`: those known to be of a wrong size. What is left of a split into more stages would make the new files
    look like another segment's; the others are replaced.
    """
    left = level.stages_of(key) if index.bytes_of(key) else []
    return sorted({*unusable, *(stage for stage in left if stage >= n_stages)})
