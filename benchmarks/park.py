"""make bench-park: what it costs to keep a conversation, and what keeping it saves. The last line is one JSON object.

All figures are ratios or differences within one run: capture against memcpy (capture.py), a durable save against the
bare disk (save.py), another slot's tokens beside a park (stall.py), bytes written while a conversation grows
(turns.py), and a desk with too little memory and a slow disk (desk.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks import desk, save, stall, turns
from benchmarks.capture import compare_capture
from benchmarks.inprocess import Bench
from benchmarks.text import prose

CAPTURED_TOKENS = 6000
DESCRIPTION = (__doc__ or "").partition("\n")[0]


async def capture(folder: Path) -> dict[str, float]:
    async with Bench(folder, flash_attention="on") as bench:
        await bench.fill(0, CAPTURED_TOKENS, await bench.tokens_of(prose(60, seed=1)))
        return {"capture_vs_memcpy": await compare_capture(bench, CAPTURED_TOKENS)}


def bytes_written(folder: Path) -> dict[str, float]:
    return {
        "bytes_written_40_turns_of_150": turns.written_per_final(folder / "short", turns=40, tokens=150),
        "bytes_written_10_turns_of_600": turns.written_per_final(folder / "long", turns=10, tokens=600),
    }


def main() -> None:
    parts = ("capture", "save", "stall", "turns", "desk", "wait")
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("parts", nargs="*", default=parts, metavar="part", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=24, help="parks beside another slot")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=given.dir) as name:
        folder = Path(name)
        (folder / "stall").mkdir()
        if "capture" in given.parts:
            figures |= asyncio.run(capture(folder / "capture"))
        if "save" in given.parts:
            figures |= save.measure(folder)
        if "stall" in given.parts:
            figures |= asyncio.run(stall.measure_stall(folder / "stall", given.rounds))
        if "turns" in given.parts:
            figures |= bytes_written(folder)
        if "desk" in given.parts:
            figures |= asyncio.run(desk.replay(folder / "desk"))
        if "wait" in given.parts:
            figures |= asyncio.run(desk.slow_disk(folder / "wait"))
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
