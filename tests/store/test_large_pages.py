"""Shared memory put into large pages: its bytes stay, and it lies in one piece of real memory."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata.store.arena import Arena
from strata.store.large_pages import collapse
from strata.store.spans import LARGE_PAGE
from strata.types import MIB, PAGE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux where memory lies")

SIZE = 4 * LARGE_PAGE
DATA = np.random.default_rng(5).integers(0, 256, SIZE, np.uint8).tobytes()
N_FRAMES = LARGE_PAGE // PAGE


@pytest.fixture
def memory() -> Iterator[tuple[int, mmap.mmap]]:
    """A memfd and a mapping of it, full of DATA."""
    fd = os.memfd_create("large")
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE) as mapped:
        mapped[:] = DATA
        yield fd, mapped
    os.close(fd)


def in_large_pages(view: memoryview) -> list[bool]:
    """Of each LARGE_PAGE bytes: whether they lie in one, by the numbers of the frames that they lie in."""
    array = np.frombuffer(view, np.uint8)
    array[::PAGE].sum()  # into this process's page table
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(array.ctypes.data // PAGE * 8)
        frames = np.frombuffer(file.read(len(view) // PAGE * 8), np.uint64) & np.uint64((1 << 55) - 1)
    if not frames.any():
        pytest.skip("only root may know where memory lies")
    return [bool((row == row[0] + np.arange(N_FRAMES)).all()) for row in frames.reshape(-1, N_FRAMES).astype(np.int64)]


def test_the_whole_large_pages_of_a_range(memory) -> None:
    fd, mapped = memory
    if not collapse(fd, PAGE, SIZE - PAGE):
        pytest.skip("this system does not put memory into large pages")
    assert mapped[:] == DATA
    assert in_large_pages(memoryview(mapped))[1:3] == [True, True]
    mapped[LARGE_PAGE : LARGE_PAGE + 4] = b"here"
    assert os.pread(fd, 4, LARGE_PAGE) == b"here"


@pytest.mark.parametrize("end", [0, PAGE, LARGE_PAGE, LARGE_PAGE + PAGE])
def test_no_whole_large_page(memory, end: int) -> None:
    assert not collapse(memory[0], PAGE, end)


def test_what_is_no_shared_memory() -> None:
    reading, writing = os.pipe()
    assert not collapse(reading, 0, SIZE)
    os.close(reading)
    os.close(writing)


def test_an_arena_lies_in_large_pages_once_it_is_resident(memory) -> None:
    if not collapse(memory[0], 0, SIZE):
        pytest.skip("this system does not put memory into large pages")
    arena = Arena(32 * MIB, 16 * MIB, large_pages=True)
    span = arena.alloc(16 * MIB)
    assert span is not None
    view = arena.view(span)
    view[: len(DATA)] = DATA
    ends = time.monotonic() + 10
    while arena.touched_bytes < 16 * MIB and time.monotonic() < ends:
        time.sleep(0.01)
    assert view[: len(DATA)] == DATA
    assert all(in_large_pages(view))
    arena.close()
