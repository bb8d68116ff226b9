"""kill -9 of a process that is storing conversations, at random moments: what it acknowledged is there and right."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.samples import IDENTITY, verify

from strata.store.level import Level

PROJECT = Path(__file__).parents[2]
STORE_FOR_EVER = """
import sys
from pathlib import Path
from strata.store.level import Level
from tests.store.samples import conversation, put

level = Level.open(Path(sys.argv[1]))
older = None
while True:
    serial = level.next_serial()
    newer = conversation(serial, 1500, seed=serial, shared=512)
    held = {key for key in newer.keys if (level.root / f"seg/{key.hex()[:2]}/{key.hex()}.s1.seg").exists()}
    put(level, newer, without=held)
    print("stored", serial, flush=True)
    if older is not None and serial % 3:
        print("dropping", older.serial, flush=True)
        level.drop([older.serial], older.keys[2:])
    older = newer
"""


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_nothing_acknowledged_is_lost_to_kill(tmp_path, rounds) -> None:
    root = tmp_path / "level"
    moments = random.Random(rounds)
    owed: set[int] = set()
    for _ in range(rounds):
        owed |= store_until_killed(root, moments.randint(2, 12), moments.random() * 0.03, owed)
        level = Level.open(root)
        scan = level.scan(IDENTITY)
        served = {stored.manifest.serial for stored in scan.manifests}
        assert owed <= served
        for stored in scan.manifests:
            verify(level, stored.manifest)
        assert scan.stale == ()
        level.remove_files(scan.temporary)
        assert level.used_bytes == level.usage()
        owed = served
        level.close()
    assert len(owed) > rounds


def store_until_killed(root: Path, after_lines: int, seconds: float, owed: set[int]) -> set[int]:
    """The serials that must be there: those owed before and those acknowledged, without those being dropped.

    The kill comes so long after the process said so much: however slow it is, it has stored something.
    """
    command = [sys.executable, "-c", STORE_FOR_EVER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as process:
        first = [process.stdout.readline() for _ in range(after_lines)]
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.wait() == -9
        lines = [*first, *process.stdout.read().splitlines()]
    result = set(owed)
    for word, serial in (line.split() for line in lines):
        if word == "stored":
            result.add(int(serial))
        else:
            result.discard(int(serial))
    return result
