"""make bench-restore: what it costs to bring a conversation back. The last line is one JSON object.

All rates are ratios within one run: a restore of 300 MB from disk, verified, against the bare disk and, where the page
cache holds the files, against memcpy; another slot's tokens beside it; the memory it takes (rates.py). Then
what is left of a damaged conversation, and what models whose memory cannot be cut reuse after a restart (resume.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks import rates, resume
from strata.cli.process import loop_factory

DESCRIPTION = (__doc__ or "").partition("\n")[0]


def main() -> None:
    parts = ("rates", "ram", "stall", "ladder", "uncut")
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("parts", nargs="*", default=parts, metavar="part", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=12, help="restores of each kind")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="strata-bench-", dir=given.dir) as name,
        asyncio.Runner(loop_factory=loop_factory()) as runner,  # as the server does
    ):
        folder = Path(name)
        if "rates" in given.parts:
            figures |= runner.run(rates.measure(folder / "rates", given.rounds))
        if "ram" in given.parts:
            figures |= runner.run(rates.extra_ram(folder / "ram"))
        if "stall" in given.parts:
            figures |= runner.run(rates.restore_stall(folder / "stall", given.rounds))
        if "ladder" in given.parts:
            figures |= runner.run(resume.ladder(folder / "ladder"))
        if "uncut" in given.parts:
            figures |= resume.uncut(folder / "uncut")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
