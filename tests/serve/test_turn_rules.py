"""Turns on the fake engine: which slot, what is reused, and every way in which a turn can be interrupted.

Every completed answer is compared with the right one (workbench.py), and after every scenario the whole state is
checked: the index, the arena, the slots, the bytes on disk and what they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.serve.workbench import LIMIT_S, Workbench, ask, later, no_hook, play, ticks, until, words

from strata.engine.protocol import Done, Prepared
from strata.errors import EngineGone, RunError, StrataError
from strata.rules import prefix
from strata.serve.request import Admitted, Completed, Reading, Started, Text, TurnRequest
from strata.serve.slots import Slot, Slots
from strata.types import Key, Tokens

SYSTEM = words(0, 600)
FIRST = ask(words(1, 300))
OTHER = ask(words(2, 300))


# -------------------------------------------------------------------------------------------------- where it comes from


def test_the_events_of_a_turn_in_order(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        events = await bench.events(FIRST)
        kinds = [kind for kind, _ in itertools.groupby(type(event) for event in events)]
        assert kinds == [Admitted, Started, Reading, Text, Completed]

    play(scenario, tmp_path)


def test_a_conversation_goes_on_in_its_slot(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        second = await bench.whole(later(FIRST, first.text))
        assert second.report.source == "live"
        # The last sampled token of a reply is never held.
        assert second.report.reused == first.completed.prompt_tokens + first.completed.completion_tokens - 1

    play(scenario, tmp_path)


def test_the_same_prompt_twice_reads_its_last_token_again(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        again = await bench.whole(FIRST)
        assert again.text == first.text
        assert again.completed.cached_tokens == first.completed.prompt_tokens - 1

    play(scenario, tmp_path, slots=1)


def test_a_conversation_comes_back_from_disk_when_its_slot_was_taken(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        await bench.whole(OTHER)
        second = await bench.whole(later(FIRST, first.text))
        assert "cold" in second.report.source
        assert second.report.reused == first.completed.prompt_tokens + first.completed.completion_tokens - 1

    play(scenario, tmp_path, slots=1, stages=3)


def test_an_edited_turn_reuses_up_to_the_change(tmp_path: Path) -> None:
    texts = [words(i, 200) for i in range(5)]

    async def scenario(bench: Workbench) -> None:
        whole = ask(*texts)
        await bench.whole(whole)
        before = await bench.prompt_of(whole)
        await bench.whole(OTHER)
        for changed in (4, 2, 0):
            edited = ask(*texts[:changed], "Z" + texts[changed][1:], *texts[changed + 1 :])
            prompt = await bench.prompt_of(edited)
            shared = int((before[: len(prompt)] != prompt[: len(before)]).argmax())
            answer = await bench.whole(edited)
            assert answer.completed.cached_tokens == shared, changed
            await bench.whole(OTHER)

    play(scenario, tmp_path, slots=1)


def test_a_sub_agent_forks_what_it_shares_with_a_running_turn(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        parent = ask("first", system=SYSTEM, max_tokens=200)
        child = ask("second", system=SYSTEM)
        running = asyncio.create_task(bench.turn(parent))
        await until(lambda: bench.slots.all[0].doing == "active")
        forked = await bench.turn(child)
        assert forked is not None
        assert not running.done(), "the parent was to be running still"
        assert forked.report.source == "fork"
        assert forked.report.reused >= len(SYSTEM)
        assert await running is not None

    play(scenario, tmp_path)


@pytest.mark.parametrize("parked", [True, False])
def test_a_fork_that_is_refused_is_restored_or_read(
    tmp_path: Path, parked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a split pool has no memory for the copy."""

    async def scenario(bench: Workbench) -> None:
        async def refused(source: int, target: int, n: int) -> Done:
            return Done(job=0, ok=False, held=0, reason="no memory")

        bench.engine.fork = refused  # type: ignore[method-assign]
        parent = ask("first", system=SYSTEM, max_tokens=200)
        if parked:
            await bench.whole(parent)
        running = asyncio.create_task(bench.turn(parent))
        await until(lambda: bench.slots.all[0].doing == "active")
        with caplog.at_level(logging.INFO):
            child = await bench.turn(ask("second", system=SYSTEM))
        assert child is not None and child.report.source == ("cold" if parked else "none")
        assert (child.report.reused >= len(SYSTEM)) == parked
        assert [m for m in caplog.messages if "slot 1 restores or reads what slot 0 holds too: no memory" in m]
        assert await running is not None

    play(scenario, tmp_path)


def test_namespaces_share_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        mine = ask(words(1, 600), namespace="mine")
        theirs = ask(words(1, 600), namespace="theirs")
        first = await bench.whole(mine)
        assert (await bench.whole(theirs)).report.source == "none"
        assert (await bench.whole(later(mine, first.text))).report.reused > 600

    play(scenario, tmp_path)


def test_cache_prompt_off_reuses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        used = bench.level.used_bytes
        private = await bench.whole(ask(words(1, 300), max_tokens=4, cache_prompt=False))
        assert private.report.source == "none"
        assert bench.level.used_bytes == used
        assert bench.slots.all[0].root is None
        again = await bench.whole(ask(words(1, 300)))
        assert "cold" in again.report.source

    play(scenario, tmp_path, slots=1)


def test_a_prompt_is_prepared_for_its_namespace_or_for_nobody(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        owners, prepare = [], bench.engine.prepare

        async def noted(**given: Any) -> Prepared:
            owners.append(given["owner"])
            return await prepare(**given)

        bench.engine.prepare = noted  # type: ignore[method-assign]
        for request in (FIRST, ask(words(1, 300), namespace="a" * 32), ask(words(1, 300), cache_prompt=False)):
            assert await bench.turn(request) is not None
        assert owners == ["", "a" * 32, None]

    play(scenario, tmp_path)


def test_a_prompt_of_one_token(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        for _ in range(2):
            events = await bench.events(TurnRequest(text="x", max_tokens=1, ignore_eos=True))
            done = events[-1]
            assert isinstance(done, Completed)
            assert (done.prompt_tokens, done.cached_tokens) == (1, 0)

    play(scenario, tmp_path, slots=1)


@pytest.mark.parametrize("text", ["", "x" * 4096, "x" * 5000])
def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_done(tmp_path: Path, text: str) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        with pytest.raises(StrataError) as refused:
            await bench.events(TurnRequest(text=text, max_tokens=1))
        assert refused.value.status == 400
        assert not text or (str(len(text)) in refused.value.message and "4096" in refused.value.message)
        assert (await bench.whole(later(FIRST, first.text))).report.source == "live"

    play(scenario, tmp_path, slots=1)


def test_an_idle_slot_that_owes_nothing_is_taken_first(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        seats = [await seat_of(bench, ask(words(i, 300))) for i in range(3)]
        assert sorted(seats) == [0, 1, 2], "an empty slot was left for one that holds something"
        assert await seat_of(bench, ask(words(9, 300))) == seats[0], "the least recently used goes first"

    play(scenario, tmp_path, slots=3)


async def seat_of(bench: Workbench, request: TurnRequest) -> int:
    started = [event for event in await bench.events(request) if isinstance(event, Started)]
    await bench.settle()
    return started[0].slot


# -------------------------------------------------------------------------------------------------------- interruptions


async def interrupted(bench: Workbench, at_step: int, action: Callable[[asyncio.Task[object]], None]) -> bool:
    """A restored turn with `action` at its step `at_step`; whether the turn came that far.

    Slot 0 holds another conversation, so that it must give way, and the turn is restored from disk.
    """
    first = await bench.whole(FIRST)
    await bench.whole(ask(words(3, 700), words(4, 40), "x"))
    steps = itertools.count()
    reached = False

    def hook(_: str) -> None:
        nonlocal reached
        if next(steps) == at_step:
            reached = True
            action(task)

    bench.engine.on_step = hook
    task: asyncio.Task[object] = asyncio.create_task(bench.turn(later(FIRST, first.text)))
    with contextlib.suppress(asyncio.CancelledError, StrataError):
        await asyncio.wait_for(task, LIMIT_S)
    bench.engine.restart()
    await bench.settle()
    return reached


async def all_is_well(bench: Workbench) -> None:
    """What was parked before is still there, and new turns are right."""
    bench.engine.on_step = no_hook
    bench.engine.restart()
    await bench.check()
    again = await bench.whole(later(FIRST, (await bench.whole(FIRST)).text))
    assert again.completed.cached_tokens > 300
    await bench.whole(ask(words(3, 700)))
    await bench.check()


def at_every_step(root: Path, action: Callable[[Workbench], Callable[[asyncio.Task[object]], None]]) -> int:
    """Play `interrupted` with the action at every step there is; how many there were."""
    for at_step in itertools.count():
        reached = False

        async def scenario(bench: Workbench, at_step: int = at_step) -> None:
            nonlocal reached
            reached = await interrupted(bench, at_step, action(bench))
            await all_is_well(bench)

        play(scenario, root / str(at_step), slots=1)
        if not reached:
            return at_step
    raise AssertionError


def test_a_cancel_at_every_step(tmp_path: Path) -> None:
    assert at_every_step(tmp_path, lambda _: lambda task: void(task.cancel())) > 15


def test_the_engine_dies_at_every_step(tmp_path: Path) -> None:
    assert at_every_step(tmp_path, lambda bench: lambda _: bench.engine.kill()) > 15


def test_the_engine_dies_and_is_back_at_once_at_every_step(tmp_path: Path) -> None:
    def die(bench: Workbench) -> None:
        bench.engine.kill()
        bench.engine.restart()

    assert at_every_step(tmp_path, lambda bench: lambda _: die(bench)) > 15


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0], ids=["nothing", "half", "all"])
def test_an_engine_error_at_every_event(tmp_path: Path, kept: float) -> None:
    for at in itertools.count():
        failed = False

        async def scenario(bench: Workbench, at: int = at) -> None:
            nonlocal failed
            events = itertools.count()

            def hook(name: str) -> None:
                if name == "event" and next(events) == at:
                    raise RunError("llama.cpp could not decode", held=int(kept * len(bench.engine.states[0])))

            await bench.whole(OTHER)
            bench.engine.on_step = hook
            try:
                await bench.turn(FIRST)
            except RunError:
                failed = True
            bench.engine.on_step = no_hook
            await bench.check()
            await bench.whole(FIRST)
            await bench.whole(OTHER)

        play(scenario, tmp_path / str(at), slots=1)
        if not failed:
            assert at > 5
            return


def test_a_client_that_leaves_after_any_event(tmp_path: Path) -> None:
    for stop_after in itertools.count():
        answered = False

        async def scenario(bench: Workbench, stop_after: int = stop_after) -> None:
            nonlocal answered
            first = await bench.whole(FIRST)
            await bench.whole(OTHER)
            request = later(FIRST, first.text)
            answered = await bench.turn(request, stop_after=stop_after) is not None
            await bench.check()
            again = await bench.whole(request)
            assert again.completed.cached_tokens >= first.completed.prompt_tokens

        play(scenario, tmp_path / str(stop_after), slots=1)
        if answered:
            assert stop_after > 5
            return


def void(_: object) -> None:
    """For actions that give something back."""


def test_what_was_read_of_a_cancelled_prompt_is_kept_in_the_slot(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        assert await bench.turn(FIRST, stop_after=3) is None
        await bench.check()
        assert bench.level.usage() == 0 or not bench.disk.index.conversations(), "a cancelled turn was parked"
        answer = await bench.whole(FIRST)
        opener = prefix.frontier(await bench.prompt_of(FIRST), bench.engine.info.openers)
        assert answer.completed.cached_tokens == opener, "back to the last turn opener that was evaluated"

    play(scenario, tmp_path, slots=1)


def test_no_engine_no_answer_and_no_harm(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        bench.engine.kill()
        with pytest.raises(EngineGone) as gone:
            await bench.turn(OTHER)
        assert gone.value.status == 503
        bench.engine.restart()
        again = await bench.whole(later(FIRST, first.text))
        assert "cold" in again.report.source

    play(scenario, tmp_path)


# ------------------------------------------------------------------------------------------------------------ the queue


def test_a_newcomer_does_not_take_the_slot_of_a_woken_one(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        bench.engine.delay = lambda _: 0
        turns = [asyncio.create_task(bench.turn(ask(words(i, 40)))) for i in range(3)]
        for i in range(3, 40):  # somebody arrives at every moment, so one arrives while another is being woken
            await ticks(i % 5)
            turns.append(asyncio.create_task(bench.turn(ask(words(i, 40)))))
        answers = await asyncio.gather(*turns)
        assert all(answer is not None for answer in answers)

    play(scenario, tmp_path, slots=2)


async def take(slots: Slots, prompt: Tokens) -> Slot:
    """A slot for `prompt`, as a request takes it."""
    ticket = slots.enter(Key(b"root"), prompt, reuse=True)
    async with aclosing(slots.wait(ticket)) as places:
        async for _ in places:
            pass
    return slots.seated(ticket)[0]


def test_the_slots_hand_over_in_the_order_of_arrival(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        slots, prompt = bench.slots, await bench.prompt_of(FIRST)
        order: list[str] = []

        async def client(name: str) -> None:
            slot = await take(slots, prompt)
            order.append(name)
            await ticks(3)
            slots.give_back(slot)

        first = await take(slots, prompt)
        clients = [asyncio.create_task(client(name)) for name in "abc"]
        await ticks(2)
        slots.give_back(first)
        clients.append(asyncio.create_task(client("late")))
        await asyncio.gather(*clients)
        assert order == ["a", "b", "c", "late"]

    play(scenario, tmp_path, slots=1)


def test_a_waiting_client_leaves_at_any_moment(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        slots, prompt = bench.slots, await bench.prompt_of(FIRST)
        for leaves_before in (True, False):
            slot = await take(slots, prompt)
            waiting = asyncio.create_task(take(slots, prompt))
            behind = asyncio.create_task(take(slots, prompt))
            await ticks(2)
            if leaves_before:
                waiting.cancel()
                slots.give_back(slot)  # the one that leaves has not noticed yet
            else:
                slots.give_back(slot)
                waiting.cancel()  # it was woken, and leaves before it runs
            (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError), repr(outcome)
            slots.give_back(await asyncio.wait_for(behind, LIMIT_S))

    play(scenario, tmp_path, slots=1)


def test_cancelled_in_the_queue(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        running = asyncio.create_task(bench.turn(ask(words(1, 40), max_tokens=50)))
        await until(lambda: bench.slots.all[0].busy)
        waiting = [asyncio.create_task(bench.turn(ask(words(i, 40)))) for i in range(2, 6)]
        await until(lambda: bench.slots.waiting == 4)
        waiting[0].cancel()
        waiting[2].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [task.cancelled() for task in waiting] == [True, False, True, False]
        assert await running is not None

    play(scenario, tmp_path, slots=1)
