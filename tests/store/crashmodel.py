"""What may happen to stored conversations, stopped at every operation of the disk: the scenarios, and what is owed.

Covers putting, superseding, handing down (by link, by copy, with shared segments), archiving and dropping, over one to
three levels, in the order in which the writers of these levels do it; conversations of rows, of rows and checkpoints,
and of checkpoints alone; every state that the disk model allows after a kill or a power cut; what a new process must
find in it. It does not cover real processes or real disks, nor damage.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The conversations of a scenario; `second` shares the start of `first`."""

    name: str
    first: Manifest
    second: Manifest
    other: Manifest

    @property
    def shared(self) -> tuple[Key, ...]:
        """What the first and the second have in common."""
        return tuple(key for key in self.first.objects if key in self.second.objects)

    def replaced(self, stamp_s: float) -> Manifest:
        """The second under the serial of the first."""
        return msgspec.structs.replace(self.second, serial=self.first.serial, stamp_s=stamp_s)


ROWS = Cast(
    name="rows",
    first=conversation(1, 260, shared=256),
    second=conversation(2, 262, seed=2, shared=256),
    other=conversation(3, 20, seed=3, stages=ONE_STAGE),
)
HYBRID = Cast(
    name="checkpoints",
    first=conversation(1, 260, shared=256, stages=ONE_STAGE, checkpoints=((200, 5000), (260, 50))),
    second=conversation(2, 262, seed=2, shared=256, stages=ONE_STAGE, checkpoints=((200, 5000), (262, 50))),
    other=conversation(3, 20, seed=3, stages=ONE_STAGE, checkpoints=((20, 50),)),
)
ROWLESS = Cast(
    name="checkpoints alone",
    first=conversation(1, 260, shared=256, stages=(), checkpoints=((256, 5000), (260, 50))),
    second=conversation(2, 262, seed=2, shared=256, stages=(), checkpoints=((256, 5000), (262, 50))),
    other=conversation(3, 20, seed=3, stages=(), checkpoints=((20, 50),)),
)

CASTS = (ROWS, HYBRID, ROWLESS)

Crash = Literal["after_kill", "after_power_cut"]
CRASHES: tuple[Crash, ...] = ("after_kill", "after_power_cut")
Place = tuple[str, int]
"""(level, serial)"""


@dataclass
class Run:
    """The open levels of one run, and what it owes: of each conversation, one of these places must serve it."""

    fs: CrashFS
    put: Callable[[Level, Manifest, Sequence[Key]], object]
    cast: Cast = ROWS
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
        """Drop a conversation that nobody is owed any more; what is in `keep` belongs to others too."""
        self.level(where).drop([manifest.serial], [key for key in manifest.objects if key not in keep])

    def forget(self, where: str, manifest: Manifest, *, owe: str, keep: Sequence[Key] = ()) -> None:
        """Drop a conversation for good: from the moment this begins it may be there or not."""
        del self.owed[owe]
        self.drop(where, manifest, keep=keep)

    def degrade(self, src: str, dst: str, manifest: Manifest, *, owe: str, keep: Sequence[Key] = ()) -> Manifest:
        """Hand an entry down; `keep` is what other entries of the giver need. Returns its manifest there."""
        giver, receiver = self.level(src), self.level(dst)
        moved = adopted(giver, receiver, manifest, keep)
        self.owed[owe] = {(dst, moved.serial)}
        self.drop(src, manifest, keep=keep)
        return moved


def adopted(giver: Level, receiver: Level, manifest: Manifest, keep: Sequence[Key]) -> Manifest:
    """The receiver's half: take the files that it lacks, then commit under a serial of its own."""
    held = receiver.scan(IDENTITY)
    named = {key for stored in held.manifests for key in stored.manifest.objects}
    moved = msgspec.structs.replace(manifest, serial=receiver.next_serial(), stamp_s=manifest.stamp_s + 1)
    pending: list[PendingFile] = []
    for key in manifest.keys:
        if key not in named:
            for stage in range(len(manifest.stages)):
                pending.append(receiver.adopt_segment(giver, key, stage, may_link=key not in keep))
    for key in manifest.checkpoint_keys:
        if key not in named:
            pending.append(receiver.adopt_checkpoint(giver, key, may_link=key not in keep))
    receiver.publish(pending)
    receiver.put_manifest(moved)
    return moved


# -------------------------------------------------------------------------------------------------------- the scenarios


def supersede(run: Run) -> None:
    """Store two conversations, replace the first by a longer version of it, drop the other."""
    run.store("cold", run.cast.first, owe="a")
    run.store("cold", run.cast.other, owe="b")
    run.store("cold", run.cast.second, run.cast.shared, owe="a")
    run.drop("cold", run.cast.first, keep=run.cast.shared)
    run.forget("cold", run.cast.other, owe="b")


def replace_in_place(run: Run) -> None:
    """Store a conversation, then what became of it under the same serial, then only a new stamp."""
    run.store("cold", run.cast.first, owe="a")
    run.store("cold", run.cast.replaced(100.0), run.cast.shared, owe="a")
    run.store("cold", run.cast.replaced(200.0), tuple(run.cast.second.objects), owe="a")


def degrade(run: Run) -> None:
    """Hand one conversation down while another stays."""
    run.store("warm", run.cast.first, owe="a")
    run.store("warm", run.cast.other, owe="b")
    run.degrade("warm", "cold", run.cast.first, owe="a")


def degrade_shared(run: Run) -> None:
    """Hand down two conversations that share a segment: the first time the giver keeps it, then the receiver has it."""
    run.store("warm", run.cast.first, owe="a")
    run.store("warm", run.cast.second, run.cast.shared, owe="b")
    run.degrade("warm", "cold", run.cast.first, owe="a", keep=run.cast.shared)
    run.degrade("warm", "cold", run.cast.second, owe="b")


def superseded_below(run: Run) -> None:
    """A cold hit goes on in warm: only when that is durable is the cold copy superseded; then it goes down again."""
    run.store("cold", run.cast.first, owe="a")
    run.store("warm", run.cast.second, owe="a")
    run.drop("cold", run.cast.first)
    run.degrade("warm", "cold", run.cast.second, owe="a")


def archive(run: Run) -> None:
    """Down from warm to cold, and what cold would discard goes to the archive; there the oldest is deleted."""
    run.store("warm", run.cast.first, owe="a")
    cold = run.degrade("warm", "cold", run.cast.first, owe="a")
    run.store("archive", run.cast.other, owe="b")
    run.degrade("cold", "archive", cold, owe="a")
    run.forget("archive", run.cast.other, owe="b")


def collect(run: Run) -> None:
    """The last level deletes its oldest, one that shares a segment with what stays, and then everything."""
    run.store("cold", run.cast.other, owe="c")
    run.store("cold", run.cast.first, owe="a")
    run.store("cold", run.cast.second, run.cast.shared, owe="b")
    run.forget("cold", run.cast.other, owe="c")
    run.forget("cold", run.cast.first, owe="a", keep=run.cast.shared)
    run.forget("cold", run.cast.second, owe="b")


Scenario = Callable[[Run], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario with these conversations, on levels that are on one volume or each on its own."""

    scenario: Scenario
    volumes: tuple[Path, ...] = ONE_VOLUME
    cast: Cast = ROWS

    @property
    def name(self) -> str:
        return f"{self.scenario.__name__} of {self.cast.name}{' across volumes' if self.volumes else ''}"


CASES = (
    *(Case(scenario=scenario, cast=cast) for cast in CASTS for scenario in (supersede, replace_in_place, collect)),
    *(
        Case(scenario=scenario, volumes=volumes, cast=cast)
        for cast in CASTS
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
    case.scenario(Run(whole, put_one, case.cast))
    counter = itertools.count()
    for cut_at in range(whole.steps, -1, -1):
        run = Run(disk(cut_at, case.volumes), put_one, case.cast)
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
        problems += [Problem(kind="torn", text=f"{name} offers {lost}") for lost in scan.lost_checkpoints]
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
        keep = {key for other in here[i + 1 :] for key in other.objects}
        moved = adopted(giver, receiver, manifest, tuple(keep))
        giver.drop([manifest.serial], set(manifest.objects) - keep)
        try:
            verify(receiver, moved)
        except (DamagedFile, OSError) as error:
            yield Problem(kind="stuck", text=f"{moved} cannot be read after it was handed down anew: {error}")
    for level in (giver, receiver):
        scan = level.scan(IDENTITY)
        if scan.temporary or scan.stale or level.used_bytes != level.usage():
            yield Problem(kind="stuck", text=f"{level} after handing down anew: {scan}")
