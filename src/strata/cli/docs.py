"""Writes docs/flags.md and docs/errors.md from the settings and errors.py: `python -m strata.cli.docs [FOLDER]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from strata.config import ENVIRONMENT_ONLY, SETTINGS, env_name
from strata.errors import StrataError

_FLAGS_HEAD = """# Settings of `strata serve`

Written by `make docs` from `src/strata/config.py`; a test keeps it current.

Each setting is a flag, a key of the same name in the TOML file given by `--config`, and an environment variable. A flag
wins over the environment, the environment over the file, the file over the default. Paths are relative to the folder
the server is started in. Where two flags are given for one setting, they must have the same value.

| flag | value | default | environment | meaning |
|---|---|---|---|---|
"""
_ERRORS_HEAD = """# Errors

Written by `make docs` from `src/strata/errors.py`; a test keeps it current.

Over HTTP an error is `{"error": {"message", "type", "param", "code"}}` with the status below; on the command line it is
one line on stderr (for a flag that does not exist, with the usage before it) and the exit code below.

| error | HTTP status | code | exit code | meaning |
|---|---|---|---|---|
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def flags_markdown() -> str:
    rows = []
    for setting in SETTINGS:
        flags = " = ".join(f"`--{name}`" for name in setting.names)
        env = " = ".join(f"`{env_name(name)}`" for name in setting.names)
        default = setting.as_text(setting.default)
        rows.append(
            f"| {flags} | {_cell(setting.kind.expects)} | {f'`{default}`' if default else '-'} | {env} "
            f"| {_cell(setting.help)} |\n"
        )
    only = "".join(f"- `{name}`: {_cell(text)}\n" for name, text in ENVIRONMENT_ONLY.items())
    return _FLAGS_HEAD + "".join(rows) + "\nOnly in the environment:\n\n" + only


def error_classes(root: type[StrataError] = StrataError) -> Iterator[type[StrataError]]:
    """The error tree, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


def errors_markdown() -> str:
    rows = [
        f"| `{error.__name__}` | {error.status} | `{error.code}` | {error.exit_code} "
        f"| {_cell((error.__doc__ or '').strip())} |\n"
        for error in error_classes()
        if error.__module__ == StrataError.__module__
    ]
    return _ERRORS_HEAD + "".join(rows)


def write(folder: Path) -> None:
    (folder / "flags.md").write_text(flags_markdown(), encoding="utf-8")
    (folder / "errors.md").write_text(errors_markdown(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
