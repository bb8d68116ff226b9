"""Kill and power cut at every operation: what was acknowledged is there and right, nothing torn is served.

Covers every scenario of `crashmodel.py` over a part of its states (`make crash` goes through all of them); and that the
same check catches disks and orders that do lose data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.store.crashfs import CrashFS
from tests.store.crashmodel import (
    CASES,
    CRASHES,
    HYBRID,
    ROWLESS,
    ROWS,
    VOLUMES,
    Case,
    Run,
    degrade,
    replace_in_place,
    states,
)
from tests.store.samples import checkpoint_plans, payloads, put, write_segments

from strata.store.format import Manifest, digest
from strata.store.level import Level
from strata.types import Key

EVERY = {ROWS.name: 17, HYBRID.name: 31, ROWLESS.name: 5}
"""Which part of the states after a power cut is looked at here: the more files, the more states there are."""


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_acknowledged_conversation_survives_every_crash(case, crash) -> None:
    every = 1 if crash == "after_kill" else EVERY[case.cast.name]
    found = list(states(case, crash, every=every))
    assert [problem for state in found for problem in state] == []
    assert len(found) >= 40


def put_block_by_block(level: Level, manifest: Manifest, held: Sequence[Key] = ()) -> None:
    """As the writer does with large checkpoints: their files grow, and the header's page is written last."""
    pending = write_segments(level, manifest, {*held, *manifest.checkpoint_keys})
    for header in checkpoint_plans(manifest):
        if header.key not in held:
            file = level.begin_growing(header)
            for i, view in enumerate(payloads(header)):
                file.add(i, view, digest(view[: header.blocks[i].length]))
            pending.append(file.pending)
    level.publish(pending)
    level.put_manifest(manifest)


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("cast", [HYBRID, ROWLESS], ids=lambda cast: cast.name)
def test_checkpoints_written_block_by_block_survive_every_crash(cast, crash) -> None:
    case = Case(scenario=replace_in_place, cast=cast)
    every = 1 if crash == "after_kill" else EVERY[cast.name]
    found = list(states(case, crash, every=every, put_one=put_block_by_block))
    assert [problem for state in found for problem in state] == []
    assert len(found) >= 40


# ------------------------------------------------------------------------------------------------ the check checks


def manifest_first(level: Level, manifest: Manifest, held: Sequence[Key]) -> None:
    pending = write_segments(level, manifest, held)
    level.put_manifest(manifest)
    level.publish(pending)


def checkpoints_last(level: Level, manifest: Manifest, held: Sequence[Key]) -> None:
    level.publish(write_segments(level, manifest, {*held, *manifest.checkpoint_keys}))
    level.put_manifest(manifest)
    level.publish(write_segments(level, manifest, {*held, *manifest.keys}))


def drop_before_put(run: Run) -> None:
    run.store("cold", run.cast.first, owe="a")
    run.drop("cold", run.cast.first)
    run.store("cold", run.cast.first, owe="a")


def drop_before_adopting(run: Run) -> None:
    first = ROWS.first
    run.store("warm", first, owe="a")
    giver, receiver = run.level("warm"), run.level("cold")
    pending = [receiver.adopt_segment(giver, key, stage, may_link=True) for key in first.keys for stage in range(2)]
    giver.drop([1], first.keys)
    receiver.publish(pending)
    receiver.put_manifest(first)
    run.owed["a"] = {("cold", 1)}


def segments_before_the_manifest_dropped(run: Run) -> None:
    run.store("cold", run.cast.first, owe="a")
    run.owed.clear()
    run.level("cold").drop((), run.cast.first.objects)
    run.level("cold").drop([1], ())


class NoFsync(CrashFS):
    def fsync(self, path: Path) -> None:
        self._step()


class NoFolderSync(CrashFS):
    def sync_dir(self, path: Path) -> None:
        self._step()


class NoSegmentFolderSync(CrashFS):
    """New folders of segments are never made durable."""

    def sync_dir(self, path: Path) -> None:
        if path.name == "seg":
            self._step()
        else:
            super().sync_dir(path)


@pytest.mark.parametrize(
    ("case", "put_one", "disk"),
    [
        pytest.param(Case(scenario=replace_in_place), manifest_first, CrashFS, id="manifest before segments"),
        pytest.param(Case(scenario=replace_in_place, cast=HYBRID), checkpoints_last, CrashFS, id="checkpoints last"),
        pytest.param(
            Case(scenario=replace_in_place, cast=ROWLESS), manifest_first, CrashFS, id="manifest first, rowless"
        ),
        pytest.param(Case(scenario=replace_in_place, cast=HYBRID), put, NoFsync, id="no fsync of checkpoints"),
        pytest.param(Case(scenario=drop_before_put), put, CrashFS, id="drop before put"),
        pytest.param(Case(scenario=drop_before_adopting), put, CrashFS, id="drop before the receiver has it"),
        pytest.param(Case(scenario=segments_before_the_manifest_dropped), put, CrashFS, id="segments dropped first"),
        pytest.param(
            Case(scenario=segments_before_the_manifest_dropped, cast=ROWLESS),
            put,
            CrashFS,
            id="checkpoints dropped first",
        ),
        pytest.param(Case(scenario=replace_in_place), put, NoFsync, id="no fsync"),
        pytest.param(Case(scenario=degrade, volumes=VOLUMES), put, NoFsync, id="no fsync of a copy"),
        pytest.param(Case(scenario=replace_in_place), put, NoFolderSync, id="no folder sync"),
        pytest.param(Case(scenario=degrade), put, NoFolderSync, id="no folder sync of a link"),
        pytest.param(Case(scenario=degrade), put, NoSegmentFolderSync, id="new folders not durable"),
    ],
)
def test_the_same_check_catches_what_does_lose_data(case, put_one, disk) -> None:
    assert any(states(case, "after_power_cut", put_one=put_one, disk=disk))
