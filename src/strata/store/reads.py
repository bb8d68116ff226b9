"""From an open file into memory: past the page cache, or out of it.

What the page cache holds already is not read from the device again. A direct read brings nothing into that cache; the
device writes straight into the memory given, fastest where that lies in large pages (`large_pages.py`).

Every call that lets go of the GIL may wait to get it back, which in a busy process costs more than the call: a block is
read by as few of them as possible.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path

from strata.errors import DamagedFile
from strata.types import PAGE

DIRECT: int = getattr(os, "O_DIRECT", 0)
_CACHESTAT = 451  # the system call's number on all processors that Linux 6.5 and an LLM are likely to meet


def read_direct(fd: int, path: Path, offset: int, view: memoryview) -> None:
    """Fill `view`, whole pages, from a file opened with DIRECT. DamagedFile when it ends before."""
    if is_cached(fd, offset, len(view)):
        stop_direct(fd)
    read_all(fd, path, offset, view)


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
