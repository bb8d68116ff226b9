"""What reading and restoring cost on this machine, measured as it goes: one set per process, kept nowhere.

Covers collecting the measurements; how they move the estimates and what follows is rules/restore.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from strata.cache.ram import RamLevel
from strata.rules.restore import DISK_COST, RAM_COST, READ_COST, RestoreCost, Verdict, read_cost, verdict
from strata.types import MIB


class Costs:
    """Estimates by level name. Belongs to the event loop."""

    def __init__(self) -> None:
        self.read = READ_COST
        self.levels: dict[str, RestoreCost] = {}

    def __repr__(self) -> str:
        return f"Costs(read {self.read}, {sorted(self.levels)})"

    def note_read(self, n_tokens: int, seconds: float) -> None:
        """A request read so much of its prompt."""
        self.read = read_cost(self.read, n_tokens, seconds)

    def note_restore(self, bytes_by_level: Mapping[str, int], seconds: float) -> None:
        """A restore went well. One from several levels says nothing about any of them."""
        if len(bytes_by_level) == 1:
            ((level, n_bytes),) = bytes_by_level.items()
            self.levels[level] = self._of(level).measured(n_bytes, seconds)

    def restore_s(self, level: str, n_bytes: int) -> float:
        """What restoring `n_bytes` from a level costs."""
        return self._of(level).seconds(n_bytes)

    def verdict(self, n_tokens: int, bytes_by_level: Mapping[str, int]) -> Verdict:
        """Whether restoring `n_tokens` pays."""
        parts = [(self._of(level), n_bytes) for level, n_bytes in bytes_by_level.items()]
        return verdict(tokens=n_tokens, read=self.read, parts=parts)

    def note_refused(self, bytes_by_level: Mapping[str, int]) -> None:
        """A restore from these levels was not worth it."""
        for level in bytes_by_level:
            self.levels[level] = self._of(level).refused()

    def _of(self, level: str) -> RestoreCost:
        return self.levels.get(level, _start(level))

    def status(self) -> dict[str, object]:
        """For /v1/status; null what is not known yet."""
        restore = {
            level: {
                "fixed_ms": cost.fixed.value * 1000 if cost.fixed.known else None,
                "mib_per_s": 1 / (cost.byte.value * MIB) if cost.byte.known and cost.byte.value else None,
            }
            for level, cost in sorted(self.levels.items())
        }
        return {"read_ms_per_token": self.read.value * 1000 if self.read.known else None, "restore": restore}


def _start(level: str) -> RestoreCost:
    return RAM_COST if level == RamLevel.name else DISK_COST
