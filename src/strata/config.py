"""Every setting of Strata, declared once: flags, TOML keys, environment names and docs/flags.md come from `Config`.

Covers the table of settings and what follows from one resolved set of them. How their text is parsed is in settings.py,
where it comes from in sources.py, the rules between settings in coherence.py. Nothing here opens the model, the cache
directories or the port: those fail where they are used, with their own messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from strata.settings import (
    FILE,
    FOLDER,
    FRACTION,
    HOST,
    KEY,
    KV,
    MODEL,
    SHARE,
    SPLIT,
    SWITCH,
    TEXT,
    TURN_TOKEN,
    Kind,
    choice,
    whole,
)

ENV_PREFIX = "STRATA_"
RESTORE_LADDER = "STRATA_RESTORE_LADDER"
ENVIRONMENT_ONLY = {
    "STRATA_NO_LARGEPAGES": "1 = do not ask the system for large memory pages",
    RESTORE_LADDER: "1 = when part of a stored conversation is damaged, use what is sound of it and of others; "
    "0 or unset = set it aside and read the prompt again",
}
SESSION_MIN_FREE_MIB = 4096
_MIB = whole(0, 1 << 30)
_TOKENS = whole(0, 2**31 - 1)
_DAYS = whole(0, 36500)


def _is(kind: Kind, help: str, **more: Any) -> dict[str, Any]:  # noqa: A002 the word the command line uses too
    return {"kind": kind, "help": help, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings as resolved. The fields with metadata are the one table of settings (`SETTINGS`)."""

    config: Path | None = field(default=None, metadata=_is(FILE, "TOML file with settings, named as the flags are"))
    model: str = field(default="", metadata=_is(MODEL, "GGUF file to serve; demo = the bundled SmolLM2-135M"))
    host: str = field(default="127.0.0.1", metadata=_is(HOST, "address to listen on"))
    port: int = field(default=8080, metadata=_is(whole(0, 65535), "port to listen on; 0 = any free one"))
    api_key: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=_is(KEY, "key a client must send; may be given several times, each key is a namespace", many=True),
    )
    api_key_file: Path | None = field(default=None, metadata=_is(FILE, "file with one API key per line"))
    no_auth: bool = field(default=False, metadata=_is(SWITCH, "listen without a key even where others can connect"))
    parallel: int = field(default=1, metadata=_is(whole(1, 128), "slots: requests that run at once"))
    max_queued_requests: int = field(
        default=256, metadata=_is(whole(0, 65536), "requests that may wait for a slot; more are refused with 429")
    )
    queue_timeout_s: int = field(
        default=0,
        metadata=_is(whole(0, 86400), "seconds after which one that waits for a slot is refused with 503; 0 = never"),
    )
    engine_timeout_s: int = field(
        default=120,
        metadata=_is(
            whole(0, 86400),
            "seconds without an answer after which a hung engine process is replaced (one that starts has 120 at "
            "least); 0 = never",
        ),
    )
    context: int | None = field(
        default=None, metadata=_is(whole(32, 1 << 24, auto=True), "tokens per slot; auto = the model's, capped")
    )
    pool: str = field(
        default="unified",
        metadata=_is(
            choice("auto", "unified", "split"),
            "how slots share the K/V pool: unified = all cells for all, prefixes shared; split = cells of its own for "
            "each slot, so that long conversations do not slow each other down, but each is copied whole when it is "
            "parked, restored or forked; auto = as measured at the start",
        ),
    )
    pool_cells: int | None = field(
        default=None,
        metadata=_is(
            whole(32, 1 << 28, auto=True),
            "tokens that all slots together hold at most; auto = parallel x context. With fewer, requests take turns",
        ),
    )
    flash_attention: str = field(
        default="auto", metadata=_is(choice("auto", "on", "off"), "auto = whichever is faster on this machine")
    )
    kv: tuple[str, str] = field(
        default=("f16", "f16"), metadata=_is(KV, "type of K and V; a quantised V needs flash attention")
    )
    threads: int | None = field(default=None, metadata=_is(whole(1, 1024, auto=True), "CPU threads of llama.cpp"))
    gpu_layers: int | None = field(default=None, metadata=_is(whole(0, 9999, auto=True), "layers kept on the GPU"))
    layer_split: tuple[float, ...] | None = field(
        default=None,
        metadata=_is(
            SPLIT,
            "proportions of the layers that each device gets, as llama.cpp's --tensor-split; each part is a stage, "
            "with a file of its own in every segment; auto = one stage",
        ),
    )
    batch_size: int = field(
        default=512, metadata=_is(whole(32, 512), "most prompt tokens read in one step; slow machines read fewer")
    )
    batch_agenda: bool = field(
        default=False, metadata=_is(SWITCH, "share steps between writing and reading by tokens, not by time")
    )
    batch_agenda_chunk: int = field(
        default=512, metadata=_is(whole(0, 512), "with the agenda: most prompt tokens of a step; 0 = a full batch")
    )
    batch_agenda_budget: int = field(
        default=520, metadata=_is(whole(1, 1 << 20), "with the agenda: tokens of a step, written and read together")
    )
    batch_agenda_age: int = field(
        default=4, metadata=_is(whole(0, 1 << 20), "with the agenda: steps until a starved prompt is read; 0 = never")
    )
    batch_decode_share: float | None = field(
        default=None,
        metadata=_is(SHARE, "share of the time that writing gets while a prompt is read; set, it wins over the agenda"),
    )
    turn_token: str = field(
        default="auto", metadata=_is(TURN_TOKEN, "token that opens a turn; auto = found from the chat template")
    )
    conversation_cache_mib: int = field(
        default=0, metadata=_is(_MIB, "budget of the conversations kept in RAM, in MiB; 0 = off")
    )
    conversation_cache_slots: int = field(default=4, metadata=_is(whole(1, 1 << 20), "most conversations kept in RAM"))
    conversation_cache_min_free_mib: int = field(
        default=2560, metadata=_is(_MIB, "parking floor: MiB of memory that a copy kept in RAM must leave free")
    )
    conversation_cache_park: str = field(
        default="ram",
        metadata=_is(
            choice("ram", "disk", "auto"),
            "where a conversation goes first; auto = disk when RAM cannot hold every slot's full context",
        ),
    )
    conversation_cache_park_min_free_mib: int = field(
        default=512,
        metadata=_is(_MIB, "transient floor: MiB that a copy on its way to disk must leave free; 0 = none"),
    )
    conversation_cache_cold_dir: Path | None = field(
        default=None,
        metadata=_is(FOLDER, "directory of the last (cold) level; empty = off", alias="conversation-cache-spill-dir"),
    )
    conversation_cache_cold_mib: int = field(
        default=8192,
        metadata=_is(_MIB, "budget of the cold level in MiB; 0 = off", alias="conversation-cache-disk-mib"),
    )
    conversation_cache_warm_dir: Path | None = field(
        default=None,
        metadata=_is(FOLDER, "directory of a level above the cold one, on a faster disk; empty = off"),
    )
    conversation_cache_warm_mib: int = field(default=0, metadata=_is(_MIB, "budget of the warm level in MiB; 0 = off"))
    conversation_cache_spill_on: str = field(
        default="park",
        metadata=_is(
            choice("park", "evict"), "park = what is parked in RAM is also written; evict = once RAM drops it"
        ),
    )
    conversation_cache_spill_when_full: str = field(
        default="evict-oldest",
        metadata=_is(
            choice("evict-oldest", "reject"), "what a full level does: let its oldest go, or refuse what is new"
        ),
    )
    conversation_cache_spill_max_age_days: int = field(
        default=0, metadata=_is(_DAYS, "days after which the last level deletes a conversation; 0 = never by time")
    )
    conversation_cache_spill_divergence_tokens: int = field(
        default=4096,
        metadata=_is(_TOKENS, "a stored conversation whose history was rewritten before this many tokens is dropped"),
    )
    conversation_cache_spill_park_throttle_s: int = field(
        default=0, metadata=_is(whole(0, 2**31 - 1), "least seconds between two writes of one conversation")
    )
    conversation_cache_similarity: float = field(
        default=0.0, metadata=_is(FRACTION, "a hit must cover more than this part of the prompt")
    )
    conversation_cache_n_min: int = field(
        default=0, metadata=_is(_TOKENS, "a hit must cover at least this many tokens")
    )
    conversation_cache_archive_mode: str = field(
        default="off",
        metadata=_is(
            choice("off", "ids", "state"),
            "keep what the disk levels replace or give up: ids = which tokens it was, state = all of it",
        ),
    )
    conversation_cache_archive_dir: Path | None = field(
        default=None, metadata=_is(FOLDER, "directory of the archive; empty = the folder archive in the last level's")
    )
    conversation_cache_archive_mib: int = field(
        default=2048, metadata=_is(_MIB, "budget of the archive in MiB; 0 = off")
    )
    conversation_cache_archive_keep: int = field(
        default=4, metadata=_is(whole(0, 1 << 20), "most archived states of one conversation; 0 = no limit")
    )
    conversation_cache_archive_max_age_days: int = field(
        default=0, metadata=_is(_DAYS, "days after which an archived state is deleted; 0 = never by time")
    )
    conversation_cache_reserve_mib: int = field(
        default=0, metadata=_is(_MIB, "MiB of memory taken for conversations before the model is loaded")
    )
    system_prompt_cache: bool = field(
        default=False,
        metadata=_is(SWITCH, "keep system prompts on disk, so that new conversations need not read them again"),
    )
    system_prompt_cache_dir: Path | None = field(
        default=None,
        metadata=_is(
            FOLDER,
            "directory of the system prompts; empty = the folder system-prompts in the last level's, or in the "
            "platform's data directory",
        ),
    )
    system_prompt_cache_mib: int = field(
        default=2048, metadata=_is(_MIB, "budget of the system prompts in MiB; 0 = off")
    )
    system_prompt_cache_slots: int = field(
        default=2, metadata=_is(whole(0, 1 << 20), "most system prompts kept, whoever sent them; 0 = no limit")
    )
    system_prompt_cache_max_age_days: int = field(
        default=0, metadata=_is(_DAYS, "days after its last use when a system prompt is deleted; 0 = never by time")
    )
    system_prompt_cache_key: str = field(
        default="",
        metadata=_is(TEXT, "part of the name of every system prompt: what was kept under another key is not used"),
    )
    prompt_cache: int = field(
        default=6,
        metadata=_is(
            whole(1, 1000), "most checkpoints kept of a conversation, for models whose memory cannot be cut anywhere"
        ),
    )
    prompt_cache_every: int = field(
        default=16384, metadata=_is(_TOKENS, "tokens from one of these checkpoints to the next; 0 = at turns only")
    )
    prompt_cache_root: int = field(
        default=2048,
        metadata=_is(
            _TOKENS, "a system prompt ends at the first turn behind so many tokens; a checkpoint is taken there"
        ),
    )
    slot_save_path: Path | None = field(
        default=None,
        metadata=_is(FOLDER, "directory that POST /slots saves to and restores from; empty = off"),
    )
    session_min_free_mib: int = field(
        default=SESSION_MIN_FREE_MIB,
        metadata=_is(_MIB, "MiB that a saved slot must leave free on the disk of --slot-save-path"),
    )
    restore_ladder: bool = False
    """Only from the environment (RESTORE_LADDER)."""
    warnings: tuple[str, ...] = ()

    @property
    def cold_dir_in_use(self) -> Path | None:
        """The cold level's directory, or None when the level is off (no directory, or a budget of 0)."""
        return self.conversation_cache_cold_dir if self.conversation_cache_cold_mib else None

    @property
    def warm_dir_in_use(self) -> Path | None:
        """The warm level's directory, or None when the level is off."""
        return self.conversation_cache_warm_dir if self.conversation_cache_warm_mib else None

    @property
    def last_dir_in_use(self) -> Path | None:
        """The directory of the level that deletes, or None when no level on disk is in use."""
        return self.cold_dir_in_use or self.warm_dir_in_use

    @property
    def archive_dir_in_use(self) -> Path | None:
        """The archive's directory, or None when there is no archive (it takes what a level on disk lets go)."""
        on = self.conversation_cache_archive_mode != "off" and self.conversation_cache_archive_mib
        return self.conversation_cache_archive_dir if on and self.last_dir_in_use else None

    @property
    def system_prompt_dir_in_use(self) -> Path | None:
        """The directory of the system prompts, or None when they are not kept."""
        on = self.system_prompt_cache and self.system_prompt_cache_mib
        return self.system_prompt_cache_dir if on else None

    @property
    def park_target(self) -> str:
        """Where parks go: "ram", "disk", or "auto", which waits for the model. Without a disk it is RAM; without RAM
        it is the disk."""
        if self.last_dir_in_use is None:
            return "ram"
        return self.conversation_cache_park if self.conversation_cache_mib else "disk"

    def public(self) -> dict[str, str]:
        """Every setting by flag name, as the flag would be written; keys are only counted."""
        shown = {setting.name: setting.as_text(getattr(self, setting.field)) for setting in SETTINGS}
        return shown | {"api-key": f"{len(self.api_key)} hidden" if self.api_key else ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table: a `field` of Config; --`name`, the TOML key `name` and STRATA_`NAME` set it."""

    field: str
    kind: Kind
    help: str
    default: Any
    alias: str | None = None
    many: bool = False

    @property
    def name(self) -> str:
        return self.field.replace("_", "-")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.alias is None else (self.name, self.alias)

    @property
    def is_switch(self) -> bool:
        return self.kind is SWITCH

    def as_text(self, value: Any) -> str:
        """`value` as a person would write it."""
        if value is None:
            return "" if self.kind in (FILE, FOLDER) else "auto"
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.kind is SPLIT:
            return ",".join(f"{share:.6f}".rstrip("0").rstrip(".") for share in value)
        if isinstance(value, tuple):
            return ",".join(dict.fromkeys(value))  # ("f16", "f16") is written f16
        return str(value)


SETTINGS = tuple(Setting(field=f.name, default=f.default, **f.metadata) for f in fields(Config) if f.metadata)


def env_name(name: str) -> str:
    """The environment variable of a setting's name."""
    return ENV_PREFIX + name.upper().replace("-", "_")


def info_line(values: Mapping[str, object]) -> str:
    """One line of key=value for the log; values are percent-encoded, so the line splits at its spaces."""
    return " ".join(f"{key}={quote(str(value), safe='/:,.-_~')}" for key, value in values.items())
