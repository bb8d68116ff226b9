"""The soak: lives of the real server under random clients, with rests in between at which everything is accounted for.

Covers whole processes over minutes: errors, leaks between conversations and keys, accounts and memory at rest, and
that the next life restores what this one kept. What a kill leaves is tests/crash. The first life shares steps between
writing and reading by time, the second one by tokens (the agenda).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.crash.kills import du, look_at
from tests.serve.running import RunningServer, wait_for
from tests.soak.clients import KEYS, STRANGER_TOKENS, Client, World

CLIENTS = 8
STRANGER = "soak-key-of-nobody"
WARM_UP_SHARE = 0.3
"""Of a life; what memory it takes then is what it may take."""
RESTS = 4
"""Parts of the rest of a long life."""
SHORT_S = 40.0
"""A shorter life has one part."""
REST_S = 60.0
FRONT_GROWTH_MIB, ENGINE_GROWTH_MIB = 32.0, 24.0
MORE_FILES, MORE_THREADS = 12, 8  # a pool of threads grows up to its size
RETURNING = 4
"""Newest conversations that are asked again after a restart."""
PROJECT = Path(__file__).parents[2]
FLAGS = (
    "--parallel=4",
    "--context=1400",
    "--pool-cells=1536",  # 1.1 contexts: some requests wait for room, or step aside
    "--max-queued-requests=3",
    "--queue-timeout-s=30",
    "--conversation-cache-mib=20",  # the longest conversations do not fit
    "--conversation-cache-slots=6",
    "--conversation-cache-warm-mib=48",
    "--conversation-cache-cold-mib=96",
    "--conversation-cache-min-free-mib=64",
    "--conversation-cache-park-min-free-mib=16",
    "--system-prompt-cache",
    "--system-prompt-cache-mib=8",
    "--system-prompt-cache-slots=2",
    "--prompt-cache-root=48",
)
_PARKED = ("parked_ram", "parked_disk", "parked_disk_transient", "provisional", "provisional_dropped")
_ENDS_OF_PARKS = (*_PARKED, "skipped", "deferred", "discards")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one process: memory of its own (the arena is shared and has a budget), open files, threads."""

    own_mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        own = int(facts["RssAnon"].split()[0]) / 1024
        return cls(own_mib=own, files=len(list(Path(f"/proc/{pid}/fd").iterdir())), threads=int(facts["Threads"]))


@dataclass(slots=True, kw_only=True)
class Figures:
    """`wrong`: in words, whatever must not be. The rest counts work."""

    wrong: list[str] = field(default_factory=list)
    rests: int = 0
    restored: int = 0
    cache: dict[str, int] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)
            print(f"WRONG: {what}", file=sys.stderr, flush=True)


class Soak:
    """Two lives on the same directories below `work`, together about `seconds` long."""

    def __init__(self, work: Path, *, seconds: float, seed: int, model: str = "demo") -> None:
        self.figures = Figures()
        self.world = World()
        self._folders = {name: work / name for name in ("warm", "cold")}
        self._prompts = work / "system-prompts"
        self._work = work
        self._life_s = seconds / 2
        self._model = model
        self._clients = [Client(i, seed, self.world) for i in range(CLIENTS)]

    def run(self) -> None:
        for life in range(2):
            with self._server(agenda=life == 1) as server:
                if life:
                    self._returns(server)
                self._live(server)
                self._read_log(server)
                server.stop()
                self._read_log(server)
            self._look_at_folders()
        self.figures.expect(not self.world.found.leaks, f"leaks: {self.world.found.leaks[:5]}")
        self.figures.expect(not self.world.found.failures, f"failures: {self.world.found.failures[:5]}")

    def _server(self, *, agenda: bool) -> RunningServer:
        folders = [f"--conversation-cache-{name}-dir={folder}" for name, folder in self._folders.items()]
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
        return RunningServer(
            self._work / "log",
            *FLAGS,
            *folders,
            f"--system-prompt-cache-dir={self._prompts}",
            f"--model={self._model}",
            keys=(*KEYS, STRANGER),
            program="tests.soak.witness",
            ladder=True,
            extra={"PYTHONPATH": path, "STRATA_BATCH_AGENDA": str(int(agenda))},
        )

    # --------------------------------------------------------------------------------------------------------- one life

    def _live(self, server: RunningServer) -> None:
        self._talk(server, self._life_s * WARM_UP_SHARE)
        self._rest(server)
        before = after = self._footprints(server)
        parts = RESTS if self._life_s > SHORT_S else 1
        for _ in range(parts):
            self._talk(server, self._life_s * (1 - WARM_UP_SHARE) / parts)
            self._rest(server)
            after = self._footprints(server)
            print(f"rest {self.figures.rests}: {after}", file=sys.stderr, flush=True)  # a leak grows from rest to rest
        self._compare(before, after)
        self._count(server.status())

    def _talk(self, server: RunningServer, seconds: float) -> None:
        stop = threading.Event()
        threads = [threading.Thread(target=c.talk, args=(server.url, stop)) for c in self._clients]
        for thread in threads:
            thread.start()
        try:
            ends = time.monotonic() + seconds
            while (left_s := ends - time.monotonic()) > 0:
                stop.wait(min(0.5, left_s))
                server.http.get("/slots", headers={"X-Api-Key": KEYS[0]}).raise_for_status()
                server.status()  # looks while all is under way: it must not fail
        finally:
            stop.set()
            for thread in threads:
                thread.join(180)
        stuck = sum(thread.is_alive() for thread in threads)
        assert not stuck, f"{stuck} clients hang: {server.status()}"

    def _footprints(self, server: RunningServer) -> dict[str, Footprint]:
        return {"front": Footprint.of(server.pid), "engine": Footprint.of(server.engine_pid)}

    def _compare(self, before: dict[str, Footprint], after: dict[str, Footprint]) -> None:
        for name, limit_mib in (("front", FRONT_GROWTH_MIB), ("engine", ENGINE_GROWTH_MIB)):
            old, new = before[name], after[name]
            grown = new.own_mib - old.own_mib
            key = f"{name}_growth_mib"
            self.figures.growth[key] = max(round(grown, 1), self.figures.growth.get(key, grown))
            self.figures.expect(grown <= limit_mib, f"{name} grew by {grown:.1f} MiB: {old} became {new}")
            self.figures.expect(new.files <= old.files + MORE_FILES, f"{name} has more files open: {old} became {new}")
            self.figures.expect(new.threads <= old.threads + MORE_THREADS, f"{name}: threads: {old} became {new}")

    # ---------------------------------------------------------------------------------------------------------- at rest

    def _rest(self, server: RunningServer) -> None:
        """Everybody is gone: nothing runs, is queued, leased or promised, and every account is right."""
        self.figures.rests += 1
        wait_for(lambda: self._is_quiet(server.status()), "quiet", REST_S)
        status = server.status()
        expect, name = self.figures.expect, f"rest {self.figures.rests}"
        expect(not status["inside"]["check"], f"{name}: {status['inside']['check']}")
        expect(status["engine"]["generation"] == 1, f"{name}: the engine was restarted")
        self._check_memory(name, status)
        self._check_levels(name, status)
        self._check_counters(name, status)

    @staticmethod
    def _is_quiet(status: dict[str, Any]) -> bool:
        slots = all(slot["state"] == "idle" and not slot["parking"] for slot in status["slots"])
        queued = status["waiting"] or status["queue"]["waiting"]
        pool = status["pool"]["running"] or status["pool"]["waiting"]
        cache = status["cache"]["under_way"] or status["inside"]["busy"]
        return slots and not queued and not pool and not cache

    def _check_memory(self, name: str, status: dict[str, Any]) -> None:
        ram = next(level for level in status["levels"] if level["name"] == "ram")
        used = status["arena"]["used_bytes"]
        self.figures.expect(used == ram["used_bytes"], f"{name}: arena {used}, RAM level {ram['used_bytes']}")
        held = sum(slot["tokens"] for slot in status["slots"])
        cells = status["engine"]["pool_cells"]
        self.figures.expect(held <= cells, f"{name}: slots hold {held} tokens in {cells} cells")

    def _check_levels(self, name: str, status: dict[str, Any]) -> None:
        expect = self.figures.expect
        for level in (*status["levels"], status["system_prompts"]["level"]):
            which = f"{name}, {level['name']}"
            expect(
                level["used_bytes"] <= level["budget_bytes"], f"{which}: {level['used_bytes']} bytes, over its budget"
            )
            if level["name"] == "ram":
                continue
            found = du(Path(level["folder"]))
            expect(level["used_bytes"] == found, f"{which}: {level['used_bytes']} bytes counted, {found} on disk")
            expect(not level["writer"]["failures"], f"{which}: {level['writer']}")
            damaged = level["counters"]["quarantined"] + level["counters"]["unreadable"] + level["counters"]["vanished"]
            expect(not damaged, f"{which}: {level['counters']}")

    def _check_counters(self, name: str, status: dict[str, Any]) -> None:
        expect, counters = self.figures.expect, status["cache"]["counters"]
        lookups = counters["hits"] + counters["misses"]
        expect(counters["lookups"] == lookups, f"{name}: {counters['lookups']} lookups, {lookups} hits and misses")
        begun, ends = status["inside"]["parks_begun"], sum(counters[end] for end in _ENDS_OF_PARKS)
        # a state that RAM took may be discarded later, when it cannot be written
        expect(begun <= ends <= begun + counters["discards"], f"{name}: {begun} parks begun, {ends} ended: {counters}")
        failed = counters["restore_failures"] + counters["restore_unproved"] + counters["ram_quarantined"]
        expect(not failed, f"{name}: restores failed: {counters}")
        levels = {level["name"]: level["counters"] for level in status["levels"] if level["name"] != "ram"}
        down, up = levels["warm"]["degraded"], levels["cold"]["adopted"]
        expect(down == up, f"{name}: warm handed {down} down, cold adopted {up}")
        expect(not levels["warm"]["disk_evictions"], f"{name}: warm deleted: {levels['warm']}")

    def _count(self, status: dict[str, Any]) -> None:
        cold = next(level for level in status["levels"] if level["name"] == "cold")
        counted = {
            **{n: status["cache"]["counters"][n] for n in ("hits", "restores", *_PARKED, "discards", "ram_evictions")},
            **{n: cold["counters"][n] for n in ("adopted", "disk_evictions")},
            "stepped_aside": status["pool"]["stepped_aside"],
            "queue_refused": status["queue"]["refused"],
            "queue_left": status["queue"]["left"],
        }
        for what, n in counted.items():
            self.figures.cache[what] = self.figures.cache.get(what, 0) + n

    # ----------------------------------------------------------------------------------------------------- after a life

    def _read_log(self, server: RunningServer) -> None:
        for bad in ("Traceback", " ERROR", "GGML_ASSERT"):
            at = (log := server.log()).find(bad)
            self.figures.expect(at < 0, f"the log has {bad!r}: {log[max(0, at - 500) : at + 3000]}")

    def _look_at_folders(self) -> None:
        for name, folder in self._folders.items():
            held = look_at(folder)
            wrong = [*held.stale, *held.unexplained, *held.damaged]
            self.figures.expect(not wrong and not held.orphans, f"{name}, offline: {wrong[:3]}, {held.orphans} orphans")

    def _returns(self, server: RunningServer) -> None:
        """A new process: the newest conversations come from disk, and a new key has nothing of them."""
        client = self._clients[0]
        with httpx.Client(base_url=server.url, timeout=120) as http:
            newest = self.world.recent[-RETURNING:]
            for talk in newest:
                answer = client.ask(http, talk, client.prompt(talk, 1))
                from_disk = "warm" in answer.header or "cold" in answer.header
                is_back = answer.cached_tokens * 2 > talk.tokens and from_disk
                self.figures.restored += is_back
                self.figures.expect(is_back, f"{talk.tokens} tokens came back as {answer.header}")
            body = client.body(newest[0], newest[0].messages[:-1], max_tokens=2)
            url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            told = http.post(url, json=body, headers={"X-Api-Key": STRANGER}).raise_for_status().json()["usage"]
            cached = told["prompt_tokens_details"]["cached_tokens"]
            self.figures.expect(cached < STRANGER_TOKENS / 4, f"a stranger got {cached} tokens of another key")
