"""From an open file into memory that is not of the reader's choosing: past the page cache, or out of it.

A device is given a read as a list of memory segments. The arena's pages are small ones on most systems and lie
scattered, so that 2 MiB of it are up to 512 segments; a large page is one. Measured on a virtual disk: 1.0-1.4 GB/s
into scattered pages, 2.3-2.6 GB/s into large ones. So a direct read goes through a few large pages, and is copied
from there while the processor's cache still holds it.

Every call that lets go of the GIL may wait to get it back, which in a busy process costs more than the call: a block is
read by as few of them as possible.

What the page cache holds already is not read from the device again. A direct read brings nothing into that cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np

from strata.errors import DamagedFile
from strata.store.spans import LARGE_PAGE
from strata.types import MIB, PAGE

DIRECT: int = getattr(os, "O_DIRECT", 0)
PIECE_BYTES = 8 * MIB
"""What is read at a time: most blocks whole, and it fits into a processor's last cache."""
_CACHESTAT = 451  # the system call's number on all processors that Linux 6.5 and an LLM are likely to meet


class Staging:
    """Direct reads from any thread; as many pieces of memory as there were reads at once."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []

    def read(self, fd: int, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view`, whole pages, from a file opened with DIRECT. DamagedFile when it ends before."""
        if is_cached(fd, offset, len(view)):
            stop_direct(fd)
            read_all(fd, path, offset, view)
        elif len(view) == PAGE:
            read_all(fd, path, offset, view)
        else:
            with self._piece() as whole:
                for at in range(0, len(view), PIECE_BYTES):
                    target = view[at : at + PIECE_BYTES]
                    piece = whole[: len(target)]
                    read_all(fd, path, offset + at, piece)
                    # Without the GIL, unlike an assignment of memoryviews.
                    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(piece, np.uint8))

    @contextmanager
    def _piece(self) -> Iterator[memoryview]:
        try:
            piece = self._idle.pop()  # one step, so no other thread gets the same
        except IndexError:
            piece = _in_large_pages(PIECE_BYTES)
        try:
            yield piece
        finally:
            self._idle.append(piece)


def _in_large_pages(n_bytes: int) -> memoryview:
    """Zeroed memory, in large pages if the system grants them."""
    room = mmap.mmap(-1, n_bytes + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system that knows no large pages
        room.madvise(mmap.MADV_HUGEPAGE)
    start = -int(np.frombuffer(room, np.uint8).ctypes.data) % LARGE_PAGE
    return memoryview(room)[start : start + n_bytes]


def is_cached(fd: int, offset: int, n_bytes: int) -> bool:
    """Whether the page cache holds all of the range; False also where that cannot be asked (before Linux 6.5)."""
    if sys.platform != "linux":
        return False
    asked = (ctypes.c_uint64 * 2)(offset, n_bytes)
    found = (ctypes.c_uint64 * 5)()  # pages: cached, dirty, being written, ...
    answer = _libc().syscall(_CACHESTAT, ctypes.c_uint(fd), asked, found, ctypes.c_uint(0))
    return answer == 0 and found[0] * mmap.PAGESIZE >= n_bytes


@cache
def _libc() -> ctypes.PyDLL:
    """Keeps the GIL: the call takes microseconds."""
    return ctypes.PyDLL(None)


def read_all(fd: int, path: Path, offset: int, view: memoryview) -> None:
    """Fill `view`, whatever the system gives at a time. DamagedFile when the file ends before."""
    done = 0
    while done < len(view):
        if done % PAGE:  # the end of a file that is no whole number of pages
            stop_direct(fd)
        n = _system_pread(fd, view[done:], offset + done)
        if n == 0:
            problem = f"{path} ends at byte {offset + done}, {offset + len(view)} expected"
            raise DamagedFile(problem, field="size")
        done += n


def _system_pread(fd: int, view: memoryview, offset: int) -> int:
    if sys.platform == "win32":
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(view))
        view[: len(data)] = data
        return len(data)
    return os.preadv(fd, [view], offset)


def stop_direct(fd: int) -> bool:
    """Switch an open file to buffered I/O; False when it was buffered already."""
    if not DIRECT:
        return False
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & DIRECT:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~DIRECT)
    return bool(flags & DIRECT)
