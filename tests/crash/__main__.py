"""`make crash`: the proof of durability. The last line is one JSON object of figures; exit 1 if one of them is bad.

Covers running the parts in `PARTS` and merging what they report; a part is a module of this directory with one function
that returns figures. Each says on stderr what is wrong, the first few times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from tests.crash.kills import kills
from tests.crash.power_cuts import power_cuts

PARTS: tuple[Callable[[], dict[str, int]], ...] = (power_cuts, kills)
# Every other figure must be 0.
COUNTS_OF_WORK = ("states", "kills", "engine_kills", "restored_segments", "acknowledged", "drops")


def main() -> int:
    figures: dict[str, int] = {}
    for part in PARTS:
        figures.update(part())
    print(json.dumps(figures))
    return int(any(count for name, count in figures.items() if name not in COUNTS_OF_WORK))


if __name__ == "__main__":
    sys.exit(main())
