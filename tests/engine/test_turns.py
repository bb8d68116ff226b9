"""Steps as they are planned: bounded in time, shared, in order; and a step that reads is stopped for a cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.engine.rig import GREEDY
from tests.engine.test_loop import Stage, run

from strata.engine.protocol import Cancel, Delta, Finished, Held, Progress, Run, pack_tokens
from strata.engine.request import Request
from strata.engine.turns import Plan, Turns
from strata.rules.agenda import Knobs


def reading(number: int, n: int, checkpoints: tuple[int, ...] = ()) -> Request:
    tokens = pack_tokens([1] * n)
    command = Run(
        request=number,
        slot=number,
        keep=0,
        tokens=tokens,
        sampling=GREEDY,
        max_tokens=9,
        limit=9000,
        checkpoints=checkpoints,
    )
    return Request(command, 9000)


def writing(number: int) -> Request:
    request = reading(number, 5)
    request.begin_writing()
    return request


def turns(knobs: Knobs | None = None, token_s: float = 0.0001, *, stoppable: bool = True) -> Turns:
    return Turns(knobs or Knobs(enabled=True), full=512, rows=520, token_s=token_s, stoppable=stoppable)


def sizes(plan: Plan) -> list[tuple[int, int]]:
    return [(request.number, n) for request, n in plan.parts]


def nothing(slot: int) -> int:
    return 0


def test_rows_come_first_and_reads_share_the_batch() -> None:
    active = [reading(1, 200), writing(2), reading(3, 180), reading(4, 900)]
    assert sizes(turns().plan(active, nothing)) == [(2, 1), (1, 200), (3, 180), (4, 132)]


def test_checkpoints_cut_the_chunk() -> None:
    active = [reading(1, 400, checkpoints=(100, 300))]
    held = {1: 0}
    one = turns()
    seen = []
    while held[1] < 400:
        plan = one.plan(active, held.__getitem__)
        held[1] += plan.read_tokens
        seen.append(held[1])
    assert seen == [100, 300, 400]


def test_a_short_prompt_overtakes_a_long_one_and_is_counted_once() -> None:
    one = turns(Knobs())
    active = [reading(1, 6000), reading(2, 900), reading(3, 30), reading(4, 20)]
    for _ in range(3):
        assert sizes(one.plan(active, nothing)) == [(2, 462), (3, 30), (4, 20)]  # in the order of slots
        assert one._gave_way == {1: frozenset({2}), 2: frozenset({3})}


def test_a_chunk_beside_writing_is_bounded_in_time() -> None:
    active = [writing(2), reading(1, 6000)]
    assert sizes(turns(token_s=0.002).plan(active, nothing)) == [(2, 1), (1, 112)]  # 0.25 s, in steps of 16
    assert sizes(turns(token_s=1.0).plan(active, nothing)) == [(2, 1), (1, 16)]
    assert sizes(turns(token_s=0.002).plan(active[1:], nothing)) == [(1, 224)]
    assert sizes(turns(token_s=0.0005).plan(active[1:], nothing)) == [(1, 512)]
    assert sizes(turns(token_s=9.0).plan(active[1:], nothing)) == [(1, 64)]


def test_without_the_agenda_batches_beside_writing_are_full_if_they_can_be_stopped() -> None:
    active = [writing(2), reading(1, 6000)]
    assert sizes(turns(Knobs(), token_s=0.006).plan(active, nothing)) == [(1, 512)]
    assert sizes(turns(Knobs(), token_s=0.006).plan(active[1:], nothing)) == [(1, 64)]
    assert sizes(turns(Knobs(), token_s=0.002, stoppable=False).plan(active, nothing)) == [(1, 224)]


def test_writing_is_owed_its_share_of_a_step_that_was_stopped() -> None:
    one, active = turns(Knobs()), [writing(2), reading(1, 6000)]
    plan, pace = one.plan(active, nothing), one.token_s
    assert sizes(plan) == [(1, 512)]
    one.spent(plan, 1.0, 1)
    assert sizes(one.plan(active, nothing)) == [(2, 1)] and one.token_s == pace


def test_the_pace_is_measured() -> None:
    one = turns(token_s=0.002)
    active = [writing(2), reading(1, 6000)]
    for _ in range(20):
        plan = one.plan(active, nothing)
        one.done(plan, 0.004 * plan.read_tokens, 1)
    assert one.token_s == pytest.approx(0.004, rel=0.01)
    assert sizes(one.plan(active, nothing)) == [(2, 1), (1, 48)]


def test_with_the_agenda_off_reading_and_writing_take_turns() -> None:
    one = turns(Knobs())
    active = [writing(2), reading(1, 6000)]
    plan = one.plan(active, nothing)
    assert sizes(plan) == [(1, 512)]
    one.done(plan, 1.0, 1)
    rows = 0
    while sizes(plan := one.plan(active, nothing)) == [(2, 1)]:
        one.done(plan, 0.1, 1)
        rows += 1
    assert 10 <= rows <= 11 and sizes(plan) == [(1, 512)]
    assert sizes(one.plan(active[:1], nothing)) == [(2, 1)]


# ------------------------------------------------------------------------------------------------------------- the loop


@pytest.fixture
def stage(tiny_paths: dict[str, Path]) -> Iterator[Stage]:
    stage = Stage(tiny_paths["qwen2vl"], agenda=False)
    yield stage
    stage.served.context.close()


def test_agenda_off_gives_the_same_tokens(stage: Stage) -> None:
    ends = stage.play(run(1, 0, n=64, max_tokens=12), ends=1)
    alone = [event.tokens for event in stage.events if isinstance(event, Delta)]
    stage.events.clear()
    stage.loop._closing = False
    stage.served.slots.clear(0)
    ends = stage.play(run(2, 0, n=64, max_tokens=12), run(3, 1, n=128, max_tokens=2), ends=2)
    assert all(isinstance(end, Finished) for end in ends.values())
    assert len([e for e in stage.events if isinstance(e, Delta) and e.request == 2]) == len(alone) == 12


@pytest.mark.parametrize("name", ["qwen2vl", "gemma3"])
def test_a_cancelled_read_is_stopped_in_the_middle_of_its_step(
    name: str, tiny_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is as before that step, the neighbour untouched, and who read in the same step goes on."""
    stage = Stage(tiny_paths[name], agenda=False, read_chunk=100)
    context, loop = stage.served.context, stage.loop
    stage.play(run(1, 1, n=100, max_tokens=0), ends=1)
    before = context.state(1).tobytes()
    loop._closing = False
    decode, codes = context.decode, []

    def interrupted(rows: int) -> int:
        if loop._jobs.held(0) == 100 and not codes:
            stage.inbox.put(Cancel(request=2))
            setter = threading.Thread(target=loop.interrupt, args=(2,))  # as the reader thread does
            setter.start()
            setter.join()
            codes.append(decode(rows))
            return codes[-1]
        return decode(rows)

    monkeypatch.setattr(context, "decode", interrupted)
    ends = stage.play(run(2, 0, n=130), run(3, 2, n=120), ends=3)
    assert codes == [2]
    ended, other = ends[2], ends[3]
    assert isinstance(ended, Finished) and (ended.reason, ended.held) == ("cancelled", 100)
    assert isinstance(other, Finished) and other.timing.write_tokens == 4
    assert context.last_position(0) == 99 and context.state(1).tobytes() == before
    context.close()


def test_a_step_that_was_stopped_for_nothing_is_done_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    context = stage.served.context
    decode, left = context.decode, [2, 2, 0, 2]
    monkeypatch.setattr(context, "decode", lambda rows: (left.pop(0) if left else 0) or decode(rows))
    ended = stage.play(run(1, 0, max_tokens=3), ends=1)[1]
    assert isinstance(ended, Finished) and ended.timing.write_tokens == 3
    assert [event.held for event in stage.events if isinstance(event, Progress)] == [64, 128, 130]


def test_only_reads_are_stopped_and_not_twice_for_others(stage: Stage) -> None:
    loop, stop = stage.loop, stage.served.context.stop
    loop.interrupt(1)
    assert stop[0] == 0
    loop._stoppable, loop._was_stopped = frozenset({1}), True
    loop.interrupt(2)
    assert stop[0] == 0
    loop.interrupt(1)
    assert stop[0] == 1
    stop[0], loop._was_stopped = 0, False
    loop.interrupt(2)
    assert stop[0] == 1
    late = [Cancel(request=number) for number in (1, 2, 1, 2)]  # of requests that have ended
    ended = stage.play(*late, run(1, 0, max_tokens=1), ends=1)[1]  # the next step begins without it
    assert isinstance(ended, Finished) and ended.reason == "length"


@pytest.mark.parametrize("name", ["qwen2vl", "qwen35"])
def test_a_cancel_between_two_steps_is_not_missed(name: str, tiny_paths: dict[str, Path]) -> None:
    """It comes when the loop has looked for commands already, and the next step is planned: that step is not made."""
    stage = Stage(tiny_paths[name], agenda=False)
    loop, plan = stage.loop, stage.loop._turns.plan

    def planned(active: Sequence[Request], held: Callable[[int], int]) -> Plan:
        if held(0) == 64 and loop._cancels_told == 0:
            loop.interrupt(1)
            stage.inbox.put(Cancel(request=1))
        return plan(active, held)

    loop._turns.plan = planned  # type: ignore[method-assign]
    ended = stage.play(run(1, 0), ends=1)[1]
    assert isinstance(ended, Finished) and (ended.reason, ended.held) == ("cancelled", 64)
    assert stage.served.context.last_position(0) == 63
    stage.served.context.close()


def test_recurrent_memory_is_not_stopped(tiny_paths: dict[str, Path]) -> None:
    stage = Stage(tiny_paths["qwen35"])
    try:
        assert not stage.loop._can_stop
        ended = stage.play(run(1, 0, max_tokens=2), ends=1)[1]
        assert isinstance(ended, Finished) and ended.timing.write_tokens == 2
    finally:
        stage.served.context.close()


def test_the_pace_counts_the_chunk_that_ends_a_prompt(stage: Stage) -> None:
    stage.loop._turns.token_s = 1000.0
    stage.play(run(1, 0, n=60, max_tokens=1), ends=1)
    assert stage.loop._turns.token_s < 600


def test_memory_that_can_be_cut_ignores_checkpoints(stage: Stage) -> None:
    command = msgspec.structs.replace(run(1, 0, n=60, max_tokens=1), checkpoints=(20, 40), hold_end=True)
    stage.play(command, ends=1)
    assert [event.held for event in stage.events if isinstance(event, Progress)] == [60]
    assert not any(isinstance(event, Held) for event in stage.events)
