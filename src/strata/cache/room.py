"""What must leave a disk level so that it keeps its budget, and what is beside the budget: plans from the index alone.

A conversation that is alone larger than the whole budget pushes nothing out, and only the next such one pushes it out:
the newest is the level's guest, unless a level below can take it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from strata.cache.entries import Conversation
from strata.cache.state import LevelIndex
from strata.rules.eviction import Eviction


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A level as it is now. `coming_bytes`: of guests that are being written. `moving`, `stuck`: see DiskLevel."""

    index: LevelIndex
    budget_bytes: int
    used_bytes: int
    coming_bytes: int
    moving: Collection[int]
    stuck: Collection[int]
    is_last: bool

    @property
    def is_over_budget(self) -> bool:
        """Whether the level takes more than it may, but for what is beside the budget."""
        return self.used_bytes > self.budget_bytes and self._counted_bytes(self._guest()) > self.budget_bytes

    def plan(self, need_bytes: int) -> Eviction:
        """What must leave so that `need_bytes` more fit: those too large first, then the oldest."""
        guest = self._guest()

        def rank(entry: Conversation) -> int | None:
            if entry.serial in self.stuck or entry is guest:
                return None
            return 0 if own_bytes(self.index, entry) <= self.budget_bytes else -1

        return self.index.plan_eviction(
            used_bytes=self._counted_bytes(guest),
            need_bytes=need_bytes,
            budget_bytes=self.budget_bytes,
            leaving=self.moving,
            rank=rank,
        )

    def _guest(self) -> Conversation | None:
        still_here = (c for c in self.index.conversations() if c.serial not in self.moving)
        too_large = (c for c in still_here if own_bytes(self.index, c) > self.budget_bytes)
        newest = max(too_large, key=lambda c: (c.stamp_s, c.serial), default=None)
        return newest if newest is not None and (self.is_last or newest.serial in self.stuck) else None

    def _counted_bytes(self, guest: Conversation | None) -> int:
        beside = self.coming_bytes + (own_bytes(self.index, guest) if guest is not None else 0)
        return self.used_bytes - beside


def own_bytes(index: LevelIndex, entry: Conversation) -> int:
    """What a conversation takes on disk, shared or not."""
    return index.bytes_named_by([entry.serial], alone=False)
