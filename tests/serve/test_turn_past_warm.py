"""A write level that cannot take a state although its budget could: the level below takes it, and nothing is dropped.

The volume of warm is full, its disk fails, or it refuses what is new. As in test_turn_disk.py, every answer and the
whole state afterwards are checked by the workbench.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.test_turn_levels import FIRST, ONE, levels_of, moved, other, stored, verbs
from tests.serve.workbench import Workbench, later, play

from strata.cache.health import MARGIN_BYTES
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLimits
from strata.store.filesystem import Entry

PLENTY = 1 << 40


class SmallVolumes(SlowDisk):
    """Folders that are volumes of their own: a write that does not fit what is left of one fails."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.roots: dict[str, Path] = {}
        self.fails = lambda kind, path: kind == "write" and self.free_bytes(path) < 4096

    def _volume(self, path: Path) -> str:
        return next((part for part in path.parts if part in self.sizes), "")

    def stat(self, path: Path) -> Entry:
        entry = super().stat(path)
        return replace(entry, version=(hash(self._volume(path)),)) if entry.kind == "dir" else entry

    def free_bytes(self, path: Path) -> int:
        name = self._volume(path)
        if not name:
            return PLENTY
        root = Path(*path.parts[: path.parts.index(name) + 1])
        files = [file for file in root.rglob("*") if file.is_file()]
        return max(0, self.sizes[name] - sum(file.lstat().st_blocks * 512 for file in files if file.exists()))


def discards(bench: Workbench) -> int:
    counts = bench.cache.counters
    return counts.discards + counts.deferred + counts.refused


@pytest.mark.parametrize("ram", [None, RamLimits(budget_bytes=2 * ONE, most=2)], ids=["no RAM", "small RAM"])
def test_a_full_volume_hands_down_below_its_budget(tmp_path: Path, ram: RamLimits | None) -> None:
    disk = SmallVolumes(warm=MARGIN_BYTES + int(2.6 * ONE))

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        kept = [(await stored(bench, other(i)))[1] for i in range(6)]
        await moved(bench)
        assert discards(bench) == 0 and warm.writer.statistics().failures == 0
        where = [levels_of(bench, keys) - {"ram"} for keys in kept]
        assert all(where), "every conversation is on a disk"
        assert where[0] == {"cold"}, "the oldest was handed down"
        assert warm.counters.degraded == cold.counters.adopted > 0
        assert warm.counters.disk_evictions == cold.counters.disk_evictions == 0 and "discard" not in verbs(bench)
        assert {"warm"} in where, "what made room is used again"

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=PLENTY, ram=ram)


def test_without_space_below_a_full_volume_keeps_what_it_has(tmp_path: Path) -> None:
    disk = SmallVolumes(warm=MARGIN_BYTES + int(2.2 * ONE), cold=MARGIN_BYTES)

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        kept = [(await stored(bench, other(i)))[1] for i in range(2)]
        await bench.turn(FIRST)
        await moved(bench)
        bench.cache.tick()
        await moved(bench)
        assert [levels_of(bench, keys) for keys in kept] == [{"warm"}] * 2
        assert warm.counters.degraded == warm.counters.degrade_failed == cold.counters.adopted == 0, "nothing is tried"
        disk.sizes["cold"] = PLENTY
        bench.cache.tick()
        await moved(bench)
        _, new = await stored(bench, later(FIRST, "x"))
        await moved(bench)
        assert levels_of(bench, new) and all(levels_of(bench, keys) for keys in kept)

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=PLENTY)


def test_what_can_never_fit_a_volume_empties_nothing(tmp_path: Path) -> None:
    disk = SmallVolumes(warm=MARGIN_BYTES + int(1.6 * ONE))

    async def scenario(bench: Workbench) -> None:
        _, small = await stored(bench, other(1, 100))
        _, large = await stored(bench, other(2, 1500))
        await moved(bench)
        assert levels_of(bench, small) == {"warm"} and levels_of(bench, large) == {"cold"}

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=PLENTY)


def test_a_level_that_fails_is_passed_while_its_slot_is_there(tmp_path: Path) -> None:
    disk = SlowDisk()
    disk.fails = lambda kind, path: kind == "write" and "warm" in path.parts

    async def scenario(bench: Workbench) -> None:
        first, old = await stored(bench, FIRST)
        assert levels_of(bench, old) == {"cold"} and discards(bench) == 0
        assert bench.cache.counters.parked_disk == 1
        disk.fails = lambda _, __: False
        bench.disk.health.has_failed = False
        _, new = await stored(bench, later(FIRST, first.text))
        await moved(bench)
        assert levels_of(bench, new) == {"warm"} and levels_of(bench, old) == set(), "superseded on the other level"
        assert bench.cache.disks[1].counters.superseded == 1

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=PLENTY)


def test_what_went_past_a_level_supersedes_what_lies_on_it(tmp_path: Path) -> None:
    disk = SmallVolumes(warm=PLENTY)

    async def scenario(bench: Workbench) -> None:
        warm, _ = bench.cache.disks
        first, old = await stored(bench, FIRST)
        assert levels_of(bench, old) == {"warm"}
        disk.sizes["warm"] = 0
        warm.health.probe()
        assert warm.writer.flush(10)
        _, new = await stored(bench, later(FIRST, first.text))
        await moved(bench)
        assert levels_of(bench, new) == {"cold"} and levels_of(bench, old) == set()
        assert warm.counters.superseded + warm.counters.degraded == 1 and discards(bench) == 0

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=PLENTY)


def test_what_a_level_refuses_the_next_one_takes_while_it_does_not(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        kept = [(await stored(bench, other(i)))[1] for i in range(4)]
        where = [levels_of(bench, keys) for keys in kept]
        assert where == [{"warm"}, {"warm"}, {"cold"}, {"cold"}] and discards(bench) == 0
        assert not any(level.counters.rejected for level in bench.cache.disks)
        bench.cache.disks[1].limits = DiskLimits(budget_bytes=1, rejects=True)
        await bench.whole(FIRST)
        assert bench.cache.disks[0].counters.rejected == 1, "the write level says it"

    limits = DiskLimits(budget_bytes=PLENTY, rejects=True)
    play(scenario, tmp_path, slots=1, warm_bytes=int(2.6 * ONE), disk_limits=limits)


def test_nothing_is_written_in_vain_while_no_volume_has_space(tmp_path: Path) -> None:
    """What would leave is larger than what the level below has left."""
    disk = SmallVolumes(warm=MARGIN_BYTES + int(2.2 * ONE), cold=MARGIN_BYTES + ONE // 2)

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        kept = [(await stored(bench, other(i)))[1] for i in range(2)]
        await bench.whole(other(2))
        before = [level.writer.statistics() for level in (warm, cold)]
        for _ in range(5):
            bench.cache.tick()
            await moved(bench)
        after = [level.writer.statistics() for level in (warm, cold)]
        assert [s.bytes_written for s in before] == [s.bytes_written for s in after]
        assert [s.failures for s in before] == [s.failures for s in after]
        assert [levels_of(bench, keys) for keys in kept] == [{"warm"}] * 2

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=PLENTY)


@pytest.mark.slow
def test_a_level_over_its_budget_above_a_full_volume_waits_and_writes_nothing(tmp_path: Path) -> None:
    disk = SmallVolumes(cold=MARGIN_BYTES)

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        kept = [(await stored(bench, other(i)))[1] for i in range(4)]
        for _ in range(5):
            bench.cache.tick()
            await moved(bench)
        assert [levels_of(bench, keys) for keys in kept] == [{"warm"}] * 4 and warm.counters.degrade_failed
        assert cold.writer.statistics().bytes_written == cold.writer.statistics().failures == 0
        assert cold.health.state.startswith("failing: No space left")
        disk.sizes["cold"] = PLENTY
        for _ in range(2):
            bench.cache.tick()
            assert cold.writer.flush(10)
            await moved(bench)
        assert warm.counters.degraded and warm.used_bytes <= warm.limits.budget_bytes and cold.health.state == "ok"

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=int(2.6 * ONE))


def test_a_level_that_failed_is_tried_with_a_file_of_its_own(tmp_path: Path) -> None:
    disk, tried = SlowDisk(), list[str]()

    def fails(kind: str, path: Path) -> bool:
        if kind != "write" or "warm" not in path.parts:
            return False
        tried.append(path.name)
        return True

    disk.fails = fails

    async def scenario(bench: Workbench) -> None:
        await stored(bench, FIRST)
        first = len(tried)
        assert first and not any(name.startswith("probe.") for name in tried)
        for i in range(3):
            bench.cache.tick()
            assert bench.disk.writer.flush(10)
            _, keys = await stored(bench, other(i))
            assert levels_of(bench, keys) == {"cold"}
        assert len(tried) == first + 3 and all(name.startswith("probe.") for name in tried[first:])
        disk.fails = lambda _, __: False
        bench.cache.tick()
        assert bench.disk.writer.flush(10)
        await moved(bench)
        _, keys = await stored(bench, other(3))
        assert levels_of(bench, keys) == {"warm"} and bench.disk.health.state == "ok" and discards(bench) == 0

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=PLENTY)
