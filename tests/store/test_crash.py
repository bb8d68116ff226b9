"""Kill and power cut at every operation: what was acknowledged is there and right, nothing torn is served.

Covers putting, superseding and dropping conversations, over every state that the disk model allows; and that the same
check catches disks and orders that do lose data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.store.crashfs import CrashFS, PowerCut
from tests.store.samples import IDENTITY, STAGES, conversation, put, verify, write_segments

from strata.errors import DamagedFile
from strata.store.format import Manifest
from strata.store.level import Level

LEVEL_DIR = Path("/data/level")
FIRST = conversation(1, 260, shared=256)
SECOND = conversation(2, 262, seed=2, shared=256)  # shares the first segment, has another tail
OTHER = conversation(3, 20, seed=3, stages=STAGES[:1])

Put = Callable[[Level, Manifest, tuple[bytes, ...]], None]
Accepted = list[set[int]]
"""Of every set, at least one of these serials must be served."""
Scenario = Callable[[Level, Put, Accepted], None]


def supersede(level: Level, put_one: Put, accepted: Accepted) -> None:
    """Store two conversations, replace the first by a longer version of it, drop the other."""
    put_one(level, FIRST, ())
    accepted[:] = [{1}]
    put_one(level, OTHER, ())
    accepted[:] = [{1}, {3}]
    put_one(level, SECOND, FIRST.keys[:1])
    accepted[:] = [{2}, {3}]
    level.drop([1], FIRST.keys[1:])
    accepted[:] = [{2}]
    level.drop([3], OTHER.keys)


def replace_in_place(level: Level, put_one: Put, accepted: Accepted) -> None:
    """Store a conversation, then what became of it under the same serial, then only a new stamp."""
    put_one(level, FIRST, ())
    accepted[:] = [{1}]
    put_one(level, conversation(1, 262, seed=2, shared=256), FIRST.keys[:1])
    put_one(level, conversation(1, 262, seed=2, shared=256, stamp_s=200.0), SECOND.keys)


def right(level: Level, manifest: Manifest, held: tuple[bytes, ...]) -> None:
    put(level, manifest, held)


def manifest_first(level: Level, manifest: Manifest, held: tuple[bytes, ...]) -> None:
    pending = write_segments(level, manifest, held)
    level.put_manifest(manifest)
    level.publish(pending)


def drop_first(level: Level, put_one: Put, accepted: Accepted) -> None:
    put_one(level, FIRST, ())
    accepted[:] = [{1}]
    level.drop([1], FIRST.keys[1:])
    put_one(level, SECOND, FIRST.keys[:1])


class NoFsync(CrashFS):
    def fsync(self, path: Path) -> None:
        self._step()


class NoFolderSync(CrashFS):
    def sync_dir(self, path: Path) -> None:
        self._step()


def problems(disk: CrashFS, accepted: Accepted) -> list[str]:
    """What is wrong with what a new process finds."""
    level = Level.open(LEVEL_DIR, fs=disk)
    scan = level.scan(IDENTITY)
    served, found = set(), [f"manifest {stale.serial} is stale: {stale.reason}" for stale in scan.stale]
    for stored in scan.manifests:
        try:
            verify(level, stored.manifest)
        except (DamagedFile, OSError) as error:
            found.append(f"{stored.manifest} is offered but damaged: {error}")
        served.add(stored.manifest.serial)
    found += [f"none of {serials} is there, only {served}" for serials in accepted if not serials & served]
    if level.used_bytes != level.usage():
        found.append("the account is wrong")
    level.close()
    return found


def states(scenario: Scenario, put_one: Put, disk: type[CrashFS], crash: str) -> Iterator[list[str]]:
    """Stop the scenario at each step, the last first; for every state of the disk after it, what is wrong with it."""
    whole = disk()
    scenario(Level.open(LEVEL_DIR, fs=whole), put_one, [])
    for cut_at in range(whole.steps, -1, -1):
        fs, accepted = disk(cut_at), []
        with suppress(PowerCut):
            scenario(Level.open(LEVEL_DIR, fs=fs), put_one, accepted)
        for after in getattr(fs, crash)():
            yield [f"step {cut_at}: {problem}" for problem in problems(after, accepted)]


@pytest.mark.parametrize(("crash", "at_least"), [("after_kill", 60), ("after_power_cut", 1000)])
@pytest.mark.parametrize("scenario", [supersede, replace_in_place])
def test_every_acknowledged_conversation_survives_every_crash(scenario, crash, at_least) -> None:
    found = list(states(scenario, right, CrashFS, crash))
    assert [problem for state in found for problem in state] == []
    assert len(found) >= at_least


@pytest.mark.parametrize(
    ("scenario", "put_one", "disk"),
    [
        pytest.param(replace_in_place, manifest_first, CrashFS, id="manifest before segments"),
        pytest.param(drop_first, right, CrashFS, id="drop before put"),
        pytest.param(replace_in_place, right, NoFsync, id="no fsync"),
        pytest.param(replace_in_place, right, NoFolderSync, id="no folder fsync"),
    ],
)
def test_the_same_check_catches_what_does_lose_data(scenario, put_one, disk) -> None:
    assert any(states(scenario, put_one, disk, "after_power_cut"))
