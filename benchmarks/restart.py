"""make bench-restart: what a conversation of 6,000 tokens costs after a restart, and what keeping it costs.

Two parts. Over HTTP, with real servers: the next turn after a restart (page cache of the files dropped), against the
same turn with nothing reused; and the bytes a second turn writes. In this process, on the real engine: state bytes and
greedy tokens after park -> new engine process -> restore against a conversation that was never parked, the rate of
capture against memcpy, and the cost of a lookup. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.capture import compare_capture
from benchmarks.inprocess import Bench, say
from benchmarks.process import Reply, ServerProcess, drop_page_cache, serving
from benchmarks.text import prose
from strata.cache.entries import Conversation
from strata.cache.parking import ParkJob
from strata.cache.state import LevelIndex
from strata.rules import prefix

RUNS = 3
TWIN_TOKENS = 80
Messages = list[dict[str, str]]


# ---------------------------------------------------------------------------------------------------------- over HTTP


def over_http(folder: Path) -> dict[str, float]:
    """Speed-up of the next turn after a restart, its reuse, and the write amplification of a second turn."""
    kept = folder / "kept"
    flags = ("--parallel", "1", "--conversation-cache-cold-dir")
    messages: Messages = [{"role": "user", "content": prose(365, seed=1)}]
    with serving(*flags, str(kept)) as server:
        say("reading the first turn (about 40 s)")
        first = server.chat(messages, max_tokens=16)
        say(f"first turn: {first.prompt_tokens} tokens, {first.ttft_s:.1f} s to the first token")
        messages.append({"role": "assistant", "content": first.text})
        server.level()
    shutil.copytree(kept, folder / "after-first-turn")
    next_turn = [*messages, {"role": "user", "content": "Which note comes last?"}]
    restored: list[Reply] = []
    reread: list[Reply] = []
    for run in range(RUNS):
        copy = folder / f"run-{run}"
        shutil.copytree(folder / "after-first-turn", copy)
        drop_page_cache(copy)
        with serving(*flags, str(copy)) as server:
            order = (True, False) if run % 2 == 0 else (False, True)
            for cached in order:
                reply = server.chat(next_turn, max_tokens=8, cache_prompt=cached)
                (restored if cached else reread).append(reply)
                reuse = f"{reply.cached_tokens} of {reply.prompt_tokens} tokens cached"
                say(f"run {run}: {reuse}, first token after {reply.ttft_s:.3f} s")
    return {
        "prompt_tokens": restored[0].prompt_tokens,
        "cached_fraction": min(r.cached_tokens / r.prompt_tokens for r in restored),
        "ttft_restored_s": _median(restored),
        "ttft_reread_s": _median(reread),
        "speedup": _median(reread) / _median(restored),
        "write_amplification": write_amplification(kept, flags, messages),
    }


def _median(replies: list[Reply]) -> float:
    return statistics.median(reply.ttft_s for reply in replies)


def write_amplification(kept: Path, flags: tuple[str, ...], messages: Messages) -> float:
    """Bytes that the park of a turn of about 1,000 new tokens writes / bytes of the state of its new tokens."""
    with serving(*flags, str(kept)) as server:
        before = server.level()
        held_before = before["newest"][0]["tokens"]
        server.chat([*messages, {"role": "user", "content": prose(70, seed=2)}], max_tokens=16)
        after = server.level()
        new_tokens = after["newest"][0]["tokens"] - held_before
        written = after["writer"]["bytes_written"] - before["writer"]["bytes_written"]
        per_token = bytes_per_token(server)
    say(f"second turn: {new_tokens} new tokens, {written} bytes written, {per_token} bytes per token")
    return float(written / (new_tokens * per_token))


def bytes_per_token(server: ServerProcess) -> int:
    return int(server.status()["engine"]["bytes_per_token"])


# ------------------------------------------------------------------------------------------------------ in this process


async def in_process(folder: Path) -> dict[str, object]:
    """Bytes and tokens equal after park and restore; capture against memcpy."""
    async with Bench(folder) as bench:
        flash = "on" if bench.engine.info.flash_attention else "off"
        prompt = await bench.tokens_of(prose(365, seed=3))
        say(f"in this process: reading {len(prompt)} tokens, flash attention {flash}")
        reply = await bench.generate(prompt, 0, 16)
        held = np.concatenate([prompt, reply])[:-1]
        root = prefix.root_key(bench.engine.info.fingerprint, "bench")
        job = ParkJob(slot=0, root=root, tokens=held, frontier=None, conversation=bytes(32))
        parking = bench.cache.begin_park(job)
        assert parking is not None and await parking.run()
        before = await bench.state_bytes(len(held))
        capture_vs_memcpy = await compare_capture(bench, len(held))
        more = await bench.tokens_of(" And then, which note comes last?")
        next_turn = np.concatenate([held, more])
        twin = await bench.generate(next_turn, len(held), TWIN_TOKENS)
    async with Bench(folder, flash_attention=flash) as bench:
        match = bench.cache.lookup(root, next_turn, beyond=1)
        assert match is not None
        restored = await bench.cache.restore(0, match, 0)
        say(f"restored {restored.held} of {len(held)} tokens in {restored.seconds:.3f} s")
        after = await bench.state_bytes(restored.held)
        again = await bench.generate(next_turn, restored.held, TWIN_TOKENS)
    return {
        "bytes_equal": restored.held == len(held) and before == after,
        "twin_tokens_equal": prefix.shared_prefix(twin, again),
        "capture_vs_memcpy": capture_vs_memcpy,
        "restore_gb_s": restored.n_bytes / restored.seconds / 1e9,
    }


# --------------------------------------------------------------------------------------------------------------- lookup


def lookup_ms(n_manifests: int) -> float:
    """Median time of a lookup of a 6,000-token prompt among `n_manifests` conversations of that length."""
    rng = np.random.default_rng(5)
    root = prefix.root_key(bytes(32), "")
    index = LevelIndex()
    system = rng.integers(0, 49152, 700, dtype=np.int32)
    for serial in range(1, n_manifests + 1):
        tokens = np.concatenate([system, rng.integers(0, 49152, 5300, dtype=np.int32)])
        segments = prefix.chain(root, tokens, prefix.cuts(len(tokens), 5950))
        for segment in segments:
            index.add_segment(segment, tokens[segment.start : segment.end], 1)
        entry = Conversation(
            serial=serial,
            root=root,
            conversation=serial.to_bytes(32, "little"),
            tokens=tokens,
            frontier=5950,
            keys=tuple(segment.key for segment in segments),
            manifest_bytes=1,
            stamp_s=serial,
        )
        index.add_conversation(entry)
    prompt = np.concatenate([tokens, rng.integers(0, 49152, 30, dtype=np.int32)])
    times = []
    for _ in range(201):
        began = time.perf_counter()
        match = index.lookup(root, prompt)
        times.append(time.perf_counter() - began)
    assert match.upto == len(tokens)
    return statistics.median(times) * 1000


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        folder = Path(name)
        figures: dict[str, object] = dict(over_http(folder))
        figures |= asyncio.run(in_process(folder / "in-process"))
    few, many = lookup_ms(10), lookup_ms(1000)
    figures |= {"lookup_ms": many, "lookup_ratio_1000_to_10": many / few}
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == "__main__":
    main()
