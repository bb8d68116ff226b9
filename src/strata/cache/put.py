"""Values around a disk level: what it may take, a write under way and its outcome, and why an entry leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from strata.store.format import Manifest
from strata.types import Key

Leaving = Literal["superseded", "compacted", "budget", "age"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """What a level may take. `rejects`: a full one refuses what is new instead of letting its oldest go.

    `divergence_tokens`: see LevelIndex.compacted_by; 0 = never. `max_age_s`: 0 = never by time. `is_archive`: nothing
    supersedes anything, and of each conversation the newest `keep` states stay (0 = all). `checkpoints`: most that a
    state keeps.
    """

    budget_bytes: int
    rejects: bool = False
    divergence_tokens: int = 0
    max_age_s: float = 0.0
    is_archive: bool = False
    keep: int = 0
    checkpoints: int = 6


@dataclass(eq=False, slots=True, kw_only=True)
class Put:
    """A write under way. `manifest`: of all that is to be written; its serial and stamp are given at the commit.

    `missing`: keys of its segments and checkpoints that this write must bring. `unwritten`: those of them that are not
    written yet, with their bytes. `whole`: nothing less than all of it may become durable. `born`: see Conversation.
    `guest_bytes`: what it brings, if it is larger than the level's whole budget.
    """

    manifest: Manifest
    ticket: int
    missing: frozenset[Key]
    whole: bool
    born: int = 0
    guest_bytes: int = 0
    unwritten: dict[Key, int] = field(default_factory=dict)

    @property
    def unwritten_bytes(self) -> int:
        return sum(self.unwritten.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOutcome:
    """`durable`: the keys that the level now names for it, in full or a prefix. `reason`: why not all, else empty.

    `serial`: of what became durable.
    """

    durable: frozenset[Key]
    tokens: int
    reason: str
    serial: int = 0
