"""Every setting of Strata, declared once: flags, TOML keys, environment names and docs/flags.md come from `Config`.

Covers parsing, precedence (flag > environment > config file > default) and the rules between settings. Does not open
the model, the cache directory or the port: those fail where they are used, with their own messages.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import platformdirs

from strata.errors import ConfigError

ENV_PREFIX = "STRATA_"
ENVIRONMENT_ONLY = {"STRATA_NO_LARGEPAGES": "1 = do not ask the system for large memory pages"}
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_FLOAT_KV_TYPES = ("f32", "f16", "bf16")


# ----------------------------------------------------------------------------------------------------- kinds of values


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the text of a setting becomes a value: `parse` raises ValueError, `expects` completes "it must be ..."."""

    metavar: str
    expects: str
    parse: Callable[[str], Any]


def whole(low: int, high: int, *, auto: bool = False) -> Kind:
    """A decimal number in [low, high]; with `auto` also the word "auto", which means None."""

    def parse(text: str) -> int | None:
        if auto and text == "auto":
            return None
        # int() alone would accept "1_000", " 7" and other digits than 0-9.
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    expects = f"a whole number from {low} to {high}" + (' or "auto"' if auto else "")
    return Kind(metavar="N", expects=expects, parse=parse)


def choice(*words: str) -> Kind:
    expects = "one of " + ", ".join(words)
    return Kind(metavar="|".join(words), expects=expects, parse=lambda text: words[words.index(text)])


def _parse_fraction(text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+([eE]-[0-9]{1,2})?", text) or not 0 <= float(text) < 1:
        raise ValueError
    return float(text)


def _parse_switch(text: str) -> bool:
    words = {"": False, "0": False, "false": False, "off": False, "no": False}
    words |= {"1": True, "true": True, "on": True, "yes": True}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _parse_path(text: str) -> Path | None:
    """An absolute path without "..", links kept as they are; None for "", which means not set."""
    if "\0" in text:
        raise ValueError
    return Path(os.path.abspath(Path(text).expanduser())) if text else None  # noqa: PTH100 resolve() would follow links


def _parse_file(text: str) -> Path:
    path = _parse_path(text)
    if path is None:  # an empty variable behind --api-key-file must not mean "no keys"
        raise ValueError
    return path


def _parse_model(text: str) -> str:
    if not text or text.startswith("hf:"):
        raise ValueError
    return text if text == "demo" else str(_parse_path(text))


def _parse_kv(text: str) -> tuple[str, str]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 2 or not all(part in KV_TYPES for part in parts):
        raise ValueError
    return parts[0], parts[-1]


def _parse_turn_token(text: str) -> str:
    return text if text in ("auto", "none") else str(whole(0, 2**31 - 1).parse(text))


def _matching(pattern: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return parse


_FRACTION = Kind(metavar="F", expects="a number from 0 up to, but not including, 1", parse=_parse_fraction)
_SWITCH = Kind(metavar="on|off", expects="one of 1, true, on, yes, 0, false, off, no", parse=_parse_switch)
_FOLDER = Kind(metavar="DIR", expects="a path", parse=_parse_path)
_FILE = Kind(metavar="FILE", expects="the path of a file", parse=_parse_file)
_MODEL = Kind(
    metavar="PATH|demo",
    expects='the path of a GGUF file, or "demo" (hf:REPO/FILE is not in this version)',
    parse=_parse_model,
)
_KV = Kind(metavar="TYPE[,TYPE]", expects="one type, or two as K,V, out of " + ", ".join(KV_TYPES), parse=_parse_kv)
_TURN_TOKEN = Kind(metavar="ID|auto|none", expects='"auto", "none" or a token id', parse=_parse_turn_token)
_HOST = Kind(metavar="HOST", expects="a host name or an IP address", parse=_matching(r"[A-Za-z0-9._:%-]+"))
_KEY = Kind(metavar="KEY", expects="printable ASCII without spaces", parse=_matching(r"[\x21-\x7e]+"))


# ----------------------------------------------------------------------------------------------------------- the table


def _is(kind: Kind, help: str, **more: Any) -> dict[str, Any]:  # noqa: A002 the word the command line uses too
    return {"kind": kind, "help": help, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings as resolved. The fields with metadata are the one table of settings (`SETTINGS`)."""

    config: Path | None = field(default=None, metadata=_is(_FILE, "TOML file with settings, named as the flags are"))
    model: str = field(default="", metadata=_is(_MODEL, "GGUF file to serve; demo = the bundled SmolLM2-135M"))
    host: str = field(default="127.0.0.1", metadata=_is(_HOST, "address to listen on"))
    port: int = field(default=8080, metadata=_is(whole(0, 65535), "port to listen on; 0 = any free one"))
    api_key: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=_is(_KEY, "key a client must send; may be given several times, each key is a namespace", many=True),
    )
    api_key_file: Path | None = field(default=None, metadata=_is(_FILE, "file with one API key per line"))
    no_auth: bool = field(default=False, metadata=_is(_SWITCH, "listen without a key even where others can connect"))
    parallel: int = field(default=1, metadata=_is(whole(1, 128), "slots: requests that run at once"))
    context: int | None = field(
        default=None, metadata=_is(whole(32, 1 << 24, auto=True), "tokens per slot; auto = the model's, capped")
    )
    flash_attention: str = field(
        default="auto", metadata=_is(choice("auto", "on", "off"), "auto = whichever is faster on this machine")
    )
    kv: tuple[str, str] = field(
        default=("f16", "f16"), metadata=_is(_KV, "type of K and V; a quantised V needs flash attention")
    )
    threads: int | None = field(default=None, metadata=_is(whole(1, 1024, auto=True), "CPU threads of llama.cpp"))
    gpu_layers: int | None = field(default=None, metadata=_is(whole(0, 9999, auto=True), "layers kept on the GPU"))
    turn_token: str = field(
        default="auto", metadata=_is(_TURN_TOKEN, "token that opens a turn; auto = found from the chat template")
    )
    conversation_cache_cold_dir: Path | None = field(
        default=None,
        metadata=_is(_FOLDER, "directory that keeps conversations; empty = off", alias="conversation-cache-spill-dir"),
    )
    conversation_cache_cold_mib: int = field(
        default=8192,
        metadata=_is(
            whole(0, 1 << 30), "budget of that directory in MiB; 0 = off", alias="conversation-cache-disk-mib"
        ),
    )
    conversation_cache_similarity: float = field(
        default=0.0, metadata=_is(_FRACTION, "a hit must cover more than this part of the prompt")
    )
    conversation_cache_n_min: int = field(
        default=0, metadata=_is(whole(0, 2**31 - 1), "a hit must cover at least this many tokens")
    )
    warnings: tuple[str, ...] = ()

    @property
    def cold_dir_in_use(self) -> Path | None:
        """The cold level's directory, or None when the level is off (no directory, or a budget of 0)."""
        return self.conversation_cache_cold_dir if self.conversation_cache_cold_mib else None

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
        return self.kind is _SWITCH

    def as_text(self, value: Any) -> str:
        """`value` as a person would write it."""
        if value is None:
            return "" if self.kind in (_FILE, _FOLDER) else "auto"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ",".join(dict.fromkeys(value))  # ("f16", "f16") is written f16
        return str(value)


SETTINGS = tuple(Setting(field=f.name, default=f.default, **f.metadata) for f in fields(Config) if f.metadata)
_BY_NAME = {name: setting for setting in SETTINGS for name in setting.names}


def env_name(name: str) -> str:
    """The environment variable of a setting's name."""
    return ENV_PREFIX + name.upper().replace("-", "_")


def info_line(values: Mapping[str, object]) -> str:
    """One line of key=value for the log; values are percent-encoded, so the line splits at its spaces."""
    return " ".join(f"{key}={quote(str(value), safe='/:,.-_~')}" for key, value in values.items())


# ----------------------------------------------------------------------------------------------------------- resolving


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """One value as a person wrote it; `origin` names the place in messages ("--port", "STRATA_PORT", ...)."""

    name: str
    origin: str
    text: str

    def value(self) -> Any:
        setting = _BY_NAME[self.name]
        try:
            return setting.kind.parse(self.text)
        except ValueError:
            shown = "" if setting.kind is _KEY else f" is {self.text!r}"
            raise ConfigError(f"{self.origin}{shown}: it must be {setting.kind.expects}", field=self.origin) from None


def load(flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Config:
    """The settings from the command line (`flags`: name without dashes -> values as written), `environ` and --config.

    Raises ConfigError for a name or value that cannot be used, and for settings that contradict each other.
    """
    from_flags = _settle(_Given(name=n, origin=f"--{n}", text=t) for n, texts in flags.items() for t in texts)
    known_env = {env_name(name): name for name in _BY_NAME}
    from_env = _settle(_Given(name=known_env[n], origin=n, text=t) for n, t in environ.items() if n in known_env)
    file = from_flags.get("config", from_env.get("config"))
    values = (_settle(_read_file(file)) if file else {}) | from_env | from_flags

    warnings = [
        f"{name} is ignored: not a setting of this version{_nearest(name, known_env)}"
        for name in environ
        if name.startswith(ENV_PREFIX) and name not in known_env and name not in ENVIRONMENT_ONLY
    ]
    if (key_file := values.get("api_key_file")) is not None:
        values["api_key"] = (*values.get("api_key", ()), *_read_keys(key_file))
    # Asking for a budget is asking for the level: it gets the platform's data directory (DESIGN §6).
    if values.get("conversation_cache_cold_mib") and values.get("conversation_cache_cold_dir") is None:
        values["conversation_cache_cold_dir"] = Path(platformdirs.user_data_dir("strata")) / "conversations"
    config = Config(**values)
    _check(config)
    if config.conversation_cache_cold_dir is not None and config.cold_dir_in_use is None:
        warnings.append(
            f"--conversation-cache-cold-dir {config.conversation_cache_cold_dir} is not used: "
            "--conversation-cache-cold-mib is 0"
        )
    return replace(config, warnings=tuple(warnings))


def _settle(given: Iterable[_Given]) -> dict[str, Any]:
    """Parsed values by field, out of one source. A name given twice: the last counts; two names must agree."""
    values: dict[str, Any] = {}
    origins: dict[str, _Given] = {}
    for one in given:
        setting, value = _BY_NAME[one.name], one.value()
        if setting.many:
            values[setting.field] = (*values.get(setting.field, ()), value)
            continue
        before = origins.get(setting.field)
        if before is not None and before.name != one.name and values[setting.field] != value:
            raise ConfigError(
                f"{before.origin} is {before.text!r} and {one.origin} is {one.text!r}, "
                "but they are two names of one setting: give one of them, or the same value",
                field=one.origin,
            )
        values[setting.field], origins[setting.field] = value, one
    return values


def _read_file(path: Path) -> Iterable[_Given]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot read it: {error.strerror}", field="--config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}", field="--config") from None
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in _BY_NAME or name == "config":
            hint = _nearest(name, _BY_NAME.keys() - {"config"})
            raise ConfigError(f"{path}: {key} is not a setting{hint}", field=key)
        for item in value if isinstance(value, list) and _BY_NAME[name].many else [value]:
            if not isinstance(item, str | int | float):
                raise ConfigError(f"{path}: {key} must be one value, not {type(item).__name__}", field=key)
            text = str(item).lower() if isinstance(item, bool) else str(item)
            yield _Given(name=name, origin=f"{key} in {path}", text=text)


def _read_keys(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot read it: {error}", field="--api-key-file") from None
    keys = [
        _Given(name="api-key", origin=f"--api-key-file {path}: line {number}", text=line).value()
        for number, line in enumerate(lines, start=1)
        if line and not line.startswith("#")
    ]
    if not keys:  # going on would serve without a key
        raise ConfigError(f"--api-key-file {path}: there is no key in it", field="--api-key-file")
    return keys


def _check(config: Config) -> None:
    """The rules between settings; raises ConfigError naming both sides."""
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


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
