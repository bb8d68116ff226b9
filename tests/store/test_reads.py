"""Reading around and out of the page cache: the same bytes either way, the cache asked and left alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.store.test_fs import needs_direct

from strata.errors import DamagedFile
from strata.store.fs import Disk, aligned_buffer
from strata.store.reads import DIRECT, is_cached
from strata.types import MIB, PAGE, pad_to_page

SIZE = 16 * MIB + 3 * PAGE + 100
DATA = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file on disk of which the page cache holds nothing."""
    needs_direct(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return path


def cached(path: Path, offset: int, n_bytes: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_cached(fd, offset, n_bytes)
    finally:
        os.close(fd)


def knows_its_cache(path: Path) -> None:
    path.read_bytes()
    if not cached(path, 0, SIZE):
        pytest.skip("this system does not tell what its page cache holds")


@pytest.mark.parametrize("n_bytes", [PAGE, 3 * PAGE, 16 * MIB + 2 * PAGE])
@pytest.mark.parametrize("offset", [0, PAGE])
def test_a_direct_read_gives_the_bytes_and_caches_none(path: Path, offset: int, n_bytes: int) -> None:
    view = aligned_buffer(n_bytes)
    Disk().read_into(path, offset, view)
    assert view == DATA[offset : offset + n_bytes]
    assert not cached(path, 0, SIZE)


def test_the_cache_is_told_apart(path: Path) -> None:
    assert not cached(path, 0, SIZE)
    knows_its_cache(path)
    assert cached(path, PAGE, 2 * PAGE)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 8 * MIB, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert cached(path, 0, 8 * MIB)
    assert not cached(path, 0, 8 * MIB + PAGE)


def test_what_is_cached_is_not_read_from_the_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knows_its_cache(path)
    direct: list[bool] = []
    preadv = os.preadv

    def spy(fd, buffers, offset):
        import fcntl

        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    view = aligned_buffer(3 * PAGE)
    Disk().read_into(path, PAGE, view)
    assert view == DATA[PAGE : 4 * PAGE]
    assert direct == [False]


@pytest.mark.parametrize("warm", [False, True])
def test_a_file_that_ends_early_is_damage(path: Path, warm: bool) -> None:
    if warm:
        path.read_bytes()
    with pytest.raises(DamagedFile, match=f"ends at byte {SIZE}"):
        Disk().read_into(path, 0, aligned_buffer(pad_to_page(SIZE)))
