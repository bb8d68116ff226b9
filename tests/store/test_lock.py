"""The lock of a level's directory between processes, and figures of a level on the real disk: `du`, a large scan."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.samples import IDENTITY, STAGES, conversation, put

from strata.errors import LevelError
from strata.store.format import encode_manifest
from strata.store.level import Level
from strata.store.names import manifest_name, segment_path


def refusal(root: Path) -> str:
    with pytest.raises(LevelError) as refused:
        Level.open(root)
    return refused.value.message


# ------------------------------------------------------------------------------------------------------------- the lock

HOLD = """
import sys
from pathlib import Path
from strata.store.level import Level
level = Level.open(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "level")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_holds_the_directory(tmp_path, holder) -> None:
    message = refusal(tmp_path / "level")
    assert f"process {holder.pid} on " in message
    assert "since 2" in message


def test_the_lock_of_a_killed_process_does_not_block(tmp_path, holder) -> None:
    holder.kill()
    holder.wait(10)
    level = Level.open(tmp_path / "level")
    assert f"process {os.getpid()} " in (tmp_path / "level" / "strata.lock").read_text()
    level.close()


def test_the_same_process_cannot_open_it_twice(tmp_path) -> None:
    level = Level.open(tmp_path)
    assert f"process {os.getpid()} " in refusal(tmp_path)
    level.close()
    level.close()
    Level.open(tmp_path).close()


def test_a_failed_open_does_not_keep_the_lock(tmp_path) -> None:
    (tmp_path / "seg").write_text("in the way")
    refusal(tmp_path / "seg")
    with pytest.raises(LevelError):
        Level.open(tmp_path)
    (tmp_path / "seg").unlink()
    Level.open(tmp_path).close()


# -------------------------------------------------------------------------------------------------------------- figures


def test_the_account_is_what_du_says(tmp_path) -> None:
    level = Level.open(tmp_path / "level")
    for serial in range(1, 6):
        put(level, conversation(serial, 300 * serial, seed=serial, shared=256))
    level.drop([2], conversation(2, 600, seed=2, shared=256).keys[1:])
    files = (path for path in level.root.rglob("*") if path.is_file())
    du = subprocess.run(["du", "-cB1", *files], capture_output=True, text=True, check=True)
    assert int(du.stdout.splitlines()[-1].split()[0]) == level.used_bytes == level.usage()
    level.close()


@pytest.fixture
def fast_dir(tmp_path) -> Iterator[Path]:
    """In memory where that is possible: making and removing 40,000 files on a disk takes longer than the test."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as where:
        yield Path(where)


def test_20000_small_conversations_are_scanned_within_5_seconds(fast_dir) -> None:
    root = fast_dir / "level"
    level = Level.open(root)
    sample = conversation(1, 40, stages=STAGES[:1])
    put(level, sample)
    level.close()
    segment = root / segment_path(sample.keys[0], 0)
    for serial in range(2, 20_001):
        manifest = conversation(serial, 40, seed=serial, stages=STAGES[:1])
        (root / manifest_name(serial)).write_bytes(encode_manifest(manifest))
        path = root / segment_path(manifest.keys[0], 0)
        path.parent.mkdir(exist_ok=True)
        path.hardlink_to(segment)  # the scan does not look inside
    started = time.perf_counter()
    level = Level.open(root)
    scan = level.scan(IDENTITY)
    seconds = time.perf_counter() - started
    level.close()
    assert len(scan.manifests) == 20_000
    assert seconds < 5.0
