"""Parts of /v1/status that belong to no single module: counts of the cache, and of the arena.

Plain values for JSON; no text, no token, no client's key.
"""

from __future__ import annotations

from strata.cache.cache import ConversationCache
from strata.cache.status import disk_status
from strata.store.arena import Arena


def cache_status(cache: ConversationCache, parks: int) -> dict[str, object]:
    """`under_way`: parks, writes and moves that have not ended; `unwritten`: states that only RAM has so far."""
    return {
        "under_way": parks + cache.under_way,
        "unwritten": cache.unwritten,
        "counters": cache.counters.as_dict(),
        "restore_ladder": cache.ladder.climbs,
        "costs": cache.ladder.costs.status(),
    }


def system_prompt_status(cache: ConversationCache) -> dict[str, object] | None:
    """None: system prompts are not kept. `level`: see `disk_status`."""
    prompts = cache.system_prompts
    return None if prompts is None else {**prompts.status(), "level": disk_status(prompts.disk)}


def arena_status(arena: Arena) -> dict[str, object]:
    return {
        "limit_bytes": arena.limit_bytes,
        "reserved_bytes": arena.reserved_bytes,
        "touched_bytes": arena.touched_bytes,
        "asked_large_bytes": arena.asked_large_bytes,
        "used_bytes": arena.used_bytes,
    }
