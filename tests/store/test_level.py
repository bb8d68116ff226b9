"""The level's contract over the real disk (with and without O_DIRECT) and over the disk in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.contract import LevelContract
from tests.store.crashfs import CrashFS

from strata.store.filesystem import Filesystem
from strata.store.fs import Disk


class TestOnDisk(LevelContract):
    @pytest.fixture
    def disk(self) -> Filesystem:
        return Disk()

    @pytest.fixture
    def root(self, tmp_path) -> Path:
        return tmp_path / "level"


class TestBuffered(TestOnDisk):
    @pytest.fixture
    def disk(self) -> Filesystem:
        return Disk(direct=False)


class TestInMemory(LevelContract):
    @pytest.fixture
    def disk(self) -> Filesystem:
        return CrashFS()

    @pytest.fixture
    def root(self) -> Path:
        return Path("/level")
