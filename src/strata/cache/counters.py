"""What the cache counts: monotonic, never reset, read by status and metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Counts since the start. `lookups == disk_hits + disk_misses` always."""

    lookups: int = 0
    disk_hits: int = 0
    disk_misses: int = 0
    restores: int = 0
    restore_failures: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restore_s: float = 0.0
    parked_disk: int = 0
    parked_tokens: int = 0
    park_skipped: int = 0
    park_cut_short: int = 0
    park_failed: int = 0
    captured_bytes: int = 0
    capture_s: float = 0.0
    superseded: int = 0
    disk_evictions: int = 0
    oversized: int = 0
    quarantined: int = 0

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)
