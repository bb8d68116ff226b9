"""Which stored conversations leave a level when its budget is short, and which are too old: oldest first, none leased.

Pure: takes what the index knows, returns a plan; the cache executes it. Whether what leaves is handed down, archived or
deleted is the cascade's concern.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from strata.types import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictable:
    """One stored conversation as the eviction rule sees it. `stamp_s`: when it was last written, seconds since 1970.

    `rank`: lower ones go first, whatever their age.
    """

    serial: int
    stamp_s: float
    manifest_bytes: int
    keys: tuple[Key, ...]
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """What must leave, and by how many bytes the level stays over its budget all the same.

    `keys`: the segments that nothing names afterwards. `loose`: those of them that nothing names even now.
    """

    serials: tuple[int, ...]
    keys: tuple[Key, ...]
    loose: tuple[Key, ...]
    freed_bytes: int
    short_bytes: int


NOTHING_TO_EVICT = Eviction(serials=(), keys=(), loose=(), freed_bytes=0, short_bytes=0)


def plan_eviction(
    *,
    conversations: Iterable[Evictable],
    segment_bytes: Mapping[Key, int],
    references: Mapping[Key, int],
    leased: Collection[Key],
    used_bytes: int,
    need_bytes: int,
    budget_bytes: int,
    too_many: int = 0,
    coming: Collection[Key] = (),
) -> Eviction:
    """Free bytes until used + need <= budget: unreferenced segments first, then whole conversations.

    At least `too_many` conversations go. A segment goes with the last conversation that names it; one of `coming`,
    which a conversation on its way will name, does not. A conversation is spared while a segment that would go with it
    is leased (being read or written). Order: rank, oldest stamp, serial.
    """
    excess = used_bytes + need_bytes - budget_bytes
    serials: list[int] = []
    loose: list[Key] = []
    freed = 0
    if excess > 0:
        for key, n_bytes in segment_bytes.items():
            if freed >= excess:
                break
            if not references.get(key) and key not in leased and key not in coming:
                loose.append(key)
                freed += n_bytes
    keys = list(loose)
    remaining: dict[Key, int] = {}
    short = freed < excess or too_many > 0
    for entry in sorted(conversations, key=lambda e: (e.rank, e.stamp_s, e.serial)) if short else ():
        if freed >= excess and len(serials) >= too_many:
            break
        stay = (key for key in entry.keys if key in segment_bytes and key not in coming)
        last = [key for key in stay if remaining.get(key, references[key]) == 1]
        if any(key in leased for key in last):
            continue
        for key in entry.keys:
            remaining[key] = remaining.get(key, references.get(key, 0)) - 1
        serials.append(entry.serial)
        keys.extend(last)
        freed += entry.manifest_bytes + sum(segment_bytes[key] for key in last)
    return Eviction(
        serials=tuple(serials),
        keys=tuple(keys),
        loose=tuple(loose),
        freed_bytes=freed,
        short_bytes=max(0, excess - freed),
    )
