"""Every state of every scenario of `tests/store/crashmodel.py`, after a kill and after a power cut."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.store.crashmodel import CASES, CRASHES, states

SHOWN = 5


def power_cuts() -> dict[str, int]:
    """`states` looked at; in how many something acknowledged was `lost`, something damaged offered or a manifest left
    without its segments (`torn`), bytes not accounted for (`unaccounted`), the next hand-down hindered (`stuck`)."""
    figures = Counter({"states": 0, "lost": 0, "torn": 0, "unaccounted": 0, "stuck": 0})
    for case in CASES:
        for crash in CRASHES:
            started, before = time.monotonic(), figures["states"]
            for problems in states(case, crash):
                figures["states"] += 1
                figures.update({problem.kind for problem in problems})
                if problems and figures.total() - figures["states"] <= SHOWN:
                    print(*problems, sep="\n", file=sys.stderr)
            seen, seconds = figures["states"] - before, time.monotonic() - started
            print(f"{case.name}, {crash}: {seen} states, {seconds:.1f} s", file=sys.stderr, flush=True)
    return dict(figures)
