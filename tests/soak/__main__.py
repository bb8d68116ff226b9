"""`make soak`: the real server under random clients for minutes. The last line is one JSON object; exit 1 if bad."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.soak.lives import Soak


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--model", default="demo", help="a GGUF file")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the server would outlive this
    with tempfile.TemporaryDirectory(prefix="strata-soak-") as work:
        soak = Soak(Path(work), seconds=60 * given.minutes, seed=given.seed, model=given.model)
        soak.run()
    found, figures = soak.world.found, soak.figures
    for text in found.differing[:20]:
        print(f"another reply: {text}", file=sys.stderr)
    print(f"sources: {dict(found.sources)}; {figures.cache}", file=sys.stderr)
    print(
        json.dumps(
            {
                "wrong": len(figures.wrong),
                "leaks": len(found.leaks),
                "failures": len(found.failures),
                **found.counts,
                "differing": len(found.differing),
                "rests": figures.rests,
                "restored": figures.restored,
                **figures.growth,
                **figures.cache,
            }
        )
    )
    return int(bool(figures.wrong))


if __name__ == "__main__":
    sys.exit(main())
