"""Disks that are full, read-only or gone while the real server runs: clear words, answers go on, parking resumes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.running import RunningServer, wait_for
from tests.serve.test_restart import ask, cached, said

MIB = 1 << 20
RAM = (
    "--conversation-cache-mib=64",
    "--conversation-cache-min-free-mib=64",
    "--conversation-cache-park-min-free-mib=16",
)
RESUMES_S = 15.0
"""A tick or two, and the rest that a failed disk gets."""


@contextlib.contextmanager
def mounted(folder: Path, *how: str) -> Iterator[None]:
    """A filesystem at `folder`; skips where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *how, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def small(folder: Path, mib: int) -> contextlib.AbstractContextManager[None]:
    return mounted(folder, "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs")


def talk(name: str, lines: int = 20) -> list[dict[str, str]]:
    facts = " ".join(f"Box {i} of {name} holds {i * 7 % 97} keys." for i in range(lines))
    return [{"role": "user", "content": f"This is {name}. {facts}"}]


def level(server: RunningServer, name: str) -> dict:
    return next(level for level in server.status()["levels"] if level["name"] == name)


def failing(server: RunningServer, name: str, why: str) -> bool:
    state = level(server, name)["writer"]["state"]
    return state.startswith("failing") and why in state


def test_a_full_disk_refuses_and_takes_again_without_a_restart_or_a_request(tmp_path) -> None:
    cold = tmp_path / "cold"
    with small(cold, 6), RunningServer(tmp_path / "log", *RAM, cold=cold) as server:
        (cold / "filler").write_bytes(bytes(5 * MIB))
        first = ask(server, talk("Ann"))
        wait_for(lambda: failing(server, "cold", "No space left"), "the state of the full disk")
        assert said(ask(server, talk("Bob", 4))) and server.healthy(), "answers go on"
        wait_for(lambda: not list(cold.rglob("*.tmp")), "the refused write to be removed")
        assert level(server, "cold")["conversations"] == 0 and not list(cold.glob("*.meta"))
        assert server.counters["spill_failed"] and not server.counters["discards"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(cold)], check=True)
        wait_for(lambda: level(server, "cold")["conversations"] == 2, "the writes to resume", RESUMES_S)
        assert level(server, "cold")["writer"]["state"] == "ok"
        server.kill9()
        with RunningServer(tmp_path / "log", *RAM, cold=cold) as again:
            more = [*talk("Ann"), {"role": "assistant", "content": said(first)}, {"role": "user", "content": "More?"}]
            assert cached(ask(again, more)) > 100
            assert level(again, "cold")["scan"]["other"] == 1, "the filler, and nothing else that is not ours"


def test_a_full_level_below_keeps_what_is_above_until_there_is_room(tmp_path) -> None:
    warm, cold = tmp_path / "warm", tmp_path / "cold"
    flags = (f"--conversation-cache-warm-dir={warm}", "--conversation-cache-warm-mib=8")
    with small(cold, 2), RunningServer(tmp_path / "log", *flags, cold=cold) as server:
        for name in ("Ann", "Bob", "Cid"):
            assert said(ask(server, talk(name)))
        wait_for(lambda: level(server, "warm")["counters"]["degrade_failed"] > 0, "the refused degrade")
        server.settled()
        held = level(server, "warm")
        assert held["conversations"] == 3 and held["counters"]["degraded"] == held["counters"]["disk_evictions"] == 0
        assert failing(server, "cold", "No space left") and level(server, "cold")["conversations"] == 0
        assert not list(cold.rglob("*.tmp")) and not list(cold.rglob("*.seg"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(cold)], check=True)
        wait_for(lambda: level(server, "warm")["counters"]["degraded"] > 0, "the degrade to resume", RESUMES_S)
        server.settled()
        held = level(server, "warm")
        assert held["used_bytes"] <= held["budget_bytes"] and held["counters"]["disk_evictions"] == 0
        assert held["conversations"] + level(server, "cold")["conversations"] == 3
        assert level(server, "cold")["writer"]["state"] == "ok"


@pytest.mark.parametrize("ram", [("--conversation-cache-mib=6", *RAM[1:]), ()], ids=["with RAM", "without"])
def test_a_full_volume_below_its_budget_hands_down_and_nothing_is_dropped(tmp_path, ram) -> None:
    warm, cold = tmp_path / "warm", tmp_path / "cold"
    flags = (*ram, f"--conversation-cache-warm-dir={warm}", "--conversation-cache-warm-mib=64")
    names = ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gus")
    with small(warm, 12), RunningServer(tmp_path / "log", *flags, cold=cold) as server:
        for name in names:
            assert said(ask(server, talk(name)))
            server.settled()
        above, below = level(server, "warm"), level(server, "cold")
        assert server.counters["discards"] == server.counters["deferred"] == server.counters["spill_failed"] == 0
        assert above["conversations"] + below["conversations"] == len(names)
        assert above["conversations"] and above["counters"]["degraded"] > 0, "it goes on being used"
        assert above["counters"]["degrade_failed"] == above["counters"]["disk_evictions"] == 0
        assert above["writer"] == {**above["writer"], "state": "ok", "failures": 0}, "nothing is tried in vain"
        for name in names:
            assert cached(ask(server, [*talk(name), {"role": "assistant", "content": "x"}])) > 100


def test_a_disk_that_becomes_read_only(tmp_path) -> None:
    cold = tmp_path / "cold"
    with RunningServer(tmp_path / "log", *RAM, cold=cold) as server:
        first = ask(server, talk("Ann"))
        kept = server.settled()["newest"][0]["tokens"]
        with mounted(cold, "--bind", str(cold)):
            subprocess.run(["mount", "-o", "remount,bind,ro", str(cold)], check=True)
            assert said(ask(server, talk("Bob")))
            wait_for(lambda: failing(server, "cold", "Read-only"), "the state of the read-only disk")
            more = [*talk("Ann"), {"role": "assistant", "content": said(first)}, {"role": "user", "content": "More?"}]
            assert cached(ask(server, more)) >= kept, "what is there can be read"
            assert level(server, "cold")["conversations"] == 1
        wait_for(lambda: level(server, "cold")["writer"]["state"] == "ok", "the writes to resume", RESUMES_S)
        wait_for(lambda: level(server, "cold")["conversations"] == 2, "both, the newer of each", RESUMES_S)
        assert not server.counters["discards"]


@pytest.mark.parametrize("ram", [RAM, ()], ids=["with RAM", "without"])
def test_a_directory_that_is_removed(tmp_path, ram) -> None:
    cold = tmp_path / "cold"
    with RunningServer(tmp_path / "log", *ram, cold=cold) as server:
        first = ask(server, talk("Ann"))
        server.settled()
        shutil.rmtree(cold)
        assert said(ask(server, talk("Bob")))
        more = [*talk("Ann"), {"role": "assistant", "content": said(first)}, {"role": "user", "content": "More?"}]
        assert said(ask(server, more)), "answers go on"
        assert said(ask(server, talk("Cid")))
        wait_for(lambda: list(cold.glob("*.meta")), "parking to resume", RESUMES_S)
        held = server.settled()
        files = sum(path.lstat().st_blocks * 512 for path in cold.rglob("*") if path.is_file())
        assert held["used_bytes"] == files, "what is gone is not counted"
        server.kill9()
    with RunningServer(tmp_path / "log", *ram, cold=cold) as server:
        assert server.level["scan"]["stale"] == 0, "no conversation was said to be there without its segments"
        assert cached(ask(server, [*talk("Cid"), {"role": "assistant", "content": "x"}])) > 100
