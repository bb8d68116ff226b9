"""Turns on the fake engine while the disk is slow, full or damaged, the arena small, or the budget spent.

As in test_turn_rules.py, every answer and the whole state afterwards are checked by the workbench.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.workbench import BLOCK, Workbench, ask, later, play, segments_of, ticks, until, words

from strata.engine.protocol import Done
from strata.store.names import segment_path
from strata.types import Span

FIRST = ask(words(1, 700))
OTHER = ask(words(2, 300))


# --------------------------------------------------------------------------------------------------- the arena is small


def test_a_park_gives_way_when_its_slot_is_wanted_and_keeps_what_it_captured(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            first = await bench.turn(FIRST)
            await until(lambda: disk.waiting["write"] > 0)
            assert bench.shop.parks, "the park was to be waiting for the writer"
            other = await bench.turn(OTHER)  # does not wait for the disk
            assert other is not None and first is not None
        await bench.settle()
        counts = bench.cache.counters
        assert counts.park_cut_short == 1
        again = await bench.whole(later(FIRST, first.text))
        assert again.completed.cached_tokens == 512, "two of the three blocks fitted the arena"

    play(scenario, tmp_path, slots=1, arena_bytes=4 * BLOCK, fs=disk)


def test_a_park_that_gets_nothing_is_a_counted_failure(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            first = await bench.turn(FIRST)  # takes all blocks that parks may have
            await until(lambda: disk.waiting["write"] > 0)
            await bench.turn(OTHER)
            third = await bench.turn(ask(words(3, 300)))
            assert first is not None and third is not None
        await bench.settle()
        assert bench.cache.counters.refused == 1
        assert any(event.verb == "discard" for event in bench.cache.story.events())
        assert (await bench.whole(OTHER)).completed.cached_tokens < 10

    play(scenario, tmp_path, slots=1, arena_bytes=4 * BLOCK, fs=disk)


def test_a_restore_does_not_wait_for_a_write(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        assert first is not None
        with disk.held("write"):
            await bench.turn(ask(words(3, 700)))
            await until(lambda: disk.waiting["write"] > 0)
            again = await bench.turn(later(FIRST, first.text))
            assert again is not None and again.completed.cached_tokens > 700

    play(scenario, tmp_path, slots=1, arena_bytes=4 * BLOCK, fs=disk)


@pytest.mark.parametrize("blocks", [2, 3, 4, 5])
def test_long_conversations_pass_through_a_small_arena(tmp_path: Path, blocks: int) -> None:
    texts = [words(i, 1500) for i in range(3)]

    async def scenario(bench: Workbench) -> None:
        for _ in range(2):
            for text in texts:
                await bench.whole(ask(text))
        assert bench.cache.counters.restores == 3
        together = await asyncio.gather(*(bench.turn(ask(text)) for text in texts))
        assert all(answer is not None for answer in together)

    play(scenario, tmp_path, slots=2, stages=1, arena_bytes=blocks * BLOCK)


@pytest.mark.parametrize("arena_bytes", [64 << 10, 96 << 10, 256 << 10])
def test_parks_that_each_hold_part_of_a_segment_do_not_block_each_other(tmp_path: Path, arena_bytes: int) -> None:
    """A segment of four blocks; parks may hold four blocks altogether, or a few more."""

    async def scenario(bench: Workbench) -> None:
        for _ in range(2):
            together = await asyncio.gather(*(bench.turn(ask(words(i, 700))) for i in range(3)))
            assert all(answer is not None for answer in together)
            await bench.settle()
        assert len(bench.disk.index.conversations()) == 3

    play(scenario, tmp_path, slots=3, block_tokens=64, arena_bytes=arena_bytes)


def test_a_segment_that_can_never_fit_the_arena_is_refused_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        assert (bench.cache.counters.refused, bench.cache.counters.discards) == (1, 0), "it is in its slot still"
        await bench.whole(OTHER)
        assert (bench.cache.counters.refused, bench.cache.counters.discards) == (3, 1)
        assert "arena" in bench.cache.story.events()[-1].detail

    play(scenario, tmp_path, slots=1, block_tokens=64, arena_bytes=48 << 10)


# ------------------------------------------------------------------------------------------------------- the disk fails


def test_a_full_disk_harms_no_answer_and_parking_goes_on_when_there_is_space(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        disk.fails = lambda kind, _: kind == "write"
        for i in range(5):
            await bench.whole(ask(words(10 + i, 300)))
        await bench.check()
        assert bench.cache.counters.refused == 9, "each at its end, and again when it left its slot"
        assert bench.cache.counters.discards == 4, "the last is in its slot still"
        assert "failing" in str(bench.cache.status()[0]["writer"])
        again = await bench.whole(later(FIRST, first.text))
        assert again.completed.cached_tokens > 700, "what was stored before must still be served"
        disk.fails = lambda _, __: False
        await bench.whole(OTHER)
        await bench.whole(ask(words(10, 300)))
        assert "failing" not in str(bench.cache.status()[0]["writer"])
        assert (await bench.whole(OTHER)).completed.cached_tokens > 300

    play(scenario, tmp_path, slots=1, fs=disk)


@pytest.mark.parametrize("failing", range(7))
def test_any_write_of_a_park_fails(tmp_path: Path, failing: int) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(OTHER)
        seen = 0

        def fails(kind: str, _: Path) -> bool:
            nonlocal seen
            seen += kind == "write"
            return kind == "write" and seen == failing + 1

        disk.fails = fails
        await bench.whole(FIRST)
        disk.fails = lambda _, __: False
        await bench.check()
        await bench.whole(later(OTHER, first.text))
        await bench.whole(FIRST)

    play(scenario, tmp_path, slots=1, stages=2, fs=disk)


def test_two_parks_share_segments_and_the_first_one_fails(tmp_path: Path) -> None:
    disk = SlowDisk()
    system = words(0, 600)

    async def scenario(bench: Workbench) -> None:
        disk.fails = lambda kind, _: kind == "write" and bench.cache.counters.refused == 0
        with disk.held("write"):
            answers = await asyncio.gather(
                bench.turn(ask("one", system=system)), bench.turn(ask("two" + words(7, 300), system=system))
            )
            await until(lambda: len(bench.shop.parks) == 2)
        assert all(answer is not None for answer in answers)
        await bench.check()
        disk.fails = lambda _, __: False
        for text in ("one", "two" + words(7, 300)):
            await bench.whole(ask(text, system=system))
        await bench.check()
        await bench.whole(OTHER)
        await bench.whole(ask(words(3, 300)))
        for text in ("one", "two" + words(7, 300)):
            assert (await bench.whole(ask(text, system=system))).completed.cached_tokens > 600

    play(scenario, tmp_path, slots=2, fs=disk)


def test_two_parks_share_segments(tmp_path: Path) -> None:
    disk = SlowDisk()
    system = words(0, 600)

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            requests = [ask(name, system=system) for name in ("one", "two")]
            await asyncio.gather(*(bench.turn(request) for request in requests))
            assert len(bench.shop.parks) == 2
        await bench.check()
        assert bench.cache.counters.parked_disk == 2
        index = bench.disk.index
        assert index.segment_count() == 2 + 2 * 2, "two shared segments; a tail up to the frontier and a reply each"

    play(scenario, tmp_path, slots=2, fs=disk)


def test_a_damaged_segment_is_set_aside_and_the_rest_is_used(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        path = file_at(bench, 256)
        damaged = bytearray(path.read_bytes())
        damaged[5000] ^= 1
        path.write_bytes(damaged)
        again = await bench.whole(later(FIRST, first.text))
        assert again.completed.cached_tokens == 256
        assert bench.disk.counters.quarantined == 1
        assert content(f"{path}.0.bad") == bytes(damaged)
        await bench.check()
        await bench.whole(OTHER)
        assert (await bench.whole(later(FIRST, first.text))).completed.cached_tokens > 700, "written anew"

    play(scenario, tmp_path, slots=1)


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def file_at(bench: Workbench, start: int) -> Path:
    """The segment file of the longest stored conversation that starts at this token."""
    longest = max(bench.disk.index.conversations(), key=lambda c: len(c.tokens))
    (segment,) = [s for s in segments_of(longest) if s.start == start]
    return bench.level.root / segment_path(segment.key, 0)


@pytest.mark.parametrize("reads", range(9))
def test_any_read_of_a_restore_fails(tmp_path: Path, reads: int) -> None:
    """Half-way through its restore the turn goes on with what it has, and the answer is right."""
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        seen = 0

        def fails(kind: str, _: Path) -> bool:
            nonlocal seen
            seen += kind == "read"
            return kind == "read" and seen == reads + 1

        disk.fails = fails
        again = await bench.whole(later(FIRST, first.text))
        disk.fails = lambda _, __: False
        assert bench.cache.counters.restore_failures == (reads < 8), "four segments: four headers and four blocks"
        assert again.completed.cached_tokens > 700 or reads < 8
        await bench.check()
        await bench.whole(OTHER)
        assert (await bench.whole(later(FIRST, first.text))).completed.cached_tokens > 700

    play(scenario, tmp_path, slots=1, fs=disk)


# --------------------------------------------------------------------------------------- somebody leaves while it reads


def test_a_client_leaves_while_its_blocks_are_read(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        with disk.held("read"):
            task = asyncio.create_task(bench.turn(later(FIRST, first.text)))
            await until(lambda: disk.waiting["read"] > 0)
            task.cancel()
            await ticks(20)
        with pytest.raises(asyncio.CancelledError):
            await task
        await bench.check()
        assert (await bench.whole(later(FIRST, first.text))).completed.cached_tokens > 700

    play(scenario, tmp_path, slots=1, fs=disk)


def test_the_engine_is_replaced_while_blocks_are_read(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        with disk.held("read"):
            task = asyncio.create_task(bench.turn(later(FIRST, first.text)))
            await until(lambda: disk.waiting["read"] > 0)
            bench.engine.kill()
            bench.engine.restart()
        await asyncio.gather(task, return_exceptions=True)
        await bench.check()
        again = await bench.whole(later(FIRST, first.text))
        assert again.completed.cached_tokens > 700, "the files are sound, and must be served"

    play(scenario, tmp_path, slots=1, fs=disk)


def test_the_engine_is_replaced_while_a_park_waits_for_the_writer(tmp_path: Path) -> None:
    """The rest of the park must not be taken out of what the new engine holds."""
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            await bench.turn(ask(words(1, 1500)))
            await until(lambda: disk.waiting["write"] > 0)
            bench.engine.kill()
            bench.engine.restart()
            running = asyncio.create_task(bench.turn(ask(words(2, 1900), max_tokens=100)))
            await until(lambda: bench.slots.all[0].doing == "active")
        await running
        await bench.check()
        await bench.whole(OTHER)
        await bench.whole(ask(words(1, 1500)))

    play(scenario, tmp_path, slots=1, arena_bytes=4 * BLOCK, fs=disk)


def test_the_source_of_a_fork_changes_while_the_target_gives_way(tmp_path: Path) -> None:
    """The slot that a fork was planned from belongs to another conversation by then: the answer must be right."""
    system = words(0, 600)

    async def scenario(bench: Workbench) -> None:
        bench.engine.delay = lambda name: 300 if name == "capture" else 0
        await bench.turn(ask(words(5, 1500)))  # slot 0; its park takes long
        source = asyncio.create_task(bench.turn(ask("source", system=system, max_tokens=20)))
        await until(lambda: bench.slots.all[1].doing == "active")
        fork = asyncio.create_task(bench.turn(ask("fork", system=system)))
        await until(lambda: bench.slots.all[0].busy)
        taker = asyncio.create_task(bench.turn(ask(words(6, 1500), max_tokens=500)))
        await source
        await until(lambda: bench.slots.all[1].doing == "active" and not source.cancelled())
        assert not fork.done(), "the fork was to be waiting for the park"
        assert await fork is not None
        assert await taker is not None

    play(scenario, tmp_path, slots=2)


# ----------------------------------------------------------------------------------------------------------- the budget


def test_the_budget_holds_and_the_oldest_goes_first(tmp_path: Path) -> None:
    one = 4 * BLOCK

    async def scenario(bench: Workbench) -> None:
        for i in range(8):
            await bench.whole(ask(words(i, 700)))
            await bench.check()
            assert bench.level.used_bytes <= 3.5 * one, f"after {i}"
        assert bench.disk.counters.disk_evictions > 3
        assert (await bench.whole(ask(words(6, 700)))).completed.cached_tokens > 600, "the newest but one is there"
        assert (await bench.whole(ask(words(0, 700)))).completed.cached_tokens < 10, "the oldest is not"

    play(scenario, tmp_path, slots=1, budget_bytes=int(3.5 * one))


def test_what_is_being_read_is_not_evicted(tmp_path: Path) -> None:
    disk = SlowDisk()
    one = 4 * BLOCK

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(ask(words(3, 300)))
        await bench.whole(ask(words(4, 300)))
        with disk.held("read"):
            reading = asyncio.create_task(bench.turn(later(FIRST, first.text)))
            await until(lambda: disk.waiting["read"] > 0)
            for i in range(10, 14):
                await bench.turn(ask(words(i, 300)))
            await until(lambda: not bench.shop.parks)
        answer = await reading
        assert answer is not None and answer.completed.cached_tokens > 700
        await bench.check()

    play(scenario, tmp_path, slots=2, budget_bytes=3 * one, fs=disk)


def test_a_shared_prefix_survives_the_eviction_of_one_owner(tmp_path: Path) -> None:
    system = words(0, 1024)

    async def scenario(bench: Workbench) -> None:
        for name in ("a", "b", "c"):
            await bench.whole(ask(name + words(1, 250), system=system))
        used = bench.level.used_bytes
        await bench.whole(ask(words(7, 300)))
        assert bench.disk.counters.disk_evictions >= 1
        assert bench.level.used_bytes < used + 4 * BLOCK
        assert (await bench.whole(ask("c" + words(1, 250), system=system))).completed.cached_tokens > 1024

    play(scenario, tmp_path, slots=1, budget_bytes=11 * BLOCK)


def test_a_conversation_larger_than_the_budget(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for i in range(3):
            await bench.whole(ask(words(i, 1500)))
            await bench.check()
        assert bench.disk.counters.oversized >= 1
        await bench.whole(ask(words(9, 40)))

    play(scenario, tmp_path, slots=1, budget_bytes=3 * BLOCK)


def test_a_segment_that_the_engine_refused_still_goes_with_its_conversation(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        apply = bench.engine.apply

        async def refuse(slot: int, **at: int) -> Done:
            done: Done = await apply(slot, **at)  # type: ignore[arg-type]
            if at["start"] != 256:
                return done
            del bench.engine.states[slot][256:]
            return msgspec.structs.replace(done, ok=False, held=256, reason="no")

        bench.engine.apply = refuse  # type: ignore[method-assign, assignment]
        refused = await bench.whole(ask(words(1, 700), first.text, "go on", cache_prompt=True))
        del bench.engine.apply
        assert refused.completed.cached_tokens == 256
        await bench.check()
        for i in range(30, 36):  # the budget makes the conversation go, and its files with it
            await bench.whole(ask(words(i, 700)))
            await bench.check()
            assert bench.level.used_bytes <= 10 * BLOCK

    play(scenario, tmp_path, slots=1, budget_bytes=10 * BLOCK)


# ----------------------------------------------------------------------------- a segment is lost while parks rely on it


def test_two_parks_that_need_what_the_other_one_brings(tmp_path: Path) -> None:
    """A segment that a park relies on is lost; the next park brings it again, and relies on the first one."""
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        slot, lost = bench.slots.all[0], file_at(bench, 256)
        assert slot.root is not None
        match = bench.cache.lookup(slot.root, slot.tokens, beyond=512)
        longer = ask(words(1, 700), first.text, words(8, 700))
        capture, go_on = bench.engine.capture, asyncio.Event()

        async def slow(slot: int, start: int, end: int, spans: tuple[Span, ...]) -> Done:
            await go_on.wait()
            return await capture(slot, start, end, spans)

        bench.engine.capture = slow  # type: ignore[method-assign]
        second = await bench.turn(longer)
        assert second is not None and match is not None and len(bench.shop.parks) == 1
        disk.fails = lambda kind, path: kind == "read" and path == lost
        assert (await bench.cache.restore(1, match, 0)).held == 256
        await bench.engine.trim(1, 0)
        disk.fails = lambda _, __: False
        await bench.turn(later(longer, second.text))
        assert len(bench.shop.parks) == 2
        go_on.set()
        await bench.check()
        await bench.whole(longer)
        await bench.whole(OTHER)
        await bench.whole(ask(words(9, 300)))
        assert (await bench.whole(longer)).completed.cached_tokens > 1400

    play(scenario, tmp_path, slots=2, fs=disk)


def test_a_failed_park_does_not_delete_what_another_conversation_names(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def before(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        lost = file_at(bench, 256)
        await bench.whole(OTHER)
        with disk.held("write"):
            disk.fails = lambda kind, path: kind == "read" and path == lost  # for this moment only: the file is sound
            await bench.turn(later(FIRST, first.text))
            disk.fails = lambda kind, path: kind == "write" and ".meta" in path.name
        await bench.settle()
        disk.fails = lambda _, __: False
        assert bench.cache.counters.refused == 1
        assert lost.exists()

    async def after_a_restart(bench: Workbench) -> None:
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700

    play(before, tmp_path, slots=1, fs=disk)
    play(after_a_restart, tmp_path, slots=1)
