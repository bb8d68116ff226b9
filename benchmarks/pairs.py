"""Strata and llama-server beside each other, with the same model, threads, K/V types and flash attention, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from benchmarks.inprocess import say
from benchmarks.process import ServerProcess, serving, serving_llama
from strata.engine.startup import default_threads

Measure = Callable[[ServerProcess, int], Awaitable[float]]
"""One measurement of a server; the number is another one each time, for prompts that nobody has seen."""


def shape(parallel: int, context: int) -> tuple[str, ...]:
    """Flags that both servers have."""
    return ("--parallel", str(parallel), "--context", str(context), "--threads", str(default_threads()))


@contextmanager
def both(
    parallel: int, context: int, *, strata: tuple[str, ...] = (), cache_ram: int = 0
) -> Iterator[list[ServerProcess]]:
    """Strata (with further flags) and llama-server, started; only one may be given work at a time."""
    same = shape(parallel, context)
    with (
        serving(*same, "--flash-attention", "on", "--kv", "f16", *strata) as ours,
        serving_llama(*same, "--cache-ram", str(cache_ram)) as theirs,
    ):
        yield [ours, theirs]


async def in_turns(name: str, servers: list[ServerProcess], measure: Measure, rounds: int) -> float:
    """The median of Strata's figure / llama-server's, over rounds whose order alternates; one before does not count."""
    ratios: list[float] = []
    for n in range(rounds + 1):
        figures = [0.0, 0.0]
        for which in (0, 1) if n % 2 else (1, 0):
            figures[which] = await measure(servers[which], n)
        if n:
            ratios.append(figures[0] / figures[1])
            say(f"{name}: {figures[0]:.4g} against {figures[1]:.4g}: {ratios[-1]:.3f}")
    return statistics.median(ratios)
