"""Whether an engine process is alive: its signs of life, how long there was none, and its end when that is too long.

Two silences are counted while something waits for the process. Its reader thread answers every Ping, whatever the other
threads do, so a process that sends nothing at all is stopped or locked up. Its engine thread reports after each step
and each block: when that stops, llama.cpp hangs. Not covered: loading and tokenising may take minutes without a word,
and are only watched for the first kind; a process that still imports cannot answer yet and has a limit of its own. Time
is counted in ticks, not read from a clock, so neither a machine that was suspended nor a front that was held up itself
sees a silence that was none.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

TICK_S = 1.0
START_LIMIT_S = 120.0
"""What a process may take at least until its first sign of life: it imports, perhaps from a slow disk."""
_LEAST_TICKS = 4  # in a limit, however short it is

log = logging.getLogger("strata.engine")


class Watched(Protocol):
    """What the watch needs to know of a process."""

    signs: int  # events of any kind so far
    reports: int  # those of them that come from the engine thread

    @property
    def pid(self) -> int: ...

    @property
    def is_waited_for(self) -> bool:
        """Whether anything waits for it: loading, a prompt, a request, a block."""
        ...

    @property
    def is_to_step(self) -> bool:
        """Whether its engine thread has something to do."""
        ...

    def ping(self) -> None: ...

    def kill(self, why: str) -> None: ...


class Silence:
    """Seconds without a sign of life, as seen at the ticks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._heard = 0

    def __repr__(self) -> str:
        return f"Silence({self.seconds} s)"

    def tick(self, tick_s: float, heard: int, *, waits: bool) -> None:
        """`heard`: signs of life so far; `waits`: whether anybody waits for one."""
        self.seconds = self.seconds + tick_s if waits and heard == self._heard else 0.0
        self._heard = heard


class Watch:
    """Counts the silence of one process, and kills it once it is silent for `limit_s` (0 = never).

    Before its first sign of life it may be silent for START_LIMIT_S at least.
    """

    def __init__(self, process: Watched, limit_s: float) -> None:
        self._process = process
        self._limit_s = limit_s
        self._tick_s = min(TICK_S, limit_s / _LEAST_TICKS) if limit_s else TICK_S
        self._silences = (Silence(), Silence())

    @property
    def silent_s(self) -> float:
        """How long the process has been silent although something waits for it."""
        return max(silence.seconds for silence in self._silences)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self.tick()

    def tick(self) -> None:
        process, (of_process, of_engine) = self._process, self._silences
        of_process.tick(self._tick_s, process.signs, waits=process.is_waited_for)
        of_engine.tick(self._tick_s, process.reports, waits=process.is_to_step)
        limit_s = self._limit_s if process.signs else max(self._limit_s, START_LIMIT_S)
        if self._limit_s and self.silent_s >= limit_s:
            failed = "answer for" if process.signs else "start within"
            why = f"it did not {failed} {self.silent_s:.0f} s"
            log.error("the engine process %d is ended: %s (--engine-timeout-s)", process.pid, why)
            process.kill(why)
        elif process.is_waited_for:
            process.ping()
