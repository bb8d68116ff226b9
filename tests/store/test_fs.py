"""The real disk: modes, links, FIFOs, short writes, O_DIRECT and its refusal, a volume that is really full."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.samples import IDENTITY, conversation, files_below, payloads, plans, put, serials, verify

from strata.errors import DamagedFile, LevelError
from strata.store.fs import Disk, aligned_buffer
from strata.store.level import Level
from strata.store.names import manifest_name, segment_path
from strata.types import PAGE


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def volume(tmp_path, request) -> Iterator[Path]:
    """A tmpfs of its own, with the mount options that the test gives."""
    where = tmp_path / "volume"
    where.mkdir()
    options = request.param
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "strata-test", str(where)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def pages(n: int, fill: bytes = b"p") -> memoryview:
    view = aligned_buffer(n * PAGE)
    view[:] = fill * len(view)
    return view


# ------------------------------------------------------------------------------------------------ directories and modes


@pytest.mark.usefixtures("open_umask")
def test_everything_is_private_whatever_the_umask(tmp_path) -> None:
    root = tmp_path / "a" / "b" / "level"
    level = Level.open(root)
    put(level, conversation(1))
    level.quarantine_manifest(1)
    level.close()
    for path in (tmp_path / "a").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_the_mode_of_a_directory_that_is_there_stays(tmp_path) -> None:
    tmp_path.chmod(0o755)
    Level.open(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_opening_changes_no_file(tmp_path) -> None:
    level = Level.open(tmp_path)
    put(level, conversation(1))
    level.close()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "x.tmp").write_text("left over")
    before = files_below(tmp_path)
    level = Level.open(tmp_path)
    level.scan(IDENTITY)
    level.close()
    assert files_below(tmp_path) == before


def refusal(root: Path) -> str:
    with pytest.raises(LevelError) as refused:
        Level.open(root)
    assert str(root) in refused.value.message or str(root.parent) in refused.value.message
    return refused.value.message


def test_a_file_is_no_directory(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in refusal(tmp_path / "file")
    assert "is not a directory" in refusal(tmp_path / "file" / "below")


def test_a_link_is_refused_and_what_it_points_to_is_named(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert str(tmp_path / "real") in refusal(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "symbolic link" in refusal(tmp_path / "dangling")
    assert "symbolic link" in refusal(tmp_path / "dangling" / "below")
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_below_a_linked_one_is_fine(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Level.open(tmp_path / "link" / "level").close()
    assert (tmp_path / "real" / "level" / "seg").is_dir()


def test_a_fifo_is_no_directory(tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "is not a directory" in refusal(tmp_path / "fifo")


@pytest.mark.parametrize("kind", ["link", "fifo", "dir"])
def test_a_lock_file_that_is_no_file_is_refused(tmp_path, kind) -> None:
    plant(tmp_path / "strata.lock", kind, tmp_path / "outside")
    assert "strata.lock" in refusal(tmp_path)
    assert not (tmp_path / "outside").exists()


def test_a_linked_segment_directory_is_refused(tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "level").mkdir()
    (tmp_path / "level" / "seg").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refusal(tmp_path / "level")


def test_a_directory_this_user_cannot_write_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "not writable" in refusal(tmp_path)


@pytest.mark.parametrize("volume", ["ro"], indirect=True)
def test_a_read_only_volume_is_refused(volume) -> None:
    assert "not writable" in refusal(volume)
    assert "read-only" in refusal(volume / "below")


@pytest.mark.parametrize("volume", ["nr_inodes=1"], indirect=True)
def test_a_full_volume_is_refused_at_the_start(volume) -> None:
    assert "the disk is full" in refusal(volume / "level")


# ---------------------------------------------------------------------------------------- other kinds in place of files


def plant(path: Path, kind: str, outside: Path) -> None:
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "fifo", "dir"])
def test_no_other_kind_passes_for_a_file(tmp_path, kind) -> None:
    """Never hangs, never follows, never deletes; the conversation can be stored again."""
    level = Level.open(tmp_path / "level")
    manifest = conversation(1, 20)
    put(level, manifest)
    segment = level.root / segment_path(manifest.keys[0], 0)
    outside = tmp_path / "outside"
    outside.write_bytes(segment.read_bytes())
    for path in (segment, level.root / manifest_name(7)):
        path.unlink(missing_ok=True)
        plant(path, kind, outside)
    with pytest.raises((DamagedFile, OSError)):
        level.read_header(manifest.keys[0], 0)
    scan = level.scan(IDENTITY)
    assert scan.manifests == ()
    assert 1 in [stale.serial for stale in scan.stale]
    assert 7 in [stale.serial for stale in scan.stale] or manifest_name(7) in scan.other
    assert level.next_serial() == 8
    put(level, manifest)
    verify(level, manifest)
    assert outside.read_bytes() == segment.read_bytes()
    assert not outside.is_symlink()
    level.close()


def test_a_linked_folder_of_segments_is_neither_read_nor_written(tmp_path) -> None:
    level = Level.open(tmp_path / "level")
    manifest = conversation(1, 20)
    put(level, manifest)
    folder = (level.root / segment_path(manifest.keys[0], 0)).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    before = files_below(tmp_path / "elsewhere")
    assert [stale.serial for stale in level.scan(IDENTITY).stale] == [1]
    with pytest.raises(LevelError, match="symbolic link"):
        put(level, manifest)
    assert files_below(tmp_path / "elsewhere") == before
    level.close()


def test_a_file_is_created_exclusively_and_never_through_a_link(tmp_path) -> None:
    disk = Disk()
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            disk.write(tmp_path / name, [b"new"])
    assert (tmp_path / "there").read_bytes() == b"old"
    assert not (tmp_path / "outside").exists()


def test_a_large_file_is_refused_before_it_is_read(tmp_path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedFile) as refused:
        Disk().read(tmp_path / "sparse", 1000)
    assert refused.value.field == "size"


def test_errors_carry_the_path(tmp_path) -> None:
    disk, path = Disk(), tmp_path / "missing"
    for operation in (
        lambda: disk.read(path, 10),
        lambda: disk.read_into(path, 0, pages(1)),
        lambda: disk.fsync(path),
        lambda: disk.unlink(path),
        lambda: disk.stat(path),
        lambda: disk.replace(path, tmp_path / "other"),
        lambda: disk.sync_dir(path),
        lambda: disk.entries(path),
    ):
        with pytest.raises(FileNotFoundError, match="missing"):
            operation()


# -------------------------------------------------------------------------------------------- O_DIRECT and short writes


def flags_of_writes(limit: int | None = None, refuse_direct: bool = False):
    """A pwritev that records whether the descriptor was O_DIRECT, and may take little at a time or refuse O_DIRECT."""
    seen: list[bool] = []

    def pwritev(fd, buffers, offset):
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append(direct)
        if direct and refuse_direct:
            raise OSError(errno.EINVAL, "not here")
        if limit is None:
            return os.pwritev(fd, buffers, offset)
        return os.pwrite(fd, buffers[0][:limit], offset)

    return pwritev, seen


def needs_direct(path: Path) -> None:
    try:
        os.close(os.open(path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip(f"the filesystem of {path} has no O_DIRECT")


def test_whole_pages_go_past_the_page_cache(tmp_path) -> None:
    needs_direct(tmp_path)
    pwritev, seen = flags_of_writes()
    disk = Disk(pwritev=pwritev)
    assert disk.write(tmp_path / "a", [pages(1), pages(3, b"q")]) == 4 * PAGE
    disk.write(tmp_path / "b", [b"not a page"])
    assert seen == [True, False]
    view = pages(4)
    disk.read_into(tmp_path / "a", 0, view)
    assert view == (tmp_path / "a").read_bytes() == b"p" * PAGE + b"q" * 3 * PAGE


def test_a_level_writes_its_segments_past_the_page_cache(tmp_path) -> None:
    needs_direct(tmp_path)
    pwritev, seen = flags_of_writes()
    level = Level.open(tmp_path / "level", fs=Disk(pwritev=pwritev))
    manifest = conversation(1, 200)
    for header in plans(manifest, manifest.segments[0]):
        level.write_segment(header, payloads(header))
    assert seen == [True, True]
    level.close()


def test_a_refusal_of_direct_is_remembered_for_the_directory(tmp_path) -> None:
    needs_direct(tmp_path)
    pwritev, seen = flags_of_writes(refuse_direct=True)
    disk = Disk(pwritev=pwritev)
    for name in ("a", "b"):
        disk.write(tmp_path / name, [pages(2)])
        assert (tmp_path / name).read_bytes() == b"p" * 2 * PAGE
    assert seen == [True, False, False]


@pytest.mark.parametrize("limit", [PAGE, 1000, 5000])
def test_short_writes_are_continued(tmp_path, limit) -> None:
    pwritev, _ = flags_of_writes(limit)
    parts = [pages(1, b"a"), pages(2, b"b"), pages(1, b"c")]
    assert Disk(pwritev=pwritev).write(tmp_path / "a", parts) == 4 * PAGE
    assert (tmp_path / "a").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("outcome", ["error", "nothing"])
def test_a_write_that_fails_half_way_leaves_no_file(tmp_path, outcome) -> None:
    def pwritev(fd, buffers, offset):
        if offset == 0:
            return os.pwrite(fd, buffers[0][:PAGE], 0)
        if outcome == "nothing":
            return 0
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match=str(tmp_path / "a")):
        Disk(pwritev=pwritev).write(tmp_path / "a", [pages(3)])
    assert not (tmp_path / "a").exists()


def test_reading_past_the_end_is_an_error_not_less(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (PAGE + 10))
    for disk in (Disk(), Disk(direct=False)):
        with pytest.raises(DamagedFile, match=f"ends at byte {PAGE + 10}"):
            disk.read_into(tmp_path / "a", 0, pages(2))
        view = memoryview(bytearray(10))
        disk.read_into(tmp_path / "a", PAGE, view)
        assert view == b"x" * 10


@pytest.mark.parametrize(("error", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_filesystem_that_cannot_sync_directories_is_usable(tmp_path, monkeypatch, error, fails) -> None:
    def fsync(fd: int) -> None:
        raise OSError(error, "no")

    monkeypatch.setattr(os, "fsync", fsync)
    if fails:
        with pytest.raises(OSError, match=str(tmp_path)):
            Disk().sync_dir(tmp_path)
    else:
        Disk().sync_dir(tmp_path)


def test_free_space_of_what_does_not_exist_yet(tmp_path) -> None:
    disk = Disk()
    free = disk.free_bytes(tmp_path / "not" / "there" / "yet")
    assert abs(free - disk.free_bytes(tmp_path)) < 1 << 30
    assert free > 0


# ---------------------------------------------------------------------------------------------------------- full volume


@pytest.mark.parametrize("volume", ["size=3m"], indirect=True)
def test_a_full_volume_tears_nothing_and_recovers(volume) -> None:
    level = Level.open(volume / "level")
    stored = []
    with pytest.raises(OSError, match="No space left") as full:
        for serial in range(1, 1000):
            put(level, manifest := conversation(serial, 900, seed=serial))
            stored.append(manifest)
    assert full.value.errno == errno.ENOSPC
    assert str(volume) in str(full.value)
    assert len(stored) > 3
    for _ in range(20):
        with pytest.raises(OSError, match="No space left"):
            put(level, conversation(5000, 900, seed=5000))
    assert level.used_bytes == level.usage()
    assert sorted(serials(level)) == [manifest.serial for manifest in stored]
    for manifest in stored:
        verify(level, manifest)
    level.remove_files(level.scan(IDENTITY).temporary)
    level.drop([1], stored[0].keys)
    level.drop((), level.scan(IDENTITY).orphans)
    put(level, again := conversation(6000, 900, seed=6000))
    verify(level, again)
    assert level.used_bytes == level.usage()
    level.close()


def test_dropping_what_someone_cleared_away_is_no_failure(tmp_path) -> None:
    level = Level.open(tmp_path / "level")
    put(level, manifest := conversation(1))
    shutil.rmtree(tmp_path / "level" / "seg")
    level.drop([1], manifest.keys)
    assert serials(level) == []
    put(level, manifest)
    verify(level, manifest)
    level.close()


def test_a_rename_over_another_name_of_the_same_file_leaves_one_name(tmp_path) -> None:
    disk = Disk()
    disk.write(tmp_path / "a", [b"x"])
    disk.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FileExistsError):
        disk.link(tmp_path / "a", tmp_path / "b")
    disk.replace(tmp_path / "a", tmp_path / "b")
    assert [entry.name for entry in disk.entries(tmp_path)] == ["b"]


@pytest.mark.parametrize("direct", [True, False])
def test_buffers_of_an_iterator_may_be_reused(tmp_path, direct) -> None:
    view = aligned_buffer(PAGE)

    def parts() -> Iterator[memoryview]:
        for fill in b"abc":
            view[:] = bytes((fill,)) * PAGE
            yield view
        yield view[:5]

    disk = Disk(direct=direct)
    assert disk.write(tmp_path / "f", parts()) == 3 * PAGE + 5
    assert disk.read(tmp_path / "f", 1 << 20) == b"".join(bytes((c,)) * PAGE for c in b"abc") + b"c" * 5

    def broken() -> Iterator[memoryview]:
        yield view
        raise DamagedFile("no more", field="digest")

    with pytest.raises(DamagedFile):
        disk.write(tmp_path / "g", broken())
    assert not (tmp_path / "g").exists()
