"""Which disk level the next write goes to: the fastest one that can take it.

That is the write level as long as it works. While it fails, has no space on its volume or refuses what is new, or for a
state that is larger than all of it, writes go past it to the level below. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from strata.cache.disk import DiskLevel
from strata.types import Key


class WriteLevels:
    """The disk levels from fast to slow. `first`: the write level, None without any."""

    def __init__(self, disks: Sequence[DiskLevel]) -> None:
        self._disks = tuple(disks)
        self.first = self._disks[0] if self._disks else None

    def __repr__(self) -> str:
        return f"WriteLevels({' -> '.join(disk.name for disk in self._disks)})"

    def choose(self, sizes: Mapping[Key, int]) -> DiskLevel | None:
        """The level for a state with files of these sizes; when none takes them, that whose refusal is told."""
        return self.taker(sizes) or next((disk for disk in self._disks if disk.health.usable), self.first)

    def taker(self, sizes: Mapping[Key, int], *, but: Collection[DiskLevel] = ()) -> DiskLevel | None:
        """The fastest level that takes them, of all `but` those that failed to; None when none does.

        One whose whole budget is smaller is passed too. One without space is told to hand down for the next.
        """
        for disk in self._disks:
            n_bytes = sum(n for key, n in sizes.items() if not disk.index.holds(key))
            if disk in but or sum(sizes.values()) > disk.limits.budget_bytes:
                continue
            if disk.takes(n_bytes):
                return disk
            if disk.health.usable:
                disk.hand_down(n_bytes)
        return None
