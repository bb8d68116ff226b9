"""What the cache may take and how many may wait: values that follow from the Config, and from the engine if need be."""

from __future__ import annotations

import logging

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLimits
from strata.cache.system_prompts import SystemPromptLimits
from strata.config import Config
from strata.engine.protocol import EngineInfo
from strata.rules.checkpoints import CheckpointLimits
from strata.rules.placement import Target, resolve_auto
from strata.serve.queue import QueueLimits
from strata.store.memory import available_memory
from strata.types import MIB

log = logging.getLogger("strata")

DAY_S = 86400.0


def queue_limits(config: Config) -> QueueLimits:
    return QueueLimits(most=config.max_queued_requests, wait_s=config.queue_timeout_s)


def floors_of(config: Config) -> Floors:
    return Floors(
        parking_bytes=config.conversation_cache_min_free_mib * MIB,
        transient_bytes=config.conversation_cache_park_min_free_mib * MIB,
    )


def cache_limits(config: Config, info: EngineInfo) -> CacheLimits:
    """What the cache may take, with the parking target "auto" resolved: the arena and the model are resident now."""
    floors = floors_of(config)
    target: Target = "disk" if config.park_target == "disk" else "ram"
    if config.park_target == "auto":
        target = resolve_auto(
            available_bytes=available_memory(),
            disk_usable=config.last_dir_in_use is not None,
            slots=info.slots,
            bytes_per_token=sum(stage.token_bytes for stage in info.stages),
            context_tokens=info.context,
            parking_floor_bytes=floors.parking_bytes,
        )
        log.info("park target auto -> %s", target)
    ram_bytes = config.conversation_cache_mib * MIB
    return CacheLimits(
        floors=floors,
        park_target=target,
        ram=RamLimits(budget_bytes=ram_bytes, most=config.conversation_cache_slots) if ram_bytes else None,
        similarity=config.conversation_cache_similarity,
        n_min=config.conversation_cache_n_min,
        spill_on_evict=config.conversation_cache_spill_on == "evict",
        throttle_s=config.conversation_cache_spill_park_throttle_s,
        ladder=config.restore_ladder,
        checkpoints=CheckpointLimits(
            keep=config.prompt_cache, every=config.prompt_cache_every, root=config.prompt_cache_root
        ),
    )


def disk_limits(config: Config, name: str) -> DiskLimits:
    budget_mib = config.conversation_cache_warm_mib if name == "warm" else config.conversation_cache_cold_mib
    return DiskLimits(
        budget_bytes=budget_mib * MIB,
        rejects=config.conversation_cache_spill_when_full == "reject",
        divergence_tokens=config.conversation_cache_spill_divergence_tokens,
        max_age_s=config.conversation_cache_spill_max_age_days * DAY_S,
    )


def archive_limits(config: Config) -> DiskLimits:
    return DiskLimits(
        budget_bytes=config.conversation_cache_archive_mib * MIB,
        max_age_s=config.conversation_cache_archive_max_age_days * DAY_S,
        is_archive=True,
        keep=config.conversation_cache_archive_keep,
    )


def system_prompt_limits(config: Config) -> SystemPromptLimits:
    return SystemPromptLimits(
        budget_bytes=config.system_prompt_cache_mib * MIB,
        most=config.system_prompt_cache_slots,
        max_age_s=config.system_prompt_cache_max_age_days * DAY_S,
        declared=config.system_prompt_cache_key,
        least=config.prompt_cache_root,
    )
