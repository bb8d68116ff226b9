"""Turns on memory that cannot be cut, kept in RAM: rows (if any) and checkpoints, beside what the disk has."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.test_checkpoints import FIRST, SYSTEM, Scenario, every_memory, failing_at, positions
from tests.serve.workbench import Workbench, ask, default_limits, later, no_hook, play, until, words

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits
from strata.cache.entries import Conversation
from strata.cache.ram import RamLevel, RamLimits
from strata.cache.system_prompts import SystemPromptLimits
from strata.errors import EngineGone, RunError
from strata.rules.checkpoints import CheckpointLimits
from strata.serve.request import TurnRequest
from strata.types import MIB

KIB = 1 << 10
ROOT = len("system\n") + 600 + 2


def limits(*, keep: int = 6, budget_bytes: int = 32 * MIB, most: int = 8, **options: object) -> CacheLimits:
    plain = default_limits(RamLimits(budget_bytes=budget_bytes, most=most))
    return replace(plain, checkpoints=CheckpointLimits(keep=keep, every=300, root=500), **options)  # type: ignore[arg-type]


def ram_of(bench: Workbench) -> RamLevel:
    assert bench.cache.ram is not None
    return bench.cache.ram


def in_ram(bench: Workbench) -> list[list[int]]:
    """Per conversation in RAM, where it can be resumed."""
    index = ram_of(bench).index
    return [[at for at, _ in index.usable_checkpoints(c.serial)] for c in index.conversations()]


def only(bench: Workbench) -> Conversation:
    (conversation,) = ram_of(bench).index.conversations()
    return conversation


def restarted(root: Path, memory: str, *scenarios: Scenario, **options: object) -> None:
    """Each scenario on a server of its own, over one directory."""
    for scenario in scenarios:
        play(scenario, root, **{"memory": memory, "limits": limits(), **options})


@every_memory
def test_a_turn_is_parked_in_ram_and_written_from_there(tmp_path: Path, memory: str) -> None:
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        texts.append(first.text)
        n = first.completed.prompt_tokens + first.completed.completion_tokens - 1
        frontier = first.completed.prompt_tokens - len("assistant\n") - 1
        assert in_ram(bench) == positions(bench) == [[600, ROOT, 900, 1200, frontier, n]]
        counts = bench.cache.counters
        assert (counts.parked_ram, counts.spilled, counts.parked_disk, counts.checkpoints_given_up) == (1, 1, 0, 0)
        assert bench.cache.kept.is_durable(only(bench).whole)

    async def after(bench: Workbench) -> None:
        second = await bench.whole(later(FIRST, texts[0]))
        assert second.report.source == "cold"
        assert second.report.reused >= 0.95 * second.completed.prompt_tokens

    restarted(tmp_path, memory, before, after)


@every_memory
def test_after_the_engine_died_the_next_turn_resumes_from_ram(tmp_path: Path, memory: str) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):  # RAM has the only copy
            first = await bench.turn(FIRST)
            assert first is not None
            await until(lambda: not bench.shop.parks)
            bench.engine.kill()
            bench.engine.restart()
            second = await bench.turn(later(FIRST, first.text))
            assert second is not None
            assert second.report.source == "ram"
            assert second.report.reused == first.completed.prompt_tokens + first.completed.completion_tokens - 1
            counts = bench.cache.counters
            assert (counts.ram_hits, counts.restores, counts.restore_failures) == (1, 1, 0)
            assert bench.disk.counters.hits == 0

    restarted(tmp_path, memory, scenario, fs=disk)


@every_memory
def test_an_edited_turn_goes_back_in_its_slot_by_a_checkpoint_in_ram(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        second = await bench.whole(later(FIRST, "another reply"))
        assert second.report.reused == first.completed.prompt_tokens - len("assistant\n") - 1
        assert bench.disk.counters.hits == 0

    restarted(tmp_path, memory, scenario, slots=1)


@every_memory
def test_another_conversation_shares_the_root_in_ram(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        other = await bench.whole(ask(words(5, 400), system=SYSTEM))
        assert (other.report.source, other.report.reused) == ("ram", ROOT)
        first, second = ram_of(bench).index.conversations()
        shared = set(first.checkpoints) & set(second.checkpoints)
        assert {at for at, _ in shared} == {600, ROOT}
        ram_of(bench).drop([first.serial])
        assert all(ram_of(bench).index.holds(key) for _, key in shared)
        gone = set(first.checkpoints) - shared
        assert not any(ram_of(bench).index.holds(key) for _, key in gone)

    restarted(tmp_path, memory, scenario)


@every_memory
def test_the_newest_checkpoints_stay_and_the_root(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        request = FIRST
        for i in range(4):
            answer = await bench.whole(request)
            request = later(request, answer.text, words(10 + i, 200))
        (held,) = in_ram(bench)
        assert (len(held), held[0]) == (3, ROOT)
        assert held[-1] == answer.completed.prompt_tokens + answer.completed.completion_tokens - 1
        assert positions(bench) == [held]

    restarted(tmp_path, memory, scenario, limits=limits(keep=3))


@every_memory
def test_without_room_in_the_budget_it_goes_to_disk(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        assert in_ram(bench) == []
        assert len(positions(bench)[0]) == 6
        counts = bench.cache.counters
        assert (counts.parked_ram, counts.parked_disk_transient, counts.discards) == (0, 1, 0)
        assert (await bench.whole(later(FIRST, first.text))).report.source == "live"

    restarted(tmp_path, memory, scenario, limits=limits(budget_bytes=40 * KIB))


@every_memory
def test_the_parking_floor_sends_it_to_disk(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.free_bytes = 8 * MIB
        await bench.whole(FIRST)
        assert in_ram(bench) == []
        assert len(positions(bench)[0]) == 6
        assert bench.cache.counters.parked_disk_transient == 1

    floors = Floors(parking_bytes=256 * MIB, transient_bytes=0)
    restarted(tmp_path, memory, scenario, limits=limits(floors=floors))


@every_memory
def test_the_oldest_gives_way_with_its_checkpoints(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        for seed in range(5):
            await bench.whole(ask(words(seed, 900)))
        assert len(in_ram(bench)) == 2
        counts = bench.cache.counters
        assert (counts.parked_ram, counts.ram_evictions) == (5, 3)
        again = await bench.whole(ask(words(0, 900), "x", "y"))
        assert again.report.source == "cold"

    restarted(tmp_path, memory, scenario, limits=limits(most=2), slots=1)


@every_memory
def test_what_ram_evicts_is_written_first(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        for seed in range(4):
            await bench.whole(ask(words(seed, 900)))
        assert bench.cache.counters.discards == 0
        assert len(bench.disk.index.conversations()) >= 2

    restarted(tmp_path, memory, scenario, limits=limits(most=2, spill_on_evict=True), slots=1)


@every_memory
def test_a_system_prompt_is_written_from_a_checkpoint_in_ram(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        prompts = bench.cache.system_prompts
        assert prompts is not None
        (kept,) = prompts.disk.index.conversations()
        assert [at for at, _ in prompts.disk.index.usable_checkpoints(kept.serial)] == [ROOT]
        assert ROOT in in_ram(bench)[0]

    restarted(tmp_path, memory, scenario, system_prompts=SystemPromptLimits(budget_bytes=1 << 40, least=500))


# -------------------------------------------------------------------------------------------------------------- damage


def spoil(bench: Workbench, position: int) -> None:
    """Change a byte of a checkpoint in RAM, as a dying engine may do."""
    key = dict(only(bench).checkpoints)[position]
    ram_of(bench).payloads(key)[0][0][20] ^= 1


@every_memory
def test_a_changed_checkpoint_in_ram_is_set_aside_and_the_disk_asked(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        end = in_ram(bench)[0][-1]
        spoil(bench, end)
        bench.engine.kill()
        bench.engine.restart()
        second = await bench.whole(later(FIRST, first.text))
        assert second.report.reused == end
        assert bench.cache.counters.ram_quarantined == 1
        assert bench.cache.counters.ladder_failed["whole"] == 1

    restarted(tmp_path, memory, scenario)


@every_memory
def test_a_changed_checkpoint_that_only_ram_has_falls_to_the_one_before(tmp_path: Path, memory: str) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        disk.fails = lambda kind, path: kind == "write"
        first = await bench.turn(FIRST)
        assert first is not None
        await until(lambda: not bench.shop.parks and not bench.cache.spiller.is_writing)
        before, end = in_ram(bench)[0][-2:]
        spoil(bench, end)
        bench.engine.kill()
        bench.engine.restart()
        second = await bench.turn(later(FIRST, first.text))
        assert second is not None
        assert (second.report.source, second.report.reused) == ("ram", before)
        disk.fails = lambda kind, path: False
        bench.disk.health.has_failed = False
        await bench.settle()
        # What is left of the first and all of the second are durable now.
        assert all(bench.cache.kept.is_durable(c.whole) for c in ram_of(bench).index.conversations())

    restarted(tmp_path, memory, scenario, fs=disk)


# --------------------------------------------------------------------------------------------------------------- random


@every_memory
@pytest.mark.parametrize("seed", range(6))
def test_many_conversations_at_random(tmp_path: Path, memory: str, seed: int) -> None:
    """Goes on, edits, branches, cancels, fails, dies; in little RAM; over restarts. Every answer is right."""
    draw = random.Random(seed)
    known: list[tuple[TurnRequest, str]] = []

    async def scenario(bench: Workbench) -> None:
        for _ in range(12):
            request = ask(words(draw.randrange(6), draw.randrange(20, 900)), system=SYSTEM)
            if known and draw.random() < 0.7:
                before, text = draw.choice(known)
                if len(str(before.messages)) < 4000:
                    reply = text if draw.random() < 0.7 else "a rewritten reply"
                    request = later(before, reply, words(draw.randrange(4), draw.randrange(1, 300)))
            bench.free_bytes = draw.choice([1 << 50, 1 << 50, 6 * MIB, 2 * MIB])
            how = draw.random()
            if how < 0.2:
                await bench.turn(request, stop_after=draw.randrange(1, 9))
                await until(lambda: not any(slot.busy for slot in bench.slots.all))
                continue
            if how < 0.3:
                bench.engine.on_step = failing_at(draw.randrange(3, 9))
            if how < 0.4:
                left = draw.randrange(1, 60)

                def die(_: str) -> None:
                    nonlocal left
                    left -= 1
                    if not left:
                        bench.engine.kill()

                bench.engine.on_step = die
            answer = None
            with contextlib.suppress(RunError, EngineGone):
                answer = await bench.turn(request)
            bench.engine.on_step = no_hook
            await until(lambda: not any(slot.busy for slot in bench.slots.all))
            bench.engine.restart()
            if answer is not None:
                known.append((request, answer.text))
            if draw.random() < 0.5:
                bench.free_bytes = 1 << 50
                await bench.check()

    budget = draw.choice([100 * KIB, 300 * KIB, 32 * MIB])
    floors = Floors(parking_bytes=4 * MIB, transient_bytes=1 * MIB)
    wanted = limits(budget_bytes=budget, most=draw.choice([1, 3, 50]), floors=floors)
    restarted(tmp_path, memory, scenario, scenario, scenario, limits=wanted)
