"""The command as a process: exit codes, one clear line on stderr, nothing loaded for nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from strata.cli.command import HABITS
from strata.config import SETTINGS, env_name


def strata(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    return subprocess.run(
        [sys.executable, "-m", "strata.cli.main", *arguments],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_shows_every_setting_with_its_default_and_environment() -> None:
    result = strata("serve", "--help")
    assert result.returncode == 0
    shown = " ".join(result.stdout.split())
    for setting in SETTINGS:
        assert all(f"--{name} " in shown for name in setting.names)
        default = f"[default: {setting.as_text(setting.default) or 'none'}; {env_name(setting.name)}]"
        assert default.replace(" ", "") in shown.replace(" ", "")  # lines also break behind a hyphen


def test_version() -> None:
    result = strata("--version")
    assert (result.returncode, result.stdout.strip()) == (0, "strata, version 0.1.0")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["serve", "--model", "demo", "--prot", "1"], ["--prot", "--port"]),
        (["serve", "--model", "demo", "--conversation-cache-cold-dri", "x"], ["--conversation-cache-cold-dir"]),
        (["serve", "-m", "demo"], ["'-m'", "--model"]),
        (["serve", "--model", "demo", "-c", "4096"], ["'-c'", "--context"]),
        (["serve", "--model", "demo", "-ngl", "99"], ["'-ngl'", "--gpu-layers"]),
        (["serve", "--model", "demo", "--ctx-size=4096"], ["'--ctx-size'", "--context"]),
        (["serve", "--model", "demo", "--port", "8GB"], ["--port", "8GB", "0 to 65535"]),
        (["serve", "--model", "demo", "--port"], ["--port"]),
        (["serve", "--model", "demo", "--no-auth=perhaps"], ["--no-auth", "perhaps"]),
        (["serve", "--model", "demo", "--host", "0.0.0.0"], ["--host 0.0.0.0", "--api-key"]),
        (["serve", "--model", "hf:a/b"], ["--model", "not in this version"]),
        (["serve"], ["--model is missing"]),
        (["serve", "stray"], ["stray"]),
        (["sevre"], ["sevre"]),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(arguments: list[str], wanted: list[str]) -> None:
    result = strata(*arguments)
    assert result.returncode == 2
    assert all(part in result.stderr for part in wanted), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_habits_are_no_options_here_and_name_ones_that_are() -> None:
    flags = {f"--{name}" for setting in SETTINGS for name in setting.names}
    assert not flags & HABITS.keys()
    assert {f"--{name}" for name in HABITS.values()} <= flags


INTERRUPTED_AFTER_S = (0.06, 0.1, 0.15, 0.2, 0.3)
ENTRY = """
import sys
from strata.cli.main import main
print("up", flush=True)
sys.argv = ["strata", "serve", "--model", "demo", "--port", "0"]
main()
"""


@pytest.mark.parametrize("after_s", INTERRUPTED_AFTER_S)
def test_ctrl_c_while_the_libraries_are_imported_ends_it_without_a_traceback(after_s: float) -> None:
    """From the moment on at which the installed command runs our code."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        time.sleep(after_s)  # there is nothing to wait for: the moment is what is tested
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
    assert "Traceback" not in said and "Aborted" not in said
    assert process.returncode == 130 or "stopping" in said


def test_a_bad_environment_variable_is_refused() -> None:
    result = strata("serve", "--model", "demo", STRATA_PARALLEL="many")
    assert result.returncode == 2
    assert result.stderr == "strata: error: STRATA_PARALLEL is 'many': it must be a whole number from 1 to 128\n"


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = strata("serve", "--model", "/nowhere/model.gguf", "--port", port)
    assert result.returncode == 1
    assert f"--port {port}" in result.stderr
    assert "model.gguf" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_host_that_is_not_here_is_named() -> None:
    result = strata("serve", "--model", "demo", "--host", "no.such.host.invalid", "--no-auth")
    assert result.returncode == 1
    assert "no.such.host.invalid" in result.stderr
    assert "Traceback" not in result.stderr
