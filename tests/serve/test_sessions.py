"""The slots API on the fake engine: what is saved comes back, what is refused changes nothing, no slot is harmed.

Every completed answer is compared with the right one, and after every scenario the whole state is checked
(workbench.py): the slots hold what they claim, no memory is lost, the engine applied nothing wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.serve.workbench import LIMIT_S, Answer, Workbench, ask, later, play, states_of, ticks, until, words

from strata.cache.admission import Floors
from strata.cache.sessions import SessionMover
from strata.engine.fake_model import LAYERS
from strata.errors import (
    BadRequest,
    Busy,
    EngineGone,
    Forbidden,
    NoMemory,
    NotFound,
    NotSupported,
    SessionRefused,
    StrataError,
)
from strata.rules import prefix
from strata.serve.sessions import Sessions, slot_list
from strata.serve.slots import MOST_WAITING
from strata.store.format import digest
from strata.store.session import SessionFile, SessionFolder
from strata.store.session_format import encode_foot
from strata.types import MIB, PAGE

NAME = "talk.bin"
TALK = ask(words(1, 700), system=words(0, 300))
OTHER = ask(words(2, 400))

Scenario = Callable[[Workbench, Sessions], Awaitable[None]]


def folder_of(bench: Workbench) -> Path:
    return bench.level.root.parent / "sessions"


def sessions_of(bench: Workbench, floors: Floors | None = None) -> Sessions:
    mover = SessionMover(
        engine=bench.engine,
        arena=bench.arena,
        folder=SessionFolder.open(folder_of(bench)),
        floors=floors or Floors(parking_bytes=0, transient_bytes=0),
        memory=lambda: bench.free_bytes,
    )
    return Sessions(bench.shop, mover)


def play_sessions(scenario: Scenario, root: Path, **options: Any) -> None:
    async def body(bench: Workbench) -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario(bench, sessions_of(bench))
        await bench.settle()
        assert not list(folder_of(bench).rglob(".*")), "a temporary file was left behind"

    play(body, root / "level", **options)


def slot_of(bench: Workbench, answer: Answer) -> int:
    """The slot that holds the conversation of an answer."""
    n = answer.completed.prompt_tokens + answer.completed.completion_tokens - 1
    return next(slot.index for slot in bench.slots.all if len(slot.tokens) == n)


# ------------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize(("stages", "block_tokens"), [(1, 256), (3, 100), (2, 7)])
def test_a_saved_conversation_goes_on_after_it_was_erased(tmp_path: Path, stages: int, block_tokens: int) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        first = await bench.whole(TALK)
        at = slot_of(bench, first)
        held = bench.slots.all[at].tokens
        states = list(bench.engine.states[at])
        saved = await sessions.save(at, NAME, "")
        assert saved.n_tokens == len(held)
        assert saved.n_bytes == (folder_of(bench) / NAME).stat().st_size
        assert await sessions.erase(at, "") == len(held)
        assert bench.engine.states[at] == []
        target = 1 - at
        restored = await sessions.restore(target, NAME, "")
        assert (restored.n_tokens, restored.n_bytes) == (saved.n_tokens, saved.n_bytes)
        assert bench.engine.states[target] == states
        assert np.array_equal(bench.slots.all[target].tokens, held)
        second = await bench.whole(later(TALK, first.text))
        assert second.report.source == "session"
        assert second.report.reused == len(held)
        third = await bench.whole(later(later(TALK, first.text), second.text))
        assert third.report.source == "live"

    play_sessions(scenario, tmp_path, stages=stages, block_tokens=block_tokens)


def test_a_restored_session_is_parked_when_it_leaves(tmp_path: Path) -> None:
    async def first_life(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        await sessions.save(0, NAME, "")

    async def second_life(bench: Workbench, sessions: Sessions) -> None:
        await sessions.restore(0, NAME, "")
        assert bench.disk.index.conversations() == ()
        await bench.whole(OTHER)
        assert len(bench.disk.index.conversations()) == 2
        again = await bench.whole(TALK)
        assert "cold" in again.report.source
        assert again.report.reused == again.report.total - 1

    play_sessions(first_life, tmp_path, slots=1)
    moved = tmp_path / "second"
    moved.mkdir()
    (tmp_path / "sessions").rename(moved / "sessions")
    play_sessions(second_life, moved, slots=1)


def test_what_a_restore_or_an_erase_takes_away_is_parked_first(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        await sessions.save(0, NAME, "")
        await sessions.erase(0, "")
        await sessions.restore(0, NAME, "")
        assert bench.slots.all[0].owed
        await bench.whole(OTHER)
        await sessions.restore(0, NAME, "")  # OTHER goes
        again = await bench.whole(OTHER)
        assert "cold" in again.report.source
        await sessions.erase(0, "")
        again = await bench.whole(OTHER)
        assert "cold" in again.report.source

    play_sessions(scenario, tmp_path, slots=1)


def test_a_session_replaces_one_of_its_name(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        answers = [await bench.whole(TALK), await bench.whole(OTHER)]
        for answer in answers:
            await sessions.save(slot_of(bench, answer), NAME, "")
        n = answers[1].completed.prompt_tokens + answers[1].completed.completion_tokens - 1
        assert (await sessions.restore(0, NAME, "")).n_tokens == n
        assert [path.name for path in folder_of(bench).iterdir()] == [NAME]

    play_sessions(scenario, tmp_path)


def test_two_blocks_are_held_at_once_and_no_more(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        before, most = bench.arena.used_bytes, 0
        seen: list[int] = []
        bench.engine.on_step = lambda _: seen.append(bench.arena.used_bytes - before)
        block = 3 * (PAGE + 3 * PAGE)  # three stages: head room, and 24 + 256 * 32 bytes in whole pages
        await sessions.save(0, NAME, "")
        await sessions.restore(1, NAME, "")
        most = max(seen)
        assert 0 < most <= 2 * block

    play_sessions(scenario, tmp_path, stages=3)


# ------------------------------------------------------------------------------------------------------- busy and whose


def test_an_action_waits_for_a_busy_slot_and_harms_no_reply(tmp_path: Path) -> None:
    long = ask(words(3, 300), max_tokens=200)

    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        await sessions.save(0, NAME, "")
        # The reply takes its time until both wait for it.
        bench.engine.delay = lambda name: 5000 if name == "event" and bench.slots.waiting < 2 else 1
        running = asyncio.create_task(bench.turn(long))
        await until(lambda: bench.slots.all[0].doing == "writing")
        save = asyncio.create_task(sessions.save(0, "long.bin", ""))
        restore = asyncio.create_task(sessions.restore(0, NAME, ""))
        await until(lambda: bench.slots.waiting == 2)
        next_turn = asyncio.create_task(bench.turn(OTHER))
        answer = await running
        assert answer is not None and len(answer.text) == 200
        assert (await save).n_tokens == answer.completed.prompt_tokens + 199
        await restore
        assert await next_turn is not None

    play_sessions(scenario, tmp_path, slots=1)


def test_waiting_is_bounded_and_may_be_given_up(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        slot = bench.slots.all[0]
        await bench.slots.take_one(slot, "testing")
        waiting = [asyncio.create_task(sessions.erase(0, "")) for _ in range(MOST_WAITING)]
        await ticks(2)
        with pytest.raises(Busy):
            await sessions.erase(0, "")
        for task in waiting[:-1]:
            task.cancel()
        await ticks(2)
        bench.slots.give_back(slot)
        waiting[-2].cancel()
        assert await waiting[-1] == held[0]
        # The one that was woken and cancelled at once passes the slot on.
        await bench.slots.take_one(slot, "testing")
        one, two = (asyncio.create_task(sessions.erase(0, "")) for _ in range(2))
        await ticks(2)
        bench.slots.give_back(slot)
        one.cancel()
        assert await two == 0

    async def body(bench: Workbench, sessions: Sessions) -> None:
        prompt = await bench.prompt_of(TALK)
        held.append(len(prompt) + 3)
        await scenario(bench, sessions)

    held: list[int] = []
    play_sessions(body, tmp_path, slots=1)


def test_a_request_that_was_promised_a_slot_keeps_it(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        slots = bench.slots
        for slot in slots.all:
            await slots.take_one(slot, "testing")
        turns = [asyncio.create_task(bench.turn(request)) for request in (TALK, OTHER)]
        await until(lambda: slots.waiting == 2)
        for slot in slots.all:
            slots.give_back(slot)  # both are promised, neither has run
        erase = asyncio.create_task(sessions.erase(0, ""))
        await asyncio.gather(*turns)
        assert await erase > 0

    play_sessions(scenario, tmp_path)


def test_of_another_key_nothing_is_saved_erased_or_restored(tmp_path: Path) -> None:
    mine, yours = ask(words(1, 300), namespace="a" * 32), ask(words(1, 300), namespace="b" * 32)

    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        answer = await bench.whole(mine)
        at = slot_of(bench, answer)
        before = list(bench.engine.states[at])
        for namespace in ("b" * 32, ""):
            with pytest.raises(Forbidden):
                await sessions.save(at, NAME, namespace)
            with pytest.raises(Forbidden):
                await sessions.erase(at, namespace)
        await sessions.save(at, NAME, "a" * 32)
        for namespace in ("b" * 32, ""):
            with pytest.raises(NotFound) as missing:
                await sessions.restore(1 - at, NAME, namespace)
            with pytest.raises(NotFound) as other:
                await sessions.restore(1 - at, "never.bin", namespace)
            assert missing.value.message.replace(NAME, "never.bin") == other.value.message
        # Also when its file is copied to where the other key looks.
        theirs = folder_of(bench) / ("b" * 32)
        theirs.mkdir()
        (theirs / NAME).write_bytes((folder_of(bench) / ("a" * 32) / NAME).read_bytes())
        with pytest.raises(NotFound):
            await sessions.restore(1 - at, NAME, "b" * 32)
        assert bench.engine.states[at] == before
        # A restore may take an idle slot of anybody, as a request may; what it held is parked.
        await bench.whole(yours)
        await sessions.save(1 - at, NAME, "b" * 32)
        await sessions.restore(at, NAME, "b" * 32)
        again = await bench.whole(later(mine, answer.text))
        assert again.report.reused == len(before)

    play_sessions(scenario, tmp_path)


def test_the_list_of_slots_tells_nothing_of_others(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        answer = await bench.whole(ask(words(1, 300), namespace="a" * 32))
        at = slot_of(bench, answer)
        fingerprint = bench.engine.info.fingerprint
        for namespace, n_past in (("a" * 32, len(bench.engine.states[at])), ("b" * 32, None)):
            shown = slot_list(bench.slots, context=4096, root=prefix.root_key(fingerprint, namespace))
            assert [slot["id"] for slot in shown] == [0, 1]
            assert all(slot["n_ctx"] == 4096 and not slot["is_processing"] for slot in shown)
            assert shown[at].get("n_past") == n_past
            assert shown[1 - at]["n_past"] == 0

    play_sessions(scenario, tmp_path)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "x ", "con.bin"])
def test_a_bad_name_is_refused_before_anything_else(tmp_path: Path, name: str) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        for action in (sessions.save, sessions.restore):
            with pytest.raises(BadRequest) as error:
                await action(99, name, "")
            assert error.value.field == "filename"

    play_sessions(scenario, tmp_path)


def test_missing_things(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        first = await bench.whole(TALK)
        at = slot_of(bench, first)
        for index in (-1, 2, 999):
            for job in (sessions.save(index, NAME, ""), sessions.restore(index, NAME, ""), sessions.erase(index, "")):
                with pytest.raises(NotFound):
                    await job
        with pytest.raises(BadRequest, match="empty") as error:
            await sessions.save(1 - at, NAME, "")
        assert error.value.field == "id_slot"
        with pytest.raises(NotFound):
            await sessions.restore(at, NAME, "")
        assert await sessions.erase(1 - at, "") == 0
        second = await bench.whole(later(TALK, first.text))  # the slot was left alone (CASES A2)
        assert second.report.source == "live"

    play_sessions(scenario, tmp_path)


def test_a_model_whose_memory_cannot_be_moved_says_so(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        bench.engine.info = msgspec.structs.replace(bench.engine.info, mode="opaque", mode_reason="sliding window")
        with pytest.raises(NotSupported, match="sliding window"):
            await sessions.save(0, NAME, "")

    play_sessions(scenario, tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": b"g" * 32, "kv": "q8_0"}, "identity"),
        ({"vocab_tokens": 20}, "tokens"),
        ({"context": 500}, "tokens"),
        ({"context": 900}, "tokens"),
        ({"block_tokens": 100}, "stages"),
        ({"row_layers": tuple(range(LAYERS + 1))}, "stages"),
    ],
)
def test_a_session_of_another_server_is_refused_before_the_engine_hears_of_it(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        await sessions.save(0, NAME, "")
        before = [list(states) for states in bench.engine.states]
        right, steps = bench.engine.info, list[str]()
        bench.engine.info = msgspec.structs.replace(right, **changes)
        bench.engine.on_step = steps.append
        with pytest.raises(SessionRefused) as error:
            await sessions.restore(0, NAME, "")
        assert error.value.field == field
        assert steps == []
        assert bench.engine.states == before
        bench.engine.info = right
        await sessions.restore(0, NAME, "")

    play_sessions(scenario, tmp_path)


def test_damage_anywhere_is_refused_with_every_slot_as_it_was(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        await bench.whole(OTHER)
        await sessions.save(0, NAME, "")
        path = folder_of(bench) / NAME
        good = path.read_bytes()
        before = [list(states) for states in bench.engine.states]
        held = [slot.tokens for slot in bench.slots.all]
        for at in (0, 9, 20, PAGE + 40, *range(2 * PAGE, len(good), 3 * PAGE), len(good) - PAGE, len(good) - 1):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(SessionRefused):
                await sessions.restore(1, NAME, "")
        for size in range(0, len(good), 2 * PAGE + 11):
            path.write_bytes(good[:size])
            with pytest.raises(SessionRefused):
                await sessions.restore(1, NAME, "")
        assert bench.engine.states == before
        assert all(slot.tokens is tokens for slot, tokens in zip(bench.slots.all, held, strict=True))
        path.write_bytes(good)
        await sessions.restore(1, NAME, "")

    play_sessions(scenario, tmp_path)


def rewrite_payload(path: Path, file: SessionFile, index: int) -> None:
    """Replace the payload of one block, with every checksum right again."""
    data, plan, block = bytearray(path.read_bytes()), file.plan, file.plan.blocks[index]
    payload = data[block.offset : block.offset + 24] + np.random.default_rng(1).bytes(block.length - 24)
    data[block.offset : block.offset + block.length] = payload
    at = plan.table_offset + 16 * index
    data[at : at + 16] = digest(bytes(payload))
    table = bytes(data[plan.table_offset : plan.table_offset + plan.table_bytes])
    head, body = bytes(data[:PAGE]), bytes(data[PAGE : PAGE + plan.manifest_bytes])
    data[plan.foot_offset :] = encode_foot(file_bytes=len(data), head=head, manifest=body, table=table)
    path.write_bytes(data)


def test_a_forged_payload_harms_no_other_slot(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        other = await bench.whole(OTHER)
        at = slot_of(bench, other)
        await sessions.save(1 - at, NAME, "")
        file = SessionFolder.open(folder_of(bench)).open_file("", NAME, most_tokens=4096)
        rewrite_payload(folder_of(bench) / NAME, file, 2)
        before = list(bench.engine.states[at])
        await sessions.restore(1 - at, NAME, "")  # nothing can tell: the file is consistent
        assert bench.engine.wrong_restores > 0
        assert bench.engine.states[at] == before
        again = await bench.whole(later(OTHER, other.text))
        assert again.report.source == "live"
        bench.engine.wrong_restores = 0
        bench.slots.all[1 - at].owed = False
        await sessions.erase(1 - at, "")

    play_sessions(scenario, tmp_path)


def test_a_file_that_changes_between_the_passes_is_refused_and_leaves_the_slot_empty(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        await bench.whole(TALK)
        other = await bench.whole(OTHER)
        at = 1 - slot_of(bench, other)
        await sessions.save(at, NAME, "")
        path = folder_of(bench) / NAME
        good = path.read_bytes()
        before = list(bench.engine.states[1 - at])
        changed = list[str]()

        def change(step: str) -> None:
            if step in ("trim", "apply answered") and step not in changed:
                changed.append(step)
                if len(changed) == wanted:
                    with path.open("r+b") as file:  # in place: readers of this moment find the file as long as before
                        file.seek(len(good) // 2)
                        file.write(b"!" * 9)

        for wanted in (1, 2):
            path.write_bytes(good)
            changed.clear()
            bench.engine.on_step = change
            with pytest.raises(SessionRefused) as error:
                await sessions.restore(at, NAME, "")
            bench.engine.on_step = lambda _: None
            assert error.value.field == ("changed" if wanted == 1 else "digest")
            assert bench.engine.states[at] == []
            assert len(bench.slots.all[at].tokens) == 0
            assert bench.engine.states[1 - at] == before
        again = await bench.whole(TALK)  # it was parked before the slot was cleared
        assert "cold" in again.report.source

    play_sessions(scenario, tmp_path)


def test_memory_that_is_not_there_refuses_and_says_when_to_come_back(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, _: Sessions) -> None:
        sessions = sessions_of(bench, Floors(parking_bytes=2560 * MIB, transient_bytes=512 * MIB))
        await bench.whole(TALK)
        await sessions.save(0, NAME, "")
        before = list(bench.engine.states[0])
        for free in (None, 0, 500 * MIB):
            bench.free_bytes = free
            for action in (sessions.save, sessions.restore):
                with pytest.raises(NoMemory) as error:
                    await action(0, NAME, "")
                assert error.value.retry_after_s
        bench.free_bytes = 1 << 40
        assert bench.engine.states[0] == before
        bench.free_bytes = 600 * MIB  # above the transient floor
        await sessions.restore(0, NAME, "")
        counts = sessions.status()
        assert (counts["admitted"], counts["admitted_transient"], counts["admission_refused"]) == (1, 2, 6)

    play_sessions(scenario, tmp_path, slots=1)


# -------------------------------------------------------------------------------------------------------- interruptions


def test_an_engine_that_dies_at_any_step_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        for n in range(40):
            bench.engine.on_step = lambda _: None
            answer = await bench.whole(TALK)
            at = slot_of(bench, answer)
            await sessions.save(at, NAME, "")
            good = (folder_of(bench) / NAME).read_bytes()
            steps = 0

            def die(_: str, n: int = n) -> None:
                nonlocal steps
                steps += 1
                if steps == n + 1:
                    bench.engine.kill()

            bench.engine.on_step = die
            action = sessions.save(at, NAME, "") if n % 2 else sessions.restore(at, NAME, "")
            with contextlib.suppress(EngineGone):
                await action
            died = bench.engine.down
            bench.engine.restart()
            assert (folder_of(bench) / NAME).read_bytes() == good
            assert not any(slot.busy for slot in bench.slots.all)
            await bench.settle()
        assert not died, "the last rounds should outlive every step"

    play_sessions(scenario, tmp_path)


def test_a_cancelled_action_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        for n in range(60):
            answer = await bench.whole(TALK)
            at = slot_of(bench, answer)
            await sessions.save(at, NAME, "")
            action = asyncio.create_task(sessions.save(at, NAME, "") if n % 2 else sessions.restore(at, NAME, ""))
            await ticks(n // 2)
            action.cancel()
            await asyncio.wait({action})
            assert not any(slot.busy for slot in bench.slots.all)
            assert not list(folder_of(bench).glob(".*"))
            await bench.settle()

    play_sessions(scenario, tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_requests_and_actions_at_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    requests = [ask(words(i, rng.randint(50, 900)), namespace=rng.choice(["", "a" * 32])) for i in range(6)]

    async def one(bench: Workbench, sessions: Sessions) -> None:
        for _ in range(12):
            index, name = rng.randrange(3), f"{rng.randrange(3)}.bin"
            namespace = rng.choice(["", "a" * 32])
            with contextlib.suppress(StrataError):
                match rng.randrange(5):
                    case 0:
                        await sessions.save(index, name, namespace)
                    case 1:
                        await sessions.restore(index, name, namespace)
                    case 2:
                        await sessions.erase(index, namespace)
                    case _:
                        await bench.turn(rng.choice(requests))

    async def scenario(bench: Workbench, sessions: Sessions) -> None:
        bench.engine.delay = lambda _: rng.randrange(4)
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(one(bench, sessions))
        for slot in bench.slots.all:
            assert bench.engine.states[slot.index] == states_of(slot.tokens)

    play_sessions(scenario, tmp_path, slots=3, stages=2)
