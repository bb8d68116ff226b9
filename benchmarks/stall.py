"""What a park to disk of 300 MB costs another slot that writes, and how fast it is: all of it, fsync included.

One slot generates all the time. The other holds a long conversation that nobody read, and is parked again and again
under another root key, so that nothing of it is stored yet. In between are windows of the same length without a park.
A restore is measured in the same way by rates.py.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.inprocess import Bench, say
from benchmarks.save import raw_s
from benchmarks.text import prose
from strata.cache.parking import ParkJob
from strata.engine.protocol import Delta
from strata.rules import prefix
from strata.store.fs import aligned_buffer
from strata.types import Key, Tokens, pad_to_page

PARKED_BYTES = 300_000_000
CONTEXT = 16384
SETTLE_S = 0.3
Move = Callable[[int], Awaitable[None]]
QUIET_ROUNDS = 2
"""Windows before the first counted one: memory is touched, folders are made."""


@dataclass(slots=True, kw_only=True)
class Ticks:
    """When each token of the other slot arrived."""

    at: list[float] = field(default_factory=list)

    def gaps(self, windows: list[tuple[float, float]]) -> list[float]:
        """Seconds between neighbouring tokens, of every gap that overlaps one of the windows."""
        at = np.array(self.at)
        found: list[float] = []
        for begin, end in windows:
            first = max(0, int(np.searchsorted(at, begin)) - 1)
            last = int(np.searchsorted(at, end))
            found += np.diff(at[first : last + 1]).tolist()
        return found


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


async def listen(bench: Bench, ticks: Ticks, prompt: Tokens) -> None:
    """Generate in slot 1 until the context is full or this is cancelled."""
    run = bench.run(1, prompt, 0, CONTEXT - len(prompt) - 1)
    try:
        async for event in run:
            if isinstance(event, Delta):
                ticks.at.append(time.perf_counter())
    finally:
        await run.cancel()


async def park(bench: Bench, tokens: Tokens, root: Key) -> None:
    conversation = prefix.conversation_key(root, tokens, ())
    job = ParkJob(slot=0, root=root, tokens=tokens, frontier=None, conversation=conversation)
    parking = bench.cache.begin_park(job)
    assert parking is not None and await parking.run(), "the park failed"


async def drop_all(bench: Bench) -> None:
    disk = bench.cache.write_level
    assert disk is not None, "this benchmark parks to disk"
    disk.drop([conversation.serial for conversation in disk.index.conversations()])
    await asyncio.to_thread(disk.writer.flush)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Seconds between neighbouring tokens of the other slot, beside a move and in windows without one; a move's own."""

    beside: list[float]
    without: list[float]
    move_s: float

    def say(self, move: str) -> None:
        rows = {"without": self.without, f"beside a {move}": self.beside}
        for name, gaps in rows.items():
            median, last, worst = (1000 * value for value in (statistics.median(gaps), p99(gaps), max(gaps)))
            say(f"{name}: a token every {median:.1f} ms, p99 {last:.1f}, worst {worst:.1f}; {len(gaps)} gaps")
        say(f"a {move} takes {self.move_s:.2f} s")

    @property
    def p99_ms(self) -> float:
        return 1000 * (p99(self.beside) - p99(self.without))

    @property
    def median_ms(self) -> float:
        return 1000 * (statistics.median(self.beside) - statistics.median(self.without))


async def gaps_beside(
    bench: Bench, prompt: Tokens, rounds: int, move: Move, undo: Callable[[], Awaitable[None]]
) -> Gaps:
    """Let slot 1 write, and `move` (round by round, the first ones not counted) and `undo` what it did beside it."""
    ticks = Ticks()
    other = asyncio.create_task(listen(bench, ticks, prompt))
    quiet: list[tuple[float, float]] = []
    moves: list[tuple[float, float]] = []
    for n in range(rounds + QUIET_ROUNDS):
        await asyncio.sleep(SETTLE_S)
        began = time.perf_counter()
        await move(n)
        moves.append((began, time.perf_counter()))
        await undo()
        await asyncio.sleep(SETTLE_S)
        began, lasts = time.perf_counter(), moves[-1][1] - moves[-1][0]
        await asyncio.sleep(lasts)
        quiet.append((began, began + lasts))
    assert not other.done(), "the other slot came to its end too early"
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    beside, without = (ticks.gaps(windows[QUIET_ROUNDS:]) for windows in (moves, quiet))
    seconds = statistics.median(end - begin for begin, end in moves[QUIET_ROUNDS:])
    return Gaps(beside=beside, without=without, move_s=seconds)


async def measure_stall(folder: Path, rounds: int) -> dict[str, float]:
    """`capture_ms_per_token`: what of the stall the captures themselves are; the rest is contention for the cores."""
    async with Bench(folder / "level", slots=2, context=CONTEXT) as bench:
        per_token = sum(stage.token_bytes for stage in bench.engine.info.stages)
        text = await bench.tokens_of(prose(60, seed=11))
        held = await bench.fill(0, PARKED_BYTES // per_token, text)
        memory = aligned_buffer(pad_to_page(PARKED_BYTES))
        np.frombuffer(memory, np.uint64)[:] = np.random.default_rng(7).integers(0, 1 << 63, len(memory) // 8, np.uint64)
        capture_s = 0.0

        async def move(n: int) -> None:
            nonlocal capture_s
            captured_s = bench.cache.counters.capture_s
            await park(bench, held, prefix.root_key(bench.engine.info.fingerprint, f"round {n}"))
            capture_s += (n >= QUIET_ROUNDS) * (bench.cache.counters.capture_s - captured_s)

        gaps = await gaps_beside(bench, text[:64], rounds, move, lambda: drop_all(bench))
        raw, alone = await durable(bench, folder, held, memory, max(3, rounds // 4))
    gaps.say("park")
    return {
        "stall_p99_ms": gaps.p99_ms,
        "stall_median_ms": gaps.median_ms,
        "capture_ms_per_token": 1000 * capture_s / len(gaps.beside),
        "token_p99_ms": 1000 * p99(gaps.without),
        "park_s": gaps.move_s,
        "park_alone_vs_raw": statistics.median(r / a for r, a in zip(raw, alone, strict=True)),
    }


async def durable(
    bench: Bench, folder: Path, held: Tokens, memory: memoryview, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of the same bytes written raw, and of whole parks with nothing else to do, in alternating order."""
    raw: list[float] = []
    alone: list[float] = []
    for n in range(rounds):
        if n % 2:
            raw.append(await asyncio.to_thread(raw_s, folder / "raw", memory))
        began = time.perf_counter()
        await park(bench, held, prefix.root_key(bench.engine.info.fingerprint, f"alone {n}"))
        alone.append(time.perf_counter() - began)
        await drop_all(bench)
        if not n % 2:
            raw.append(await asyncio.to_thread(raw_s, folder / "raw", memory))
    return raw, alone
