"""What a level promises about checkpoints, over the real disk (direct and buffered) and over the one in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.checkpoint_contract import CheckpointContract
from tests.store.crashfs import CrashFS

from strata.store.filesystem import Filesystem
from strata.store.fs import Disk


class TestOnDisk(CheckpointContract):
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


class TestInMemory(CheckpointContract):
    @pytest.fixture
    def disk(self) -> Filesystem:
        return CrashFS()

    @pytest.fixture
    def root(self) -> Path:
        return Path("/level")
