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


async def compare_capture(bench: Bench, n_tokens: int) -> float:
    """Rate of capture of slot 0 into touched arena memory / rate of memcpy of the same blocks: median of the ratios.

    Each ratio is of two neighbours in time, in alternating order. The copies come from ordinary memory, in pages as
    small as the arena's; numpy would take large ones for itself.
    """
    blocks = bench.blocks(n_tokens)
    views = [np.frombuffer(payload, np.uint8) for payload in bench.payloads(blocks)]
    sources = [np.frombuffer(mmap.mmap(-1, len(view)), np.uint8) for view in views]

    _copy(sources, views)  # touches every page
    _copy(views, sources)
    copies, captures, inside = [], [], []
    for run in range(1 + RUNS):
        if run % 2:
            copies.append(_copy(views, sources))
        began = time.perf_counter()
        inside.append(await bench.capture_all(blocks))
        captures.append(time.perf_counter() - began)
        if not run % 2:
            copies.append(_copy(views, sources))
    size = sum(map(len, sources))
    rates = [size / statistics.median(times) / 1e9 for times in (captures, inside, copies)]
    say("{:.0f} MiB: capture {:.1f} GB/s ({:.1f} inside the engine), memcpy {:.1f} GB/s".format(size / MIB, *rates))
    del views
    bench.free(blocks)
    return statistics.median(copied / captured for copied, captured in zip(copies, captures, strict=True))


def _copy(targets: Sequence[NDArray[np.uint8]], sources: Sequence[NDArray[np.uint8]]) -> float:
    began = time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
    return time.perf_counter() - began
