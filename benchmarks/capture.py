"""Capture out of the engine against memcpy of the same blocks."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.inprocess import Bench, say
from strata.types import MIB

RUNS = 25


class Copies:
    """Arena blocks for `n_tokens`, and as many bytes of ordinary memory to copy there.

    That memory is in pages as small as the arena's; numpy would take large ones for itself.
    """

    def __init__(self, bench: Bench, n_tokens: int) -> None:
        self.blocks = bench.blocks(n_tokens)
        self._bench = bench
        self._views = [np.frombuffer(payload, np.uint8) for payload in bench.payloads(self.blocks)]
        self._sources = [np.frombuffer(mmap.mmap(-1, len(view)), np.uint8) for view in self._views]
        _copy(self._sources, self._views)  # touches every page
        _copy(self._views, self._sources)

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self._sources))

    def into_arena(self) -> float:
        """Seconds of one memcpy of all of it, block by block."""
        return _copy(self._views, self._sources)

    def close(self) -> None:
        self._views.clear()
        self._bench.free(self.blocks)


async def compare_capture(bench: Bench, n_tokens: int) -> float:
    """Rate of capture of slot 0 into touched arena memory / rate of memcpy of the same blocks: median of the ratios.

    Each ratio is of two neighbours in time, in alternating order.
    """
    memory = Copies(bench, n_tokens)
    copies, captures, inside = [], [], []
    for run in range(1 + RUNS):
        if run % 2:
            copies.append(memory.into_arena())
        began = time.perf_counter()
        inside.append(await bench.capture_all(memory.blocks))
        captures.append(time.perf_counter() - began)
        if not run % 2:
            copies.append(memory.into_arena())
    size = memory.n_bytes
    rates = [size / statistics.median(times) / 1e9 for times in (captures, inside, copies)]
    say("{:.0f} MiB: capture {:.1f} GB/s ({:.1f} inside the engine), memcpy {:.1f} GB/s".format(size / MIB, *rates))
    memory.close()
    return statistics.median(copied / captured for copied, captured in zip(copies, captures, strict=True))


def _copy(targets: Sequence[NDArray[np.uint8]], sources: Sequence[NDArray[np.uint8]]) -> float:
    began = time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
    return time.perf_counter() - began
