"""How fast a conversation of 300 MB comes back from disk, verified, and what memory that takes.

The store reads past the page cache, so that is the usual case: measured against bare O_DIRECT reads of the same files
(reads.py). Where the page cache does hold a file (a backup has read it, a filesystem knows no O_DIRECT), it is read
from there: measured against memcpy of the same blocks into the arena.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.capture import Copies
from benchmarks.inprocess import Bench, say
from benchmarks.process import drop_page_cache
from benchmarks.reads import raw_reader
from benchmarks.stall import CONTEXT, PARKED_BYTES, gaps_beside, p99, park
from benchmarks.text import prose
from strata.rules import prefix
from strata.types import MIB, Key, Tokens

QUIET_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A conversation of PARKED_BYTES that nobody read, on disk and in slot 0."""

    root: Key
    tokens: Tokens
    n_bytes: int


async def store(bench: Bench) -> Stored:
    per_token = sum(stage.token_bytes for stage in bench.engine.info.stages)
    n_tokens = PARKED_BYTES // per_token
    tokens = await bench.fill(0, n_tokens, await bench.tokens_of(prose(60, seed=11)))
    root = prefix.root_key(bench.engine.info.fingerprint, "bench")
    await park(bench, tokens, root)
    assert await bench.cache.flush(60), "the park does not end"
    return Stored(root=root, tokens=tokens, n_bytes=n_tokens * per_token)


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.seg"))


async def restore_s(bench: Bench, stored: Stored) -> float:
    """Seconds from asking for it to the engine's word that slot 0 holds all of it; nothing of it was there before."""
    done = await bench.engine.trim(0, 0)
    assert done.ok, done.reason
    began = time.perf_counter()
    found = bench.cache.lookup(stored.root, stored.tokens, beyond=1)
    assert found is not None, "it is stored"
    restored = await bench.cache.restore(0, found, 0)
    seconds = time.perf_counter() - began
    assert restored.held == found.upto >= len(stored.tokens) - 1 and not restored.failed, restored
    return seconds


async def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Medians of ratios of neighbours in time, in alternating order."""
    async with Bench(folder, slots=2, context=CONTEXT, flash_attention="on") as bench:
        stored = await store(bench)
        files = segment_files(folder)
        with raw_reader(files) as raw:
            way = raw.best_way()
            drop_page_cache(folder)
            raws, cold = await _in_turns(bench, stored, rounds, lambda: raw.seconds(way))
        say(f"the disk at its best, {way}: {_rate(stored, raws)}; restored and verified {_rate(stored, cold)}")
        for path in files:
            path.read_bytes()
        copies = Copies(bench, len(stored.tokens) // 2)
        half, cached = await _in_turns(bench, stored, rounds, copies.into_arena)
        copied = [seconds * stored.n_bytes / copies.n_bytes for seconds in half]
        copies.close()
        say(f"files in the page cache: memcpy {_rate(stored, copied)}; restored and verified {_rate(stored, cached)}")
    return {
        "restore_vs_raw": _ratio(raws, cold),
        "restore_vs_memcpy": _ratio(copied, cached),
        "restore_gb_s": stored.n_bytes / statistics.median(cold) / 1e9,
        "raw_gb_s": stored.n_bytes / statistics.median(raws) / 1e9,
        "restore_cached_gb_s": stored.n_bytes / statistics.median(cached) / 1e9,
        "memcpy_gb_s": stored.n_bytes / statistics.median(copied) / 1e9,
    }


async def _in_turns(
    bench: Bench, stored: Stored, rounds: int, other: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds of the other thing and of restores, without the first rounds."""
    others: list[float] = []
    restores: list[float] = []
    for n in range(QUIET_ROUNDS + rounds):
        if n % 2:
            others.append(other())
        restores.append(await restore_s(bench, stored))
        if not n % 2:
            others.append(other())
    return others[QUIET_ROUNDS:], restores[QUIET_ROUNDS:]


def _ratio(others: list[float], restores: list[float]) -> float:
    return statistics.median(other / restore for other, restore in zip(others, restores, strict=True))


def _rate(stored: Stored, seconds: list[float]) -> str:
    return f"{stored.n_bytes / statistics.median(seconds) / 1e9:.2f} GB/s"


# ---------------------------------------------------------------------------------------------------------- neighbours


async def restore_stall(folder: Path, rounds: int) -> dict[str, float]:
    """99th percentile of another slot's time per token during restores, over its own."""
    async with Bench(folder, slots=2, context=CONTEXT) as bench:
        stored = await store(bench)
        prompt = (await bench.tokens_of(prose(60, seed=12)))[:64]

        async def move(_: int) -> None:
            await restore_s(bench, stored)

        async def undo() -> None:
            await bench.engine.trim(0, 0)

        await undo()
        gaps = await gaps_beside(bench, prompt, rounds, move, undo)
    gaps.say("restore")
    return {"stall_p99_ms": gaps.p99_ms, "stall_median_ms": gaps.median_ms, "token_p99_ms": 1000 * p99(gaps.without)}


# --------------------------------------------------------------------------------------------------------------- memory


async def extra_ram(folder: Path) -> dict[str, float]:
    """Most that front and engine have at once during a restore in new processes, beyond what they had before.

    The arena, of which nothing was reserved, lies in both and is counted once. The K/V pool is the engine's from the
    start.
    """
    async with Bench(folder, slots=2, context=CONTEXT, flash_attention="on") as bench:
        stored = await store(bench)
    async with Bench(folder, slots=2, context=CONTEXT, flash_attention="on", reserved_mib=0) as bench:
        processes = [os.getpid(), bench.engine.pid or 0]
        before = [_forget_peak(pid) for pid in processes]
        arena_before = bench.arena.touched_bytes
        await restore_s(bench, stored)
        grown = [_kib(pid, "VmHWM") * 1024 - rss for pid, rss in zip(processes, before, strict=True)]
        arena = bench.arena.touched_bytes - arena_before
    front, engine = (n / MIB for n in grown)
    say(f"front +{front:.1f} MiB, engine +{engine:.1f} MiB, both with an arena of {arena / MIB:.1f} MiB")
    return {"extra_ram_mib": front + engine - arena / MIB}


def _forget_peak(pid: int) -> int:
    """Let the peak begin anew; the resident bytes now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _kib(pid, "VmRSS") * 1024


def _kib(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
