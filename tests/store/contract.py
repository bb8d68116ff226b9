"""What a Level promises over any Filesystem: subclass `LevelContract` and give it a disk.

Covers storing, scanning, dropping, quarantine, the account, damage, and failure of every single operation. What only a
real disk has (modes, links, locks, a full volume) is tested next to `fs.py`.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.store.samples import (
    IDENTITY,
    OTHER_IDENTITY,
    STAGES,
    conversation,
    payloads,
    plans,
    put,
    serials,
    verify,
    write_segments,
)

from strata.errors import DamagedFile
from strata.store.filesystem import Filesystem
from strata.store.format import encode_header, encode_manifest
from strata.store.fs import aligned_buffer
from strata.store.level import Level
from strata.store.names import FOREIGN_FOLDERS, manifest_name, segment_path
from strata.types import PAGE


class Faulty:
    """Wraps a disk; the n-th operation that changes something fails, or all of them from there on."""

    def __init__(self, disk: Filesystem, error: int = errno.ENOSPC) -> None:
        self._disk = disk
        self._error = error
        self.steps = 0
        self.fail_at: int | None = None
        self.fail_until = 0
        self._counting = threading.Lock()  # a writer syncs on several threads

    def __getattr__(self, name: str) -> Callable:
        operation = getattr(self._disk, name)
        if name not in ("write", "link", "fsync", "replace", "unlink", "sync_dir"):
            return operation

        def step(path: Path, *rest: object) -> object:
            with self._counting:
                self.steps += 1
                n = self.steps
            if self.fail_at is not None and self.fail_at <= n <= self.fail_until:
                raise OSError(self._error, "injected", str(path))
            return operation(path, *rest)

        return step


class LevelContract:
    @pytest.fixture
    def disk(self) -> Filesystem:
        raise NotImplementedError

    @pytest.fixture
    def root(self) -> Path:
        raise NotImplementedError

    @pytest.fixture
    def level(self, disk, root):
        level = Level.open(root, fs=disk)
        yield level
        assert level.used_bytes == level.usage()
        level.close()

    def overwrite(self, disk: Filesystem, path: Path, data: bytes) -> None:
        """Change a file behind the level's back."""
        disk.unlink(path)
        disk.write(path, [data])

    def damage(self, disk: Filesystem, path: Path, at: int) -> None:
        data = bytearray(disk.read(path, 1 << 30))
        data[at] ^= 0x10
        self.overwrite(disk, path, bytes(data))

    # ---------------------------------------------------------------------------------------------- storing and reading

    def test_what_was_put_is_there_after_reopening(self, disk, root) -> None:
        manifest = conversation(1, 700, frontier=600)
        level = Level.open(root, fs=disk)
        assert put(level, manifest) > 0
        verify(level, manifest)
        level.close()
        again = Level.open(root, fs=disk)
        assert [stored.manifest for stored in again.scan(IDENTITY).manifests] == [manifest]
        verify(again, manifest)
        again.close()

    def test_the_file_is_the_header_and_the_padded_payloads(self, level, disk, root) -> None:
        manifest = conversation(1, 300)
        put(level, manifest)
        for segment in manifest.segments:
            for planned in plans(manifest, segment):
                data = disk.read(root / segment_path(segment.key, planned.stage), 1 << 30)
                header = level.read_header(segment.key, planned.stage)
                assert data[:PAGE] == encode_header(header)
                assert len(data) == planned.file_bytes
                assert level.scan(IDENTITY).segments[segment.key].sizes[planned.stage] == (planned.stage, len(data))

    @pytest.mark.parametrize("aligned", [True, False])
    def test_payloads_of_any_alignment_give_the_same_file(self, level, disk, root, aligned) -> None:
        manifest = conversation(1, 200)
        header = plans(manifest, manifest.segments[0])[0]
        views = payloads(header)
        if not aligned:
            views = tuple(
                memoryview(b"x" + bytes(v))[1 : 1 + b.length] for v, b in zip(views, header.blocks, strict=True)
            )
        level.publish([level.write_segment(header, views)])
        read = level.read_header(header.key, 0)
        for i, block in enumerate(read.blocks):
            for view in (aligned_buffer(2 * PAGE * 4), memoryview(bytearray(block.length))):
                level.read_block(read, i, view)
                assert view[: block.length] == views[i][: block.length]
        data = disk.read(root / segment_path(header.key, 0), 1 << 30)
        end = header.blocks[-1].offset + header.blocks[-1].length
        assert not any(data[end:]), "the padding must not carry what lay in memory before"

    def test_segments_are_shared_between_conversations(self, level) -> None:
        first, second = conversation(1, 300, shared=256), conversation(2, 310, seed=2, shared=256)
        put(level, first)
        before = level.used_bytes
        put(level, second, without=first.keys)
        assert len(level.scan(IDENTITY).segments) == 3
        assert level.used_bytes - before < before
        verify(level, second)

    def test_publishing_a_segment_again_changes_nothing(self, level) -> None:
        manifest = conversation(1, 300)
        put(level, manifest)
        before = level.used_bytes
        level.publish(write_segments(level, manifest))
        assert level.used_bytes == before
        verify(level, manifest)

    def test_a_manifest_of_the_same_serial_is_replaced(self, level) -> None:
        put(level, conversation(1, 300))
        level.put_manifest(conversation(1, 300, stamp_s=900.0))
        (stored,) = level.scan(IDENTITY).manifests
        assert stored.manifest.stamp_s == 900.0

    def test_a_wrong_payload_is_refused_before_anything_is_written(self, level) -> None:
        manifest = conversation(1, 100)
        header = plans(manifest, manifest.segments[0])[0]
        for views in ((), (memoryview(b"short"),)):
            with pytest.raises(ValueError, match=r"payload|argument"):
                level.write_segment(header, views)
        assert level.scan(IDENTITY).temporary == ()

    # --------------------------------------------------------------------------------------------------------- the scan

    def test_the_scan_sorts_by_stamp_then_serial(self, level) -> None:
        for serial, stamp_s in ((1, 30.0), (2, 10.0), (3, 30.0), (4, 20.0)):
            put(level, conversation(serial, 20, seed=serial, stamp_s=stamp_s))
        assert serials(level) == [2, 4, 1, 3]

    def test_the_scan_counts_everything_and_deletes_nothing(self, level, disk, root) -> None:
        put(level, conversation(1, 300))
        put(level, conversation(2, 20, seed=2, identity=OTHER_IDENTITY))
        put(level, gone := conversation(3, 300, seed=3))
        put(level, torn := conversation(4, 300, seed=4))
        put(level, empty := conversation(5, 300, seed=5))
        put(level, conversation(6, 20, seed=6))
        put(level, bad := conversation(7, 20, seed=7))
        disk.unlink(root / segment_path(gone.keys[0], 1))
        path = root / segment_path(torn.keys[1], 0)
        self.overwrite(disk, path, disk.read(path, 1 << 30)[:-1])
        self.overwrite(disk, root / segment_path(empty.keys[1], 0), b"")
        self.damage(disk, root / manifest_name(6), 60)
        level.publish(write_segments(level, orphan := conversation(8, 20, seed=8)))
        write_segments(level, conversation(9, 20, seed=9))
        level.quarantine_segment(bad.keys[0], 0)
        disk.write(root / "notes.txt", [b"mine"])
        disk.write(root / "seg" / "stray", [b"?"])
        disk.write(root / manifest_name(70), [b""])
        before = {path: entry.size for path, entry in _all_files(disk, root).items()}

        scan = level.scan(IDENTITY)

        assert [stored.manifest.serial for stored in scan.manifests] == [1]
        assert [(entry.serial, len(entry.keys)) for entry in scan.foreign] == [(2, 1)]
        assert [(entry.serial, entry.manifest is not None) for entry in scan.stale] == [
            (3, True),
            (4, True),
            (5, True),
            (6, False),
            (7, True),
            (70, False),
        ]
        reasons = {entry.serial: entry.reason for entry in scan.stale}
        assert "segment 0 of 2" in reasons[3]
        assert "segment 1 of 2" in reasons[4]
        assert "segment 1 of 2" in reasons[5]
        assert "checksum" in reasons[6]
        assert "missing" in reasons[7] or "number of stages" in reasons[7]
        assert "length" in reasons[70]
        damaged_manifest = conversation(6, 20, seed=6)
        assert set(scan.orphans) == {*orphan.keys, *damaged_manifest.keys}
        assert len(scan.temporary) == 2
        assert len(scan.bad) == 1
        assert set(scan.other) == {"notes.txt", "seg/stray"}
        assert scan.used_bytes == level.usage() == level.used_bytes
        assert {path: entry.size for path, entry in _all_files(disk, root).items()} == before
        assert level.next_serial() == 71

    def test_a_manifest_under_another_serials_name_is_stale(self, level, disk, root) -> None:
        put(level, conversation(1, 20))
        disk.write(root / manifest_name(2), [encode_manifest(conversation(1, 20))])
        scan = level.scan(IDENTITY)
        assert [(entry.serial, "serial" in entry.reason) for entry in scan.stale] == [(2, True)]

    @pytest.mark.parametrize("folder", FOREIGN_FOLDERS)
    def test_an_archive_in_the_directory_is_not_the_level_s(self, level, disk, root, folder) -> None:
        put(level, conversation(1, 20))
        before = level.used_bytes
        archive = Level.open(root / folder, name=folder, fs=disk)
        put(archive, conversation(2, 300, seed=2))
        scan = level.scan(IDENTITY)
        assert ([s.manifest.serial for s in scan.manifests], scan.orphans, scan.other) == ([1], (), ())
        assert level.used_bytes == scan.used_bytes == level.usage() == before
        assert serials(archive) == [2]
        archive.close()

    def test_temporaries_go_when_asked(self, level, disk, root) -> None:
        put(level, conversation(1, 20))
        write_segments(level, conversation(2, 300, seed=2))
        scan = level.scan(IDENTITY)
        before = level.used_bytes
        freed = level.remove_files(scan.temporary)
        assert freed == before - level.used_bytes > 0
        assert level.scan(IDENTITY).temporary == ()
        assert serials(level) == [1]

    def test_only_files_that_a_level_names_are_its_own(self, level, disk, root) -> None:
        put(level, conversation(1, 20))
        foreign = ("report.tmp", "projects/x/draft.tmp", "strata-conv-x.meta.tmp", "notes.1.bad", "seg/00/mine.tmp")
        for name in foreign:
            disk.make_dir((root / name).parent)
            disk.write(root / name, [b"mine"])
        level.quarantine_manifest(1)
        scan = level.scan(IDENTITY)
        assert set(foreign) <= set(scan.other) and scan.temporary == ()
        assert [*level.quarantined()] == list(scan.bad) == [manifest_name(1) + ".0.bad"]
        level.remove_files((*scan.temporary, *level.quarantined()))
        assert all(disk.read(root / name, 10) == b"mine" for name in foreign)
        assert level.used_bytes == level.usage()

    def test_serials_are_above_everything_seen(self, disk, root) -> None:
        level = Level.open(root, fs=disk)
        assert level.next_serial() == 1
        put(level, conversation(40, 20))
        disk.write(root / (manifest_name(55) + ".9-9.tmp"), [b"x"])
        level.close()
        again = Level.open(root, fs=disk)
        assert [again.next_serial(), again.next_serial()] == [56, 57]
        again.quarantine_manifest(40)
        again.close()

    # ------------------------------------------------------------------------------------------ dropping and quarantine

    def test_dropping_frees_what_it_says(self, level) -> None:
        put(level, first := conversation(1, 300, shared=256))
        put(level, second := conversation(2, 310, seed=2, shared=256), without=first.keys)
        before = level.used_bytes
        freed = level.drop([1], first.keys[1:])
        assert freed == before - level.used_bytes > 0
        assert serials(level) == [2]
        verify(level, second)
        level.drop([2], second.keys)
        assert level.scan(IDENTITY).segments == {}

    def test_what_was_dropped_does_not_come_back(self, level, disk, root, monkeypatch) -> None:
        synced: list[Path] = []
        put(level, manifest := conversation(1, 300))
        sync = disk.sync_dir
        monkeypatch.setattr(disk, "sync_dir", lambda path: (synced.append(path), sync(path)))
        level.drop([1], manifest.keys)
        folders = {(root / segment_path(key, 0)).parent for key in manifest.keys}
        assert synced[0] == root, "the manifest goes first"
        assert set(synced[1:]) == folders

    def test_dropping_what_is_not_there_frees_nothing(self, level) -> None:
        manifest = conversation(1, 20)
        assert level.drop([1], manifest.keys) == 0

    def test_a_quarantined_file_is_kept_and_not_served(self, level, disk, root) -> None:
        manifest = conversation(1, 20)
        for n in range(3):
            put(level, manifest)
            assert level.quarantine_segment(manifest.keys[0], 1)
            with pytest.raises(FileNotFoundError):
                level.read_header(manifest.keys[0], 1)
            scan = level.scan(IDENTITY)
            assert len(scan.bad) == n + 1
            assert [entry.serial for entry in scan.stale] == [1]
        assert level.quarantine_manifest(1)
        assert not level.quarantine_manifest(1)
        assert len(level.scan(IDENTITY).bad) == 4
        put(level, manifest)
        verify(level, manifest)

    # ----------------------------------------------------------------------------------------------------------- damage

    def test_every_flipped_byte_of_a_segment_is_noticed(self, level, disk, root) -> None:
        manifest = conversation(1, 120)
        put(level, manifest)
        header = level.read_header(manifest.keys[0], 0)
        path = root / segment_path(manifest.keys[0], 0)
        good = disk.read(path, 1 << 30)
        payload_bytes = [b.offset + i for b in header.blocks for i in (0, b.length // 2, b.length - 1)]
        for at in [0, 9, 70, 100, 200, PAGE - 20, PAGE - 1, *payload_bytes]:
            self.damage(disk, path, at)
            with pytest.raises(DamagedFile) as refused:
                verify(level, manifest)
            assert str(path) in refused.value.message
            self.overwrite(disk, path, good)
        verify(level, manifest)

    def test_a_truncated_or_longer_segment_is_refused(self, level, disk, root) -> None:
        manifest = conversation(1, 120)
        put(level, manifest)
        header = level.read_header(manifest.keys[0], 0)
        path = root / segment_path(manifest.keys[0], 0)
        good = disk.read(path, 1 << 30)
        for bad in (b"", good[:100], good[:PAGE], good[:-1], good + b"\0"):
            self.overwrite(disk, path, bad)
            with pytest.raises(DamagedFile):
                level.read_header(manifest.keys[0], 0)
        self.overwrite(disk, path, good[: header.blocks[-1].offset + 1])
        with pytest.raises(DamagedFile):
            level.read_block(header, len(header.blocks) - 1, aligned_buffer(16 * PAGE))
        self.overwrite(disk, path, good)

    def test_swapped_segments_are_noticed(self, level, disk, root) -> None:
        put(level, first := conversation(1, 20))
        put(level, second := conversation(2, 20, seed=2))
        ours, theirs = (root / segment_path(m.keys[0], 0) for m in (first, second))
        self.overwrite(disk, ours, disk.read(theirs, 1 << 30))
        with pytest.raises(DamagedFile) as refused:
            level.read_header(first.keys[0], 0)
        assert refused.value.field == "key"

    def test_a_pickle_is_no_segment_and_no_manifest(self, level, disk, root) -> None:
        put(level, manifest := conversation(1, 20))
        evil = b"\x80\x04cos\nsystem\n(S'touch /tmp/strata-pickle'\ntR."
        self.overwrite(disk, root / segment_path(manifest.keys[0], 0), evil.ljust(2 * PAGE, b"\0"))
        self.overwrite(disk, root / manifest_name(1), evil)
        with pytest.raises(DamagedFile):
            level.read_header(manifest.keys[0], 0)
        assert [entry.serial for entry in level.scan(IDENTITY).stale] == [1]

    def test_a_huge_manifest_is_not_read(self, level, disk, root, monkeypatch) -> None:
        monkeypatch.setattr("strata.store.scan.MAX_MANIFEST_BYTES", 1000)
        disk.write(root / manifest_name(1), [bytes(1001)])
        (stale,) = level.scan(IDENTITY).stale
        assert "1001 bytes" in stale.reason
        level.drop([1], ())

    # --------------------------------------------------------------------------------------------------------- failures

    @pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
    def test_a_failure_at_any_operation_loses_nothing(self, disk, root, lasting) -> None:
        """For every operation of a put and a drop: the good copy stays, the account is right, trying again works."""
        faulty = Faulty(disk)
        level = Level.open(root, fs=faulty)
        old = conversation(1, 260, shared=256)
        new = conversation(2, 262, seed=2, shared=256, stages=STAGES)
        put(level, old)
        for _ in range(2):  # the first time makes folders; that is not counted
            faulty.steps = 0
            put(level, new, without=old.keys)
            level.drop([2], new.keys[1:])
        total = faulty.steps
        assert total > 10
        for fail_at in range(1, total + 1):
            faulty.steps, faulty.fail_at = 0, fail_at
            faulty.fail_until = 1 << 30 if lasting else fail_at
            stored = False
            with pytest.raises(OSError, match="injected"):
                put(level, new, without=old.keys)
                stored = True
                level.drop([2], new.keys[1:])
            faulty.fail_at = None
            assert stored or lasting or serials(level) == [1], "what failed is not offered"
            assert level.used_bytes == level.usage()
            verify(level, old)
            assert 1 in serials(level)
            for serial in set(serials(level)) - {1}:
                assert serial == 2
                verify(level, new)
            level.remove_files(level.scan(IDENTITY).temporary)
            put(level, new, without=old.keys)
            verify(level, new)
            level.drop([2], new.keys[1:])
            assert serials(level) == [1]
        level.close()

    def test_a_failed_restamp_keeps_the_manifest(self, disk, root) -> None:
        faulty = Faulty(disk, errno.EIO)
        level = Level.open(root, fs=faulty)
        put(level, manifest := conversation(1, 20))
        for fail_at in range(1, 5):
            faulty.steps, faulty.fail_at, faulty.fail_until = 0, fail_at, fail_at
            with pytest.raises(OSError, match="injected"):
                level.put_manifest(msgspec.structs.replace(manifest, stamp_s=500.0))
            faulty.fail_at = None
            assert serials(level) == [1]
            assert level.used_bytes == level.usage()
        level.close()


def _all_files(disk: Filesystem, root: Path) -> dict[str, object]:
    found = {}
    for entry in disk.entries(root):
        if entry.kind == "dir":
            below = _all_files(disk, root / entry.name)
            found.update({f"{entry.name}/{path}": value for path, value in below.items()})
        else:
            found[entry.name] = entry
    return found
