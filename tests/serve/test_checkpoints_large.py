"""Checkpoints too large to wait in the arena: written block by block while their turn runs, in bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.test_checkpoints import FIRST, every_memory, positions
from tests.serve.workbench import Workbench, default_limits, later, no_hook, play, until

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits
from strata.cache.ram import RamLimits
from strata.errors import EngineGone
from strata.rules.checkpoints import CheckpointLimits
from strata.types import BLOCK_BYTES, MIB, PAGE

LARGE = 2 * BLOCK_BYTES + 5000
"""Three blocks; more than may wait of a transient share of 64 MiB, a quarter."""
POSITIONS = 3
once = pytest.mark.parametrize("memory", ["recurrent"])


def limits(ram: RamLimits | None = None, **options: object) -> CacheLimits:
    wanted = CheckpointLimits(keep=6, every=0, root=500)
    return replace(default_limits(ram), checkpoints=wanted, transient_bytes=64 * MIB, **options)  # type: ignore[arg-type]


def run(root: Path, memory: str, scenario: Callable[[Workbench], Awaitable[None]], **options: object) -> None:
    async def large(bench: Workbench) -> None:
        bench.engine.info = msgspec.structs.replace(bench.engine.info, checkpoint_bytes=LARGE)
        await scenario(bench)

    play(large, root, **{"memory": memory, "limits": limits(), "arena_bytes": 128 * MIB, **options})


@every_memory
def test_they_are_written_through_two_blocks_and_found_again(tmp_path: Path, memory: str) -> None:
    texts: list[str] = []
    most = 0

    async def before(bench: Workbench) -> None:
        def look(_: str) -> None:
            nonlocal most
            most = max(most, bench.arena.used_bytes)

        bench.engine.on_step = look
        texts.append((await bench.whole(FIRST)).text)
        assert len(positions(bench)[0]) == POSITIONS
        counts = bench.cache.counters
        assert (counts.checkpoints_taken, counts.checkpoints_given_up, counts.parked_disk) == (POSITIONS, 0, 1)
        assert BLOCK_BYTES < most <= 2 * (BLOCK_BYTES + PAGE) + MIB

    async def after(bench: Workbench) -> None:
        second = await bench.whole(later(FIRST, texts[0]))
        assert second.report.source == "cold"
        assert second.report.reused >= 0.95 * second.completed.prompt_tokens
        assert bench.cache.counters.restore_failures == 0

    run(tmp_path, memory, before)
    run(tmp_path, memory, after)


@once
def test_ram_has_them_whole_where_its_budget_allows(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        assert bench.cache.counters.parked_ram == 1
        bench.engine.kill()
        bench.engine.restart()
        assert (await bench.whole(later(FIRST, first.text))).report.source == "ram"

    ram = RamLimits(budget_bytes=512 * MIB, most=4)
    run(tmp_path, memory, scenario, limits=limits(ram), arena_bytes=640 * MIB)


@once
def test_one_that_ram_cannot_have_takes_its_conversation_to_disk(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        counts = bench.cache.counters
        assert (counts.parked_ram, counts.parked_disk_transient, counts.checkpoints_given_up) == (0, 1, 0)
        assert len(positions(bench)[0]) == POSITIONS
        assert bench.cache.ram is not None
        assert bench.cache.ram.used_bytes == 0

    run(tmp_path, memory, scenario, limits=limits(RamLimits(budget_bytes=48 * MIB, most=4)))


@once
def test_the_floors_decide(tmp_path: Path, memory: str) -> None:
    """Two blocks, and twice its size in the engine, must leave the transient floor free."""
    floor, need = 16 * MIB, 2 * (BLOCK_BYTES + PAGE) + 2 * LARGE

    async def scenario(bench: Workbench) -> None:
        bench.free_bytes = floor + need - bench.cache._pool.idle_bytes - 1
        await bench.whole(FIRST)
        assert bench.cache.counters.checkpoints_taken == 0
        assert positions(bench) == []
        bench.free_bytes = floor + need
        await bench.whole(later(FIRST, "another reply"))
        assert bench.cache.counters.checkpoints_taken > 0
        assert len(positions(bench)) == 1

    run(tmp_path, memory, scenario, limits=limits(floors=Floors(parking_bytes=512 * MIB, transient_bytes=floor)))


@once
def test_a_cancelled_turn_leaves_no_file(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        for stop_after in (2, 3, 5, 7):
            await bench.turn(FIRST, stop_after=stop_after)
            await until(lambda: not any(slot.busy for slot in bench.slots.all))
            await bench.check()
        assert bench.level.usage() == bench.level.used_bytes
        assert not list(bench.level.root.rglob("*.tmp"))
        assert (await bench.whole(FIRST)).text

    run(tmp_path, memory, scenario, slots=1)


@once
@pytest.mark.parametrize("nth", [4, 9, 14])
def test_an_engine_that_dies_meanwhile_leaves_no_file(tmp_path: Path, memory: str, nth: int) -> None:
    async def scenario(bench: Workbench) -> None:
        left = nth

        def die(_: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                bench.engine.kill()

        bench.engine.on_step = die
        with contextlib.suppress(EngineGone):
            await bench.turn(FIRST)
        bench.engine.on_step = no_hook
        await until(lambda: not any(slot.busy for slot in bench.slots.all))
        bench.engine.restart()
        await bench.settle()
        assert not list(bench.level.root.rglob("*.tmp"))
        assert (await bench.whole(FIRST)).text

    run(tmp_path, memory, scenario)


@once
def test_one_that_the_disk_refuses_is_given_up_and_the_others_are_kept(tmp_path: Path, memory: str) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        left = 2

        def fails(kind: str, path: Path) -> bool:
            nonlocal left
            left -= kind == "write" and ".ckpt" in path.name
            return kind == "write" and left == 0

        disk.fails = fails
        await bench.whole(FIRST)
        counts = bench.cache.counters
        assert (counts.checkpoints_taken, counts.checkpoints_given_up) == (POSITIONS - 1, 1)
        assert [len(held) for held in positions(bench)] == [POSITIONS - 1]

    run(tmp_path, memory, scenario, fs=disk)
