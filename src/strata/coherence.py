"""What settings may not be together, and what follows where one of them makes another useless.

Covers SPEC §1 "Across flags": contradictions stop the start and name both sides, what is given in vain is a warning.
One value at a time is checked in settings.py. Nothing is opened or created here; links are followed to see whether two
directories are one.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import platformdirs

from strata.config import SESSION_MIN_FREE_MIB, Config
from strata.errors import ConfigError

_FLOAT_KV_TYPES = ("f32", "f16", "bf16")
_COLD, _WARM, _ARCHIVE = (f"--conversation-cache-{level}" for level in ("cold", "warm", "archive"))
_SYSTEM_PROMPTS = "--system-prompt-cache"
ARCHIVE_FOLDER = "archive"
SYSTEM_PROMPTS_FOLDER = "system-prompts"
"""The two folders of a level's directory that the level leaves alone (store/names.py)."""


def coherent(config: Config) -> Config:
    """`config` with the directories of archive and system prompts and the floors settled, and its warnings added.

    Raises ConfigError for settings that contradict each other.
    """
    config = replace(config, system_prompt_cache_dir=_system_prompt_dir(config))
    _check_access(config)
    _check_directories(config)
    warnings = (*config.warnings, *_useless(config), *_floors(config))
    archive_dir = config.conversation_cache_archive_dir
    wants_archive = config.conversation_cache_archive_mode != "off" and config.conversation_cache_archive_mib
    if wants_archive and archive_dir is None and config.last_dir_in_use is not None:
        archive_dir = config.last_dir_in_use / ARCHIVE_FOLDER
    return replace(
        config,
        conversation_cache_archive_dir=archive_dir,
        conversation_cache_park_min_free_mib=min(
            config.conversation_cache_park_min_free_mib, config.conversation_cache_min_free_mib
        ),
        warnings=warnings,
    )


def _system_prompt_dir(config: Config) -> Path | None:
    """As given; else beside what the last level keeps, or where the platform wants data to be."""
    wanted = config.system_prompt_cache and config.system_prompt_cache_mib
    if config.system_prompt_cache_dir is not None or not wanted:
        return config.system_prompt_cache_dir
    return (config.last_dir_in_use or Path(platformdirs.user_data_dir("strata"))) / SYSTEM_PROMPTS_FOLDER


def _check_access(config: Config) -> None:
    if not config.model:
        raise ConfigError("--model is missing: give the path of a GGUF file, or demo", field="--model")
    if config.api_key and config.no_auth:
        raise ConfigError("--no-auth contradicts --api-key: give one of them", field="--no-auth")
    if not _is_loopback(config.host) and not config.api_key and not config.no_auth:
        raise ConfigError(
            f"--host {config.host} lets other machines connect: give --api-key or --api-key-file "
            "(or --no-auth, if everybody who can connect may use it)",
            field="--host",
        )
    if config.pool == "split" and config.pool_cells is not None:
        raise ConfigError(
            f"--pool-cells {config.pool_cells} is shared by all slots, but --pool split gives each slot cells of its "
            "own (as many as --context): remove one of them",
            field="--pool-cells",
        )
    if config.kv[1] not in _FLOAT_KV_TYPES and config.flash_attention == "off":
        raise ConfigError(
            f"--kv {','.join(config.kv)} has a quantised V, which needs flash attention, but --flash-attention is off",
            field="--kv",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_directories(config: Config) -> None:
    """Levels, archive and system prompts count, scan and lock a directory of their own, whether it is in use now or
    not; what people save lies in none of them."""
    cold = (f"{_COLD}-dir", config.conversation_cache_cold_dir)
    warm = (f"{_WARM}-dir", config.conversation_cache_warm_dir)
    archive = (f"{_ARCHIVE}-dir", config.conversation_cache_archive_dir)
    prompts = (f"{_SYSTEM_PROMPTS}-dir", config.system_prompt_cache_dir)
    sessions = ("--slot-save-path", config.slot_save_path)
    folders = {archive[0]: ARCHIVE_FOLDER, prompts[0]: SYSTEM_PROMPTS_FOLDER}
    for (other_flag, other_given), (flag, given) in combinations((cold, warm, archive, prompts, sessions), 2):
        if given is None or other_given is None:
            continue
        one, other = Path(os.path.realpath(given)), Path(os.path.realpath(other_given))
        if flag in folders and other_flag in (cold[0], warm[0]) and one == other / folders[flag]:
            continue
        if one == other:
            how = "are one directory"
        elif one.is_relative_to(other) or other.is_relative_to(one):
            how = "lie one inside the other"
        else:
            continue
        raise ConfigError(f"{flag} {given} and {other_flag} {other_given} {how}: give each its own", field=flag)


def _useless(config: Config) -> Iterator[str]:
    """What was given in vain, with the setting that makes it so."""
    if config.pool == "auto" and config.pool_cells is not None:
        yield f"--pool auto is unified: --pool-cells {config.pool_cells} is shared by all slots"
    elif config.pool != "unified" and config.parallel == 1:
        yield f"--pool {config.pool} is unified: --parallel is 1"
    for level, folder, mib in (
        (_COLD, config.conversation_cache_cold_dir, config.conversation_cache_cold_mib),
        (_WARM, config.conversation_cache_warm_dir, config.conversation_cache_warm_mib),
    ):
        if folder is not None and not mib:
            yield f"{level}-dir {folder} is not used: {level}-mib is 0; give it a budget"
    if config.conversation_cache_warm_mib and config.conversation_cache_warm_dir is None:
        yield f"{_WARM}-mib {config.conversation_cache_warm_mib} is not used: {_WARM}-dir is empty"
    if config.slot_save_path is None and config.session_min_free_mib != SESSION_MIN_FREE_MIB:
        yield f"--session-min-free-mib {config.session_min_free_mib} is not used: --slot-save-path is empty"
    no_disk = f"no level on disk is in use ({_COLD}-dir or {_WARM}-dir, with a budget)"
    if config.conversation_cache_park == "disk" and config.last_dir_in_use is None:
        yield f"--conversation-cache-park disk acts as ram: {no_disk}"
    mode, folder = config.conversation_cache_archive_mode, config.conversation_cache_archive_dir
    archive = f"{_ARCHIVE}-mode {mode}" if folder is None else f"{_ARCHIVE}-dir {folder}"
    if mode == "off":
        if folder is not None:
            yield f"{archive} is not used: {_ARCHIVE}-mode is off"
    elif not config.conversation_cache_archive_mib:
        yield f"{archive} is not used: {_ARCHIVE}-mib is 0"
    elif config.last_dir_in_use is None:
        yield f"{archive} is not used: {no_disk}"
    prompts = config.system_prompt_cache_dir
    if prompts is not None and not config.system_prompt_cache:
        yield f"{_SYSTEM_PROMPTS}-dir {prompts} is not used: {_SYSTEM_PROMPTS} is off"
    if config.system_prompt_cache and not config.system_prompt_cache_mib:
        named = _SYSTEM_PROMPTS if prompts is None else f"{_SYSTEM_PROMPTS}-dir {prompts}"
        yield f"{named} is not used: {_SYSTEM_PROMPTS}-mib is 0"


def _floors(config: Config) -> Iterator[str]:
    transient, parking = config.conversation_cache_park_min_free_mib, config.conversation_cache_min_free_mib
    if transient > parking:
        yield (
            f"--conversation-cache-park-min-free-mib {transient} is more than --conversation-cache-min-free-mib "
            f"{parking}: {parking} is used for both"
        )
