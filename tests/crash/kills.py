"""SIGKILL of the real server, and of its engine, under load: nothing acknowledged is lost, nothing wrong is served.

Covers whole processes and real directories; what a power cut leaves is power_cuts.py. The server runs with a witness,
whose notes say what was acknowledged at the moment of the kill. After each kill the directories are opened offline:
what must be there is there, every digest holds, and every file is explained; the next life must count the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.crash.journal import Owed, notes, replay
from tests.crash.talkers import Finding, Talker
from tests.serve.running import RunningServer, alive, wait_for

from strata.store.format import decode_manifest
from strata.store.level import Level

SEED = 20261130
FULL_KILLS = 220
CLIENTS = 4
FIRST_NOTE_S, NEXT_NOTE_S = 3.0, 1.0
NURSERY_S, NURSERY_ACKNOWLEDGED = 60.0, 8
PROJECT = Path(__file__).parents[2]
POLICIES = (
    (),
    ("--conversation-cache-park=disk",),
    (),
    ("--conversation-cache-mib=14", "--conversation-cache-spill-park-throttle-s=1"),
    (),
    ("--conversation-cache-spill-on=evict",),
)


@dataclass(slots=True, kw_only=True)
class Figures:
    """`unexplained`: entries and files that must not be there."""

    kills: int = 0
    engine_kills: int = 0
    lost: int = 0
    corrupt: int = 0
    unaccounted_bytes: int = 0
    unexplained: int = 0
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, what: str, n: int, why: str) -> None:
        setattr(self, what, getattr(self, what) + n)
        if n:
            self.wrong.append(f"kill {self.kills}: {what}: {why}")
            print(self.wrong[-1], file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class Held:
    """What a directory holds, looked at offline. `entries`: by serial, the keys."""

    entries: dict[int, list[str]] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    orphans: int = 0


def du(folder: Path) -> int:
    """What the files below a folder take on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_dir())


def look_at(folder: Path) -> Held:
    """Open a directory as its owner would, and verify every block that a manifest names."""
    held = Held()
    level = Level.open(folder)
    try:
        identities = {decode_manifest(path.read_bytes()).identity for path in folder.glob("*.meta")}
        scan = level.scan(identities.pop() if identities else b"")
        held.stale = [f"{folder.name}: {stale.serial}: {stale.reason}" for stale in scan.stale]
        held.unexplained = [f"{folder.name}: {path}" for path in (*scan.other, *scan.bad)]
        held.unexplained += [f"{folder.name}: foreign {entry.serial}" for entry in scan.foreign]
        held.orphans = len(scan.orphans)
        for stored in scan.manifests:
            held.entries[stored.manifest.serial] = [key.hex() for key in stored.manifest.keys]
        for key in {key for stored in scan.manifests for key in stored.manifest.keys}:
            try:
                header = level.read_header(key, 0)
                for index, block in enumerate(header.blocks):
                    level.read_block(header, index, memoryview(bytearray(block.length)))
            except Exception as error:
                held.damaged.append(str(error))
    finally:
        level.close()
    return held


class KillLoop:
    """Lives of one server on the same directories. `folders`: of the levels, fast to slow, then of the archive."""

    def __init__(self, work: Path, folders: dict[str, Path], seed: int) -> None:
        self.figures = Figures()
        self.found = Finding()
        self._work = work
        self._folders = folders
        self._rng = random.Random(seed)
        words: set[str] = set()
        self._talkers = [Talker(i, seed, words, self.found) for i in range(CLIENTS)]
        self._held: dict[str, Held] = {name: Held() for name in folders}

    @property
    def _journal(self) -> Path:
        return self._work / "journal"

    @contextlib.contextmanager
    def _life(self, policy: tuple[str, ...]) -> Iterator[RunningServer]:
        """A server, seen to hold what the directories do."""
        for path in (self._journal, self._work / "log"):
            path.unlink(missing_ok=True)
        flags = [f"--conversation-cache-{name}-dir={folder}" for name, folder in self._folders.items()]
        flags += ["--conversation-cache-warm-mib=24"] if "warm" in self._folders else []
        if "archive" in self._folders:
            flags += ["--conversation-cache-archive-mode=state", "--conversation-cache-archive-mib=32"]
        budgets = ("--conversation-cache-cold-mib=64", "--parallel=4")
        floors = ("--conversation-cache-min-free-mib=64", "--conversation-cache-park-min-free-mib=16")
        ram = () if any("cache-mib" in flag for flag in policy) else ("--conversation-cache-mib=32",)
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
        extra = {"WITNESS_JOURNAL": str(self._journal), "PYTHONPATH": path}
        with RunningServer(
            self._work / "log",
            *flags,
            *budgets,
            *floors,
            *ram,
            *policy,
            program="tests.crash.witness",
            extra=extra,
        ) as server:
            self._compare_start(server.status())
            yield server

    def _compare_start(self, status: dict[str, Any]) -> None:
        """A start changes nothing, and counts what is there to the byte."""
        opened: dict[str, dict[int, list[str]]] = {name: {} for name in self._folders}
        for note in notes(self._journal):
            if note["what"] == "opened":
                opened[note["level"]][note["serial"]] = note["keys"]
        for level in status["levels"]:
            if level["name"] == "ram":
                continue
            held = self._held[level["name"]].entries
            missing = [serial for serial, keys in held.items() if opened[level["name"]].get(serial) != keys]
            self.figures.note("lost", len(missing), f"{level['name']} was started without {missing}")
            scan = {name: level["scan"][name] for name in ("foreign", "stale", "bad", "other") if level["scan"][name]}
            self.figures.note("unexplained", len(scan), f"{level['name']}: {scan}")
        self._compare_bytes(status)

    def _compare_bytes(self, status: dict[str, Any]) -> None:
        for level in status["levels"]:
            if level["name"] != "ram":
                found = du(self._folders[level["name"]])
                difference = abs(level["used_bytes"] - found)
                self.figures.note("unaccounted_bytes", difference, f"{level['name']} {level['used_bytes']} not {found}")

    @contextlib.contextmanager
    def _talking(self, server: RunningServer) -> Iterator[None]:
        stop = threading.Event()
        threads = [threading.Thread(target=t.talk, args=(server.url, stop)) for t in self._talkers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(90)
                assert not thread.is_alive(), "a client hangs"

    def _wait_for_moment(self) -> None:
        """Some time under load, mostly after a first state was acknowledged; or just after a commit or a drop."""
        if not self.figures.kills:  # conversations to go on with are there after the first life
            wait_for(
                lambda: self._journal.read_bytes().count(b"acknowledged") > NURSERY_ACKNOWLEDGED, "acks", NURSERY_S
            )
        elif self._rng.random() < 0.9:
            self._await_note("acknowledged", FIRST_NOTE_S)
        if self._rng.random() < 0.4:
            time.sleep(self._rng.uniform(0.0, 1.0))
            return
        self._await_note(self._rng.choice(["commit", "drop", "acknowledged"]), NEXT_NOTE_S)
        time.sleep(self._rng.choice([0, 0.0005, 0.002, 0.005, 0.02]))

    def _await_note(self, what: str, within_s: float) -> None:
        """The next one of this kind, if it comes soon."""
        wanted, deadline = f'"what": "{what}"'.encode(), time.monotonic() + within_s
        with self._journal.open("rb") as journal:
            journal.seek(0, os.SEEK_END)
            while wanted not in journal.read() and time.monotonic() < deadline:
                time.sleep(0.0005)

    # ------------------------------------------------------------------------------------------------------- one life

    def kill_server(self, *, settle: bool = False) -> None:
        """One life, which ends with SIGKILL under load; with `settle`, when all is quiet."""
        policy = POLICIES[self.figures.kills % len(POLICIES)]
        with self._life(policy) as server:
            engine = server.engine_pid
            with self._talking(server):
                self._wait_for_moment()
                if not settle:
                    server.signal(signal.SIGKILL)
            if settle:
                self._check_settled(server)
                server.signal(signal.SIGKILL)
            code = server.ended()
            assert code == -signal.SIGKILL, f"the server ended by itself with {code}"
            wait_for(lambda: not alive(engine), "the end of the engine process")
        self.figures.kills += 1
        self._after_death()

    def _check_settled(self, server: RunningServer) -> None:
        """Nothing moves: the account is the directory's to the byte, and the levels are within their budgets."""
        server.settled()
        status = server.status()
        self._compare_bytes(status)
        for level in status["levels"]:
            over = max(0, level["used_bytes"] - level["budget_bytes"])
            self.figures.note("unexplained", int(over > 0), f"{level['name']} is {over} bytes over its budget at rest")

    def kill_engine(self) -> None:
        """One life whose engine is killed under load: what RAM holds is restored from RAM. Ends with SIGKILL."""
        with self._life(()) as server:
            server_clients = self._talkers[1:]
            guest = self._talkers[0]
            talk = guest.new()
            with httpx.Client(base_url=server.url, timeout=60) as client:
                stop = threading.Event()
                threads = [threading.Thread(target=t.talk, args=(server.url, stop)) for t in server_clients]
                for thread in threads:
                    thread.start()
                guest.turn(client, talk)
                wait_for(lambda: self._in_ram(talk.tokens), "the park to RAM")
                pid = server.kill_engine()
                for thread in threads:  # each ends with its first error
                    stop.set()
                    thread.join(90)
                server.wait_for_engine_after(pid)
                header = guest.turn(client, talk)
            self.figures.engine_kills += 1
            sources = header.split(";")[0].removeprefix("source=").split("+")
            self.figures.note("lost", int("ram" not in sources), f"a conversation parked in RAM came {header}")
            server.signal(signal.SIGKILL)
            server.ended()
        self.figures.kills += 1
        self._after_death()

    def _in_ram(self, tokens: int) -> bool:
        return any(note["what"] == "ram" and abs(note["tokens"] - tokens) <= 1 for note in notes(self._journal))

    def _after_death(self) -> None:
        owed = replay(self._journal, list(self._folders)[-1])
        self.figures.note("corrupt", len(owed.wrong), "; ".join(owed.wrong[:3]))
        self.figures.note("corrupt", len(self.found.leaks), "; ".join(self.found.leaks[:3]))
        self.figures.note("unexplained", len(self.found.failures), "; ".join(self.found.failures[:3]))
        self.found.leaks.clear()
        self.found.failures.clear()
        for what, n in owed.counts.items():
            self.figures.counts[what] = self.figures.counts.get(what, 0) + n
        for name, folder in self._folders.items():
            self._held[name] = held = look_at(folder)
            self._compare(name, held, owed)

    def _compare(self, name: str, held: Held, owed: Owed) -> None:
        must = owed.entries.get(name, {})
        missing = [serial for serial, note in must.items() if held.entries.get(serial) != note["keys"]]
        self.figures.note("lost", len(missing), f"{name} does not hold {missing} any more")
        more = [s for s in held.entries if s not in must and (name, s) not in owed.maybe]
        self.figures.note("unexplained", len(more), f"{name} holds {more} that were never acknowledged")
        self.figures.note("lost", len(held.stale), "; ".join(held.stale[:3]))
        self.figures.note("corrupt", len(held.damaged), "; ".join(held.damaged[:3]))
        self.figures.note("unexplained", len(held.unexplained), "; ".join(held.unexplained[:3]))


def run(work: Path, folders: dict[str, Path], *, kills: int, engine_kills: int, seed: int = SEED) -> KillLoop:
    """`kills` lives in all; `engine_kills` of them lose their engine first, and each tenth other is killed at rest."""
    loop = KillLoop(work, folders, seed)
    every = kills // engine_kills if engine_kills else kills + 1
    for i in range(kills):
        if i % every == every - 1:
            loop.kill_engine()
        else:
            loop.kill_server(settle=i % 10 == 5)
        if i % 10 == 9:
            print(f"{i + 1} of {kills} kills: {loop.found}, {loop.figures}", file=sys.stderr, flush=True)
    return loop


def one_volume(work: Path) -> dict[str, Path]:
    """Both levels, and an archive for what they drop."""
    return {name: work / name for name in ("warm", "cold", "archive")}


@contextlib.contextmanager
def two_filesystems(work: Path) -> Iterator[dict[str, Path]]:
    """A warm level in memory and a cold one on disk, which deletes; both on disk where there is no /dev/shm."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield {"warm": work / "warm", "cold": work / "cold"}
        return
    warm = Path(tempfile.mkdtemp(prefix="strata-warm-", dir=shm))
    try:
        yield {"warm": warm, "cold": work / "cold"}
    finally:
        shutil.rmtree(warm)


def kills(n: int = FULL_KILLS) -> dict[str, int]:
    """The figures of `make crash`: half of the kills with both levels and an archive on one volume, half on two."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the server would outlive this
    total: dict[str, int] = {}
    for volumes in (1, 2):
        with contextlib.ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-kills-")))
            folders = one_volume(work)
            if volumes == 2:
                folders = stack.enter_context(two_filesystems(work))
            loop = run(work, folders, kills=n // 2, engine_kills=max(1, n // 20), seed=SEED + volumes)
            print(f"{volumes} volumes: {loop.found}, {loop.figures.counts}", file=sys.stderr, flush=True)
            figures = loop.figures
            for name in ("kills", "engine_kills", "lost", "corrupt", "unaccounted_bytes", "unexplained"):
                total[name] = total.get(name, 0) + getattr(figures, name)
            for name, count in (("restored_segments", "right"), ("acknowledged", "acknowledged"), ("drops", "drop")):
                total[name] = total.get(name, 0) + figures.counts.get(count, 0)
    return total


if __name__ == "__main__":
    figures = kills(int(sys.argv[1]) if len(sys.argv) > 1 else FULL_KILLS)
    print(json.dumps(figures))
    sys.exit(any(figures[name] for name in ("lost", "corrupt", "unaccounted_bytes", "unexplained")))
