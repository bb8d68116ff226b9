"""Parts of /v1/status that belong to no single module: the engine, the slots, counts of the cache, and the arena.

Plain values for JSON; no text, no token, no client's key.
"""

from __future__ import annotations

from strata.cache.cache import ConversationCache
from strata.cache.status import disk_status
from strata.engine.protocol import EngineInfo
from strata.serve.parks import Workshop
from strata.store.arena import Arena


def engine_facts(info: EngineInfo) -> dict[str, object]:
    """What was resolved at the start, flat, as the INFO line shows it too."""
    return {
        "model": info.model_name,
        "identity": info.fingerprint.hex()[:16],
        "context_tokens": info.context,
        "pool": info.pool,
        "pool_reason": info.pool_reason,
        "pool_cells": info.pool_cells,
        "room_cells": info.room_cells,
        "slots": info.slots,
        "kv": info.kv,
        "bytes_per_token": sum(stage.token_bytes for stage in info.stages),
        "flash_attention": "on" if info.flash_attention else "off",
        "flash_attention_reason": info.flash_attention_reason,
        "stages": len(info.stages),
        "openers": ",".join(map(str, info.openers)),
        "mode": info.mode,
        "threads": info.threads,
        "load_s": round(info.load_s, 2),
    }


def slots_status(shop: Workshop) -> list[dict[str, object]]:
    return [
        {
            "id": slot.index,
            "state": slot.doing,
            "tokens": len(slot.tokens),
            "total": slot.total if slot.doing in ("reading", "ready") else None,
            "parked": not slot.owed or shop.slots.is_kept(slot.index),
            "parking": len(slot.parkings),
        }
        for slot in shop.slots.all
    ]


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
