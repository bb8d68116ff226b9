"""The `strata` command: reads the command line, turns StrataErrors into one line and an exit code.

Options that other servers have under another name are refused with Strata's name for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import click

import strata
from strata.cli.output import never_fail
from strata.config import SETTINGS, Setting, env_name
from strata.errors import StrataError
from strata.sources import load

HABITS: Mapping[str, str] = {
    "-m": "model",
    "-c": "context",
    "--ctx-size": "context",
    "--max-model-len": "context",
    "-np": "parallel",
    "--max-num-seqs": "parallel",
    "-ngl": "gpu-layers",
    "--n-gpu-layers": "gpu-layers",
    "-t": "threads",
    "-b": "batch-size",
    "-fa": "flash-attention",
    "--flash-attn": "flash-attention",
    "-ctk": "kv",
    "-ctv": "kv",
    "--cache-type-k": "kv",
    "--cache-type-v": "kv",
    "-ts": "layer-split",
    "--tensor-split": "layer-split",
    "-cram": "conversation-cache-mib",
    "--cache-ram": "conversation-cache-mib",
}
"""What users of llama-server and vLLM type, and the setting they mean."""


class _Serve(click.Command):
    """`strata serve`, whose refusals know what other servers call its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        written = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # click takes "-ngl" for "-n", so the option is looked up as it was written
            names = [text.partition("=")[0] for text in written]
            habit = next((name for name in names if name in HABITS and name.startswith(error.option_name)), None)
            if habit is None:
                raise
            message = f"No such option '{habit}'; it is --{HABITS[habit]} here."
            raise click.NoSuchOption(habit, message, ctx=ctx) from None


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


@cli.command(cls=_Serve, params=[option for setting in SETTINGS for option in _options(setting)])
def serve(**given: tuple[str, ...]) -> None:
    """Serve a model over HTTP, in OpenAI's protocol.

    Each setting can also stand in the --config file (a TOML key of the same name) or in the environment.
    A flag wins over the environment, the environment over the file.
    """
    config = load({name.replace("_", "-"): texts for name, texts in given.items()}, os.environ)
    # Loading the server's libraries takes a second; a wrong flag should not have to wait for it.
    from strata.cli.serve import serve as run_server

    sys.exit(run_server(config))


def run() -> NoReturn:
    never_fail()
    try:
        cli.main(prog_name="strata")
    except StrataError as error:
        click.echo(f"strata: error: {error.message}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0)
