"""A disk that refuses to delete: nothing else is let go for it, and it is tried again until it works."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

from tests.serve.workbench import LIMIT_S
from tests.store.samples import IDENTITY, conversation, put, verify

from strata.cache.disk import DiskLevel
from strata.cache.put import DiskLimits
from strata.cache.room import own_bytes
from strata.store.fs import Disk
from strata.store.level import Level

STORED = [conversation(n, 300, seed=n, stamp_s=float(n)) for n in (1, 2, 3)]


class NoDeletions(Disk):
    def __init__(self) -> None:
        super().__init__()
        self.refuses = True

    def unlink(self, path: Path) -> None:
        if self.refuses and path.suffix in (".meta", ".seg"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        super().unlink(path)


def open_level(root: Path, fs: Disk) -> DiskLevel:
    store = Level.open(root, fs=fs)
    for manifest in STORED:
        put(store, manifest)
    budget_bytes = store.usage()
    return DiskLevel(store, DiskLimits(budget_bytes=budget_bytes), IDENTITY, clock=lambda: 1000.0)


async def settled(level: DiskLevel) -> None:
    await asyncio.wrap_future(level.writer.drop((), ()))
    await asyncio.sleep(0)


def serials(level: DiskLevel) -> list[int]:
    return sorted(c.serial for c in level.index.conversations())


def test_one_that_cannot_be_deleted_costs_no_other_its_place(tmp_path: Path, caplog) -> None:
    fs = NoDeletions()
    level = open_level(tmp_path, fs)
    full = level.used_bytes

    async def run() -> None:
        level.make_room(1)
        await settled(level)
        assert serials(level) == [2, 3] and level.level.usage() == full
        for _ in range(3):
            level.retry_stuck()
            level.make_room(1)
            await settled(level)
        assert serials(level) == [2, 3], "what is still there and sound stays"
        assert len([r for r in caplog.records if "cannot be removed" in r.message]) == 1
        fs.refuses = False
        level.retry_stuck()
        await settled(level)
        assert level.removals.n_bytes == 0
        assert level.used_bytes == level.level.used_bytes == level.level.usage() < full
        for manifest in STORED[1:]:
            verify(level.level, manifest)

    asyncio.run(run())
    level.close()


def test_what_comes_again_meanwhile_is_not_deleted_later(tmp_path: Path) -> None:
    fs = NoDeletions()
    level = open_level(tmp_path, fs)

    async def run() -> None:
        level.drop([1])
        await settled(level)
        writing = level.begin_put(STORED[0], whole=False)
        fs.refuses = False
        level.retry_stuck()
        await settled(level)
        assert all(level.level.has(key) for key in STORED[0].keys), "they are announced, and their files are there"
        await level.finish_put(writing, 0, "the test writes nothing")
        await settled(level)

    asyncio.run(run())
    level.close()


def test_what_goes_counts_as_gone_once_at_last(tmp_path: Path) -> None:
    """While the account has it off and the loop has not heard of it, it counts twice; that is made up for."""
    level = open_level(tmp_path, Disk())
    rest = level.used_bytes - own_bytes(level.index, level.index.conversation(1))
    level.limits = replace(level.limits, budget_bytes=rest - 4096)

    async def run() -> None:
        level.drop([1])
        level.writer.drop((), ()).result(LIMIT_S)  # the loop stands still meanwhile
        assert level.level.used_bytes == rest
        level.make_room(0)  # as at the end of a write at that moment
        assert serials(level) == [2, 3]
        await settled(level)
        await settled(level)
        assert serials(level) == [3]
        assert level.used_bytes == level.level.usage() <= level.limits.budget_bytes

    asyncio.run(run())
    level.close()
