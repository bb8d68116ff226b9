"""What durable saving costs over the bare disk: `python -m benchmarks.save [--dir DIR]`, last line one JSON object.

Covers one conversation of 300 MB, written as a ticket of 256-token segments of SmolLM2's shape with its commit (every
fsync included), against the same bytes in 16 MiB O_DIRECT writes to one file with fdatasync. Both in turns, in both
orders; the figures are medians of ratios. It does not measure the capture out of the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.rules import prefix
from strata.store.format import Manifest, SegmentHeader, plan_segment, segment_file_bytes
from strata.store.fs import aligned_buffer
from strata.store.level import Level
from strata.store.writer import Committed, Writer
from strata.types import BLOCK_BYTES, MIB, StageShape, pad_to_page

SHAPE = StageShape(layer_first=0, layer_end=30, base_bytes=60 * 12, token_bytes=23040)
BLOCK_TOKENS = (BLOCK_BYTES - SHAPE.base_bytes) // SHAPE.token_bytes
ROOT = prefix.root_key(bytes(32), "")
WAIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One durable save: seconds in all, and of these the writer's wait for digests; and the fsyncs it took."""

    seconds: float
    hash_wait_s: float
    fsyncs: int


def conversation(serial: int, n_bytes: int) -> Manifest:
    """A conversation of about `n_bytes`, whose tokens depend on the serial: nothing is shared."""
    n_tokens = n_bytes // SHAPE.token_bytes
    tokens = np.random.default_rng(serial).integers(0, 49_152, n_tokens).astype("<i4")
    ends = prefix.cuts(n_tokens, None)
    segments = prefix.chain(ROOT, tokens, ends)
    return Manifest(
        serial=serial,
        identity=bytes(32),
        root=ROOT,
        conversation=prefix.conversation_key(ROOT, tokens, ()),
        tokens=tokens.tobytes(),
        frontier=None,
        cuts=ends,
        keys=tuple(segment.key for segment in segments),
        file_bytes=tuple(segment_file_bytes(SHAPE, s.start, s.end, BLOCK_TOKENS) for s in segments),
        stages=(SHAPE,),
        block_tokens=BLOCK_TOKENS,
        model_name="SmolLM2-135M shape",
        created_s=1.0,
        stamp_s=1.0,
    )


def planned(manifest: Manifest) -> list[SegmentHeader]:
    return [
        plan_segment(segment, stage=0, n_stages=1, shape=SHAPE, block_tokens=BLOCK_TOKENS)
        for segment in manifest.segments
    ]


def save(writer: Writer, manifest: Manifest, headers: list[SegmentHeader], memory: memoryview) -> Save:
    """One ticket, from the first segment given to the answer that all is durable. `memory` holds every block once."""
    before = writer.statistics()
    started = time.perf_counter()
    at = 0
    for header in headers:
        views = []
        for block in header.blocks:
            views.append(memory[at : at + pad_to_page(block.length)])
            at += pad_to_page(block.length)
        writer.write_segment(manifest.serial, header, tuple(views))
    outcome = writer.commit(manifest.serial, manifest).result(WAIT_S)
    seconds = time.perf_counter() - started
    if not isinstance(outcome, Committed):
        raise SystemExit(f"the save failed: {outcome}")
    after = writer.statistics()
    hash_wait_s = after.hash_wait_s - before.hash_wait_s
    return Save(seconds=seconds, hash_wait_s=hash_wait_s, fsyncs=after.fsyncs - before.fsyncs)


def raw_s(path: Path, memory: memoryview) -> float:
    """Seconds for the same bytes by bare system calls: one file, O_DIRECT, fdatasync."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0), 0o600)
    try:
        at = 0
        while at < len(memory):
            at += os.pwrite(fd, memory[at : at + BLOCK_BYTES], at)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def measure(directory: Path, *, n_bytes: int = 300_000_000, rounds: int = 5) -> dict[str, float]:
    """The figures, on the volume of `directory`, where it makes and removes a directory of its own."""
    root = Path(tempfile.mkdtemp(prefix="strata-bench-", dir=directory))
    saves: list[Save] = []
    raws: list[float] = []
    try:
        level = Level.open(root / "level")
        writer = Writer(level)
        total = sum(header.file_bytes for header in planned(conversation(1, n_bytes)))
        memory = aligned_buffer(total)
        np.frombuffer(memory, np.uint64)[:] = np.random.default_rng(7).integers(0, 1 << 63, total // 8, np.uint64)
        raw_s(root / "warm-up", memory)
        for n in range(2 * rounds):
            manifest = conversation(n + 1, n_bytes)
            headers = planned(manifest)
            if n % 2:
                raws.append(raw_s(root / "raw", memory))
            saves.append(save(writer, manifest, headers, memory))
            if not n % 2:
                raws.append(raw_s(root / "raw", memory))
            writer.drop([manifest.serial], manifest.keys).result(WAIT_S)
        writer.close(WAIT_S)
        level.close()
    finally:
        shutil.rmtree(root)
    return {
        "save_vs_raw": round(statistics.median(raw / one.seconds for raw, one in zip(raws, saves, strict=True)), 3),
        "hash_cost": round(statistics.median(one.hash_wait_s / one.seconds for one in saves), 4),
        "save_mb_per_s": round(total / 1e6 / statistics.median(one.seconds for one in saves)),
        "raw_mb_per_s": round(total / 1e6 / statistics.median(raws)),
        "fsyncs": saves[-1].fsyncs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=286, help="size of the conversation")
    parser.add_argument("--rounds", type=int, default=5, help="how often, in each order")
    given = parser.parse_args()
    print(json.dumps(measure(given.dir, n_bytes=given.mib * MIB, rounds=given.rounds)))


if __name__ == "__main__":
    main()
