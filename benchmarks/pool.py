"""python -m benchmarks.pool: what idle conversations cost the one that writes, once those that cost too much have left.

Four conversations of 8,000 tokens in one engine, all kept on disk; one of them writes while three are idle. `idle_tax`:
its tokens per second over those that it has with the pool to itself. Both are timed in one run, in turns, as soon as
the idle ones have left and its rows were moved; stderr tells the speed before that, and the longest wait for a token
while they were moved. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.desk import settled, workshop
from benchmarks.inprocess import Bench, say
from benchmarks.text import prose
from strata.engine.protocol import Delta
from strata.rules import prefix
from strata.serve.making_room import empty
from strata.serve.parks import Workshop, park
from strata.serve.slots import Slot
from strata.serve.tax import PoolTax
from strata.types import Tokens

SLOTS, CONTEXT, TOKENS = 4, 8192, 8000
SETTLING, TIMED = 150, 100
DESCRIPTION = (__doc__ or "").partition("\n")[0]


class Desk:
    """The four conversations; the last one writes."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.shop: Workshop = workshop(bench)
        self.tax = PoolTax(self.shop)
        self.shop.pool.on_written = self.tax.wrote
        self.writer: Slot = self.shop.slots.all[-1]

    async def open(self, slot: Slot, *, kept: bool) -> None:
        """Let a slot hold its conversation; `kept`: on disk too."""
        sample = await self.bench.tokens_of(prose(60, seed=1 + slot.index))
        slot.tokens = await self.bench.fill(slot.index, TOKENS, sample)
        slot.root = prefix.root_key(self.bench.engine.info.fingerprint, "")
        slot.last_used_s = time.monotonic()
        if kept:
            slot.owed = True
            park(self.shop, slot, frontier=None)
            await settled(self.shop)

    async def close(self) -> None:
        for slot in self.shop.slots.all:
            await empty(self.shop, slot)
        await settled(self.shop)

    async def write(self, tokens: Tokens, n: int) -> list[float]:
        """When each of `n` tokens came."""
        slot, pool = self.writer, self.shop.pool
        claim = pool.claim(slot.index, len(tokens))
        slot.busy = True
        pool.enter_anyway(claim)
        times = []
        async for event in self.bench.run(slot.index, tokens, len(tokens) - 1, n):
            if isinstance(event, Delta):
                times.append(time.perf_counter())
                claim.wrote(1)
        pool.leave(claim)
        self.shop.slots.give_back(slot)
        return times

    async def rate(self) -> float:
        """Tokens per second, the first of them left out."""
        times = await self.write(self.writer.tokens, TIMED)
        return (len(times) - 1) / (times[-1] - times[0])

    async def alone(self) -> float:
        await self.open(self.writer, kept=False)
        await self.write(self.writer.tokens, 8)
        rate = await self.rate()
        await self.close()
        return rate

    async def move_s(self) -> float:
        """Seconds in the engine that the move of one block takes, between two steps."""
        engine, step = self.bench.engine, self.bench.engine.info.block_tokens
        done = [await engine.compact(self.writer.index, start, start + step) for start in range(0, 16 * step, step)]
        return statistics.median(one.seconds for one in done)

    async def beside_idle(self) -> float:
        left = self.tax.left
        for slot in self.shop.slots.all:
            await self.open(slot, kept=slot is not self.writer)
        times = await self.write(self.writer.tokens, SETTLING)
        while self.tax.tasks:
            await asyncio.wait(self.tax.tasks)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        say(
            f"before: {16 / sum(gaps[:16]):.1f} tokens/s; {self.tax.left - left} left the pool; "
            f"longest wait {1000 * max(gaps):.0f} ms, median {1000 * statistics.median(gaps):.0f} ms"
        )
        rate = await self.rate()
        say(f"moving a block takes {1000 * await self.move_s():.1f} ms")
        await self.close()
        return rate


async def measure(folder: Path, rounds: int) -> float:
    async with Bench(folder, slots=SLOTS, context=CONTEXT, measure_idle_cells=True) as bench:
        info = bench.engine.info
        cell_us = None if info.idle_cell_s is None else 1e6 * info.idle_cell_s
        say(f"flash attention {info.flash_attention} ({info.flash_attention_reason}); an idle cell costs {cell_us} us")
        desk, alone, beside = Desk(bench), [], []
        for n in range(rounds):
            for what in (desk.alone, desk.beside_idle) if n % 2 == 0 else (desk.beside_idle, desk.alone):
                rate = await what()
                (alone if what == desk.alone else beside).append(rate)
                say(f"{what.__name__}: {rate:.1f} tokens/s")
        return statistics.median(beside) / statistics.median(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to keep them on")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=given.dir) as name:
        print(json.dumps({"idle_tax": round(asyncio.run(measure(Path(name), given.rounds)), 3)}))


if __name__ == "__main__":
    main()
