"""What may happen to stored conversations, stopped at every operation of the disk: the scenarios, and what is owed.

Covers putting, superseding, handing down (by link, by copy, with shared segments), archiving and dropping, over one to
three levels, in the order in which the writers of these levels do it; every state that the disk model allows after a
kill or a power cut; and what a new process must find then. It does not cover real processes or real disks, nor damage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from tests.store.crashfs import CrashFS, PowerCut
from tests.store.samples import IDENTITY, STAGES, conversation, put, verify

from strata.errors import DamagedFile
from strata.store.format import Manifest
from strata.store.level import Level, PendingFile
from strata.types import Key

DIRS = {name: Path("/") / name / "level" for name in ("warm", "cold", "archive")}
ONE_VOLUME: tuple[Path, ...] = ()
VOLUMES = tuple(path.parent for path in DIRS.values())
ONE_STAGE = STAGES[:1]

FIRST = conversation(1, 260, shared=256)
SECOND = conversation(2, 262, seed=2, shared=256)  # shares the first segment, has another tail
OTHER = conversation(3, 20, seed=3, stages=ONE_STAGE)

Crash = Literal["after_kill", "after_power_cut"]
CRASHES: tuple[Crash, ...] = ("after_kill", "after_power_cut")
Place = tuple[str, int]
"""(level, serial)"""


@dataclass
class Run:
    """The open levels of one run, and what it owes: of each conversation, one of these places must serve it."""

    fs: CrashFS
    put: Callable[[Level, Manifest, Sequence[Key]], object]
    levels: dict[str, Level] = field(default_factory=dict)
    owed: dict[str, set[Place]] = field(default_factory=dict)

    def level(self, name: str) -> Level:
        if name not in self.levels:
            self.levels[name] = Level.open(DIRS[name], name=name, fs=self.fs)
        return self.levels[name]

    def store(self, where: str, manifest: Manifest, held: Sequence[Key] = (), *, owe: str) -> None:
        """Put a conversation; from the acknowledgement on it is owed under the name `owe`."""
        self.put(self.level(where), manifest, held)
        self.owed[owe] = {(where, manifest.serial)}

    def drop(self, where: str, manifest: Manifest, *, keep: Sequence[Key] = ()) -> None:
        """Drop a conversation that nobody is owed any more; the segments in `keep` belong to others too."""
        self.level(where).drop([manifest.serial], [key for key in manifest.keys if key not in keep])

    def forget(self, where: str, manifest: Manifest, *, owe: str, keep: Sequence[Key] = ()) -> None:
        """Drop a conversation for good: from the moment this begins it may be there or not."""
        del self.owed[owe]
        self.drop(where, manifest, keep=keep)

    def degrade(self, src: str, dst: str, manifest: Manifest, *, owe: str, keep: Sequence[Key] = ()) -> Manifest:
        """Hand an entry down; `keep` are segments that other entries of the giver need. Returns its manifest there."""
        giver, receiver = self.level(src), self.level(dst)
        moved = adopted(giver, receiver, manifest, keep)
        self.owed[owe] = {(dst, moved.serial)}
        self.drop(src, manifest, keep=keep)
        return moved


def adopted(giver: Level, receiver: Level, manifest: Manifest, keep: Sequence[Key]) -> Manifest:
    """The receiver's half: take the segments that it lacks, then commit under a serial of its own."""
    held = receiver.scan(IDENTITY)
    named = {key for stored in held.manifests for key in stored.manifest.keys}
    moved = msgspec.structs.replace(manifest, serial=receiver.next_serial(), stamp_s=manifest.stamp_s + 1)
    pending: list[PendingFile] = []
    for key in manifest.keys:
        if key not in named:
            for stage in range(len(manifest.stages)):
                pending.append(receiver.adopt_segment(giver, key, stage, may_link=key not in keep))
    receiver.publish(pending)
    receiver.put_manifest(moved)
    return moved


# -------------------------------------------------------------------------------------------------------- the scenarios


def supersede(run: Run) -> None:
    """Store two conversations, replace the first by a longer version of it, drop the other."""
    run.store("cold", FIRST, owe="a")
    run.store("cold", OTHER, owe="b")
    run.store("cold", SECOND, FIRST.keys[:1], owe="a")
    run.drop("cold", FIRST, keep=FIRST.keys[:1])
    run.forget("cold", OTHER, owe="b")


def replace_in_place(run: Run) -> None:
    """Store a conversation, then what became of it under the same serial, then only a new stamp."""
    run.store("cold", FIRST, owe="a")
    run.store("cold", conversation(1, 262, seed=2, shared=256), FIRST.keys[:1], owe="a")
    run.store("cold", conversation(1, 262, seed=2, shared=256, stamp_s=200.0), SECOND.keys, owe="a")


def degrade(run: Run) -> None:
    """Hand one conversation down while another stays."""
    run.store("warm", FIRST, owe="a")
    run.store("warm", OTHER, owe="b")
    run.degrade("warm", "cold", FIRST, owe="a")


def degrade_shared(run: Run) -> None:
    """Hand down two conversations that share a segment: the first time the giver keeps it, then the receiver has it."""
    run.store("warm", FIRST, owe="a")
    run.store("warm", SECOND, FIRST.keys[:1], owe="b")
    run.degrade("warm", "cold", FIRST, owe="a", keep=FIRST.keys[:1])
    run.degrade("warm", "cold", SECOND, owe="b")


def superseded_below(run: Run) -> None:
    """A cold hit goes on in warm: only when that is durable is the cold copy superseded; then it goes down again."""
    run.store("cold", FIRST, owe="a")
    run.store("warm", SECOND, owe="a")
    run.drop("cold", FIRST)
    run.degrade("warm", "cold", SECOND, owe="a")


def archive(run: Run) -> None:
    """Down from warm to cold, and what cold would discard goes to the archive; there the oldest is deleted."""
    run.store("warm", FIRST, owe="a")
    cold = run.degrade("warm", "cold", FIRST, owe="a")
    run.store("archive", OTHER, owe="b")
    run.degrade("cold", "archive", cold, owe="a")
    run.forget("archive", OTHER, owe="b")


def collect(run: Run) -> None:
    """The last level deletes its oldest, one that shares a segment with what stays, and then everything."""
    run.store("cold", OTHER, owe="c")
    run.store("cold", FIRST, owe="a")
    run.store("cold", SECOND, FIRST.keys[:1], owe="b")
    run.forget("cold", OTHER, owe="c")
    run.forget("cold", FIRST, owe="a", keep=FIRST.keys[:1])
    run.forget("cold", SECOND, owe="b")


Scenario = Callable[[Run], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario on levels that are on one volume or each on its own."""

    scenario: Scenario
    volumes: tuple[Path, ...] = ONE_VOLUME

    @property
    def name(self) -> str:
        return f"{self.scenario.__name__}{' across volumes' if self.volumes else ''}"


CASES = (
    *(Case(scenario=scenario) for scenario in (supersede, replace_in_place, collect)),
    *(
        Case(scenario=scenario, volumes=volumes)
        for scenario in (degrade, degrade_shared, superseded_below, archive)
        for volumes in (ONE_VOLUME, VOLUMES)
    ),
)


# ------------------------------------------------------------------------------------------------- crashing and looking


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with one state."""

    kind: Literal["lost", "torn", "unaccounted", "stuck"]
    text: str


def states(
    case: Case, crash: Crash, *, put_one: Callable = put, disk: type[CrashFS] = CrashFS, every: int = 1
) -> Iterator[list[Problem]]:
    """Stop the scenario at each step, the last first; for every `every`th state after it, what is wrong with it."""
    whole = disk(volumes=case.volumes)
    case.scenario(Run(whole, put_one))
    counter = itertools.count()
    for cut_at in range(whole.steps, -1, -1):
        run = Run(disk(cut_at, case.volumes), put_one)
        with suppress(PowerCut):
            case.scenario(run)
        for after in getattr(run.fs, crash)():
            if next(counter) % every == 0:
                found = look(after(), run.owed.values(), run.levels)
                yield [Problem(kind=p.kind, text=f"{case.name}, {crash}, step {cut_at}: {p.text}") for p in found]


def look(disk: CrashFS, owed: Iterable[set[Place]], names: Iterable[str]) -> list[Problem]:
    """What is wrong with what a new process finds, and with what it can do then."""
    levels = {name: Level.open(DIRS[name], name=name, fs=disk) for name in names}
    served: dict[Place, Manifest] = {}
    problems: list[Problem] = []
    for name, level in levels.items():
        scan = level.scan(IDENTITY)
        problems += [Problem(kind="torn", text=f"{name} {stale.serial}: {stale.reason}") for stale in scan.stale]
        for stored in scan.manifests:
            try:
                verify(level, stored.manifest)
            except (DamagedFile, OSError) as error:
                problems.append(Problem(kind="torn", text=f"{name} offers {stored.manifest}: {error}"))
            served[name, stored.manifest.serial] = stored.manifest
        level.remove_files(scan.temporary)
        if level.used_bytes != level.usage():
            problems.append(Problem(kind="unaccounted", text=f"{name}: {level.used_bytes} != {level.usage()}"))
    missing = [places for places in owed if not places & served.keys()]
    problems += [Problem(kind="lost", text=f"none of {places}, only {sorted(served)}") for places in missing]
    if not problems and len(levels) > 1:
        problems += _go_on(levels, served)
    return problems


def _go_on(levels: dict[str, Level], served: dict[Place, Manifest]) -> Iterator[Problem]:
    """After the restart everything that warm holds goes down: what was left half-way must not be in the way."""
    giver, receiver = levels.get("warm"), levels["cold"]
    if giver is None:
        return
    here = [manifest for (name, _), manifest in served.items() if name == "warm"]
    for i, manifest in enumerate(here):
        keep = {key for other in here[i + 1 :] for key in other.keys}
        moved = adopted(giver, receiver, manifest, tuple(keep))
        giver.drop([manifest.serial], set(manifest.keys) - keep)
        try:
            verify(receiver, moved)
        except (DamagedFile, OSError) as error:
            yield Problem(kind="stuck", text=f"{moved} cannot be read after it was handed down anew: {error}")
    for level in (giver, receiver):
        scan = level.scan(IDENTITY)
        if scan.temporary or scan.stale or level.used_bytes != level.usage():
            yield Problem(kind="stuck", text=f"{level} after handing down anew: {scan}")
