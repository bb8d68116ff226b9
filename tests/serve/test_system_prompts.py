"""The system-prompt cache on the fake engine: who gets what, and each counter exactly when it should.

The workbench compares every answer with the right one, and checks files, index and leases afterwards. The real engine
is in test_system_prompts_real.py.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.serve.workbench import Workbench, ask, default_limits, later, play, segments_of, words

from strata.cache.admission import Floors
from strata.cache.system_prompts import SystemPromptLimits, SystemPrompts
from strata.rules.checkpoints import CheckpointLimits
from strata.serve.request import TurnRequest
from strata.store.names import SYSTEM_PROMPTS_FOLDER, segment_path
from strata.types import PAGE

SYSTEM = words(0, 600)
END = len("system\n") + 600 + 2
"""Tokens before the first turn."""
LIMITS = SystemPromptLimits(budget_bytes=1 << 40, least=500)
every_memory = pytest.mark.parametrize("memory", ["segments", "checkpoints", "recurrent", "opaque"])
Scenario = Callable[[Workbench], Awaitable[None]]


def talk(seed: int, system: str = SYSTEM, namespace: str = "") -> TurnRequest:
    """A conversation of its own behind the system prompt; no two begin with the same letter."""
    return ask("abcdefghijklmnop"[seed] + words(seed, 60), system=system, namespace=namespace)


def other(seed: int) -> str:
    """Another system prompt."""
    return words(100 + seed, 600)


def prompts_of(bench: Workbench) -> SystemPrompts:
    assert bench.cache.system_prompts is not None
    return bench.cache.system_prompts


def counts(bench: Workbench, *names: str) -> tuple[object, ...]:
    status = prompts_of(bench).status()
    return tuple(status[name] for name in names)


def alone(root: Path, *scenarios: Scenario, **options: Any) -> None:
    """Each scenario on a server of its own that keeps system prompts and nothing else, over one directory."""
    limits = replace(default_limits(), checkpoints=CheckpointLimits(root=500))
    given = {"limits": limits, "system_prompts": LIMITS, "conversations": False, "slots": 1, **options}
    for scenario in scenarios:
        play(scenario, root, **given)


async def hits(bench: Workbench, request: TurnRequest) -> None:
    answer = await bench.whole(request)
    assert answer.report.source in ("system-prompt", "live+system-prompt")
    assert answer.report.reused == END


async def misses(bench: Workbench, request: TurnRequest) -> None:
    """A new conversation that reads its system prompt; the slot has its first tokens at most."""
    answer = await bench.whole(request)
    assert answer.report.source in ("none", "live") and answer.report.reused < 20


def variants(bench: Workbench) -> set[bytes]:
    return {c.tokens.tobytes() for c in prompts_of(bench).disk.index.conversations()}


# ------------------------------------------------------------------------------------------------------ kept and found


@every_memory
def test_another_conversation_starts_with_it_after_a_restart(tmp_path: Path, memory: str) -> None:
    async def before(bench: Workbench) -> None:
        await misses(bench, talk(1))
        assert counts(bench, "hits", "misses", "written", "variants", "tokens_saved") == (0, 1, 1, 1, 0)
        assert counts(bench, "bytes") == (prompts_of(bench).disk.level.usage(),)

    async def after(bench: Workbench) -> None:
        await hits(bench, talk(2))
        assert counts(bench, "hits", "misses", "written", "variants", "tokens_saved") == (1, 0, 0, 1, END)
        assert counts(bench, "evicted_by_space", "evicted_by_age", "hash_changes") == (0, 0, 0)
        assert counts(bench, "admitted", "admitted_transient", "admission_refused") == (1, 0, 0)

    alone(tmp_path, before, after, memory=memory)
    assert [path.name for path in tmp_path.iterdir()] == [SYSTEM_PROMPTS_FOLDER]


@every_memory
def test_beside_a_cold_level_it_is_used_when_nothing_else_is_longer(tmp_path: Path, memory: str) -> None:
    texts: list[str] = []

    async def before(bench: Workbench) -> None:
        texts.append((await bench.whole(talk(1))).text)
        assert counts(bench, "misses", "written") == (1, 1)

    async def goes_on(bench: Workbench) -> None:
        answer = await bench.whole(later(talk(1), texts[0]))
        assert answer.report.source == "cold"
        assert counts(bench, "hits", "misses", "written", "hash_changes") == (0, 0, 0, 0)

    async def cold_is_gone(bench: Workbench) -> None:
        await hits(bench, talk(2))

    given: dict[str, Any] = {"memory": memory, "conversations": True}
    alone(tmp_path, before, goes_on, **given)
    for path in tmp_path.iterdir():
        if path.name == "seg":
            shutil.rmtree(path)
        elif path.name.endswith(".meta"):
            path.unlink()
    alone(tmp_path, cold_is_gone, **given)


@every_memory
def test_a_cold_level_that_was_there_before_does_not_keep_it_from_being_written(tmp_path: Path, memory: str) -> None:
    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def after(bench: Workbench) -> None:
        await bench.whole(ask("x", system=other(1)))
        answer = await bench.whole(talk(1, other(2)))
        assert answer.report.reused < 20
        assert counts(bench, "written") == (2,)

    alone(tmp_path, before, memory=memory, conversations=True, system_prompts=None)
    alone(tmp_path, after, memory=memory, conversations=True)


@every_memory
def test_it_is_written_once_and_asked_for_only_when_needed(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(talk(1))
        size = counts(bench, "bytes")
        second = await bench.whole(later(talk(1), first.text))
        assert second.report.source == "live"
        assert counts(bench, "hits", "misses") == (0, 1), "the slot has more: it was not asked"
        await bench.whole(ask("x"))
        await hits(bench, talk(2))
        assert counts(bench, "hits", "misses", "written", "variants") == (1, 1, 1, 1)
        assert counts(bench, "bytes") == size

    alone(tmp_path, scenario, memory=memory)


def test_two_slots_that_read_it_at_once_write_it_once(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await asyncio.gather(bench.turn(talk(1)), bench.turn(talk(2)))
        await bench.settle()
        assert counts(bench, "written", "given_up", "variants", "misses") == (1, 0, 1, 2)

    alone(tmp_path, scenario, slots=2)


def test_a_short_system_prompt_is_not_kept(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(ask("hello", system=words(3, 400)))
        assert counts(bench, "hits", "misses", "written", "variants", "hash_changes") == (0, 0, 0, 0, 0)

    alone(tmp_path, scenario)


@pytest.mark.parametrize("kept", [True, False])
def test_a_request_that_wants_no_cache_leaves_nothing_and_gets_nothing(tmp_path: Path, kept: bool) -> None:
    async def scenario(bench: Workbench) -> None:
        if kept:
            await bench.whole(talk(1))
        answer = await bench.whole(replace(talk(2), cache_prompt=False))
        assert answer.report.reused == 0
        assert counts(bench, "misses", "variants", "hits") == (int(kept), int(kept), 0)

    alone(tmp_path, scenario)


def test_a_cancelled_request_has_read_it_all_the_same(tmp_path: Path) -> None:
    async def before(bench: Workbench) -> None:
        assert await bench.turn(talk(1), stop_after=4) is None
        await bench.settle()
        assert counts(bench, "written") == (1,)

    async def after(bench: Workbench) -> None:
        await hits(bench, talk(2))

    alone(tmp_path, before, after)


# ------------------------------------------------------------------------------------------------------------- variants


@every_memory
def test_a_changed_prompt_is_a_second_variant(tmp_path: Path, memory: str) -> None:
    changed = SYSTEM[:590] + "!" + SYSTEM[591:]
    live = memory == "segments"  # the opener of what the slot held, where memory can be cut

    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))
        await bench.whole(ask("x"))
        await misses(bench, talk(2, changed))
        assert counts(bench, "hash_changes", "misses", "variants", "written") == (1, 2, 2, 2)

    async def after(bench: Workbench) -> None:
        await hits(bench, talk(3))
        assert counts(bench, "hash_changes") == (1,), "another one than the newest that was kept"
        await bench.whole(ask("x"))
        await hits(bench, talk(4, changed))
        assert counts(bench, "hash_changes", "hits", "misses", "variants") == (2, 2, 0, 2)
        assert counts(bench, "evicted_by_space", "evicted_by_age", "tokens_saved") == (0, 0, 2 * END - live)

    alone(tmp_path, before, after, memory=memory)


def test_one_that_begins_with_another_does_not_replace_it(tmp_path: Path) -> None:
    request = ask("a" * 600, "b", "c", system=words(3, 300))  # its system prompt ends behind the first turn
    shorter = replace(LIMITS, least=250)

    async def deep(bench: Workbench) -> None:
        await bench.whole(request)

    async def both(bench: Workbench) -> None:
        await bench.whole(ask("x"))
        await bench.whole(request)
        assert counts(bench, "variants") == (2,)

    alone(tmp_path, deep)
    alone(tmp_path, both, system_prompts=shorter)
    alone(tmp_path, both, system_prompts=LIMITS)


@pytest.mark.parametrize("slots", [1, 2])
def test_api_keys_share_nothing(tmp_path: Path, slots: int) -> None:
    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1, namespace="alice"))
        answer = await bench.whole(talk(2, namespace="bob"))
        assert answer.report.reused == 0
        assert counts(bench, "variants", "hits", "misses", "hash_changes") == (2, 0, 2, 0)

    async def after(bench: Workbench) -> None:
        assert (await bench.whole(talk(3, namespace="eve"))).report.reused == 0
        await hits(bench, talk(4, namespace="alice"))

    alone(tmp_path, before, after, slots=slots, system_prompts=replace(LIMITS, most=0))


def test_a_declared_key_keeps_variants_apart(tmp_path: Path) -> None:
    async def first(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def miss(bench: Workbench) -> None:
        await misses(bench, talk(2))
        assert counts(bench, "misses", "hash_changes") == (1, 0)

    async def hit(bench: Workbench) -> None:
        await hits(bench, talk(3))
        assert counts(bench, "variants") == (2,)

    declared = replace(LIMITS, declared="v2")
    alone(tmp_path, first)
    alone(tmp_path, miss, hit, system_prompts=declared)
    alone(tmp_path, hit)


def test_another_model_gets_nothing_and_removes_nothing(tmp_path: Path) -> None:
    async def first(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def foreign(bench: Workbench) -> None:
        await misses(bench, talk(2))
        assert counts(bench, "variants", "misses") == (2, 1)

    async def hit(bench: Workbench) -> None:
        await hits(bench, talk(3))

    alone(tmp_path, first)
    alone(tmp_path, foreign, fingerprint=b"g" * 32)
    alone(tmp_path, hit)


# --------------------------------------------------------------------------------------------------------------- limits


def test_the_ones_unused_longest_go_by_count(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for seed in (1, 2):
            await bench.whole(talk(seed, other(seed)))
        assert counts(bench, "variants", "evicted_by_space") == (2, 0)
        await bench.whole(ask("x"))
        await hits(bench, talk(3, other(1)))
        await bench.whole(talk(4, other(3)))
        assert counts(bench, "variants", "evicted_by_space", "evicted_by_age") == (2, 1, 0)
        await bench.whole(ask("x"))
        await hits(bench, talk(5, other(1)))
        await bench.whole(ask("x"))
        await misses(bench, talk(6, other(2)))

    alone(tmp_path, scenario)


def test_the_time_of_use_survives_a_restart(tmp_path: Path) -> None:
    async def before(bench: Workbench) -> None:
        for seed in (1, 2):
            await bench.whole(talk(seed, other(seed)))
        await bench.whole(ask("x"))
        await hits(bench, talk(3, other(1)))
        while prompts_of(bench)._tasks:
            await bench.settle()

    async def after(bench: Workbench) -> None:
        bench._now = 1e9
        await bench.whole(talk(4, other(3)))
        await bench.whole(ask("x"))
        await hits(bench, talk(5, other(1)))

    alone(tmp_path, before, after, clock_step_s=3601.0)


def test_without_a_most_number_all_stay(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for seed in range(5):
            await bench.whole(talk(seed, other(seed)))
        assert counts(bench, "variants", "evicted_by_space") == (5, 0)

    alone(tmp_path, scenario, system_prompts=replace(LIMITS, most=0))


def test_a_smaller_number_after_a_restart_counts_at_the_next_look(tmp_path: Path) -> None:
    async def before(bench: Workbench) -> None:
        for seed in range(3):
            await bench.whole(talk(seed, other(seed)))

    async def after(bench: Workbench) -> None:
        assert counts(bench, "variants") == (3,), "opening removes nothing"
        bench.cache.tick()
        assert counts(bench, "variants", "evicted_by_space") == (1, 2)
        await hits(bench, talk(5, other(2)))

    alone(tmp_path, before, system_prompts=replace(LIMITS, most=0))
    alone(tmp_path, after, system_prompts=replace(LIMITS, most=1))


def test_they_go_by_bytes(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def one(bench: Workbench) -> None:
        await bench.whole(talk(1, other(1)))
        sizes.append(prompts_of(bench).disk.used_bytes)

    async def two(bench: Workbench) -> None:
        await bench.whole(talk(2, other(2)))
        assert counts(bench, "variants", "evicted_by_space") == (1, 1)
        assert prompts_of(bench).disk.used_bytes <= sizes[0]
        await bench.whole(ask("x"))
        await hits(bench, talk(3, other(2)))

    alone(tmp_path, one)
    alone(tmp_path, two, system_prompts=replace(LIMITS, budget_bytes=sizes[0] + PAGE))


def test_one_larger_than_the_budget_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Workbench) -> None:
        for seed in (1, 2):
            await bench.whole(talk(seed))
        assert counts(bench, "variants", "written", "oversized") == (0, 0, 1)

    with caplog.at_level(logging.WARNING):
        alone(tmp_path, scenario, system_prompts=replace(LIMITS, budget_bytes=PAGE))
    assert [m for m in caplog.messages if f"a system prompt of {END} tokens is not kept" in m] == caplog.messages


def test_they_go_by_age_since_their_last_use(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for seed in (1, 2):
            await bench.whole(talk(seed, other(seed)))
        await bench.whole(ask("x"))
        bench._now += 900
        await hits(bench, talk(3, other(1)))
        bench._now += 500
        bench.cache.tick()
        assert counts(bench, "variants", "evicted_by_age", "evicted_by_space") == (1, 1, 0)
        await bench.whole(ask("x"))
        await hits(bench, talk(4, other(1)))

    alone(tmp_path, scenario, system_prompts=replace(LIMITS, max_age_s=1000))


# ---------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize(
    ("rules", "is_hit"),
    [({"n_min": END + 1}, False), ({"n_min": END}, True), ({"similarity": 0.95}, False), ({"similarity": 0.8}, True)],
)
def test_a_weak_hit_is_none(tmp_path: Path, rules: dict[str, Any], is_hit: bool) -> None:
    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def after(bench: Workbench) -> None:
        await (hits if is_hit else misses)(bench, talk(2))
        assert counts(bench, "hits", "misses") == (int(is_hit), int(not is_hit))

    alone(tmp_path, before)
    alone(tmp_path, after, limits=replace(default_limits(), **rules))


@every_memory
def test_memory_admits_it_or_not(tmp_path: Path, memory: str, caplog: pytest.LogCaptureFixture) -> None:
    limits = replace(default_limits(), floors=Floors(parking_bytes=1 << 41, transient_bytes=1 << 40))

    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def refused(bench: Workbench) -> None:
        bench.free_bytes = 1 << 39
        await misses(bench, talk(2))
        assert counts(bench, "hits", "misses", "admitted", "admitted_transient", "admission_refused") == (0, 1, 0, 0, 1)

    async def transient(bench: Workbench) -> None:
        bench.free_bytes = (1 << 40) + (1 << 39)
        await hits(bench, talk(3))
        assert counts(bench, "hits", "misses", "admitted", "admitted_transient", "admission_refused") == (1, 0, 0, 1, 0)

    alone(tmp_path, before, memory=memory, limits=replace(default_limits(), checkpoints=CheckpointLimits(root=500)))
    with caplog.at_level(logging.INFO):
        alone(tmp_path, refused, transient, memory=memory, limits=limits)
    assert any(m.startswith("system-prompt hit under the transient RAM floor (need") for m in caplog.messages)


def test_it_is_not_written_when_memory_does_not_admit_that(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.free_bytes = None
        await bench.whole(talk(1))
        assert counts(bench, "written", "variants") == (0, 0)
        bench.free_bytes = 1 << 50
        await bench.whole(later(talk(1), "ok"))
        assert counts(bench, "written") == (1,), "it is in the slot still"

    alone(tmp_path, scenario)


# --------------------------------------------------------------------------------------------------------------- damage


def damage(bench: Workbench) -> None:
    """One bit of the only variant: of its checkpoint if it has one, else of its first segment."""
    root = prompts_of(bench).disk.level.root
    (entry,) = prompts_of(bench).disk.index.conversations()
    flip(next(root.rglob("*.ckpt"), root / segment_path(entry.keys[0], 0)))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[PAGE + 1] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("ladder", [True, False])
@every_memory
def test_a_damaged_one_is_set_aside_and_written_again(tmp_path: Path, memory: str, ladder: bool) -> None:
    limits = replace(default_limits(ladder=ladder), checkpoints=CheckpointLimits(root=500))

    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def after(bench: Workbench) -> None:
        damage(bench)
        await misses(bench, talk(2))
        assert counts(bench, "hits", "misses", "tokens_saved", "written") == (0, 1, 0, 1)
        assert prompts_of(bench).disk.counters.quarantined == 1
        assert bench.cache.counters.restore_failures == 1
        await bench.whole(ask("x"))
        await hits(bench, talk(3))
        assert counts(bench, "hits", "misses", "variants") == (1, 1, 1)

    async def last(bench: Workbench) -> None:
        await hits(bench, talk(4))

    alone(tmp_path, before, after, last, memory=memory, limits=limits)


def test_with_the_ladder_what_is_sound_of_it_is_used(tmp_path: Path) -> None:
    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def after(bench: Workbench) -> None:
        (entry,) = prompts_of(bench).disk.index.conversations()
        flip(prompts_of(bench).disk.level.root / segment_path(segments_of(entry)[1].key, 0))
        answer = await bench.whole(talk(2))
        assert (answer.report.source, answer.report.reused) == ("system-prompt", 256)
        assert counts(bench, "hits", "misses", "tokens_saved", "written") == (1, 0, 256, 1)

    alone(tmp_path, before, after)


@pytest.mark.parametrize("ladder", [True, False])
@pytest.mark.parametrize("memory", ["checkpoints", "recurrent", "opaque"])
def test_rung_4_of_memory_that_cannot_be_cut(tmp_path: Path, memory: str, ladder: bool) -> None:
    limits = replace(default_limits(ladder=ladder), checkpoints=CheckpointLimits(root=500))

    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def after(bench: Workbench) -> None:
        for path in bench.disk.level.root.glob("seg/*/*.ckpt"):
            flip(path)
        answer = await bench.whole(talk(1))
        assert answer.report.reused == (END if ladder else 0)
        rungs = bench.cache.counters.ladder_used
        assert (rungs["system_prompt"], rungs["good_part"]) == (int(ladder), 0)
        assert counts(bench, "hits", "misses", "tokens_saved") == (int(ladder), 0, END * ladder)
        assert answer.report.source.endswith("system-prompt" if ladder else "none")

    alone(tmp_path, before, after, memory=memory, limits=limits, conversations=True)


@pytest.mark.parametrize("missing", ["segment", "manifest"])
def test_one_with_a_missing_file_is_written_again(tmp_path: Path, missing: str) -> None:
    async def before(bench: Workbench) -> None:
        await bench.whole(talk(1))

    async def after(bench: Workbench) -> None:
        await misses(bench, talk(2))
        await bench.whole(ask("x"))
        await hits(bench, talk(3))
        assert counts(bench, "hits", "misses", "variants", "written") == (1, 1, 1, 1)

    alone(tmp_path, before)
    pattern = "seg/*/*.seg" if missing == "segment" else "*.meta"
    next((tmp_path / SYSTEM_PROMPTS_FOLDER).glob(pattern)).unlink()
    alone(tmp_path, after)


# ---------------------------------------------------------------------------------------------------------------- races


@every_memory
def test_the_slot_is_wanted_while_it_is_written(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.engine.delay = lambda name: 40 if name == "capture" else 1
        for seed in (1, 2, 3):
            assert await bench.turn(talk(seed, other(seed))) is not None
        await bench.settle()
        assert counts(bench, "written", "given_up", "variants") == (3, 0, 3)

    async def after(bench: Workbench) -> None:
        for seed in (1, 2, 3):
            await hits(bench, talk(4, other(seed)))
            await bench.whole(ask("x"))

    alone(tmp_path, scenario, after, memory=memory, system_prompts=replace(LIMITS, most=0))


@pytest.mark.parametrize("memory", ["segments", "checkpoints"])
def test_the_engine_dies_while_it_is_written(tmp_path: Path, memory: str) -> None:
    async def scenario(bench: Workbench) -> None:
        killed = False

        def kill(step: str) -> None:
            nonlocal killed
            if step == "capture" and not killed and not bench.engine.running:  # not the turn's own checkpoint
                killed = True
                bench.engine.kill()

        bench.engine.on_step = kill
        await bench.turn(talk(1))
        await bench.settle()
        bench.engine.restart()
        assert killed
        assert counts(bench, "written", "given_up", "variants") == (0, 1, 0)
        await bench.whole(talk(2))
        assert counts(bench, "variants") == (1,)

    alone(tmp_path, scenario, memory=memory)


def test_a_state_that_is_owed_is_parked_though_its_system_prompt_is_being_written(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.free_bytes = None  # so the park at the end of the turn is refused
        assert await bench.turn(talk(1)) is not None
        bench.free_bytes = 1 << 50
        await bench.whole(talk(2, other(2)))
        assert bench.cache.counters.deferred >= 1
        assert bench.cache.counters.discards == 0
        answer = await bench.whole(talk(1))
        assert answer.report.source.endswith("cold")

    alone(tmp_path, scenario, conversations=True)


def test_conversations_are_neither_kept_nor_counted_as_lost(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for seed in (1, 2, 3):
            await bench.whole(talk(seed))
        counters = bench.cache.counters
        assert (counters.discards, counters.deferred, counters.parked_disk, counters.skipped) == (0, 0, 0, 0)
        assert bench.cache.status() == []

    alone(tmp_path, scenario)


def test_a_users_long_message_is_no_system_prompt(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for request in (ask(SYSTEM + " and what now?"), talk(1)):
            await bench.whole(request)
            await bench.whole(ask("x", system=""))
        assert counts(bench, "written", "variants") == (1, 1)

    alone(tmp_path, scenario)
