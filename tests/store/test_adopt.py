"""Taking segments from another level: by link, by verified copy, over two volumes, and whose fault a failure is."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.contract import Faulty
from tests.store.samples import IDENTITY, conversation, payloads, plans, put, serials, verify

from strata.errors import DamagedFile
from strata.store.format import Manifest, plan_segment
from strata.store.fs import Disk
from strata.store.level import Level, PendingFile
from strata.store.names import segment_path
from strata.store.reader import Damaged, Missing, Unreadable
from strata.store.writer import OK, Adopted, Committed, Failed, Writer
from strata.types import PAGE

WAIT_S = 20.0
ENTRY = conversation(1, 300)


class NoLinks(Disk):
    """A volume without hard links, or the way to another volume."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self._error = error

    def link(self, src: Path, dst: Path) -> None:
        raise OSError(self._error, os.strerror(self._error), str(src), None, str(dst))


class BadSector(Disk):
    """A disk that cannot read one file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        if path == self._path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().read_into(path, offset, view)


@pytest.fixture
def giver(tmp_path) -> Iterator[Level]:
    level = Level.open(tmp_path / "warm", name="warm")
    put(level, ENTRY)
    yield level
    assert level.used_bytes == level.usage()
    level.close()


@pytest.fixture
def disk() -> Faulty:
    return Faulty(Disk())


@pytest.fixture
def receiver(tmp_path, disk) -> Iterator[Level]:
    level = Level.open(tmp_path / "cold", fs=disk)
    yield level
    assert level.used_bytes == level.usage()
    level.close()


@pytest.fixture
def writer(receiver) -> Iterator[Writer]:
    writer = Writer(receiver)
    yield writer
    assert writer.close(WAIT_S)


def adopt(receiver: Level, giver: Level, manifest: Manifest, *, may_link: bool = True) -> list[PendingFile]:
    pending = [
        receiver.adopt_segment(giver, key, stage, may_link=may_link)
        for key in manifest.keys
        for stage in range(len(manifest.stages))
    ]
    receiver.publish(pending)
    receiver.put_manifest(manifest)
    return pending


def inodes(level: Level, manifest: Manifest) -> list[int]:
    stages = range(len(manifest.stages))
    return [(level.root / segment_path(key, stage)).stat().st_ino for key in manifest.keys for stage in stages]


# ------------------------------------------------------------------------------------------------------------ the level


def test_a_link_moves_no_byte_and_survives_the_giver(giver, receiver) -> None:
    pending = adopt(receiver, giver, ENTRY)
    assert all(file.linked for file in pending)
    assert [file.size for file in pending] == [h.file_bytes for s in ENTRY.segments for h in plans(ENTRY, s)]
    assert inodes(receiver, ENTRY) == inodes(giver, ENTRY)
    assert receiver.counts.files_linked == 4
    assert receiver.counts.bytes_written < 2 * PAGE, "the manifest alone"
    assert receiver.used_bytes == receiver.usage() == giver.used_bytes == giver.usage()
    giver.drop([1], ENTRY.keys)
    assert receiver.used_bytes == receiver.usage()
    verify(receiver, ENTRY)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_what_cannot_be_linked_is_copied(giver, tmp_path, error) -> None:
    receiver = Level.open(tmp_path / "cold", fs=NoLinks(error))
    pending = adopt(receiver, giver, ENTRY)
    assert not any(file.linked for file in pending)
    assert receiver.counts.bytes_written > sum(file.size for file in pending)
    verify(receiver, ENTRY)
    assert set(inodes(receiver, ENTRY)).isdisjoint(inodes(giver, ENTRY))
    receiver.close()


def test_a_file_the_giver_keeps_is_copied(giver, receiver) -> None:
    adopt(receiver, giver, ENTRY, may_link=False)
    assert set(inodes(receiver, ENTRY)).isdisjoint(inodes(giver, ENTRY))
    for key in ENTRY.keys:
        for stage in range(len(ENTRY.stages)):
            path = segment_path(key, stage)
            assert (receiver.root / path).read_bytes() == (giver.root / path).read_bytes()
    verify(receiver, ENTRY)
    verify(giver, ENTRY)


def test_between_two_volumes(tmp_path, giver) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second volume here")
    root = Path(tempfile.mkdtemp(dir=memory))
    try:
        receiver = Level.open(root / "cold")
        assert not any(file.linked for file in adopt(receiver, giver, ENTRY))
        verify(receiver, ENTRY)
        assert receiver.used_bytes == receiver.usage()
        giver.drop([1], ENTRY.keys)
        assert all(not file.linked for file in adopt(giver, receiver, ENTRY)), "and back"
        verify(giver, ENTRY)
        receiver.close()
    finally:
        shutil.rmtree(root)


def test_adopting_again_leaves_no_second_name(giver, receiver) -> None:
    adopt(receiver, giver, ENTRY)
    adopt(receiver, giver, ENTRY)
    scan = receiver.scan(IDENTITY)
    assert (scan.temporary, serials(receiver)) == ((), [1])
    assert receiver.used_bytes == receiver.usage()


def test_the_padding_of_a_copy_is_zero(giver, receiver) -> None:
    header = giver.read_header(ENTRY.keys[0], 0)
    path = giver.root / segment_path(header.key, 0)
    data = bytearray(path.read_bytes())
    last = header.blocks[-1]
    data[last.offset + last.length :] = b"\xee" * (len(data) - last.offset - last.length)
    path.write_bytes(data)
    receiver.publish([receiver.adopt_segment(giver, header.key, 0, may_link=False)])
    copy = (receiver.root / segment_path(header.key, 0)).read_bytes()
    assert not any(copy[last.offset + last.length :])
    assert copy[: last.offset + last.length] == bytes(data[: last.offset + last.length])


@pytest.mark.parametrize("may_link", [True, False])
def test_a_damaged_or_missing_file_of_the_giver_is_named(giver, receiver, may_link) -> None:
    header = giver.read_header(ENTRY.keys[0], 0)
    path = giver.root / segment_path(header.key, 0)
    good = path.read_bytes()
    bad = [b"", good[:-1], good[:100], b"\xff" + good[1:]]
    if not may_link:
        bad += [good[:at] + bytes((good[at] ^ 1,)) + good[at + 1 :] for at in (b.offset for b in header.blocks)]
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(DamagedFile) as refused:
            receiver.adopt_segment(giver, header.key, 0, may_link=may_link)
        assert str(path) in refused.value.message
    path.unlink()
    with pytest.raises(FileNotFoundError) as missing:
        receiver.adopt_segment(giver, header.key, 0, may_link=may_link)
    assert str(missing.value.filename) == str(path)
    path.symlink_to(tmp := giver.root / "elsewhere")
    tmp.write_bytes(good)
    with pytest.raises(DamagedFile):
        receiver.adopt_segment(giver, header.key, 0, may_link=may_link)
    assert receiver.scan(IDENTITY).temporary == ()
    assert receiver.used_bytes == receiver.usage()
    giver.scan(IDENTITY)  # its account, after what was done behind its back


# ----------------------------------------------------------------------------------------------------------- the writer


def outcomes(writer: Writer, giver: Level, *, may_link: bool, ticket: int = 1) -> tuple[list, object]:
    stages = range(len(ENTRY.stages))
    jobs = [
        writer.adopt_segment(ticket, giver, key, stage, may_link=may_link) for key in ENTRY.keys for stage in stages
    ]
    committed = writer.commit(ticket, ENTRY)
    return [job.result(WAIT_S) for job in jobs], committed.result(WAIT_S)


@pytest.mark.parametrize("may_link", [True, False])
def test_the_writer_adopts(writer, receiver, giver, may_link) -> None:
    adopted, committed = outcomes(writer, giver, may_link=may_link)
    sizes = [header.file_bytes for s in ENTRY.segments for header in plans(ENTRY, s)]
    assert adopted == [Adopted(bytes=size, linked=may_link) for size in sizes]
    assert isinstance(committed, Committed)
    written = writer.statistics().bytes_written
    assert (written < 2 * PAGE) if may_link else (written > sum(sizes))
    verify(receiver, ENTRY)
    verify(giver, ENTRY)


def test_an_abandoned_adoption_leaves_both_as_they_were(writer, receiver, giver) -> None:
    before = giver.used_bytes
    writer.adopt_segment(1, giver, ENTRY.keys[0], 0, may_link=True)
    writer.abandon(1).result(WAIT_S)
    scan = receiver.scan(IDENTITY)
    assert (scan.segments, scan.temporary) == ({}, ())
    assert giver.used_bytes == giver.usage() == before
    verify(giver, ENTRY)


@pytest.mark.parametrize("kind", [Damaged, Missing, Unreadable])
def test_the_fault_of_the_giver_does_not_make_the_receiver_fail(writer, receiver, giver, monkeypatch, kind) -> None:
    path = giver.root / segment_path(ENTRY.keys[1], 0)
    if kind is Damaged:
        data = path.read_bytes()
        path.write_bytes(data[:PAGE] + bytes((data[PAGE] ^ 1,)) + data[PAGE + 1 :])
    elif kind is Missing:
        giver.quarantine_segment(ENTRY.keys[1], 0)
    else:
        monkeypatch.setattr(giver, "_fs", BadSector(path))
    adopted, committed = outcomes(writer, giver, may_link=False)
    failed = next(outcome for outcome in adopted if isinstance(outcome, Failed))
    assert isinstance(failed.giver, kind)
    assert str(path) in failed.giver.reason
    assert committed == failed
    assert (writer.state, writer.statistics().failures) == (OK, 0)
    scan = receiver.scan(IDENTITY)
    assert (scan.manifests, scan.segments, scan.temporary) == ((), {}, ())


@pytest.mark.parametrize("may_link", [True, False])
@pytest.mark.parametrize("lasting", [True, False])
def test_the_fault_of_the_receiver_is_its_own(writer, receiver, giver, disk, may_link, lasting) -> None:
    outcomes(writer, giver, may_link=may_link)
    writer.drop([1], ENTRY.keys).result(WAIT_S)
    disk.steps = 0
    outcomes(writer, giver, may_link=may_link)
    steps = disk.steps
    for fail_at in range(1, steps + 1):
        writer.drop([1], receiver.scan(IDENTITY).segments).result(WAIT_S)
        disk.steps, disk.fail_at, disk.fail_until = 0, fail_at, 1 << 30 if lasting else fail_at
        adopted, committed = outcomes(writer, giver, may_link=may_link, ticket=fail_at)
        disk.fail_at = None
        if may_link and not lasting and isinstance(committed, Committed):
            assert [outcome.linked for outcome in adopted].count(False) == 1, "a link that failed became a copy"
        else:
            assert isinstance(committed, Failed)
            assert committed.giver is None
            assert committed.errno == errno.ENOSPC
            assert writer.state.startswith("failing: ")
        verify(giver, ENTRY)
        receiver.remove_files(receiver.scan(IDENTITY).temporary)


# ------------------------------------------------------------------------------------------------------- hashing ahead


def test_digests_that_are_there_are_not_computed_again(writer, receiver, monkeypatch) -> None:
    planned = plans(ENTRY, ENTRY.segments[0])[0]
    assert not planned.has_digests
    writer.write_segment(1, planned, payloads(planned)).result(WAIT_S)
    writer.commit(1, conversation(2, 20, seed=2)).result(WAIT_S)
    ready = receiver.read_header(planned.key, 0)
    assert ready.has_digests
    monkeypatch.setattr("strata.store.hashing.digest", lambda _: pytest.fail("hashed again"))
    monkeypatch.setattr("strata.store.content.digest", lambda _: pytest.fail("hashed again"))
    writer.write_segment(2, ready, payloads(planned)).result(WAIT_S)
    assert writer.flush(WAIT_S)
    assert writer.state == OK
    assert 0 <= writer.statistics().hash_wait_s <= writer.statistics().seconds


def test_a_header_has_digests_once_every_block_has_one() -> None:
    header = plan_segment(ENTRY.segments[0], stage=0, n_stages=1, shape=ENTRY.stages[0], block_tokens=100)
    digests = [bytes((i + 1,)) * 16 for i in range(len(header.blocks))]
    assert header.with_digests(digests).has_digests
    assert not header.with_digests([*digests[:-1], bytes(16)]).has_digests


def test_pools_exist_only_with_work(receiver) -> None:
    def pools() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith(("hasher", "syncer"))]

    before = pools()
    writer = Writer(receiver)
    writer.commit(1, conversation(2, 20, seed=2)).result(WAIT_S)
    assert pools() == before
    header = plans(ENTRY, ENTRY.segments[0])[0]
    writer.write_segment(2, header, payloads(header)).result(WAIT_S)
    assert len(pools()) > len(before)
    writer.close(WAIT_S)
    assert pools() == before
