"""Files that someone else removes while a level is in use: nothing is acknowledged that is not there whole."""

from __future__ import annotations

import shutil

import pytest
from tests.store.samples import conversation, put

from strata.errors import LevelError
from strata.store.account import Vanished
from strata.store.level import Level
from strata.store.names import segment_path
from strata.store.writer import Failed, Writer


@pytest.mark.parametrize("what", ["a segment", "the directory", "the lock"])
def test_a_manifest_of_files_that_are_gone_is_refused_and_the_account_is_right_again(tmp_path, what) -> None:
    root = tmp_path / "level"
    level = Level.open(root)
    first = conversation(1, 600)
    put(level, first)
    if what == "the directory":
        shutil.rmtree(root)
    else:
        (root / (segment_path(first.keys[0], 0) if what == "a segment" else "strata.lock")).unlink()
    writer = Writer(level)
    again = conversation(2, 600)
    failed = writer.commit(1, again).result()
    assert isinstance(failed, Failed) and failed.vanished and "removed" in failed.reason
    assert level.used_bytes == level.usage()
    assert level.has(1) == (what != "the directory") and not level.has(2)
    put(level, again)
    assert not isinstance(writer.commit(2, again).result(), Failed), "written anew"
    with pytest.raises(LevelError):
        Level.open(root)
    writer.close()
    level.close()


def test_a_directory_that_another_process_made_anew_is_left_to_it(tmp_path) -> None:
    root = tmp_path / "level"
    level, manifest = Level.open(root), conversation(1, 600)
    root.rename(tmp_path / "moved")
    other = Level.open(root)
    with pytest.raises(LevelError, match="in use by"):
        level.require(manifest)
    other.close()
    with pytest.raises(Vanished):
        level.require(manifest)
    level.close()
