"""Memory that cannot be cut on two disk levels: a newer state supersedes the older ones, on whatever level they lie.

Each state that warm hands down, or that goes past it, must name what the one before it left in cold. As in
test_checkpoints.py, every answer and the whole state afterwards are checked by the workbench.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serve.test_checkpoints import flip_header, limits
from tests.serve.test_turn_levels import moved
from tests.serve.test_turn_past_warm import PLENTY, SmallVolumes
from tests.serve.workbench import Answer, Workbench, ask, default_limits, later, play, words

from strata.cache.disk import DiskLevel
from strata.cache.health import MARGIN_BYTES
from strata.cache.ram import RamLimits
from strata.rules.checkpoints import CheckpointLimits
from strata.serve.request import TurnRequest
from strata.types import MIB

KIB = 1 << 10
KEEP = 6
ROOT = len("system\n") + 600 + 2
SYSTEM = words(0, 600)
every_memory = pytest.mark.parametrize("memory", ["checkpoints", "recurrent"])
# A warm level that has one state of some turns, and not two.
tight = pytest.mark.parametrize(("memory", "warm_bytes"), [("checkpoints", 350 * KIB), ("recurrent", 130 * KIB)])


def opening(who: int) -> TurnRequest:
    return ask(words(who, 300), system=SYSTEM, namespace=f"n{who}")


async def talk(bench: Workbench, requests: list[TurnRequest], n_turns: int) -> list[Answer]:
    """`n_turns` rounds of all these conversations in turn; `requests` become what follows. The last answers."""
    answers: list[Answer] = []
    for turn in range(n_turns):
        answers = []
        for i, request in enumerate(requests):
            answers.append(await bench.whole(request))
            requests[i] = later(request, answers[-1].text, words(100 * i + turn, 120))
        await moved(bench)
    return answers


def entries(disk: DiskLevel) -> Counter[bytes]:
    """How many states of each conversation."""
    return Counter(c.conversation for c in disk.index.conversations())


def most(*disks: DiskLevel) -> int:
    return max(sum((entries(disk) for disk in disks), Counter[bytes]()).values(), default=0)


def held_positions(bench: Workbench) -> list[list[int]]:
    return [
        [at for at, _ in disk.index.usable_checkpoints(c.serial)]
        for disk in bench.cache.disks
        for c in disk.index.conversations()
    ]


def frontier_of(answer: Answer) -> int:
    return answer.completed.prompt_tokens - len("assistant\n") - 1


def end_of(answer: Answer) -> int:
    return answer.completed.prompt_tokens + answer.completed.completion_tokens - 1


@tight
def test_what_is_handed_down_supersedes_the_state_before_it(tmp_path: Path, memory: str, warm_bytes: int) -> None:
    requests = [opening(who) for who in range(1, 4)]
    ends: list[int] = []

    async def before(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        for turn in range(8):
            ends[:] = [end_of(answer) for answer in await talk(bench, requests, 1)]
            assert most(cold) <= 1, f"turn {turn}: {entries(cold)}"
            assert most(warm, cold) <= 2, f"turn {turn}"
        assert cold.counters.adopted == warm.counters.degraded >= 8, "most turns hand something down"
        assert cold.counters.superseded >= cold.counters.adopted - 3
        assert warm.counters.oversized == cold.counters.oversized == 0
        assert all(len(held) <= KEEP for held in held_positions(bench))
        assert all(c.checkpoints[0][0] == ROOT for c in cold.index.conversations())

    async def after(bench: Workbench) -> None:
        for request, end in zip(requests, ends, strict=True):
            assert (await bench.whole(request)).report.reused == end, "the deepest"

    for scenario in (before, after):
        play(scenario, tmp_path, slots=1, memory=memory, warm_bytes=warm_bytes, limits=limits(every=0))


@tight
def test_an_early_checkpoint_that_only_an_older_state_in_cold_had_is_still_resumed(
    tmp_path: Path, memory: str, warm_bytes: int
) -> None:
    """The newer state began where the older one ended, in warm: it took none of the early ones itself."""
    requests = [opening(who) for who in range(1, 4)]

    async def before(bench: Workbench) -> None:
        first, *_ = await talk(bench, requests, 1)
        second, *_ = await talk(bench, requests, 1)
        await talk(bench, requests[1:], 2)  # hands it down
        _, cold = bench.cache.disks
        (held,) = [c for c in cold.index.conversations() if len(c.tokens) == end_of(second)]
        at = [position for position, _ in cold.index.usable_checkpoints(held.serial)]
        assert at == [ROOT, frontier_of(first), end_of(first), frontier_of(second), end_of(second)]

    async def after(bench: Workbench) -> None:
        answer = await bench.whole(ask(words(1, 300), "another reply", "go on", system=SYSTEM, namespace="n1"))
        assert answer.report.reused == ROOT + len("user\n") + 302, "where the first reply began"
        assert most(*bench.cache.disks) == 2, "the branch is a state of its own"

    for scenario in (before, after):
        play(scenario, tmp_path, slots=1, memory=memory, warm_bytes=warm_bytes, limits=limits(every=0))


@tight
def test_the_root_in_cold_stays_while_warm_has_all_others(tmp_path: Path, memory: str, warm_bytes: int) -> None:
    requests = [opening(who) for who in range(1, 4)]

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        await talk(bench, requests, 1)
        first = requests[:1]
        (answer,) = await talk(bench, first, 5)
        (newest,) = [c for c in warm.index.conversations() if len(c.tokens) == end_of(answer)]
        (old,) = [c for c in cold.index.conversations() if c.conversation == newest.conversation]
        assert len(newest.checkpoints) == KEEP and newest.checkpoints[0][0] > old.checkpoints[-1][0]
        await talk(bench, requests[1:], 3)  # hands it down
        (state,) = [c for disk in (warm, cold) for c in disk.index.conversations() if c.root == newest.root]
        assert state.checkpoints == (old.checkpoints[0], *newest.checkpoints[1:])
        assert old.checkpoints[0][0] == ROOT
        answer = await bench.whole(ask("something else", system=SYSTEM, namespace="n1"))
        assert answer.report.reused == ROOT

    play(scenario, tmp_path, slots=1, memory=memory, warm_bytes=warm_bytes, limits=limits(every=0))


def test_a_damaged_state_that_is_handed_down_keeps_what_lies_below(tmp_path: Path) -> None:
    """Its rows end before the first checkpoint that it brings, so that those of the older state are all it has."""
    requests = [opening(who) for who in range(1, 4)]

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        await talk(bench, requests, 1)
        await talk(bench, requests[:1], 5)
        newest = max(warm.index.conversations(), key=lambda c: len(c.tokens))
        (old,) = [c for c in cold.index.conversations() if c.conversation == newest.conversation]
        (path,) = warm.level.root.rglob(f"*{newest.keys[4].hex()}*")  # tokens [1024, 1280)
        flip_header(path)
        await talk(bench, requests[1:], 3)
        (state,) = [c for disk in (warm, cold) for c in disk.index.conversations() if c.root == newest.root]
        assert (len(state.tokens), state.checkpoints) == (1024, old.checkpoints)
        assert warm.counters.unreadable == 0 and cold.counters.superseded > 0
        answer = await bench.whole(later(opening(1), "another reply"))
        assert answer.report.reused == old.checkpoints[1][0]

    play(scenario, tmp_path, slots=1, memory="checkpoints", warm_bytes=350 * KIB, limits=limits(every=0))


@every_memory
def test_what_goes_past_a_full_level_supersedes_what_lies_below(tmp_path: Path, memory: str) -> None:
    disk = SmallVolumes(warm=MARGIN_BYTES)

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        requests = [opening(1), opening(2)]
        await talk(bench, requests, 6)
        assert not entries(warm)
        assert most(cold) == 1 and cold.counters.superseded == 10
        assert bench.cache.counters.park_cut_short == 0
        assert all(len(held) == KEEP for held in held_positions(bench))

    play(scenario, tmp_path, slots=1, memory=memory, fs=disk, warm_bytes=PLENTY, limits=limits(every=0))


@every_memory
@pytest.mark.parametrize("ram", [None, RamLimits(budget_bytes=8 * MIB, most=2)], ids=["no RAM", "RAM"])
def test_a_level_that_fills_up_and_empties_again_leaves_one_state_on_each(
    tmp_path: Path, memory: str, ram: RamLimits | None
) -> None:
    """Written to warm, then past it, then to warm again: each write names what its own level has."""
    disk = SmallVolumes(warm=PLENTY)
    checkpoints = CheckpointLimits(keep=KEEP, every=0, root=500)

    async def scenario(bench: Workbench) -> None:
        warm, cold = bench.cache.disks
        requests = [opening(1)]
        for n_bytes in (PLENTY, 0, PLENTY, 0):
            disk.sizes["warm"] = n_bytes
            bench.cache.tick()  # looks at the space
            assert warm.writer.flush(10)
            written = warm if n_bytes else cold
            for _ in range(3):
                (answer,) = await talk(bench, requests, 1)
                assert most(warm) <= 1 and most(cold) <= 1
                newest = max(written.index.conversations(), key=lambda c: len(c.tokens))
                assert len(newest.tokens) == end_of(answer)
        assert bench.cache.counters.park_cut_short == 0
        assert bench.cache.counters.spill_failed == 0
        held = held_positions(bench)
        assert all(len(positions) <= KEEP for positions in held)
        assert ROOT in {position for positions in held for position in positions}

    small = replace(default_limits(ram), checkpoints=checkpoints)
    play(scenario, tmp_path, slots=1, memory=memory, fs=disk, warm_bytes=PLENTY, limits=small)


@tight
def test_cold_grows_with_the_conversations_and_not_with_their_turns(
    tmp_path: Path, memory: str, warm_bytes: int
) -> None:
    """However long they go on, it takes what one state of each takes, and none has more checkpoints than it may."""

    async def scenario(bench: Workbench) -> None:
        _, cold = bench.cache.disks
        requests = [opening(who) for who in range(1, 6)]
        for _ in range(16):
            await talk(bench, requests, 1)
            states = cold.index.conversations()
            assert most(cold) == 1 and len(states) <= len(requests)
            alone = [sum(map(cold.index.bytes_of, c.objects)) + c.manifest_bytes for c in states]
            assert cold.used_bytes <= sum(alone) + 4 * KIB, "and the file of the level itself"
            assert max(len(c.checkpoints) for c in states) <= KEEP
        assert cold.counters.superseded > 40

    play(scenario, tmp_path, slots=1, memory=memory, warm_bytes=warm_bytes, limits=limits(every=0))
