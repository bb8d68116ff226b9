"""What the cache counts: monotonic, never reset, read by status and metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from strata.rules.restore import Rung


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Counts since the start, over all levels. `lookups == hits + misses` always.

    `disk_hits`, `disk_hits_transient`, `disk_hits_refused`: reads of a stored prefix from disk, by the floor that
    admitted them. `provisional_dropped`: states of cancelled requests, to which nothing was owed. `deferred`: parks
    that kept nothing while the state stays in its slot; it is tried again when it leaves. Every park that is begun ends
    in exactly one of `parked_*`, `skipped`, `provisional`, `provisional_dropped`, `deferred` and `discards`. Of what
    the spiller took up, `spill_skipped` were durable already. `not_worth_it`: hits that were read again because that is
    cheaper (they count as misses). `restore_failures`: restores of which some rung failed; `restore_unproved`: those
    after which the engine did not hold what it should. `checkpoints_given_up`: positions that cannot be resumed later,
    for want of memory or of a spare in the engine. `ladder_failed`, `ladder_used`: rungs that failed, and those
    that the slot ended up with instead. `ladder_tokens_saved`: tokens not read again although something failed.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    ram_hits: int = 0
    disk_hits: int = 0
    disk_hits_transient: int = 0
    disk_hits_refused: int = 0
    restores: int = 0
    not_worth_it: int = 0
    restore_failures: int = 0
    restore_unproved: int = 0
    ladder_failed: dict[str, int] = field(default_factory=lambda: {r.label: 0 for r in Rung if r is not Rung.READ})
    ladder_used: dict[str, int] = field(default_factory=lambda: {r.label: 0 for r in Rung if r is not Rung.WHOLE})
    ladder_tokens_saved: int = 0
    ram_quarantined: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    parked_ram: int = 0
    parked_disk: int = 0
    parked_disk_transient: int = 0
    parked_tokens: int = 0
    skipped: int = 0
    provisional: int = 0
    provisional_dropped: int = 0
    deferred: int = 0
    discards: int = 0
    refused: int = 0
    park_cut_short: int = 0
    captured_bytes: int = 0
    checkpoints_taken: int = 0
    checkpoints_given_up: int = 0
    capture_s: float = 0.0
    spilled: int = 0
    spill_failed: int = 0
    spill_skipped: int = 0
    collapsed: int = 0
    throttled: int = 0
    ram_superseded: int = 0
    ram_evictions: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """Flat: one entry for each rung (`ladder_used_other_level`, ...)."""
        flat: dict[str, int | float] = {}
        for name, value in asdict(self).items():
            flat |= {f"{name}_{rung}": n for rung, n in value.items()} if isinstance(value, dict) else {name: value}
        return flat


@dataclass(slots=True, kw_only=True)
class LevelCounters:
    """Counts of one disk level. What is handed down is no eviction: `degraded` here, `adopted` by the receiver.

    `vanished`: conversations whose files someone else removed.
    """

    hits: int = 0
    superseded: int = 0
    compacted: int = 0
    compaction_unclear: int = 0
    disk_evictions: int = 0
    age_evictions: int = 0
    degraded: int = 0
    adopted: int = 0
    degrade_failed: int = 0
    archived: int = 0
    archive_failed: int = 0
    oversized: int = 0
    rejected: int = 0
    quarantined: int = 0
    quarantined_dropped: int = 0
    unreadable: int = 0
    vanished: int = 0

    def leave(self, n: int, why: str) -> None:
        """Entries left the level for good; `why` is one of put.Leaving."""
        self.superseded += n * (why == "superseded")
        self.compacted += n * (why == "compacted")
        self.disk_evictions += n * (why == "budget")
        self.age_evictions += n * (why == "age")

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
