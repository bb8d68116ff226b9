"""Which levels are on: what they write where, what they say, how entries move, and what a stop writes. Real server."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from tests.crash.kills import du, look_at, two_filesystems
from tests.crash.test_disks import RAM, level, small, talk
from tests.serve.running import RunningServer, alive, wait_for
from tests.serve.test_restart import ask, cached, said

WARM_MIB = "--conversation-cache-warm-mib=8"
NAMES = ("Ann", "Bob", "Cid", "Dan")


def source(server: RunningServer, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    answer = server.http.post("/v1/chat/completions", json=body)
    return answer.headers["x-strata-cache"].split(";")[0].removeprefix("source=")


def again(name: str) -> list[dict[str, str]]:
    return [*talk(name), {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]


# ---------------------------------------------------------------------------------------------------- warm, cold, both


@pytest.mark.parametrize("volumes", [1, 2])
def test_a_degrade_links_on_one_volume_and_copies_to_another(tmp_path, volumes) -> None:
    one = {"warm": tmp_path / "warm", "cold": tmp_path / "cold"}
    with two_filesystems(tmp_path) as two:
        folders = one if volumes == 1 else two
        flags = (f"--conversation-cache-warm-dir={folders['warm']}", WARM_MIB)
        with RunningServer(tmp_path / "log", *flags, cold=folders["cold"]) as server:
            written = {}
            for name in NAMES:
                ask(server, talk(name))
                server.settled()
                written[name] = level(server, "warm")["newest"][0]["written_s"]
            warm, cold = level(server, "warm"), level(server, "cold")
            assert warm["counters"]["degraded"] == cold["counters"]["adopted"] == cold["conversations"] >= 2
            assert warm["counters"]["disk_evictions"] == 0 and warm["used_bytes"] <= warm["budget_bytes"]
            stamps = [entry["written_s"] for entry in cold["newest"]]
            assert min(stamps) > written["Ann"] and not set(stamps) & set(written.values()), "the age starts anew"
            copied = cold["writer"]["bytes_written"]
            assert copied < 1 << 16 if volumes == 1 else copied > 4 << 20
            assert [du(folders[name]) for name in ("warm", "cold")] == [warm["used_bytes"], cold["used_bytes"]]
            assert source(server, again("Ann")).endswith("cold")
            server.settled()
            server.kill9()
        for folder in folders.values():
            held = look_at(folder)
            assert not held.damaged and not held.stale and not held.unexplained and not held.orphans


def test_warm_alone_is_the_last_level_and_deletes(tmp_path) -> None:
    flags = (f"--conversation-cache-warm-dir={tmp_path / 'warm'}", WARM_MIB)
    with RunningServer(tmp_path / "log", *flags) as server:
        for name in NAMES:
            ask(server, talk(name))
        server.settled()
        (warm,) = server.status()["levels"]
        assert warm["name"] == "warm" and warm["counters"]["disk_evictions"] >= 2 and warm["counters"]["degraded"] == 0
        assert "tokens from warm: the oldest of a level over its budget" in server.log()
        server.stop()
    with RunningServer(tmp_path / "log", *flags) as server:
        assert source(server, again("Dan")) == "warm"
        assert source(server, again("Ann")) in ("none", "live")


def test_nothing_set_makes_no_directory_file_or_thread(tmp_path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    extra = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
    tasks, files = {}, {}
    for name, flags in {"none": (), "cold": (f"--conversation-cache-cold-dir={tmp_path / 'cold'}",)}.items():
        with RunningServer(tmp_path / f"log-{name}", *flags, extra={**extra, "TMPDIR": str(home)}) as server:
            ask(server, talk("Ann"))
            server.idle()
            process = Path(f"/proc/{server.pid}")
            tasks[name] = len(list((process / "task").iterdir()))
            names = (str(fd.readlink()) for fd in (process / "fd").iterdir() if fd.is_symlink())
            files[name] = [path for path in names if path.startswith(("/memfd", str(tmp_path / "cold"), str(home)))]
            status = server.status()
            server.stop()
        if name == "none":
            assert status["levels"] == [] and status["cache"] is None and status["arena"] is None
    assert files["none"] == [] and files["cold"]
    assert not list(home.iterdir()), "no file anywhere"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cold", "home", "log-cold", "log-none"]
    assert tasks["none"] < tasks["cold"]


COLD_ONLY_FILES = [
    ("seg/<2 hex>/<key>.s0.seg", 98304),
    ("seg/<2 hex>/<key>.s0.seg", 98304),
    ("seg/<2 hex>/<key>.s0.seg", 376832),
    ("seg/<2 hex>/<key>.s0.seg", 5906432),
    ("seg/<2 hex>/<key>.s0.seg", 5906432),
    ("strata-conv-<serial>.meta", 1526),
    ("strata-conv-<serial>.meta", 1634),
]
COLD_ONLY_LINES = [
    "INFO park: 260 of 260 tokens, slot 0 -> cold",
    "INFO park: 276 of 276 tokens, slot 0 -> cold",
    "INFO park: 260 of 260 tokens, slot 0 -> cold",
    "INFO restore: 249 tokens from cold in N ms",
    "stopping; answers in progress get 10 s (a second signal ends at once)",
    "INFO kept 2 conversations; parked 3, restored 1",
]
COLD_ONLY_HEADERS = [
    "source=none; reused=0/260",
    "source=live; reused=260/276",
    "source=live; reused=26/260",
    "source=live+cold; reused=275/276; restore_ms=N",
]
"""What commit 0c444e0, which knew no cascade, left and said in this session (its names were compared in full then)."""


def shape(path: str) -> str:
    path = re.sub(r"strata-conv-\d+", "strata-conv-<serial>", path)
    return re.sub(r"seg/[0-9a-f]{2}/[0-9a-f]{64}", "seg/<2 hex>/<key>", path)


def session(server: RunningServer) -> list[str]:
    """Deterministic: one token of reply, which the state does not hold yet."""
    headers = []
    for messages in (talk("Ann"), again("Ann"), talk("Bob"), again("Ann")):
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        answer = server.http.post("/v1/chat/completions", json=body)
        headers.append(re.sub(r"restore_ms=\d+", "restore_ms=N", answer.headers["x-strata-cache"]))
        server.settled()
    return headers


def test_cold_alone_is_what_it_was_before_there_was_a_cascade(tmp_path) -> None:
    cold = tmp_path / "cold"
    with RunningServer(tmp_path / "log", cold=cold) as server:
        assert session(server) == COLD_ONLY_HEADERS
        server.stop()
        said = re.sub(r"(park|restore) [0-9a-f]{12}", r"\1", server.log().rpartition("not read again.")[2])
        said = re.sub(r"in [0-9.]+ ms", "in N ms", said)
        assert [line for line in said.splitlines() if line] == COLD_ONLY_LINES
    files = (path for path in cold.rglob("*") if path.is_file() and path.name != "strata.lock")
    assert sorted((shape(str(path.relative_to(cold))), path.stat().st_size) for path in files) == COLD_ONLY_FILES


# ----------------------------------------------------------------------------------------------------------- the stop


@pytest.mark.parametrize("how", ["throttle", "evict"])
def test_a_stop_writes_what_only_ram_has(tmp_path, how) -> None:
    cold = tmp_path / "cold"
    prefix = "--conversation-cache-spill"
    waits = f"{prefix}-park-throttle-s=3600" if how == "throttle" else f"{prefix}-on=evict"
    with RunningServer(tmp_path / "log", *RAM, waits, cold=cold) as server:
        tokens = []
        for messages in (talk("Ann"), again("Ann"), talk("Bob")):
            ask(server, messages, max_tokens=2)
            tokens.append(wait_for(lambda: server.idle() and level(server, "ram")["newest"][0]["tokens"], "the park"))
        on_disk = [entry["tokens"] for entry in level(server, "cold")["newest"]]
        assert tokens[1] not in on_disk, "the newer state of Ann waits in RAM"
        server.stop()
        assert "stopping" in server.log() and "were not written" not in server.log()
        assert re.search(r"kept 2 conversations", server.log())
    with RunningServer(tmp_path / "log", *RAM, waits, cold=cold) as server:
        assert {entry["tokens"] for entry in server.level["newest"]} == set(tokens[1:])
        assert source(server, again("Ann")) == "cold"
    assert not look_at(cold).damaged


def test_a_second_signal_ends_at_once_and_loses_nothing_acknowledged(tmp_path) -> None:
    cold = tmp_path / "cold"
    with RunningServer(tmp_path / "log", *RAM, cold=cold) as server:
        ask(server, talk("Ann"))
        held = server.settled()["newest"]
        body = {"messages": talk("Bob"), "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_raw())  # it would hold the stop up for seconds
            engine = server.engine_pid
            server.signal(signal.SIGTERM)
            wait_for(lambda: "a second signal ends at once" in server.log(), "the stop to begin")
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            assert server.ended(10) == 128 + signal.SIGTERM
            assert time.monotonic() - began < 2
        wait_for(lambda: not alive(engine), "the end of the engine")
    found = look_at(cold)
    assert not found.damaged and not found.stale and not found.unexplained
    with RunningServer(tmp_path / "log", *RAM, cold=cold) as server:
        assert {entry["serial"] for entry in held} <= {entry["serial"] for entry in server.level["newest"]}
        assert cached(ask(server, again("Ann"))) > 250


def test_a_stop_says_what_it_could_not_write(tmp_path) -> None:
    """A disk that is full at the stop: it is said what was not written, and the end comes within the limit."""
    cold = tmp_path / "cold"
    with small(cold, 2), RunningServer(tmp_path / "log", *RAM, cold=cold) as server:
        assert said(ask(server, talk("Ann")))
        wait_for(lambda: server.counters["spill_failed"], "the refused write")
        server.stop()
        assert "1 conversations were not written" in server.log() and "kept 0 conversations" in server.log()
