"""Turns on memory that cannot be cut: kept by checkpoints, found again after a restart, right whatever breaks.

The workbench compares every answer with the right one, and checks afterwards that no spare of the engine leaks, that
every slot holds exactly what it claims, and that the level's files are what the index says.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.workbench import Hook, Workbench, ask, default_limits, later, no_hook, play, until, words

from strata.cache.cache import CacheLimits
from strata.errors import EngineGone, RunError
from strata.rules.checkpoints import CheckpointLimits
from strata.serve.request import TurnRequest

SYSTEM = words(0, 600)
FIRST = ask(words(1, 700), system=SYSTEM)
every_memory = pytest.mark.parametrize("memory", ["checkpoints", "recurrent", "opaque"])
with_rows = pytest.mark.parametrize("memory", ["checkpoints"])

Scenario = Callable[[Workbench], Awaitable[None]]


def limits(*, ladder: bool = True, keep: int = 6, every: int = 300, root: int = 500) -> CacheLimits:
    return replace(default_limits(ladder=ladder), checkpoints=CheckpointLimits(keep=keep, every=every, root=root))


def positions(bench: Workbench) -> list[list[int]]:
    """Per conversation of the write level, where it can be resumed."""
    index = bench.disk.index
    return [[at for at, _ in index.usable_checkpoints(c.serial)] for c in index.conversations()]


def restarted(root: Path, memory: str, *scenarios: Scenario, **options: object) -> None:
    """Each scenario on a server of its own, over one directory."""
    for scenario in scenarios:
        play(scenario, root, **{"memory": memory, "limits": limits(), **options})


# ------------------------------------------------------------------------------------------------------- kept and found


@every_memory
def test_the_next_turn_resumes_after_a_restart(tmp_path: Path, memory: str) -> None:
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        texts.append(first.text)
        assert first.report.reused == 0
        n = first.completed.prompt_tokens + first.completed.completion_tokens - 1
        frontier = first.completed.prompt_tokens - len("assistant\n") - 1
        root = len("system\n") + 600 + 2
        # The root, multiples of 300, the frontier, and the end of the turn: the six deepest.
        assert positions(bench) == [[600, root, 900, 1200, frontier, n]]
        counts = bench.cache.counters
        assert (counts.parked_disk, counts.checkpoints_given_up) == (1, 0)
        assert counts.checkpoints_taken == len(positions(bench)[0])

    async def after(bench: Workbench) -> None:
        second = await bench.whole(later(FIRST, texts[0]))
        assert second.report.source == "cold"
        assert second.report.reused >= 0.95 * second.completed.prompt_tokens
        counts = bench.cache.counters
        assert (counts.hits, counts.restores, counts.restore_failures) == (1, 1, 0)
        assert counts.restored_tokens == second.report.reused

    restarted(tmp_path, memory, before, after)


@every_memory
def test_a_conversation_goes_on_in_its_slot(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        second = await bench.whole(later(FIRST, first.text))
        assert second.report.source == "live"
        assert second.report.reused == first.completed.prompt_tokens + first.completed.completion_tokens - 1
        assert bench.cache.counters.restores == 0

    restarted(tmp_path, memory, scenario)


@every_memory
def test_a_rewritten_reply_goes_back_to_the_frontier(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        second = await bench.whole(later(FIRST, "another reply"))
        assert second.report.reused == first.completed.prompt_tokens - len("assistant\n") - 1
        assert second.report.source == "live"

    restarted(tmp_path, memory, scenario, slots=1)


@every_memory
def test_an_edited_turn_resumes_at_the_deepest_checkpoint_before_it(tmp_path: Path, memory: str) -> None:
    edited = ask(words(1, 350) + "edited" + words(2, 300), system=SYSTEM)
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        texts.append((await bench.whole(FIRST)).text)

    async def after(bench: Workbench) -> None:
        assert (await bench.whole(edited)).report.reused == 900
        # The other branch is still there.
        second = await bench.whole(later(FIRST, texts[0]))
        assert second.report.reused >= 0.95 * second.completed.prompt_tokens

    restarted(tmp_path, memory, before, after)


@every_memory
def test_another_conversation_starts_from_the_root(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        other = await bench.whole(ask(words(5, 400), system=SYSTEM))
        assert other.report.reused == len("system\n") + 600 + 2

    restarted(tmp_path, memory, scenario)


@every_memory
def test_the_newest_checkpoints_stay_and_the_root(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        request = FIRST
        for i in range(4):
            answer = await bench.whole(request)
            request = later(request, answer.text, words(10 + i, 200))
        (held,) = positions(bench)
        assert len(held) == 3
        assert held[0] == len("system\n") + 600 + 2
        assert held[-1] == answer.completed.prompt_tokens + answer.completed.completion_tokens - 1

    restarted(tmp_path, memory, scenario, limits=limits(keep=3))


@every_memory
def test_a_whole_slot_is_forked(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        second = later(FIRST, first.text)
        await bench.whole(second)
        branch = await bench.whole(later(FIRST, first.text, "somewhere else"))
        assert branch.report.reused >= first.completed.prompt_tokens - 20

    restarted(tmp_path, memory, scenario)


@every_memory
def test_nothing_is_reused_or_kept_when_the_request_says_so(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(replace(FIRST, cache_prompt=False))
        assert positions(bench) == []
        assert bench.cache.counters.checkpoints_taken == 0

    restarted(tmp_path, memory, scenario)


# -------------------------------------------------------------------------------------------------------------- damage


def break_deepest(bench: Workbench, how: Callable[[Path], None]) -> int:
    """Break the file of the deepest checkpoint; its position."""
    (conversation,) = bench.disk.index.conversations()
    position, key = bench.disk.index.usable_checkpoints(conversation.serial)[-1]
    (path,) = [path for path in bench.level.root.rglob("*") if key.hex() in path.name]
    how(path)
    return position


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))


def flip_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")


@every_memory
@pytest.mark.parametrize("how", [flip, flip_header, Path.unlink])
def test_a_damaged_checkpoint_falls_to_the_one_before(tmp_path: Path, memory: str, how: Callable[[Path], None]) -> None:
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        texts.append((await bench.whole(FIRST)).text)

    async def after(bench: Workbench) -> None:
        before_it = positions(bench)[0][-2]
        break_deepest(bench, how)
        second = await bench.whole(later(FIRST, texts[0]))
        assert second.report.reused == before_it
        counts = bench.cache.counters
        assert (counts.restores, counts.restore_failures) == (1, 1)
        assert (counts.ladder_failed["whole"], counts.ladder_used["good_part"]) == (1, 1)
        assert bench.disk.counters.quarantined == (how is not Path.unlink)

    async def later_on(bench: Workbench) -> None:
        assert bench.cache.counters.restore_failures == 0

    restarted(tmp_path, memory, before, after, later_on)


@every_memory
def test_without_the_ladder_a_damaged_checkpoint_means_reading(tmp_path: Path, memory: str) -> None:
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        texts.append((await bench.whole(FIRST)).text)

    async def after(bench: Workbench) -> None:
        break_deepest(bench, flip)
        second = await bench.whole(later(FIRST, texts[0]))
        assert second.report.reused == 0
        assert second.report.source == "none"

    restarted(tmp_path, memory, before, after, limits=limits(ladder=False))


@every_memory
def test_when_no_checkpoint_is_left_the_prompt_is_read(tmp_path: Path, memory: str) -> None:
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        texts.append((await bench.whole(FIRST)).text)

    async def after(bench: Workbench) -> None:
        (conversation,) = bench.disk.index.conversations()
        for _, key in bench.disk.index.usable_checkpoints(conversation.serial):
            for path in bench.level.root.rglob(f"*{key.hex()}*"):
                flip(path)
        assert (await bench.whole(later(FIRST, texts[0]))).report.reused == 0

    restarted(tmp_path, memory, before, after)


@with_rows
def test_damaged_rows_fall_to_the_checkpoint_before_them(tmp_path: Path, memory: str) -> None:
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        texts.append((await bench.whole(FIRST)).text)

    async def after(bench: Workbench) -> None:
        (conversation,) = bench.disk.index.conversations()
        (path,) = bench.level.root.rglob(f"*{conversation.keys[4].hex()}*")  # tokens [1024, 1280)
        flip(path)
        second = await bench.whole(later(FIRST, texts[0]))
        assert second.report.reused == 900

    restarted(tmp_path, memory, before, after)


# ---------------------------------------------------------------------------------------------------------- interrupted


@every_memory
def test_a_cancelled_request_leaves_its_slot_right(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        for stop_after in range(1, 8):
            await bench.turn(FIRST, stop_after=stop_after)
            await until(lambda: not any(slot.busy for slot in bench.slots.all))
            await bench.check()
        assert bench.cache.counters.parked_disk == 0
        assert (await bench.whole(FIRST)).text

    restarted(tmp_path, memory, scenario, slots=1)


@every_memory
def test_a_cancelled_request_goes_back_to_the_last_checkpoint_that_was_taken(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.turn(FIRST, stop_after=7)
        await until(lambda: not any(slot.busy for slot in bench.slots.all))
        again = await bench.whole(FIRST)
        assert again.report.source == "live"
        assert again.report.reused == again.completed.prompt_tokens - len("assistant\n") - 1

    restarted(tmp_path, memory, scenario, slots=1)


@every_memory
def test_a_turn_that_ends_while_the_one_before_is_written_keeps_its_checkpoints(tmp_path: Path, memory: str) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            first = await bench.turn(FIRST)
            assert first is not None
            second = await bench.turn(later(FIRST, first.text))
            assert second is not None and second.report.source == "live"
            await until(lambda: bench.disk.puts_under_way == 2)
        await bench.settle()
        (held,) = positions(bench)
        assert held[0] == len("system\n") + 600 + 2
        assert len(held) == 6

    restarted(tmp_path, memory, scenario, slots=1, fs=disk)


@every_memory
def test_without_room_for_checkpoints_the_turn_goes_on(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.free_bytes = None
        await bench.whole(FIRST)
        counts = bench.cache.counters
        assert counts.checkpoints_taken == 0
        assert counts.checkpoints_given_up > 0
        assert positions(bench) == []
        assert counts.deferred == 1
        bench.free_bytes = 1 << 50
        # It is tried again when it leaves: the end alone can be had by then.
        await bench.whole(ask(words(7, 900)))
        assert counts.parked_disk == 2

    restarted(tmp_path, memory, scenario, slots=1)


@every_memory
def test_an_engine_that_dies_costs_no_memory(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        steps = 0

        def die(_: str) -> None:
            nonlocal steps
            steps += 1
            if steps in (6, 18, 34, 60):
                bench.engine.kill()

        for seed in range(6):
            bench.engine.on_step = die
            with contextlib.suppress(EngineGone):
                await bench.turn(ask(words(seed, 600), system=SYSTEM))
            bench.engine.on_step = no_hook
            await until(lambda: not any(slot.busy for slot in bench.slots.all))
            bench.engine.restart()
        assert (await bench.whole(FIRST)).text

    restarted(tmp_path, memory, scenario)


def failing_at(nth: int) -> Hook:
    """The nth event of a request is an engine error that loses what the slot held."""
    left = nth

    def fail(name: str) -> None:
        nonlocal left
        left -= name == "event"
        if name == "event" and left == 0:
            raise RunError("decode failed", held=0)

    return fail


@every_memory
@pytest.mark.parametrize("seed", range(4))
def test_many_conversations_at_random(tmp_path: Path, memory: str, seed: int) -> None:
    """Goes on, edits, branches, cancels, fails; over restarts. Every answer is right."""
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
            if draw.random() < 0.2:
                await bench.turn(request, stop_after=draw.randrange(1, 9))
                await until(lambda: not any(slot.busy for slot in bench.slots.all))
                continue
            if draw.random() < 0.1:
                bench.engine.on_step = failing_at(draw.randrange(3, 9))
                with contextlib.suppress(RunError):
                    await bench.turn(request)
                bench.engine.on_step = no_hook
                continue
            answer = await bench.turn(request)
            assert answer is not None
            known.append((request, answer.text))
            if draw.random() < 0.5:
                await bench.check()

    restarted(tmp_path, memory, scenario, scenario, scenario)
