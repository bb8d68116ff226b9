"""Every rung of the restore ladder: what breaks the one above it, what is reused then, and what is counted and told.

On the fake engine: every answer is compared with the right one. Damage of all shapes on one level is in test_damage.py.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.workbench import Answer, Workbench, ask, default_limits, later, play, segments_of, until, words

from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation
from strata.cache.ram import RamLimits
from strata.cache.system_prompts import SystemPromptLimits
from strata.engine.protocol import Done
from strata.store.names import segment_path
from strata.types import MIB, PAGE, Key

FIRST = ask(words(1, 700))
OTHER = ask(words(2, 700))
BRANCH = ask(words(1, 700)[:600] + words(9, 100))
LIVE = len("\x01user\n")
"""Tokens that any two conversations share, so that a slot offers them to every prompt."""
WHOLE = 700 + LIVE + len("\x02\x01assistant\n") - 1
"""FIRST's prompt but for its last token."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with FIRST, OTHER and BRANCH, closed in order."""
    root = tmp_path_factory.mktemp("stored") / "level"

    async def scenario(bench: Workbench) -> None:
        for request in (FIRST, BRANCH, OTHER):
            await bench.whole(request)

    play(scenario, root, slots=1)
    return root


@pytest.fixture
def cold(tmp_path: Path, stored: Path) -> Path:
    shutil.copytree(stored, tmp_path / "cold")
    return tmp_path / "cold"


@pytest.fixture
def both(tmp_path: Path, stored: Path) -> Path:
    """A directory with everything on a warm and on a cold level."""
    for level in ("warm", "cold"):
        shutil.copytree(stored, tmp_path / level)
    return tmp_path


def first(disk: DiskLevel) -> Conversation:
    """FIRST as a level has it: the oldest."""
    return min(disk.index.conversations(), key=lambda c: c.serial)


def key_at(disk: DiskLevel, start: int) -> Key:
    return next(s.key for s in segments_of(first(disk)) if s.start == start)


def file_at(disk: DiskLevel, start: int, stage: int = 0) -> Path:
    return disk.level.root / segment_path(key_at(disk, start), stage)


def flip(path: Path, at: int = PAGE + 100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def told(bench: Workbench, verb: str) -> list[str]:
    return [event.detail for event in bench.cache.story.events() if event.verb == verb]


def used(bench: Workbench) -> dict[str, int]:
    """The rungs that were used."""
    return {rung: n for rung, n in bench.cache.counters.ladder_used.items() if n}


def failed(bench: Workbench) -> dict[str, int]:
    return {rung: n for rung, n in bench.cache.counters.ladder_failed.items() if n}


def asides(path: Path) -> list[Path]:
    """What was set aside of a file."""
    return list(path.parent.glob(f"{path.name}*.bad"))


def spoil_ram(bench: Workbench, start: int) -> None:
    ram = bench.cache.ram
    assert ram is not None
    ram.payloads(key_at(bench.disk, start))[0][0][77] ^= 1


async def comes_back(bench: Workbench, *, cached: int, source: str) -> Answer:
    """FIRST, out of what is stored, into a slot that something else was in."""
    await bench.whole(ask("x"))
    before = bench.cache.counters.restores
    answer = await bench.whole(FIRST)
    assert answer.completed.cached_tokens == answer.report.reused == cached
    assert answer.report.source == source
    assert bench.cache.counters.restores == before + (cached > LIVE)
    return answer


# ----------------------------------------------------------------------------------------------------------- the rungs


def test_rung_0_the_whole_entry(cold: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await comes_back(bench, cached=WHOLE, source="live+cold")
        assert (used(bench), failed(bench)) == ({}, {})
        assert told(bench, "restore")[-1].startswith(f"{WHOLE - LIVE} tokens from cold in ")

    play(scenario, cold, slots=1)


@pytest.mark.parametrize(("start", "source"), [(0, "cold+warm"), (256, "warm+cold"), (512, "warm+cold")])
@pytest.mark.parametrize("how", ["damaged", "gone", "unreadable"])
def test_rung_1_the_same_segment_from_another_level(both: Path, start: int, source: str, how: str) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        victim = file_at(bench.disk, start)
        assert bench.disk.name == "warm" and "warm" in str(victim)
        if how == "unreadable":
            disk.fails = lambda kind, path: kind == "read" and path == victim
        elif how == "damaged":
            flip(victim)
        else:
            victim.unlink()
        await comes_back(bench, cached=WHOLE, source=f"live+{source}")
        assert (used(bench), failed(bench)) == ({"other_level": 1}, {"whole": 1})
        counts = bench.cache.counters
        assert (counts.ladder_tokens_saved, counts.restore_failures) == (WHOLE - LIVE, 1)
        assert bench.disk.counters.quarantined == len(asides(victim)) == (how == "damaged")
        text = told(bench, "restore")[-1]
        assert "rung 1 (other_level)" in text and f"rung 0 (whole) failed: tokens [{start}, " in text
        assert {"damaged": "digest", "gone": "No such file", "unreadable": "No space"}[how] in text
        assert bool(told(bench, "quarantine")) is (how != "unreadable")
        assert victim.exists(), "written anew to the level that parks go to"
        disk.fails = lambda _, __: False
        await comes_back(bench, cached=WHOLE, source="live+warm")

    play(scenario, both, slots=1, warm_bytes=1 << 40, fs=disk)


def test_rung_1_from_ram_to_disk(tmp_path: Path) -> None:
    """Bytes in RAM that changed are found by their digest; the copy on disk serves."""

    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        await bench.whole(ask("x"))
        spoil_ram(bench, 256)
        await comes_back(bench, cached=WHOLE, source="live+ram+cold")
        assert used(bench) == {"other_level": 1} and bench.cache.counters.ram_quarantined == 1
        assert "its copy in RAM has changed" in told(bench, "restore")[-1]
        for _ in range(3):
            await comes_back(bench, cached=WHOLE, source="live+ram+cold")
        assert bench.cache.counters.ram_quarantined == 1
        assert used(bench) == {"other_level": 1}, "the bad one is gone; nothing fails any more"

    play(scenario, tmp_path, slots=1, ram=RamLimits(budget_bytes=8 * MIB, most=8))


@pytest.mark.parametrize("block", range(4))
def test_rung_2_up_to_the_last_good_block(tmp_path: Path, block: int) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        path = file_at(bench.disk, 256)
        entry = bench.disk.level.read_header(key_at(bench.disk, 256), 0).blocks[block]
        flip(path, entry.offset + 50)
        await comes_back(bench, cached=256 + 64 * block, source="live+cold")
        assert (used(bench), failed(bench)) == ({"good_part": 1}, {"whole": 1})
        assert bench.cache.counters.ladder_tokens_saved == 256 + 64 * block - LIVE
        assert bench.disk.counters.quarantined == len(asides(path)) == 1
        text = told(bench, "restore")[-1]
        assert "rung 2 (good_part)" in text and f"block {block} does not match" in text

    play(scenario, tmp_path, slots=1, block_tokens=64)


def test_rung_3_a_branch_that_shares_more_than_is_left(cold: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        flip(file_at(bench.disk, 512))
        await comes_back(bench, cached=600 + LIVE, source="live+cold")
        assert used(bench) == {"other_conversation": 1} and failed(bench) == {"whole": 1}
        assert bench.cache.counters.ladder_tokens_saved == 600
        text = told(bench, "restore")[-1]
        assert "rung 3 (other_conversation)" in text and "rung 0 (whole) failed: tokens [512, 707) of cold" in text
        again = await bench.whole(ask("x"))
        assert again.completed.cached_tokens == LIVE
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700, "it was written anew"
        assert bench.disk.counters.quarantined == 1

    play(scenario, cold, slots=1)


def test_rung_3_fails_too(cold: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        flip(file_at(bench.disk, 512))
        branch = next(c for c in bench.disk.index.conversations() if c.serial == 2)
        tail = next(s.key for s in segments_of(branch) if s.start == 512)
        flip(bench.disk.level.root / segment_path(tail, 0))
        await comes_back(bench, cached=512, source="live+cold")
        assert used(bench) == {"good_part": 1} and failed(bench) == {"whole": 1, "other_conversation": 1}
        text = told(bench, "restore")[-1]
        assert "rung 0 (whole) failed" in text and "rung 3 (other_conversation) failed" in text
        assert bench.disk.counters.quarantined == 2

    play(scenario, cold, slots=1)


def test_rung_4_the_system_prompt(tmp_path: Path) -> None:
    system = words(4, 600)
    request = ask(words(1, 700), system=system)
    end = len("system\n") + 600 + 2
    live = len("\x01")
    kept = SystemPromptLimits(budget_bytes=1 << 40, least=500)

    async def first(bench: Workbench) -> None:
        await bench.whole(request)

    async def second(bench: Workbench) -> None:
        prompts = bench.cache.system_prompts
        assert prompts is not None
        await bench.whole(ask("x"))
        flip(file_at(bench.disk, 256))
        answer = await bench.whole(request)
        assert answer.completed.cached_tokens == end
        assert answer.report.source == "live+cold+system-prompt"
        assert used(bench) == {"system_prompt": 1} and failed(bench) == {"whole": 1}
        assert "rung 4 (system_prompt)" in told(bench, "restore")[-1]
        assert bench.cache.counters.ladder_tokens_saved == end - live
        counts = prompts.counters
        assert (counts.hits, counts.misses, counts.tokens_saved) == (1, 0, end - 256), "the first 256 came from cold"

    play(first, tmp_path, slots=1, system_prompts=kept)
    play(second, tmp_path, slots=1, system_prompts=kept)


def test_rung_5_everything_is_read(cold: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        flip(file_at(bench.disk, 0))
        await comes_back(bench, cached=LIVE, source="live")
        assert used(bench) == {"read": 1} and failed(bench) == {"whole": 1}
        assert bench.cache.counters.ladder_tokens_saved == 0
        assert "nothing" in told(bench, "restore")[-1] and "rung 5 (read)" in told(bench, "restore")[-1]

    play(scenario, cold, slots=1)


# ----------------------------------------------------------------------------------------------------------- ladder off


@pytest.mark.parametrize("start", [0, 256, 512])
@pytest.mark.parametrize("levels", ["cold", "both"])
def test_without_the_ladder_a_failed_image_is_read_again_from_what_was_live(
    request: pytest.FixtureRequest, levels: str, start: int
) -> None:
    root: Path = request.getfixturevalue(levels)

    async def scenario(bench: Workbench) -> None:
        victim = file_at(bench.disk, start)
        flip(victim)
        await comes_back(bench, cached=LIVE, source="live")
        counts = bench.cache.counters
        assert (counts.restore_failures, counts.restored_bytes, counts.ladder_tokens_saved) == (1, 0, 0)
        assert used(bench) == {} and bench.disk.counters.quarantined == 1
        assert asides(victim)
        assert "rung 0 (whole) failed" in told(bench, "restore")[-1]
        await bench.whole(ask("x"))
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700, "it was written anew"
        assert counts.restore_failures == bench.disk.counters.quarantined == 1

    options: dict[str, Any] = {"warm_bytes": 1 << 40} if levels == "both" else {}
    play(scenario, root, slots=1, limits=default_limits(ladder=False), **options)


# ------------------------------------------------------------------------------------------------- damage, exactly once


@pytest.mark.parametrize("ladder", [True, False])
def test_two_restores_meet_the_same_damage_and_it_is_set_aside_once(cold: Path, ladder: bool) -> None:
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        victim = file_at(bench.disk, 256)
        flip(victim)
        with disk.held("read"):
            turns = [asyncio.create_task(bench.turn(later(FIRST, "so", text))) for text in ("one", "two")]
            await until(lambda: all(slot.doing == "preparing" for slot in bench.slots.all))
            await until(lambda: disk.waiting["read"] > 1)
        assert all(answer is not None for answer in await asyncio.gather(*turns))
        await bench.check()
        assert bench.disk.counters.quarantined == 1
        assert len(asides(victim)) == 1
        assert victim.exists(), "written anew"
        for _ in range(3):
            await bench.whole(OTHER)
            await bench.whole(BRANCH)
            assert (await bench.whole(later(FIRST, "so", "one"))).completed.cached_tokens > 700
        assert bench.disk.counters.quarantined == 1

    play(scenario, cold, slots=2, fs=disk, limits=default_limits(ladder=ladder))


def test_a_segment_written_anew_is_not_blamed_for_the_one_before(cold: Path) -> None:
    """A restore that has read the damaged file says so when a sound one has taken its place already."""
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        await bench.whole(OTHER)
        victim, index = file_at(bench.disk, 256), bench.disk.index
        sound, held = victim.read_bytes(), index.held(key_at(bench.disk, 256))
        assert held is not None
        flip(victim)
        with disk.held("read"):
            reading = asyncio.create_task(bench.turn(FIRST))
            await until(lambda: disk.waiting["read"] > 0)
            n_bytes = index.bytes_of(held.key)
            index.remove_segments([held.key])
            index.add_segment(held.segment, held.tokens, n_bytes, held.stages)
        answer = await reading
        assert answer is not None and answer.completed.cached_tokens == LIVE
        assert failed(bench) == {"whole": 1}
        assert bench.disk.counters.quarantined == 0 and index.holds(held.key)
        victim.write_bytes(sound)

    play(scenario, cold, slots=1, fs=disk, limits=default_limits(ladder=False))


@pytest.mark.parametrize("at_fault", [(0,), (1,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("how", ["header", "payload", "gone"])
def test_a_bad_stage_makes_the_segment_bad_and_only_its_file_is_set_aside(
    tmp_path: Path, at_fault: tuple[int, ...], how: str
) -> None:
    async def scenario(bench: Workbench) -> None:
        answer = await bench.whole(FIRST)
        await bench.whole(OTHER)
        files = [file_at(bench.disk, 256, stage) for stage in range(3)]
        for stage in at_fault:
            files[stage].unlink() if how == "gone" else flip(files[stage], 20 if how == "header" else PAGE + 9)
        if how == "gone":
            bench.level._walk()
        again = await bench.turn(FIRST)
        assert again is not None and again.completed.cached_tokens == 256
        assert f"stage {at_fault[0]}" in told(bench, "quarantine")[-1]
        assert bench.disk.counters.quarantined == (0 if how == "gone" else len(at_fault))
        await bench.check()
        for stage, path in enumerate(files):
            assert len(asides(path)) == (how != "gone" and stage in at_fault)
            assert path.exists(), "written anew"
        await bench.whole(OTHER)
        assert (await bench.whole(later(FIRST, answer.text))).completed.cached_tokens > 700

    play(scenario, tmp_path, slots=1, stages=3)


def test_the_sound_stages_of_a_bad_segment_go_with_their_conversation(tmp_path: Path) -> None:
    """They are not forgotten: otherwise nobody would ever delete them."""

    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        await bench.whole(OTHER)
        sound = file_at(bench.disk, 256, 1)
        flip(file_at(bench.disk, 256, 0))
        await bench.turn(ask(words(1, 700), "cut", max_tokens=1, cache_prompt=True), stop_after=1)
        await bench.settle()
        for i in range(30, 38):
            await bench.whole(ask(words(i, 700)))
            await bench.check()
        assert not sound.exists()

    play(scenario, tmp_path, slots=1, stages=2, budget_bytes=24 * 16 * 1024)


# -------------------------------------------------------------------------------------------------------------- proof


@pytest.mark.parametrize("ladder", [True, False])
@pytest.mark.parametrize("lie", ["fewer", "all gone", "more", "fewer, but says so"])
def test_a_restore_that_the_engine_does_not_confirm_did_not_happen(cold: Path, ladder: bool, lie: str) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(OTHER)
        apply, engine = bench.engine.apply, bench.engine

        async def lying(slot: int, **at: Any) -> Done:
            done = await apply(slot, **at)
            if at["start"] != 256:
                return done
            held = {"fewer": 300, "all gone": 0, "more": 512, "fewer, but says so": 300}[lie]
            del engine.states[slot][held:]
            said = {"fewer": 300, "all gone": 0, "more": 513, "fewer, but says so": 300}[lie]
            return msgspec.structs.replace(done, ok=lie != "fewer, but says so", held=said)

        engine.apply = lying  # type: ignore[method-assign, assignment]
        answer = await bench.whole(FIRST)
        del engine.apply
        lost = lie == "all gone"
        assert answer.completed.cached_tokens == (256 if ladder else 0 if lost else LIVE)
        assert (
            answer.report.source == {(1, 1): "cold", (1, 0): "live+cold", (0, 1): "none", (0, 0): "live"}[ladder, lost]
        )
        assert bench.cache.counters.restore_failures == 1
        assert bench.cache.counters.restore_unproved == lost
        assert bench.disk.counters.quarantined == 0, "no file is at fault"

    play(scenario, cold, slots=1, limits=default_limits(ladder=ladder))


def test_whatever_breaks_in_a_rung_ends_the_rung_and_not_the_request(cold: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(OTHER)
        apply = bench.engine.apply

        async def breaking(slot: int, **at: Any) -> Done:
            if at["start"] == 256:
                raise ZeroDivisionError("nobody thought of this")
            return await apply(slot, **at)

        bench.engine.apply = breaking  # type: ignore[method-assign, assignment]
        answer = await bench.whole(FIRST)
        del bench.engine.apply
        assert answer.completed.cached_tokens == LIVE
        assert failed(bench) == {"whole": 1} and used(bench) == {"read": 1}
        await bench.whole(OTHER)
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700, "nothing stored was blamed"

    play(scenario, cold, slots=1)


# ---------------------------------------------------------------------------------------------------------- the memory


def test_a_climb_from_ram_to_disk_asks_for_memory(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        await bench.whole(ask("x"))
        spoil_ram(bench, 256)
        bench.free_bytes = None
        await comes_back(bench, cached=256, source="live+ram")
        assert used(bench) == {"good_part": 1}
        bench.free_bytes = 1 << 40

    play(scenario, tmp_path, slots=1, ram=RamLimits(budget_bytes=8 * MIB, most=8))
