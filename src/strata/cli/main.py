"""The `strata` command: reads the command line, turns StrataErrors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

import strata
from strata.config import SETTINGS, Setting, env_name
from strata.errors import StrataError
from strata.sources import load


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(strata.__version__, prog_name="strata")
def cli() -> None:
    """An LLM server whose conversations outlive VRAM, RAM and restarts."""


def _options(setting: Setting) -> list[click.Parameter]:
    """One option for each name of a setting; values stay text, sources.py parses all alike."""
    text = f"{setting.help}  [default: {setting.as_text(setting.default) or 'none'}; {env_name(setting.name)}]"
    helps = [text] + [f"another name of --{setting.name}"] * (len(setting.names) - 1)
    alone = {"is_flag": False, "flag_value": "on"} if setting.is_switch else {}  # --no-auth means --no-auth=on
    return [
        click.Option(
            [f"--{name}"],
            multiple=True,
            type=str,
            metavar=setting.kind.metavar,
            help=help_text,
            **alone,  # type: ignore[arg-type]
        )
        for name, help_text in zip(setting.names, helps, strict=True)
    ]


@cli.command(params=[option for setting in SETTINGS for option in _options(setting)])
def serve(**given: tuple[str, ...]) -> None:
    """Serve a model over HTTP, in OpenAI's protocol.

    Each setting can also stand in the --config file (a TOML key of the same name) or in the environment.
    A flag wins over the environment, the environment over the file.
    """
    config = load({name.replace("_", "-"): texts for name, texts in given.items()}, os.environ)
    # Loading the server's libraries takes a second; a wrong flag should not have to wait for it.
    from strata.cli.serve import serve as run

    sys.exit(run(config))


def main() -> NoReturn:
    try:
        cli.main(prog_name="strata")
    except StrataError as error:
        click.echo(f"strata: error: {error.message}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
