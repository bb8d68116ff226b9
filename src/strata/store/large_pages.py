"""Large pages for shared memory that the system gave in small ones.

A device is given a read or a write as a list of memory segments: 2 MiB of small pages that lie scattered are up to 512
of them, a large page is one. Measured on a virtual disk: 1.0-1.5 GB/s into small pages, 2.4-3.0 GB/s into large ones.

Linux gives shared memory large pages only where its administrator has allowed that; but since 6.1 a process may have
what it has touched put into large ones, whatever that setting says (MADV_COLLAPSE). The bytes stay what they are, and
whoever has them mapped may read and write meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from strata.store.spans import LARGE_PAGE

_MADV_COLLAPSE, _MAP_FIXED = 25, 0x10  # Python's mmap has no names for them
_FAILED = ctypes.c_void_p(-1).value


def collapse(fd: int, start: int, end: int) -> bool:
    """Put the whole large pages of [start, end) of a memfd into such; False when the system does not.

    They must be resident. Takes about as long as copying them, without the GIL.
    """
    start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
    if not sys.platform.startswith("linux") or start >= end:
        return False
    libc, size = _libc(), end - start
    # For a while they are mapped once more, at an address that is a multiple of their size.
    room = libc.mmap(None, size + LARGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        return False
    try:
        at = room + -room % LARGE_PAGE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(at, size, access, mmap.MAP_SHARED | _MAP_FIXED, fd, start) == _FAILED:
            return False
        return bool(libc.madvise(at, size, _MADV_COLLAPSE) == 0)
    finally:
        libc.munmap(room, size + LARGE_PAGE)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    return libc
