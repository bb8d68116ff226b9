"""The queue for a slot, on the fake engine: places, limits, ageing, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.serve.workbench import Workbench, ask, play, ticks, until, words

from strata.errors import Busy, WaitedTooLong
from strata.rules.queue import AGED_S
from strata.serve.queue import Queue, QueueLimits
from strata.serve.request import Started, Waiting
from strata.serve.turn import run_turn

LONG = ask(words(1, 300), max_tokens=40)


def limited(bench: Workbench, *, clock: Callable[[], float] | None = None, **limits: float) -> Queue:
    """Put these limits on the queue, before anybody waits."""
    now = clock or asyncio.get_running_loop().time
    bench.slots.queue = Queue(QueueLimits(**limits), now)  # type: ignore[arg-type]
    bench.slots._clock = now
    return bench.slots.queue


def status(queue: Queue, *names: str) -> list[object]:
    found = queue.status()
    return [found[name] for name in names]


async def places(bench: Workbench, seed: int) -> list[tuple[int, int]]:
    """The places in the queue that a turn is told of."""
    told = []
    async for event in run_turn(bench.shop, ask(words(seed, 40))):
        if isinstance(event, Waiting):
            told.append((event.position, event.total))
    return told


def test_who_waits_is_told_each_place(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        running = asyncio.create_task(bench.turn(LONG))
        await until(lambda: bench.slots.all[0].busy)
        first = asyncio.create_task(places(bench, 2))
        await until(lambda: bench.slots.waiting == 1)
        second = asyncio.create_task(places(bench, 3))
        await until(lambda: bench.slots.waiting == 2)
        assert await running is not None
        assert await first == [(1, 1), (1, 2)]
        assert await second == [(2, 2), (1, 1)]
        assert await places(bench, 4) == [], "an idle slot is taken at once"

    play(scenario, tmp_path, slots=1)


def test_a_full_queue_refuses_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        queue = limited(bench, most=1)
        running = asyncio.create_task(bench.turn(LONG))
        await until(lambda: bench.slots.all[0].busy)
        waiting = asyncio.create_task(bench.turn(ask(words(2, 40))))
        await until(lambda: bench.slots.waiting == 1)
        with pytest.raises(Busy, match="1 requests wait") as caught:
            await places(bench, 3)
        assert caught.value.status == 429 and caught.value.retry_after_s
        with pytest.raises(Busy):
            await bench.slots.take_one(bench.slots.all[0], "testing")
        assert await running is not None and await waiting is not None
        assert status(queue, "waiting", "refused", "longest_wait_s") == [0, 2, None]

    play(scenario, tmp_path, slots=1)


def test_nobody_may_wait(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        limited(bench, most=0)
        running = asyncio.create_task(bench.turn(LONG))
        await until(lambda: bench.slots.all[0].busy)
        assert await places(bench, 2) == [], "the other slot is idle"
        await bench.slots.take_one(bench.slots.all[1], "testing")
        with pytest.raises(Busy):
            await places(bench, 3)
        bench.slots.give_back(bench.slots.all[1])
        assert await running is not None

    play(scenario, tmp_path, slots=2)


def test_who_waits_too_long_is_refused(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        queue = limited(bench, most=9, wait_s=0.02)
        slot = bench.slots.all[0]
        await bench.slots.take_one(slot, "testing")
        with pytest.raises(WaitedTooLong, match=r"0\.02 s") as caught:
            await places(bench, 2)
        assert caught.value.status == 503 and caught.value.retry_after_s
        with pytest.raises(WaitedTooLong):
            await bench.slots.take_one(slot, "testing")
        assert status(queue, "waiting", "timed_out", "wait_limit_s") == [0, 2, 0.02]
        bench.slots.give_back(slot)
        assert await places(bench, 3) == []

    play(scenario, tmp_path, slots=1)


def test_who_leaves_makes_room_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        queue = limited(bench, most=2)
        slot = bench.slots.all[0]
        await bench.slots.take_one(slot, "testing")
        gone, stays = (asyncio.create_task(places(bench, seed)) for seed in (2, 3))
        await until(lambda: len(queue) == 2)
        gone.cancel()
        await until(lambda: len(queue) == 1)
        assert status(queue, "left") == [1]
        late = asyncio.create_task(places(bench, 4))
        await until(lambda: len(queue) == 2)
        await ticks(3)
        bench.slots.give_back(slot)
        assert (await stays)[-1] == (1, 2)
        assert (await late)[0] == (2, 2)

    play(scenario, tmp_path, slots=1)


@pytest.mark.parametrize("waited_s", [0.0, AGED_S])
def test_an_aged_request_goes_before_an_action_that_came_later(tmp_path: Path, waited_s: float) -> None:
    async def scenario(bench: Workbench) -> None:
        time_s = [0.0]
        limited(bench, clock=lambda: time_s[0])
        slot, order = bench.slots.all[0], []
        await bench.slots.take_one(slot, "testing")

        async def action() -> None:
            await bench.slots.take_one(slot, "testing")
            order.append("action")
            bench.slots.give_back(slot)

        async def request() -> None:
            async for event in run_turn(bench.shop, ask(words(2, 40))):
                if isinstance(event, Started):
                    order.append("request")

        tasks = [asyncio.create_task(request())]
        await until(lambda: bench.slots.waiting == 1)
        time_s[0] += waited_s
        tasks.append(asyncio.create_task(action()))
        await until(lambda: bench.slots.waiting == 2)
        bench.slots.give_back(slot)
        await asyncio.gather(*tasks)
        assert order == (["request", "action"] if waited_s else ["action", "request"])

    play(scenario, tmp_path, slots=1)


def test_a_slot_tells_its_state(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        slot, states = bench.slots.all[0], []
        async for _ in run_turn(bench.shop, LONG):
            if slot.doing not in states:
                states.append(slot.doing)
        assert states == ["idle", "preparing", "ready", "active"]
        await ticks(1)

    play(scenario, tmp_path, slots=1)
