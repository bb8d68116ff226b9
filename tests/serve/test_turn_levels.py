"""RAM, warm, cold and archive under whole turns: what is handed down, superseded, damaged or stuck, and counted.

As in test_turn_disk.py, every answer and the whole state afterwards are checked by the workbench.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.test_turn_placement import ends, limits, parked
from tests.serve.workbench import BLOCK, Answer, Workbench, ask, later, play, states_of, until, words

from strata.cache.cascade import Cascade
from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation
from strata.cache.put import DiskLimits
from strata.cache.status import over_budget
from strata.engine.fake_model import BASE_BYTES
from strata.serve.request import TurnRequest
from strata.types import Key

FIRST = ask(words(1, 700), system="be brief")
"""Four segments and a manifest."""
ONE = 4 * BLOCK


def other(n: int, chars: int = 700) -> TurnRequest:
    return ask(words(100 + n, chars), system="be brief")


async def stored(bench: Workbench, request: TurnRequest) -> tuple[Answer, tuple[Key, ...]]:
    """A turn in slot 0, with everything done; and what names the state that it left."""
    answer = await bench.whole(request)
    return answer, bench.cache.live[0]


def levels_of(bench: Workbench, keys: tuple[Key, ...]) -> set[str]:
    """The levels that have this state, whole, and as a conversation of its own."""
    return {
        name
        for name, index in indexes(bench).items()
        if index.stores(keys) or any(c.keys == keys for c in index.conversations())
    }


def indexes(bench: Workbench) -> dict[str, Any]:
    ram = {} if bench.cache.ram is None else {"ram": bench.cache.ram.index}
    return ram | {disk.name: disk.index for disk in bench.cache._all_disks()}


def by_name(bench: Workbench, name: str) -> DiskLevel:
    (level,) = [disk for disk in bench.cache._all_disks() if disk.name == name]
    return level


def verbs(bench: Workbench) -> list[str]:
    return [event.verb for event in bench.cache.story.events()]


async def moved(bench: Workbench) -> None:
    """Until nothing is on its way; without writing what waits."""
    await parked(bench)
    await until(lambda: bench.cache.under_way == 0)


# ------------------------------------------------------------------------------------------------------------- spilling


def test_a_newer_state_takes_the_place_of_one_that_waits(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            await bench.turn(other(1))  # the spiller is busy with it
            await until(lambda: disk.waiting["write"] > 0)
            request, answer = FIRST, await bench.turn(FIRST)
            for _ in range(3):
                assert answer is not None
                request = later(request, answer.text)
                answer = await bench.turn(request)
                await parked(bench)
        await bench.settle()
        counts = bench.cache.counters
        assert (counts.collapsed, counts.spilled, counts.ram_superseded, counts.parked_ram) == (3, 2, 3, 5)
        assert (counts.throttled, counts.spill_failed, counts.skipped, counts.discards) == (0, 0, 0, 0)

    play(scenario, tmp_path, slots=1, fs=disk, limits=limits("ram", 100))


def test_a_state_is_superseded_while_it_is_written(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        with disk.held("write"):
            first = await bench.turn(FIRST)
            await until(lambda: disk.waiting["write"] > 0)
            assert first is not None
            await bench.turn(later(FIRST, first.text))
            await parked(bench)
            assert bench.cache.ram is not None
            assert len(bench.cache.ram.index.conversations()) == 1
        await bench.settle()
        assert len(bench.disk.index.conversations()) == 1, "the newest"
        assert bench.disk.counters.superseded == 1

    play(scenario, tmp_path, slots=1, fs=disk, limits=limits("ram", 100))


def test_an_older_state_that_is_written_late_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    """The first reply waits in RAM for the writer; a second one to the same prompt went straight to disk."""
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        assert bench.cache.ram is not None and bench.cache.spiller is not None
        bench.cache.spiller._closed = True  # it gets to it later
        await bench.turn(FIRST)
        await parked(bench)
        bench.free_bytes = 4 << 20  # only the transient floor holds
        longer = ask(words(1, 700), system="be brief", max_tokens=40)
        await bench.turn(longer)
        await parked(bench)
        assert ends(bench) == {"parked_ram": 1, "parked_disk_transient": 1}
        bench.cache.spiller._closed = False
        await bench.settle()
        (only,) = bench.disk.index.conversations()
        assert len(only.tokens) > 740, "the newer, longer reply"
        assert bench.cache.ram.index.conversations() == ()
        assert bench.cache.counters.ram_superseded == 1 and bench.cache.counters.collapsed == 1

    play(scenario, tmp_path, slots=1, fs=disk, limits=limits("ram", 100))


def test_a_throttled_state_waits_and_is_written_at_the_end(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.turn(FIRST)
        assert first is not None
        await parked(bench)
        await until(lambda: bench.cache.counters.spilled == 1)
        await bench.turn(later(FIRST, first.text))
        await parked(bench)
        assert bench.cache.counters.throttled == 1 and bench.cache.unwritten == 1
        assert len(bench.disk.index.conversations()) == 1
        assert await bench.cache.flush(30)
        assert bench.cache.counters.spilled == 2 and bench.cache.unwritten == 0
        third = later(FIRST, first.text, "and on")
        await bench.turn(third)
        await parked(bench)
        assert bench.cache.counters.throttled == 2, "a flush is no end of the throttle"

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100, throttle_s=10_000.0))


def test_a_failing_disk_leaves_ram_alone_and_is_used_again_when_it_recovers(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        disk.fails = lambda kind, _: kind == "write"
        for i in range(2):
            await bench.turn(other(i))
            await moved(bench)
        assert await bench.cache.flush(30)
        assert bench.cache.counters.spill_failed >= 2 and bench.cache.unwritten == 2, "nothing is given up"
        assert bench.cache.ram is not None and len(bench.cache.ram.index.conversations()) == 2
        assert bench.disk.health.state.startswith("failing") and not bench.disk.health.usable
        disk.fails = lambda _, __: False
        assert await bench.cache.flush(30)
        assert bench.cache.unwritten == 0 and bench.disk.health.state == "ok" and bench.disk.health.usable
        assert len(bench.disk.index.conversations()) == 2

    play(scenario, tmp_path, slots=1, fs=disk, limits=limits("ram", 100), clock_step_s=1e-6)


def test_spill_on_evict_writes_when_ram_is_full_and_only_what_it_needs(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for i in range(3):
            await bench.turn(other(i))
            await moved(bench)
        assert bench.disk.index.conversations() == () and bench.level.counts.files_written == 0
        await bench.turn(other(3))
        await moved(bench)
        assert bench.cache.counters.parked_disk_transient == 1, "this one finds no room"
        assert bench.cache.counters.spilled == 1, "and room is made for the next, no more"
        await bench.turn(other(4))
        await moved(bench)
        assert ends(bench) == {"parked_ram": 4, "parked_disk_transient": 1}
        assert bench.cache.counters.ram_evictions == 1

    play(scenario, tmp_path, slots=1, limits=limits("ram", 10, spill_on_evict=True))


def test_a_broken_spill_is_logged_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Workbench) -> None:
        assert bench.cache.ram is not None
        digests, bench.cache.ram.digests = bench.cache.ram.digests, broken  # type: ignore[method-assign]
        await bench.turn(FIRST)
        await parked(bench)
        await until(lambda: "the spiller broke" in caplog.text)
        bench.cache.ram.digests = digests  # type: ignore[method-assign]
        await bench.settle()
        assert bench.cache.counters.spilled == 1

    async def broken(_: Key) -> Any:
        raise ValueError("no such thing")

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100))


def test_a_flush_writes_anew_what_was_set_aside_while_it_wrote_the_rest(tmp_path: Path) -> None:
    """A save relies on segments that are on disk already, until one of them turns out to be unusable."""
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        (entry,) = bench.disk.index.conversations()
        with disk.held("write"):
            await bench.turn(later(FIRST, first.text))
            await until(lambda: bool(bench.disk.manifests_under_way))
            bench.disk.set_aside(entry.keys[0])
        assert await bench.cache.flush(30)
        assert (bench.cache.counters.spill_failed, bench.cache.unwritten) == (1, 0)
        (newest,) = bench.disk.index.conversations()
        assert bench.disk.index.stores(newest.keys)

    play(scenario, tmp_path, slots=1, fs=disk, limits=limits("ram", 100))


# -------------------------------------------------------------------------------------------------------- damage in RAM


async def flip(bench: Workbench, start: int) -> None:
    """A byte of the segment that begins there changes in shared memory, after its digest was taken."""
    assert bench.cache.ram is not None
    longest = max(bench.cache.ram.index.conversations(), key=lambda c: len(c.tokens))
    (key,) = [k for k in longest.keys if bench.cache.ram.index._segments[k].segment.start == start]
    await bench.cache.ram.digests(key)
    bench.cache.ram.payloads(key)[0][0][BASE_BYTES] ^= 1


@pytest.mark.parametrize("start", [0, 256, 512])
def test_a_damaged_copy_in_ram_is_never_used_and_a_new_one_takes_its_place(tmp_path: Path, start: int) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.turn(FIRST)
        await parked(bench)
        assert first is not None and bench.cache.ram is not None
        await flip(bench, start)
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        again = await bench.turn(later(FIRST, first.text))
        await parked(bench)
        assert again is not None and again.completed.cached_tokens == start
        assert bench.cache.counters.restore_failures == 1
        assert bench.cache.counters.parked_ram == 2, "and it is parked in RAM again"
        await bench.check()
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        third = await bench.turn(later(later(FIRST, first.text), again.text))
        assert third is not None and third.completed.cached_tokens > 700

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100, spill_on_evict=True))


def test_what_precedes_damage_in_ram_is_written(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.turn(FIRST)
        await parked(bench)
        assert first is not None and bench.cache.ram is not None
        await flip(bench, 256)
        await bench.turn(ask(words(9, 20), cache_prompt=False))
        assert await bench.turn(later(FIRST, first.text), stop_after=1) is None  # the restore finds it
        await bench.settle()
        counts = bench.cache.counters
        assert (counts.spilled, counts.spill_failed, counts.discards) == (1, 0, 0)
        (stored,) = bench.disk.index.conversations()
        assert len(stored.tokens) == 256
        assert all(c.serial in bench.cache.ram.provisional for c in bench.cache.ram.index.conversations())

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100, spill_on_evict=True))


def test_the_engine_dies_and_ram_is_still_there(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.turn(FIRST)
        await parked(bench)
        assert first is not None
        bench.engine.kill()
        bench.engine.restart()
        again = await bench.turn(later(FIRST, first.text))
        assert again is not None
        assert again.report.source == "ram" and again.completed.cached_tokens > 700

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100, spill_on_evict=True))


def test_an_engine_that_dies_under_a_park_to_ram_is_a_discard(tmp_path: Path) -> None:
    """Nothing can try again: the state went with it."""

    async def scenario(bench: Workbench) -> None:
        def hook(name: str) -> None:
            if name == "capture answered":
                bench.engine.on_step = lambda _: None
                bench.engine.kill()
                bench.engine.restart()

        bench.engine.on_step = hook
        await bench.turn(FIRST)
        await parked(bench)
        assert bench.cache.counters.discards + bench.cache.counters.park_cut_short == 1
        assert bench.cache.counters.deferred == 0

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100))


# -------------------------------------------------------------------------------------------------------- order in RAM


def test_what_leaves_ram_first(tmp_path: Path) -> None:
    """Durable ones before what only lies in a slot; what is neither stays."""

    async def scenario(bench: Workbench) -> None:
        _, durable = await stored(bench, other(1, 300))  # a flush writes it
        nowhere_else = []
        for i in range(2):
            await bench.turn(other(2 + i, 300))
            await parked(bench)
            nowhere_else.append(bench.cache.live[0])
        live = nowhere_else.pop()
        slot = bench.slots.all[0]
        for leaves, kept in ((durable, live), (live, nowhere_else[0])):
            assert "ram" in levels_of(bench, leaves)
            assert bench.cache.ram is not None and slot.root is not None
            room = bench.cache.ram.plan_to_free(1)
            gone = [bench.cache.ram.index.conversation(serial).keys for serial in room.serials]
            assert gone == [leaves] and kept not in gone
            bench.cache.kept.evict(room)
        room = bench.cache.ram.room_for(1 << 40, (), supersedes=(), provisional=False)
        assert room.serials == () and not bench.cache.ram.fits(room, supersedes=())
        assert bench.cache.counters.ram_evictions == 2

    play(scenario, tmp_path, slots=1, limits=limits("ram", 6, most=3, spill_on_evict=True))


# ------------------------------------------------------------------------------------------------------------- cascade


def test_what_does_not_fit_warm_goes_to_cold_and_is_no_eviction(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for i in range(6):
            await bench.whole(other(i))
            await bench.check()
        warm, cold = bench.cache.disks
        assert warm.counters.degraded == cold.counters.adopted == 4
        for level in (warm, cold):
            counts = level.counters
            assert (counts.disk_evictions, counts.age_evictions, counts.degrade_failed, counts.superseded) == (0,) * 4
        assert verbs(bench).count("degrade") == 4 and "delete" not in verbs(bench)
        again = await bench.whole(other(0))
        assert again.completed.cached_tokens > 700 and "cold" in again.report.source

    play(scenario, tmp_path, slots=1, warm_bytes=int(2.6 * ONE))


def test_a_cold_hit_is_written_back_and_only_then_superseded_below(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        first, old = await stored(bench, FIRST)
        for i in range(3):
            await bench.whole(other(i))
        warm, cold = bench.cache.disks
        assert levels_of(bench, old) == {"cold"}
        disk.fails = lambda kind, path: kind == "write" and "warm" in path.parts
        cold.health.has_failed = True
        second = await bench.turn(later(FIRST, first.text))
        await parked(bench)
        assert second is not None and "cold" in second.report.source
        assert levels_of(bench, old) == {"cold"}, "the write back failed: the cold copy stays"
        disk.fails = lambda _, __: False
        warm.health.has_failed = cold.health.has_failed = False
        _, new = await stored(bench, later(FIRST, first.text))
        assert levels_of(bench, old) == set() and levels_of(bench, new) == {"warm"}
        assert cold.counters.superseded == 1 and warm.counters.superseded == 0

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=int(2.6 * ONE))


def test_levels_number_their_conversations_apart(tmp_path: Path) -> None:
    """The serial of the new copy above says nothing about the old one below."""

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        cold.level._serial = 1000
        first, old = await stored(bench, FIRST)
        for i in range(3):
            await bench.whole(other(i))
        (below,) = [c for c in cold.index.conversations() if c.keys == old]
        warm.level._serial = below.serial - 1  # the next one there has the same
        _, new = await stored(bench, later(FIRST, first.text))
        assert [c.serial for c in warm.index.conversations() if c.keys == new] == [below.serial]
        assert levels_of(bench, old) == set() and levels_of(bench, new) == {"warm"}

    play(scenario, tmp_path, slots=1, warm_bytes=int(2.6 * ONE))


FAILURES: dict[str, Callable[[str, Path], bool]] = {
    "segment": lambda kind, path: kind == "write" and "cold" in path.parts and "seg" in path.parts,
    "manifest": lambda kind, path: kind == "write" and "cold" in path.parts and ".meta" in path.name,
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_degrade_that_fails_leaves_everything_and_is_not_spun(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        disk.fails = FAILURES[what]
        cold.level._link = lambda *_: False  # type: ignore[method-assign]
        answers = [await stored(bench, other(i)) for i in range(4)]
        failed = warm.counters.degrade_failed
        assert warm.counters.degraded == 0 and 1 <= failed <= 4, "at most once for each park"
        for _, keys in answers:
            assert levels_of(bench, keys) == {"warm"}
        assert over_budget(warm) and "cannot leave" in over_budget(warm)
        assert cold.index.conversations() == ()
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert warm.counters.degrade_failed == failed, "nothing tries before the tick"
        bench.cache.tick()
        await moved(bench)
        assert failed < warm.counters.degrade_failed <= failed + 4
        disk.fails = lambda _, __: False
        cold.health.has_failed = False
        bench.cache.tick()
        await moved(bench)
        assert warm.counters.degraded == cold.counters.adopted >= 1 and not over_budget(warm)

    with caplog.at_level(logging.WARNING, "strata.cache"):
        play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=int(2.6 * ONE))
    assert "warm -> cold: a conversation stays: " in caplog.text


def test_a_degrade_takes_no_more_than_it_must_when_conversations_share(tmp_path: Path) -> None:
    """Two that leave together free what only they share: a third one stays."""
    system = words(0, 1024)

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        for i in range(2):
            await bench.whole(ask(f"{i}", system=system))
        await bench.whole(other(1, 300))
        assert len(cold.index.conversations()) == 0
        await bench.whole(other(2, 1300))
        assert len(cold.index.conversations()) == 2, "the two that share, and no more"
        assert len(warm.index.conversations()) == 2

    play(scenario, tmp_path, slots=1, warm_bytes=13 * BLOCK)


def test_a_conversation_goes_on_while_its_old_state_is_handed_down(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        cold.level._link = lambda *_: False  # type: ignore[method-assign]
        first, old = await stored(bench, FIRST)
        gate = asyncio.Event()
        move = bench.cache.cascade._move

        async def slow(*given: Any, **more: Any) -> Any:
            outcome = await move(*given, **more)
            await gate.wait()
            return outcome

        bench.cache.cascade._move = slow  # type: ignore[method-assign]
        for i in range(3):
            await bench.turn(other(i))
            await parked(bench)
        await until(lambda: bool(warm.moving) and bool(cold.index.conversations()))
        await bench.turn(later(FIRST, first.text))
        await parked(bench)
        new = bench.cache.live[0]
        assert "warm" in levels_of(bench, old), "it moves still"
        gate.set()
        await bench.settle()
        assert levels_of(bench, old) == set(), "neither above nor below is the old state left"
        assert levels_of(bench, new) == {"warm"}

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=int(2.6 * ONE))


def test_a_superseded_entry_that_could_not_leave_goes_when_it_may(tmp_path: Path) -> None:
    """It could not be handed down; the newer state makes it superfluous all the same."""
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        cold.level._link = lambda *_: False  # type: ignore[method-assign]
        disk.fails = FAILURES["segment"]
        first, old = await stored(bench, FIRST)
        for i in range(3):
            await bench.whole(other(i))
        assert next(warm.index.conversation(serial).keys for serial in warm.stuck) == old
        _, new = await stored(bench, later(FIRST, first.text))
        assert levels_of(bench, old) == set() and levels_of(bench, new) == {"warm"}
        disk.fails = lambda _, __: False

    play(scenario, tmp_path, slots=1, fs=disk, warm_bytes=int(2.6 * ONE))


@pytest.mark.parametrize("start", [0, 256])
def test_a_damaged_segment_lets_what_precedes_it_go_down(tmp_path: Path, start: int) -> None:
    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        cold.level._link = lambda *_: False  # type: ignore[method-assign] a copy is verified
        await bench.whole(FIRST)
        (stored,) = warm.index.conversations()
        (key,) = [k for k in stored.keys if warm.index._segments[k].segment.start == start]
        (path,) = warm.level.root.glob(f"seg/*/{key.hex()}*.seg")
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        for i in range(3):
            await bench.whole(other(i))
        assert warm.counters.quarantined == 1
        told = [
            event.detail for event in bench.cache.story.events() if event.conversation == stored.conversation.hex()[:12]
        ]
        if start:
            assert [len(c.tokens) for c in cold.index.conversations() if c.keys[0] == stored.keys[0]] == [start]
            assert warm.counters.unreadable == 0 and "cut short" in told[-1]
        else:
            assert warm.counters.unreadable == 1 and "nothing of it can be read" in told[-1]
        assert warm.counters.degraded == cold.counters.adopted

    play(scenario, tmp_path, slots=1, warm_bytes=int(2.9 * ONE))


def test_one_larger_than_warm_goes_past_it_and_only_what_is_new_is_written(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        _, small = await stored(bench, other(1, 100))
        first, large = await stored(bench, other(2, 1500))
        assert levels_of(bench, small) == {"warm"}, "it makes way for nothing that does not fit"
        assert levels_of(bench, large) == {"cold"}
        written = [disk.writer.statistics().bytes_written for disk in (warm, cold)]
        _, more = await stored(bench, later(other(2, 1500), first.text))
        assert levels_of(bench, more) == {"cold"}
        assert warm.writer.statistics().bytes_written == written[0]
        assert cold.writer.statistics().bytes_written - written[1] < written[1] / 2
        assert (warm.counters.oversized, warm.counters.degraded, cold.counters.oversized) == (0, 0, 0)

    play(scenario, tmp_path, slots=1, warm_bytes=ONE)


def test_one_larger_than_every_level_is_kept_and_pushes_nothing_out(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        small = [(await stored(bench, other(i, 100)))[1] for i in range(2)]
        large = (await stored(bench, other(3, 1500)))[1]
        more = (await stored(bench, other(4, 100)))[1]
        (cold,) = bench.cache.disks
        for keys in (*small, large, more):
            assert levels_of(bench, keys) == {"cold"}
        assert cold.counters.oversized == 1 and cold.counters.disk_evictions == 0
        assert "larger" in over_budget(cold)
        _, second = await stored(bench, other(5, 1500))
        assert levels_of(bench, large) == set() and levels_of(bench, second) == {"cold"}, "the newest such one stays"
        assert cold.counters.disk_evictions == 1

    play(scenario, tmp_path, slots=1, budget_bytes=ONE)


def test_foreign_conversations_are_handed_down_and_age(tmp_path: Path) -> None:
    async def before(bench: Workbench) -> None:
        for i in range(2):
            await bench.whole(other(i))

    async def after(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        assert len(warm.scan.foreign) == 2
        for i in range(2):
            await bench.whole(other(10 + i))
        assert warm.counters.degraded == cold.counters.adopted == 2
        assert warm.counters.disk_evictions == 0
        bench._now += 1e9
        bench.cache.tick()
        await moved(bench)
        assert cold.counters.age_evictions == 2

    play(before, tmp_path, slots=1, warm_bytes=int(2.6 * ONE))
    options = {"disk_limits": DiskLimits(budget_bytes=1 << 40, max_age_s=1e8), "fingerprint": b"g" * 32}
    play(after, tmp_path, slots=1, warm_bytes=int(2.6 * ONE), **options)


def test_an_entry_whose_files_vanish_while_it_moves(tmp_path: Path) -> None:
    """Somebody empties the directory: what was on its way is gone, and nothing stumbles over it."""

    async def scenario(bench: Workbench) -> None:
        warm, _ = bench.cache.disks
        await bench.whole(FIRST)
        (entry,) = warm.index.conversations()
        warm.begin_leaving(entry.serial)
        warm.let_go([entry.serial], "superseded")
        warm.drop([entry.serial])
        assert warm.used_bytes >= 0 and not warm.is_over_budget
        warm.make_room(1 << 40)
        assert warm.end_leaving(entry.serial, "budget", left=False) is None
        assert not warm.stuck and not warm.moving
        bench.cache.tick()

    play(scenario, tmp_path, slots=1, warm_bytes=int(2.6 * ONE))


# ------------------------------------------------------------------------------------------------------------- archive


@pytest.mark.parametrize("mode", ["ids", "state"])
def test_what_is_superseded_goes_to_the_archive(tmp_path: Path, mode: str) -> None:
    async def scenario(bench: Workbench) -> None:
        request, answer = FIRST, await bench.whole(FIRST)
        for _ in range(6):
            request = later(request, answer.text)
            answer = await bench.whole(request)
        (cold,), archive = bench.cache.disks, by_name(bench, "archive")
        assert cold.counters.archived == cold.counters.superseded == 6
        assert len(archive.index.conversations()) == 4, "the newest four are kept"
        assert bool(archive.index.segment_count()) == (mode == "state")
        await bench.check()
        prompt = await bench.prompt_of(request)
        root = archive.index.conversations()[0].root
        found = bench.cache.lookup(root, prompt, beyond=0)
        assert found is not None and found.disk is cold, "nothing is ever restored from the archive"

    play(scenario, tmp_path, slots=1, archive=mode)


@pytest.mark.parametrize("mode", ["ids", "state"])
def test_a_move_to_the_archive_that_fails_leaves_the_entry_until_a_tick(tmp_path: Path, mode: str) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        (cold,), archive = bench.cache.disks, by_name(bench, "archive")
        first, old = await stored(bench, FIRST)
        disk.fails = lambda kind, path: kind == "write" and "archive" in path.parts
        _, new = await stored(bench, later(FIRST, first.text))
        assert cold.counters.archive_failed == 1 and cold.counters.superseded == 0
        assert levels_of(bench, old) == levels_of(bench, new) == {"cold"}
        bench.cache.tick()
        await moved(bench)
        assert cold.counters.archive_failed == 2, "once for each tick"
        disk.fails = lambda _, __: False
        archive.health.has_failed = False
        bench.cache.tick()
        await moved(bench)
        assert (cold.counters.archived, cold.counters.superseded) == (1, 1)
        assert levels_of(bench, old) == {"archive"}

    play(scenario, tmp_path, slots=1, fs=disk, archive=mode)


def test_without_an_archive_there_is_no_trace_of_one(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(later(FIRST, first.text))
        assert bench.disk.counters.superseded == 1 and bench.disk.counters.archived == 0
        assert not (tmp_path / "archive").exists() and not (tmp_path / "warm").exists()

    play(scenario, tmp_path, slots=1)


# ----------------------------------------------------------------------------------------------------------- compaction


def test_a_rewritten_history_is_compacted_unless_its_owner_is_unclear(tmp_path: Path) -> None:
    head = ("a", "b")
    options = {"disk_limits": DiskLimits(budget_bytes=1 << 40, divergence_tokens=200)}

    async def scenario(bench: Workbench) -> None:
        await bench.whole(ask(*head, words(1, 300), system="s"))
        await bench.whole(ask(*head, words(2, 300), system="s"))
        counts = bench.disk.counters
        assert (counts.compacted, counts.compaction_unclear) == (1, 0)
        assert len(bench.disk.index.conversations()) == 1
        assert counts.superseded == 0

    play(scenario, tmp_path, slots=1, **options)


# ------------------------------------------------------------------------------------------------------ planted faults


def planted() -> dict[str, Callable[[Workbench], None]]:
    def ram(bench: Workbench) -> Any:
        assert bench.cache.ram is not None
        return bench.cache.ram

    def first(bench: Workbench) -> Conversation:
        found: Conversation = ram(bench).index.conversations()[0]
        return found

    return {
        "used bytes": lambda b: setattr(ram(b), "_used_bytes", ram(b)._used_bytes + 1),
        "promised bytes": lambda b: ram(b).promise(-1),
        "promised conversations": lambda b: ram(b).promise(0, -1),
        "a segment that is not held": lambda b: void(ram(b)._held.pop(first(b).keys[0])),
        "a size": lambda b: ram(b).index.note_bytes(first(b).keys[0], 1),
        "provisional": lambda b: ram(b).provisional.add(99),
        "over the number": lambda b: setattr(ram(b), "limits", limits("ram", 100, most=0).ram),
        "over the budget": lambda b: setattr(ram(b), "limits", limits("ram", 1).ram),
        "a reference": lambda b: b.disk.index._references.update([first(b).keys[0]]),
        "a last key": lambda b: b.disk.index._last_keys.clear(),
        "a lease": lambda b: b.disk.index._leases.update({first(b).keys[0]: -1}),
        "a child": lambda b: b.disk.index._children.clear(),
        "a conversation": lambda b: b.disk.index._serials_by_conversation.clear(),
        "a segment without size": lambda b: b.disk.index._bytes.clear(),
    }


def void(_: object) -> None:
    """For actions that give something back."""


@pytest.mark.parametrize("fault", planted())
def test_check_finds_what_is_planted(tmp_path: Path, fault: str) -> None:
    async def scenario() -> None:
        bench = Workbench(tmp_path, slots=1, limits=limits("ram", 100))
        await bench.whole(FIRST)
        await bench.check()
        planted()[fault](bench)
        assert len(bench.cache.check()) >= 1
        bench.close()

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "held disk"])
def test_an_end_in_the_middle_of_everything_loses_nothing_acknowledged(tmp_path: Path, waits: bool) -> None:
    disk = SlowDisk()
    durable: set[tuple[Key, ...]] = set()

    async def before() -> None:
        bench = Workbench(tmp_path, slots=2, fs=disk, warm_bytes=int(1.6 * ONE), limits=limits("ram", 9))
        for i in range(5):
            await bench.turn(other(i))
            if not waits:
                await moved(bench)
        if waits:
            with disk.held("write"):
                for i in range(5, 8):
                    await bench.turn(other(i))
        durable.update(c.keys for level in bench.cache.disks for c in level.index.conversations())
        bench.close()

    async def after(bench: Workbench) -> None:
        there = {c.keys for level in bench.cache.disks for c in level.index.conversations()}
        assert durable <= there

    asyncio.run(before())
    play(after, tmp_path, slots=2, warm_bytes=int(1.6 * ONE))


def test_a_park_that_breaks_is_logged_and_leaves_its_slot_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(bench: Workbench) -> None:
        async def broken(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EIO, "out of the blue")

        bench.engine.capture = broken  # type: ignore[method-assign]
        await bench.turn(FIRST)
        await parked(bench)
        assert "the park of slot 0 broke" in caplog.text
        del bench.engine.capture
        await bench.check()
        await bench.whole(other(1))

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100))


def test_the_states_in_ram_are_right(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        ram = bench.cache.ram
        assert ram is not None
        (entry,) = ram.index.conversations()
        states = states_of(entry.tokens)
        for key in entry.keys:
            segment = ram.index._segments[key].segment
            body = b"".join(states[segment.start : segment.end])
            assert bytes(ram.payloads(key)[0][0][BASE_BYTES:][: len(body)]) == body

    play(scenario, tmp_path, slots=1, limits=limits("ram", 100))


def test_the_cascade_of_one_level_has_nothing_below() -> None:
    assert Cascade((), None, story=None, clock=lambda: 0.0).levels == ()  # type: ignore[arg-type]
