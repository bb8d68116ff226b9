"""SPEC §4, row by row, with whole turns: where the state of a finished turn goes, and what is counted.

A turn ends, and then another conversation takes the only slot: each row says what the counters gained by both.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.workbench import BLOCK, Workbench, ask, later, play, until, words

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLimits
from strata.engine.protocol import Sampling
from strata.rules.placement import Target
from strata.serve.request import Reading, TurnRequest
from strata.serve.turn import run_turn
from strata.types import MIB

FIRST = ask(words(1, 700))
SMALL = ask(words(2, 20))
FLOORS = Floors(parking_bytes=8 * MIB, transient_bytes=MIB)
PLENTY, TRANSIENT, NONE = 1 << 40, 4 * MIB, MIB // 2
ENDS = (
    "parked_ram",
    "parked_disk",
    "parked_disk_transient",
    "skipped",
    "provisional",
    "provisional_dropped",
    "deferred",
    "discards",
    "refused",
)


def limits(target: Target, ram_blocks: int | None, *, most: int = 50, **more: Any) -> CacheLimits:
    ram = None if ram_blocks is None else RamLimits(budget_bytes=ram_blocks * BLOCK, most=most)
    return CacheLimits(floors=FLOORS, park_target=target, ram=ram, ladder=True, **more)


def ends(bench: Workbench) -> dict[str, int]:
    """How parks ended so far; only what is not 0."""
    counts = bench.cache.counters.as_dict()
    return {name: int(counts[name]) for name in ENDS if counts[name]}


async def parked(bench: Workbench) -> None:
    """Until every park has ended; what the spiller does goes on."""
    while bench.shop.parks:
        await asyncio.wait(set(bench.shop.parks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`disk`: "ok", "resting" after a failure, or "failing". `end`, `left`: the counters after the turn, and later."""

    number: str
    target: Target = "ram"
    disk: str = "ok"
    ram_blocks: int | None = 50
    memory: int | None = PLENTY
    end: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    where: frozenset[str] = frozenset()


def row(number: str, end: dict[str, int], left: dict[str, int] | None = None, where: str = "", **given: Any) -> Row:
    return Row(number=number, end=end, left=end if left is None else left, where=frozenset(where.split()), **given)


KEPT_NOWHERE = {"end": {"deferred": 1}, "left": {"deferred": 1, "discards": 1}}
ROWS = [
    row("1", {"parked_ram": 1}, where="ram"),
    row("2", {"parked_ram": 1}, where="ram", disk="resting"),
    row("3", {"parked_disk_transient": 1}, where="cold", memory=TRANSIENT),
    row("4", **KEPT_NOWHERE, memory=NONE),
    row("5", **KEPT_NOWHERE, disk="resting", memory=TRANSIENT),
    row("6", {"parked_disk_transient": 1}, where="cold", ram_blocks=2),
    row("6, floor", {"parked_disk_transient": 1}, where="cold", ram_blocks=2, memory=TRANSIENT),
    row("7", **KEPT_NOWHERE, ram_blocks=2, memory=NONE),
    row("8", **KEPT_NOWHERE, disk="resting", ram_blocks=2),
    row("9", {"parked_disk": 1}, where="cold", target="disk"),
    row("9, no RAM level", {"parked_disk": 1}, where="cold", target="disk", ram_blocks=None),
    row("10", {"parked_disk_transient": 1}, where="cold", target="disk", memory=TRANSIENT),
    row("11, nothing to evict", **KEPT_NOWHERE, target="disk", memory=NONE),
    row("12 as 2", {"parked_ram": 1}, where="ram", target="disk", disk="resting"),
    row("12 as 5", **KEPT_NOWHERE, target="disk", disk="resting", memory=TRANSIENT),
    row("12 as 8", **KEPT_NOWHERE, target="disk", disk="resting", ram_blocks=2),
    row("15", **KEPT_NOWHERE, memory=None),
    row("15, disk", **KEPT_NOWHERE, target="disk", memory=None),
    row(
        "18",
        {"refused": 1, "deferred": 1},
        {"refused": 2, "deferred": 1, "discards": 1},
        target="disk",
        disk="failing",
        ram_blocks=None,
    ),
]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.number)
def test_row(tmp_path: Path, case: Row, caplog: pytest.LogCaptureFixture) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        bench.free_bytes = case.memory
        if case.disk == "resting":
            bench.disk.health.has_failed = True
        if case.disk == "failing":
            disk.fails = lambda kind, _: kind == "write"
        answer = await bench.turn(FIRST)
        await parked(bench)
        assert ends(bench) == case.end
        keys = bench.cache.live[0]
        levels = {d.name for d in bench.cache.disks if d.index.stores(keys)}
        assert case.where == levels | (
            {"ram"} if bench.cache.ram and bench.cache.ram.index.stores(keys) else set()
        ) or (
            case.where == {"ram"} and "cold" in levels  # the spiller was quick
        )
        # What the next conversation makes of it is none of this row's business: it is not parked.
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        await parked(bench)
        assert ends(bench) == case.left
        disk.fails = lambda _, __: False
        bench.free_bytes, bench.disk.health.has_failed = PLENTY, False
        assert answer is not None
        again = await bench.whole(later(FIRST, answer.text))
        assert (again.completed.cached_tokens > 600) == bool(case.where)

    with caplog.at_level(logging.INFO, "strata.cache"):
        play(scenario, tmp_path, slots=1, fs=disk, limits=limits(case.target, case.ram_blocks))
    if case.number == "4":
        assert "skip parking (physical RAM admission: need 1 MiB + floor 1 MiB, available 0 MiB" in caplog.text
    if case.number.startswith("15"):
        assert "telemetry unavailable" in caplog.text
    if case.number == "3":
        assert "park to disk under the transient RAM floor (need 1 plus 1 MiB, not 8 MiB)" in caplog.text


def test_row_11_what_is_durable_leaves_ram_for_a_park_to_disk(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.disk.health.has_failed = True
        await bench.whole(FIRST)
        assert ends(bench) == {"parked_ram": 1} and bench.cache.counters.spilled == 1
        bench.disk.health.has_failed = False
        bench.free_bytes = MIB + 10_000  # the transient floor, and less than a park needs
        await bench.turn(ask(words(3, 300)))
        await parked(bench)
        assert ends(bench) == {"parked_ram": 1, "parked_disk_transient": 1}
        assert bench.cache.counters.ram_evictions == 1

    play(scenario, tmp_path, slots=1, limits=limits("disk", 50))


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(PLENTY, {"provisional": 1}), (TRANSIENT, {"provisional_dropped": 1}), (None, {"provisional_dropped": 1})],
    ids=["row 13", "row 14", "row 14 as 15"],
)
def test_a_cancelled_request_is_kept_in_ram_if_that_costs_nothing(
    tmp_path: Path, memory: int | None, expected: dict[str, int]
) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        before = [c.serial for c in bench.disk.index.conversations()]
        counts = ends(bench)
        longer = ask(words(1, 700), first.text, words(4, 300))
        assert await bench.turn(longer, stop_after=4) is None
        bench.free_bytes = memory
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        await parked(bench)
        assert {name: n for name, n in ends(bench).items() if n != counts.get(name, 0)} == expected
        await bench.settle()
        assert [c.serial for c in bench.disk.index.conversations()] == before, "the durable copy stays as it was"
        bench.free_bytes = PLENTY
        again = await bench.whole(longer)
        assert (again.completed.cached_tokens > 1000) == (memory == PLENTY)
        assert bench.cache.counters.discards == 0

    play(scenario, tmp_path, slots=1, limits=limits("ram", 50))


def test_a_cancelled_request_pushes_no_other_conversation_out(tmp_path: Path) -> None:
    """Row 14: RAM is full of what is durable, which could go, but not for this."""

    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        assert bench.cache.ram is not None
        before = {c.serial for c in bench.cache.ram.index.conversations()}
        assert await bench.turn(ask(words(5, 300), "x", words(6, 300)), stop_after=4) is None
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        await parked(bench)
        assert {c.serial for c in bench.cache.ram.index.conversations()} == before
        assert bench.cache.counters.provisional_dropped == 1

    play(scenario, tmp_path, slots=1, limits=limits("ram", 4))


def test_a_state_that_was_provisional_is_owed_once_a_request_ended_with_it(tmp_path: Path) -> None:
    """A text prompt has no opener to go back to: the very state of a cancelled request is that of a finished one."""
    request = TurnRequest(text=words(3, 400), sampling=Sampling(temperature=0), max_tokens=1, ignore_eos=True)

    async def scenario(bench: Workbench) -> None:
        async with aclosing(run_turn(bench.shop, request)) as turn:
            async for event in turn:
                if isinstance(event, Reading):
                    break
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        await parked(bench)
        assert ends(bench) == {"provisional": 1}
        await bench.events(request)
        await bench.settle()
        assert bench.cache.ram is not None and not bench.cache.ram.provisional
        assert len(bench.disk.index.conversations()) == 1, "it is owed now, and was not written"

    play(scenario, tmp_path, slots=1, limits=limits("ram", 50))


@pytest.mark.parametrize("memory", [TRANSIENT, NONE, None], ids=["transient", "none", "unknown"])
def test_row_16_a_floor_that_fails_after_the_capture(tmp_path: Path, memory: int | None) -> None:
    async def scenario(bench: Workbench) -> None:
        def hook(name: str) -> None:
            if name == "capture":
                bench.free_bytes = memory

        bench.engine.on_step = hook
        await bench.turn(FIRST)
        await parked(bench)
        assert ends(bench) == ({"parked_disk_transient": 1} if memory == TRANSIENT else {"deferred": 1})
        assert bench.cache.ram is not None and bench.cache.ram.used_bytes == 0
        assert bench.cache.counters.captured_bytes < 30_000 + 700 * 32, "nothing was captured twice"

    play(scenario, tmp_path, slots=1, limits=limits("ram", 50))


def test_row_16_evicts_what_reaches_the_floor(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)

        def hook(name: str) -> None:
            if name == "capture":
                bench.free_bytes = FLOORS.parking_bytes - 10_000

        bench.engine.on_step = hook
        await bench.turn(ask(words(3, 300)))
        await parked(bench)
        assert ends(bench) == {"parked_ram": 2}
        assert bench.cache.counters.ram_evictions == 1, "it stays because the first one went"

    play(scenario, tmp_path, slots=1, limits=limits("ram", 50))


def test_row_17_an_arena_that_cannot_grow(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        def refuse(size: int, *, large_pages: bool) -> Any:
            raise OSError("no memory")

        bench.arena._backing = refuse
        await bench.turn(FIRST)
        await parked(bench)
        assert ends(bench) == {"refused": 1, "deferred": 1}, "nor is there any for a block that passes through"
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        await parked(bench)
        assert ends(bench) == {"refused": 2, "deferred": 1, "discards": 1}

    play(scenario, tmp_path, slots=1, limits=limits("ram", 50))


def test_row_17_what_ram_cannot_get_passes_through(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for i in range(3):
            await bench.turn(ask(words(i, 600)))
            await parked(bench)
            await bench.check()
        assert ends(bench) == {"parked_ram": 2, "parked_disk_transient": 1}

    play(scenario, tmp_path, slots=1, arena_bytes=7 * BLOCK, limits=limits("ram", 50))


def test_row_18_a_full_level_that_rejects(tmp_path: Path) -> None:
    """RAM takes it while it can; then it is lost, counted at both."""

    async def scenario(bench: Workbench) -> None:
        await bench.turn(FIRST)
        await parked(bench)
        await until(lambda: bench.cache.counters.spill_failed == 1)
        assert ends(bench) == {"parked_ram": 1}, "with the disk full, RAM is what is left"
        assert bench.disk.counters.rejected == 1
        await bench.turn(ask(words(3, 700)))
        await parked(bench)
        assert ends(bench) == {"parked_ram": 1, "refused": 1, "deferred": 1}
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        await parked(bench)
        assert ends(bench) == {"parked_ram": 1, "refused": 2, "deferred": 1, "discards": 1}
        assert bench.disk.index.conversations() == ()

    options = {"disk_limits": DiskLimits(budget_bytes=2 * BLOCK, rejects=True)}
    play(scenario, tmp_path, slots=1, limits=limits("disk", 6), **options)


def test_a_refusal_that_repeats_is_said_once_for_each_conversation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> int:
        return sum("spill of" in record.message for record in caplog.records)

    async def fail_twice_more(bench: Workbench) -> None:
        wanted = bench.cache.counters.spill_failed + 2

        def failed() -> bool:
            bench.cache.tick()
            return bench.cache.counters.spill_failed >= wanted

        await until(failed)

    async def scenario(bench: Workbench) -> None:
        await bench.turn(FIRST)
        await fail_twice_more(bench)
        assert said() == 1
        await bench.turn(ask(words(3, 700)))
        await fail_twice_more(bench)
        assert said() == 2

    options = {"disk_limits": DiskLimits(budget_bytes=2 * BLOCK, rejects=True)}
    play(scenario, tmp_path, slots=1, limits=limits("ram", 50), **options)


def test_a_level_that_rejects_takes_what_grows_within_it(tmp_path: Path) -> None:
    """What a new state shares with a stored one needs no room."""

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(later(FIRST, first.text))
        assert bench.cache.counters.spilled == 2 and bench.disk.counters.rejected == 0

    options = {"disk_limits": DiskLimits(budget_bytes=5 * BLOCK, rejects=True)}
    play(scenario, tmp_path, slots=1, limits=limits("ram", 50), **options)


def test_row_19_nothing_new(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        await bench.whole(FIRST)
        assert ends(bench) == {"parked_ram": 1, "skipped": 1}

    play(scenario, tmp_path, slots=1, limits=limits("ram", 50))


@pytest.mark.parametrize("target", ["ram", "disk"])
def test_no_turn_waits_for_a_write(tmp_path: Path, target: Target) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            for i in range(6):
                assert await bench.turn(ask(words(i, 700))) is not None
        await bench.settle()
        counts = bench.cache.counters
        assert counts.park_cut_short + counts.discards > 0 or target == "ram", "the disk was to be far behind"

    play(scenario, tmp_path, slots=1, arena_bytes=12 * BLOCK, fs=disk, limits=limits(target, 8))


def test_two_parks_at_once_are_not_promised_the_same_memory(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.free_bytes = FLOORS.parking_bytes + 5 * BLOCK
        bench.engine.delay = lambda name: 50 if name == "capture" else 1
        await asyncio.gather(bench.turn(FIRST), bench.turn(ask(words(7, 700))))
        await parked(bench)
        assert ends(bench) == {"parked_ram": 1, "parked_disk_transient": 1}

    play(scenario, tmp_path, slots=2, limits=limits("ram", 50))


def test_the_number_of_conversations_in_ram(tmp_path: Path) -> None:
    """--conversation-cache-slots; the next turn of one that is there takes no other place."""

    async def scenario(bench: Workbench) -> None:
        assert bench.cache.ram is not None
        request = ask(words(1, 700), system="be brief")
        first = await bench.whole(request)
        await bench.whole(SMALL)
        assert len(bench.cache.ram.index.conversations()) == 2
        await bench.whole(later(request, first.text))
        assert bench.cache.counters.ram_evictions == 0, "it superseded its older state"
        await bench.whole(ask(words(8, 300)))
        assert len(bench.cache.ram.index.conversations()) == 2
        assert bench.cache.counters.ram_evictions == 1
        assert bench.cache.counters.parked_ram == 4

    play(scenario, tmp_path, slots=1, limits=limits("ram", 50, most=2))
