"""What the levels hold, as plain values for /v1/status: no text, no token, no client's key."""

from __future__ import annotations

from dataclasses import asdict

from strata.cache.disk import DiskLevel
from strata.cache.ram import RamLevel
from strata.cache.state import LevelIndex
from strata.cache.story import Story

NEWEST_SHOWN = 50
"""Conversations and events listed."""
_FOUND = ("manifests", "foreign", "stale", "orphans", "temporary", "bad", "other")


def ram_status(ram: RamLevel) -> dict[str, object]:
    return {
        "name": ram.name,
        "budget_bytes": ram.limits.budget_bytes,
        "used_bytes": ram.used_bytes,
        "most_conversations": ram.limits.most,
        **_index_status(ram.index),
    }


def disk_status(disk: DiskLevel) -> dict[str, object]:
    writes = disk.writer.statistics()
    return {
        "name": disk.name,
        "folder": str(disk.level.root),
        "budget_bytes": disk.limits.budget_bytes,
        "used_bytes": disk.level.used_bytes,
        "over_budget": over_budget(disk),
        "free_bytes": disk.level.volume.free_bytes(),
        "writes_under_way": disk.puts_under_way,
        "moving": len(disk.moving),
        "writer": {"state": disk.health.state, "bytes_written": writes.bytes_written, "failures": writes.failures},
        "scan": {name: len(getattr(disk.scan, name)) for name in _FOUND},
        "counters": disk.counters.as_dict(),
        **_index_status(disk.index),
    }


def over_budget(disk: DiskLevel) -> str:
    """Why a level takes more than its budget; empty when it does not."""
    excess = disk.used_bytes - disk.limits.budget_bytes
    if excess <= 0:
        return ""
    if disk.stuck:
        return f"{excess} bytes over the budget: {len(disk.stuck)} conversations cannot leave"
    return f"{excess} bytes over the budget: what is left is in use, set aside, or alone larger than the budget"


def story_status(story: Story) -> list[dict[str, object]]:
    return [asdict(event) for event in story.events()[-NEWEST_SHOWN:]]


def _index_status(index: LevelIndex) -> dict[str, object]:
    conversations = index.conversations()
    newest = sorted(conversations, key=lambda c: (c.stamp_s, c.serial))[-NEWEST_SHOWN:]
    return {
        "conversations": len(conversations),
        "segments": index.segment_count(),
        "newest": [
            {
                "conversation": c.conversation.hex()[:12],
                "serial": c.serial,
                "tokens": len(c.tokens),
                "written_s": c.stamp_s,
            }
            for c in reversed(newest)
        ],
    }
