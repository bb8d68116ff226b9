"""What the bare disk gives: the payload of a level's segment files by O_DIRECT reads, several of them under way.

The files are open before the clock starts, nothing is verified, and every byte has a place of its own in memory that is
touched already and lies in large pages: what a restore is measured against is what this disk and this memory give.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.store.fs import aligned_buffer
from strata.types import MIB, PAGE

DEPTHS = (1, 2, 4, 8)
BLOCKS_MIB = (1, 4, 16)
TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the disk is read: `depth` threads, each `block_bytes` at a time."""

    depth: int
    block_bytes: int

    def __str__(self) -> str:
        return f"{self.depth} reads of at most {self.block_bytes // MIB} MiB at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    fd: int
    offset: int
    view: memoryview


class RawReader:
    """Reads open files, their first page (the header) left out. Made by `raw_reader`."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._files = [(fd, os.fstat(fd).st_size) for fd in descriptors]
        self._memory = aligned_buffer(sum(size - PAGE for _, size in self._files))
        np.frombuffer(self._memory, np.uint8)[::PAGE] = 1

    def seconds(self, way: Way) -> float:
        """Read everything once, in order."""
        pieces = iter(list(self._pieces(way.block_bytes)))
        lock = threading.Lock()
        threads = [threading.Thread(target=_read, args=(pieces, lock)) for _ in range(way.depth)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _pieces(self, block_bytes: int) -> Iterator[_Piece]:
        at = 0
        for fd, size in self._files:
            for offset in range(PAGE, size, block_bytes):
                length = min(block_bytes, size - offset)
                yield _Piece(fd=fd, offset=offset, view=self._memory[at : at + length])
                at += length

    def best_way(self) -> Way:
        """The fastest one, by the median of a few tries."""
        ways = [Way(depth=depth, block_bytes=n * MIB) for depth, n in itertools.product(DEPTHS, BLOCKS_MIB)]
        tries = [[self.seconds(way) for way in ways] for _ in range(TRIES)]
        seconds = [statistics.median(times) for times in zip(*tries, strict=True)]
        return ways[seconds.index(min(seconds))]


def _read(pieces: Iterator[_Piece], lock: threading.Lock) -> None:
    while True:
        with lock:
            piece = next(pieces, None)
        if piece is None:
            return
        got = os.preadv(piece.fd, [piece.view], piece.offset)
        assert got == len(piece.view), "a file that ends early"


@contextmanager
def raw_reader(paths: Sequence[Path]) -> Iterator[RawReader]:
    """A reader of these files, which must be whole pages long."""
    with ExitStack() as stack:
        descriptors = []
        for path in paths:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
            stack.callback(os.close, descriptors[-1])
        yield RawReader(descriptors)
