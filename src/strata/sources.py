"""Where settings come from: flags, environment, config file, with that precedence; the result is one checked Config.

Covers names (unknown ones with a hint), two names of one setting, and reading the files that --config and
--api-key-file name. What one text may be is in settings.py, what settings may not be together in coherence.py.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from strata.coherence import coherent
from strata.config import ENV_PREFIX, ENVIRONMENT_ONLY, RESTORE_LADDER, SETTINGS, Config, env_name
from strata.errors import ConfigError
from strata.settings import KEY

_BY_NAME = {name: setting for setting in SETTINGS for name in setting.names}


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
            shown = "" if setting.kind is KEY else f" is {self.text!r}"
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
    values["restore_ladder"] = _switch(environ, RESTORE_LADDER)
    return coherent(Config(**values, warnings=tuple(warnings)))


def _switch(environ: Mapping[str, str], name: str) -> bool:
    """A setting that only the environment has: 1 or 0; unset and empty are 0."""
    text = environ.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name} is {text!r}: it must be 0 or 1", field=name)
    return text == "1"


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


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
