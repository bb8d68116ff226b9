"""What is kept outside the engine, and what of it RAM may let go.

Covers whether a state lies on a level or still in its slot, dropping RAM conversations by a plan, and what only RAM
has. It plans nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation
from strata.cache.ram import RamLevel
from strata.cache.story import Story
from strata.rules.eviction import Eviction
from strata.types import Key


class Kept:
    """Answers from the indexes of all levels. `ram` None: off."""

    def __init__(
        self,
        ram: RamLevel | None,
        disks: Sequence[DiskLevel],
        *,
        counters: CacheCounters,
        story: Story,
        clock: Callable[[], float],
    ) -> None:
        self.live: dict[int, tuple[Key, ...]] = {}
        """Per slot, the segments of the state that was parked last and still lies in it, and its last checkpoint."""
        self._ram = ram
        self._disks = tuple(disks)
        self._counters = counters
        self._story = story
        self._clock = clock

    def __repr__(self) -> str:
        return f"Kept({self._ram!r}, {list(self._disks)!r})"

    def anywhere(self, keys: Sequence[Key]) -> bool:
        """Whether a state that ends with this chain of segments lies outside the engine, whole.

        Behind the segments, checkpoints that must be there too.
        """
        return self.is_durable(keys) or (self._ram is not None and self._ram.index.stores(keys))

    def is_durable(self, keys: Sequence[Key]) -> bool:
        """The same on a disk level."""
        return any(disk.index.stores(keys) for disk in self._disks)

    def level_of(self, keys: Sequence[Key]) -> str | None:
        """The name of the fastest level that keeps such a state whole; None when none does."""
        if self._ram is not None and self._ram.index.stores(keys):
            return self._ram.name
        return next((disk.name for disk in self._disks if disk.index.stores(keys)), None)

    def is_live(self, keys: Sequence[Key]) -> bool:
        """Whether the state still lies in the slot that it was parked from."""
        return tuple(keys) in self.live.values()

    def only_in_ram(self) -> list[Conversation]:
        """What RAM keeps and no disk does, oldest first; nothing that is not owed."""
        if self._ram is None:
            return []
        owed = (c for c in self._ram.index.conversations() if c.serial not in self._ram.provisional)
        return sorted((c for c in owed if not self.is_durable(c.whole)), key=lambda c: (c.stamp_s, c.serial))

    def evict(self, plan: Eviction) -> int:
        """Drop RAM conversations; how many."""
        if self._ram is None:
            return 0
        for serial in plan.serials:
            gone = self._ram.index.conversation(serial)
            if serial in self._ram.provisional:
                verb, why = "drop", "nothing was owed to a cancelled request"
            elif self.is_durable(gone.whole):
                verb, why = "drop", "its copy on disk stays"
            elif self.is_live(gone.whole):
                verb, why = "drop", "it is in its slot still"
            else:
                verb, why = "delete", "the oldest of a level over its budget"
            self._story.tell(self._clock(), gone.conversation, verb, f"{len(gone.tokens)} tokens from ram: {why}")
        self._ram.drop(plan.serials)
        self._counters.ram_evictions += len(plan.serials)
        return len(plan.serials)
