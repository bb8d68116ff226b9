"""What a Level promises about checkpoints over any Filesystem: subclass `CheckpointContract` and give it a disk.

Covers storing, sharing, adopting by link and by copy, the scan, dropping, quarantine and damage, for conversations with
rows and checkpoints and for those that have checkpoints alone. What is the same for any file is in `contract.py`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from tests.store.samples import (
    IDENTITY,
    OTHER_IDENTITY,
    checkpoint_plans,
    conversation,
    payloads,
    put,
    serials,
    verify,
    write_segments,
)

from strata.errors import DamagedFile
from strata.store.filesystem import Filesystem
from strata.store.format import Manifest, digest, encode_manifest
from strata.store.fs import aligned_buffer
from strata.store.level import Level
from strata.store.names import checkpoint_path, manifest_name, segment_path
from strata.types import PAGE

HYBRID = conversation(1, 300, shared=256, checkpoints=((100, 9000), (256, 1), (300, 5000)))
BRANCH = conversation(2, 310, seed=2, shared=256, checkpoints=((100, 9000), (256, 1), (310, 77)))
ROWLESS = conversation(3, 300, seed=3, stages=(), checkpoints=((200, 9000), (300, PAGE)))
MOST = 1 << 30


class CheckpointContract:
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

    @pytest.fixture
    def receiver(self, disk, root):
        level = Level.open(root.with_name("below"), name="below", fs=disk)
        yield level
        assert level.used_bytes == level.usage()
        level.close()

    def overwrite(self, disk: Filesystem, path: Path, data: bytes) -> None:
        disk.unlink(path)
        disk.write(path, [data])

    @pytest.mark.parametrize("manifest", [HYBRID, ROWLESS], ids=["with rows", "without rows"])
    def test_what_was_put_is_there_after_reopening(self, disk, root, manifest) -> None:
        level = Level.open(root, fs=disk)
        assert put(level, manifest) > 0
        verify(level, manifest)
        level.close()
        again = Level.open(root, fs=disk)
        scan = again.scan(IDENTITY)
        assert [stored.manifest for stored in scan.manifests] == [manifest]
        assert (scan.lost_checkpoints, scan.orphans, scan.stale) == ((), (), ())
        sizes = {key: file.size for key, file in scan.checkpoints.items()}
        assert sizes == {header.key: header.file_bytes for header in checkpoint_plans(manifest)}
        assert set(scan.segments) == (set(manifest.keys) if manifest.stages else set())
        assert again.used_bytes == again.usage() == scan.used_bytes
        verify(again, manifest)
        again.close()

    def test_the_file_is_the_header_and_the_padded_payload(self, level, disk, root) -> None:
        planned = checkpoint_plans(HYBRID)[0]
        level.publish([level.write_segment(planned, payloads(planned))])
        data = disk.read(root / checkpoint_path(planned.key), MOST)
        assert data[:PAGE] == level.read_checkpoint_header(planned.key).encode()
        assert data[PAGE : PAGE + planned.n_bytes] == b"".join(
            bytes(view[: block.length]) for view, block in zip(payloads(planned), planned.blocks, strict=True)
        )
        assert len(data) == planned.file_bytes
        assert not any(data[PAGE + planned.n_bytes :]), "the padding must not carry what lay in memory before"

    def test_checkpoints_are_shared_and_dropped_by_their_keys(self, level) -> None:
        put(level, HYBRID)
        put(level, BRANCH, without=HYBRID.objects)
        assert len(level.scan(IDENTITY).checkpoints) == 4
        verify(level, BRANCH)
        before = level.used_bytes
        freed = level.drop([1], HYBRID.objects.keys() - BRANCH.objects.keys())
        assert freed == before - level.used_bytes >= sum(HYBRID.file_bytes[1:]) + HYBRID.checkpoints[-1].file_bytes
        assert serials(level) == [2]
        verify(level, BRANCH)
        level.drop([2], BRANCH.objects)
        scan = level.scan(IDENTITY)
        assert (scan.segments, scan.checkpoints, level.used_bytes) == ({}, {}, level.usage())

    @pytest.mark.parametrize("may_link", [True, False])
    @pytest.mark.parametrize("manifest", [HYBRID, ROWLESS], ids=["with rows", "without rows"])
    def test_another_level_adopts_them(self, level, receiver, disk, root, manifest, may_link) -> None:
        put(level, manifest)
        pending = [
            receiver.adopt_segment(level, key, stage, may_link=may_link)
            for key in manifest.keys
            for stage in range(len(manifest.stages))
        ]
        taken = [receiver.adopt_checkpoint(level, key, may_link=may_link) for key in manifest.checkpoint_keys]
        assert [file.size for file in taken] == [entry.file_bytes for entry in manifest.checkpoints]
        assert {file.linked for file in (*pending, *taken)} == {may_link}
        receiver.publish([*pending, *taken])
        receiver.put_manifest(manifest)
        for key in manifest.checkpoint_keys:
            name = checkpoint_path(key)
            assert disk.read(root / name, MOST) == disk.read(receiver.root / name, MOST)
        level.drop([manifest.serial], manifest.objects)
        verify(receiver, manifest)

    def test_what_the_giver_cannot_give_is_named(self, level, receiver, disk, root) -> None:
        put(level, HYBRID)
        key = HYBRID.checkpoint_keys[0]
        path = root / checkpoint_path(key)
        good = disk.read(path, MOST)
        for at, may_link in ((20, True), (20, False), (PAGE + 5000, False)):
            self.overwrite(disk, path, good[:at] + bytes((good[at] ^ 1,)) + good[at + 1 :])
            with pytest.raises(DamagedFile) as refused:
                receiver.adopt_checkpoint(level, key, may_link=may_link)
            assert str(path) in refused.value.message
        level.quarantine_checkpoint(key)
        with pytest.raises(FileNotFoundError):
            receiver.adopt_checkpoint(level, key, may_link=True)
        assert receiver.scan(IDENTITY).temporary == ()
        level.scan(IDENTITY)  # its account, after what was done behind its back

    # --------------------------------------------------------------------------------------------------------- the scan

    def test_a_lost_checkpoint_is_listed_and_the_rest_is_whole(self, level, disk, root) -> None:
        put(level, HYBRID)
        first, second, _ = HYBRID.checkpoint_keys
        disk.unlink(root / checkpoint_path(first))
        self.overwrite(disk, root / checkpoint_path(second), b"short")
        scan = level.scan(IDENTITY)
        assert [stored.manifest for stored in scan.manifests] == [HYBRID]
        lost = [(one.serial, one.position, one.key) for one in scan.lost_checkpoints]
        assert lost == [(1, 100, first), (1, 256, second)]
        assert "missing" in scan.lost_checkpoints[0].reason
        assert "5 bytes" in scan.lost_checkpoints[1].reason
        assert scan.orphans == (), "a file of a wrong size belongs to who names it"

    @pytest.mark.parametrize("manifest", [HYBRID, ROWLESS], ids=["with rows", "without rows"])
    def test_without_any_checkpoint_a_conversation_is_stale(self, level, manifest) -> None:
        put(level, manifest)
        for key in manifest.checkpoint_keys:
            assert level.quarantine_checkpoint(key)
        scan = level.scan(IDENTITY)
        assert (scan.manifests, [entry.serial for entry in scan.stale]) == ((), [manifest.serial])
        assert "checkpoint" in scan.stale[0].reason
        assert len(scan.lost_checkpoints) == len(manifest.checkpoints)

    def test_a_missing_segment_makes_it_stale_and_spares_the_checkpoints(self, level, disk, root) -> None:
        put(level, HYBRID)
        disk.unlink(root / segment_path(HYBRID.keys[1], 0))
        scan = level.scan(IDENTITY)
        assert "segment 1 of 2" in scan.stale[0].reason
        assert (scan.lost_checkpoints, len(scan.checkpoints)) == ((), 3)

    def test_orphans_temporaries_and_foreign_ones_are_counted(self, level) -> None:
        orphan, unpublished = checkpoint_plans(HYBRID)[0], checkpoint_plans(HYBRID)[1]
        level.publish([level.write_segment(orphan, payloads(orphan))])
        level.write_segment(unpublished, payloads(unpublished))
        put(level, foreign := conversation(5, 20, seed=5, identity=OTHER_IDENTITY, checkpoints=((20, 50),)))
        level.drop((), foreign.checkpoint_keys)
        put(level, foreign)
        scan = level.scan(IDENTITY)
        assert scan.orphans == (orphan.key,)
        assert [(entry.serial, entry.keys) for entry in scan.foreign] == [(5, tuple(foreign.objects))]
        assert (len(scan.temporary), scan.other) == (1, ())
        level.remove_files(scan.temporary)
        level.drop((), scan.orphans)
        scan = level.scan(IDENTITY)
        assert (scan.orphans, scan.temporary, len(scan.checkpoints)) == ((), (), 1)

    def test_a_directory_with_a_checkpoints_name_is_in_nobodys_way(self, level, disk, root) -> None:
        disk.make_dir(root / checkpoint_path(HYBRID.checkpoint_keys[0]))
        assert level.scan(IDENTITY).other == (checkpoint_path(HYBRID.checkpoint_keys[0]),)
        put(level, HYBRID)
        verify(level, HYBRID)

    def test_a_manifest_of_version_1_is_served(self, level, disk, root) -> None:
        old = conversation(1, 300)
        put(level, old)
        self.overwrite(disk, root / manifest_name(1), as_version_1(old))
        (stored,) = level.scan(IDENTITY).manifests
        assert stored.manifest == old == level.read_manifest(1)
        verify(level, stored.manifest)
        level.put_manifest(msgspec.structs.replace(old, stamp_s=500.0))
        assert level.read_manifest(1).stamp_s == 500.0

    # ----------------------------------------------------------------------------------------------- damage, quarantine

    def test_a_quarantined_checkpoint_is_kept_and_not_served(self, level) -> None:
        put(level, HYBRID)
        key = HYBRID.checkpoint_keys[2]
        assert level.quarantine_checkpoint(key)
        assert not level.quarantine_checkpoint(key)
        with pytest.raises(FileNotFoundError):
            level.read_checkpoint_header(key)
        scan = level.scan(IDENTITY)
        assert (len(scan.bad), serials(level)) == (1, [1])
        level.publish(write_segments(level, HYBRID, without=set(HYBRID.objects) - {key}))
        verify(level, HYBRID)

    def test_every_flipped_byte_is_noticed(self, level, disk, root) -> None:
        put(level, HYBRID)
        header = level.read_checkpoint_header(HYBRID.checkpoint_keys[0])
        path = root / header.path
        good = disk.read(path, MOST)
        payload_bytes = [b.offset + i for b in header.blocks for i in (0, b.length // 2, b.length - 1)]
        for at in [0, 9, 20, 50, 60, 70, 76, 90, PAGE - 20, PAGE - 1, *payload_bytes]:
            self.overwrite(disk, path, good[:at] + bytes((good[at] ^ 0x10,)) + good[at + 1 :])
            with pytest.raises(DamagedFile) as refused:
                verify(level, HYBRID)
            assert str(path) in refused.value.message
        for bad in (b"", good[:100], good[:PAGE], good[:-1], good + b"\0"):
            self.overwrite(disk, path, bad)
            with pytest.raises(DamagedFile):
                level.read_checkpoint_header(header.key)
        self.overwrite(disk, path, good[: header.blocks[-1].offset + 1])
        with pytest.raises(DamagedFile):
            level.read_block(header, len(header.blocks) - 1, aligned_buffer(PAGE))
        self.overwrite(disk, path, good)
        verify(level, HYBRID)

    def test_swapped_files_are_noticed(self, level, disk, root) -> None:
        put(level, HYBRID)
        ours, theirs = (root / checkpoint_path(key) for key in HYBRID.checkpoint_keys[:2])
        self.overwrite(disk, ours, disk.read(theirs, MOST))
        with pytest.raises(DamagedFile) as refused:
            level.read_checkpoint_header(HYBRID.checkpoint_keys[0])
        assert refused.value.field == "key"
        self.overwrite(disk, ours, disk.read(root / segment_path(HYBRID.keys[0], 0), MOST))
        with pytest.raises(DamagedFile) as refused:
            level.read_checkpoint_header(HYBRID.checkpoint_keys[0])
        assert refused.value.field == "magic"
        level.scan(IDENTITY)


def as_version_1(manifest: Manifest) -> bytes:
    """The bytes that the first version wrote for a manifest without checkpoints."""
    head = struct.Struct("<8sQQ16s")
    fields = msgspec.msgpack.decode(encode_manifest(manifest)[head.size :])
    del fields["checkpoints"]
    body = msgspec.msgpack.encode(fields)
    return head.pack(b"strata-m", 1, len(body), digest(body)) + body
