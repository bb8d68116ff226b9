"""The writer: outcomes are values, a failed park leaves nothing behind, and it recovers by itself."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.store.contract import Faulty
from tests.store.samples import IDENTITY, conversation, payloads, plans, serials, verify

from strata.store.format import Manifest
from strata.store.fs import Disk
from strata.store.level import Level
from strata.store.names import manifest_name
from strata.store.writer import OK, Abandoned, Committed, Dropped, Failed, Quarantined, Writer, Written

WAIT_S = 20.0


@pytest.fixture
def disk() -> Faulty:
    return Faulty(Disk())


@pytest.fixture
def level(tmp_path, disk) -> Iterator[Level]:
    level = Level.open(tmp_path / "level", fs=disk)
    yield level
    assert level.used_bytes == level.usage()
    level.close()


@pytest.fixture
def writer(level) -> Iterator[Writer]:
    writer = Writer(level)
    yield writer
    assert writer.close(WAIT_S)


def park(writer: Writer, ticket: int, manifest: Manifest) -> tuple[list[Written | Failed], Committed | Failed]:
    headers = [header for segment in manifest.segments for header in plans(manifest, segment)]
    written = [writer.write_segment(ticket, header, payloads(header)) for header in headers]
    committed = writer.commit(ticket, manifest)
    return [future.result(WAIT_S) for future in written], committed.result(WAIT_S)


def test_a_park_is_durable_when_it_says_so(writer, level) -> None:
    manifest = conversation(1)
    written, committed = park(writer, 1, manifest)
    expected = [header.file_bytes for s in manifest.segments for header in plans(manifest, s)]
    assert written == [Written(bytes=n) for n in expected]
    assert isinstance(committed, Committed)
    assert committed.manifest_bytes > 0
    assert committed.seconds > 0
    assert [stored.manifest for stored in level.scan(IDENTITY).manifests] == [manifest]
    verify(level, manifest)
    assert writer.state == OK
    statistics = writer.statistics()
    assert statistics.files_written == 5
    assert statistics.bytes_written > sum(expected)
    assert (statistics.failures, statistics.waiting_jobs, statistics.waiting_bytes) == (0, 0, 0)
    assert statistics.fsyncs >= 5 + 2
    assert statistics.seconds > 0


def test_two_parks_at_once_keep_their_files_apart(writer, level) -> None:
    first, second = conversation(1), conversation(2, seed=2)
    jobs = []
    for a, b in zip(first.segments, second.segments, strict=True):
        for ticket, manifest, segment in ((1, first, a), (2, second, b)):
            jobs += [writer.write_segment(ticket, h, payloads(h)) for h in plans(manifest, segment)]
    assert isinstance(writer.commit(1, first).result(WAIT_S), Committed)
    scan = level.scan(IDENTITY)
    assert (len(scan.manifests), len(scan.temporary)) == (1, 4)
    assert isinstance(writer.commit(2, second).result(WAIT_S), Committed)
    assert serials(level) == [1, 2]


def test_a_commit_without_new_segments_writes_the_manifest_alone(writer, level) -> None:
    manifest = conversation(1)
    park(writer, 1, manifest)
    again = msgspec.structs.replace(manifest, stamp_s=500.0)
    assert isinstance(writer.commit(2, again).result(WAIT_S), Committed)
    assert [stored.manifest.stamp_s for stored in level.scan(IDENTITY).manifests] == [500.0]


def test_an_abandoned_park_leaves_nothing(writer, level) -> None:
    manifest = conversation(1)
    before = level.used_bytes
    for header in plans(manifest, manifest.segments[0]):
        writer.write_segment(1, header, payloads(header))
    assert writer.abandon(1).result(WAIT_S) == Abandoned()
    assert writer.abandon(99).result(WAIT_S) == Abandoned()
    assert level.used_bytes == level.usage() == before


def test_dropping_and_quarantine(writer, level) -> None:
    park(writer, 1, first := conversation(1))
    park(writer, 2, second := conversation(2, seed=2))
    before = level.used_bytes
    assert writer.quarantine(second.keys[0], 1).result(WAIT_S) == Quarantined(found=True)
    assert writer.quarantine(second.keys[0], 1).result(WAIT_S) == Quarantined(found=False)
    assert writer.quarantine_manifest(2).result(WAIT_S) == Quarantined(found=True)
    assert level.used_bytes == before
    dropped = writer.drop([1], first.keys).result(WAIT_S)
    assert isinstance(dropped, Dropped)
    assert dropped.bytes == before - level.used_bytes > 0


# ------------------------------------------------------------------------------------------------------------- failures


def count_steps(writer: Writer, disk: Faulty) -> int:
    disk.steps = 0
    park(writer, 1000, conversation(1000, seed=1000))
    return disk.steps


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_park_that_fails_anywhere_is_undone_and_the_next_works(writer, level, disk, error) -> None:
    steps = count_steps(writer, disk)
    disk._error = error
    for fail_at in range(1, steps + 1):
        serial = fail_at
        manifest = conversation(serial, seed=serial)
        disk.steps, disk.fail_at, disk.fail_until = 0, fail_at, 1 << 30
        written, committed = park(writer, serial, manifest)
        disk.fail_at = None
        assert isinstance(committed, Failed)
        assert committed.errno == error
        assert str(level.root) in committed.reason
        assert writer.state == f"failing: {committed.reason}"
        first_bad = next((i for i, outcome in enumerate(written) if isinstance(outcome, Failed)), len(written))
        assert all(isinstance(outcome, Failed) for outcome in written[first_bad:])
        assert set(committed.left) <= set(manifest.keys)
        writer.drop([serial], committed.left).result(WAIT_S)
        writer.drop((), level.scan(IDENTITY).orphans).result(WAIT_S)
        level.remove_files(level.scan(IDENTITY).temporary)
        assert serials(level) == [1000]
        _, committed = park(writer, serial, manifest)
        assert isinstance(committed, Committed)
        assert writer.state == OK
        verify(level, manifest)
        writer.drop([serial], manifest.keys).result(WAIT_S)
    assert writer.statistics().failures == steps


def test_after_a_single_failure_no_temporary_is_left(writer, level, disk) -> None:
    steps = count_steps(writer, disk)
    for fail_at in range(1, steps + 1):
        disk.steps, disk.fail_at, disk.fail_until = 0, fail_at, fail_at
        _, committed = park(writer, fail_at, conversation(fail_at, seed=fail_at))
        assert isinstance(committed, Failed)
        assert level.scan(IDENTITY).temporary == ()
        assert level.used_bytes == level.usage()


def test_the_manifest_of_a_failed_segment_is_never_written(writer, level, disk) -> None:
    disk.fail_at, disk.fail_until = 2, 2
    written, committed = park(writer, 1, conversation(1))
    assert [type(outcome) for outcome in written] == [Written, Failed, Failed, Failed]
    assert isinstance(committed, Failed)
    assert not (level.root / manifest_name(1)).exists()
    assert writer.statistics().failures == 1
    assert writer.state.startswith("failing: ")


def test_a_job_that_breaks_is_an_outcome_too(writer, level) -> None:
    manifest = conversation(1)
    header = plans(manifest, manifest.segments[0])[0]
    broken = writer.write_segment(1, header, ()).result(WAIT_S)
    assert isinstance(broken, Failed)
    assert "ValueError" in broken.reason
    bad = writer.commit(2, msgspec.structs.replace(manifest, frontier=9999), ids_only=True).result(WAIT_S)
    assert isinstance(bad, Failed)
    assert "frontier" in bad.reason
    assert isinstance(park(writer, 3, manifest)[1], Committed)


def test_a_linked_folder_is_a_failure_with_a_message(writer, level, tmp_path) -> None:
    manifest = conversation(1)
    (tmp_path / "elsewhere").mkdir()
    link = level.root / "seg" / manifest.keys[0].hex()[:2]
    link.symlink_to(tmp_path / "elsewhere")
    _, committed = park(writer, 1, manifest)
    link.unlink()
    assert isinstance(committed, Failed)
    assert "symbolic link" in committed.reason
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -------------------------------------------------------------------------------------------------- order, flush, close


class Gated:
    """A disk whose writes wait until they are let through."""

    def __init__(self) -> None:
        self._disk = Disk()
        self.gate = threading.Event()

    def __getattr__(self, name: str):
        return getattr(self._disk, name)

    def write(self, path: Path, buffers) -> int:
        assert self.gate.wait(WAIT_S)
        return self._disk.write(path, buffers)


def test_nobody_waits_for_the_disk_but_flush_and_close(tmp_path) -> None:
    disk = Gated()
    level = Level.open(tmp_path / "level", fs=disk)
    writer = Writer(level)
    manifest = conversation(1, 20)
    headers = plans(manifest, manifest.segments[0])
    futures = [writer.write_segment(1, header, payloads(header)) for header in headers]
    futures.append(writer.commit(1, manifest))
    assert not any(future.done() for future in futures)
    assert not any(future.cancel() for future in futures), "files are at stake: no job can be cancelled"
    assert writer.statistics().waiting_jobs == 3
    assert writer.statistics().waiting_bytes == sum(block.length for h in headers for block in h.blocks)
    assert not writer.flush(0.01)
    assert not writer.close(0.01)
    late = writer.commit(2, conversation(2, 20)).result(0)
    assert late == Failed(reason="the writer is closed")
    disk.gate.set()
    assert writer.close(WAIT_S)
    assert isinstance(futures[-1].result(0), Committed)
    verify(level, manifest)
    assert writer.statistics().waiting_jobs == 0
    level.close()


def test_flush_waits_for_what_was_given(writer) -> None:
    manifest = conversation(1, 20)
    futures = [writer.write_segment(1, h, payloads(h)) for h in plans(manifest, manifest.segments[0])]
    assert writer.flush(WAIT_S)
    assert all(future.done() for future in futures)


def test_closing_removes_the_temporaries_of_open_parks(level) -> None:
    writer = Writer(level)
    manifest = conversation(1, 20)
    for header in plans(manifest, manifest.segments[0]):
        writer.write_segment(1, header, payloads(header))
    assert writer.close(WAIT_S)
    assert level.scan(IDENTITY).temporary == ()


def test_payloads_are_not_held_once_the_job_is_done(writer) -> None:
    manifest = conversation(1, 20)
    header = plans(manifest, manifest.segments[0])[0]
    memory = np.zeros(1 << 16, np.uint8)
    gone = weakref.ref(memory)
    writer.write_segment(1, header, (memory.data,)).result(WAIT_S)
    writer.flush(WAIT_S)
    del memory
    gc.collect()
    assert gone() is None
