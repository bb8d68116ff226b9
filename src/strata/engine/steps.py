"""What the loop's steps cost: time inside llama.cpp (decoding, sampling), and the rest, which is ours.

A step lasts from the end of the one before, so that sending the events of that one is part of it. Turns of the loop
that carried out commands of slots are not counted: moving blocks is bounded by a budget of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from strata.engine.protocol import Steps

_T = TypeVar("_T")


class StepClock:
    """Counts steps. Belongs to the engine thread."""

    def __init__(self) -> None:
        self._count = self._rows = 0
        self._inside_s = self._outside_s = 0.0
        self._began = self._step_inside_s = 0.0

    def begin(self) -> None:
        self._began, self._step_inside_s = time.perf_counter(), 0.0

    def inside(self, call: Callable[[], _T]) -> _T:
        """Make a call into llama.cpp."""
        began = time.perf_counter()
        try:
            return call()
        finally:
            self._step_inside_s += time.perf_counter() - began

    def end(self, rows: int) -> None:
        """A step of `rows` rows has ended."""
        self._count += 1
        self._rows += rows
        self._inside_s += self._step_inside_s
        self._outside_s += time.perf_counter() - self._began - self._step_inside_s

    def counts(self) -> Steps:
        return Steps(count=self._count, rows=self._rows, inside_s=self._inside_s, outside_s=self._outside_s)
