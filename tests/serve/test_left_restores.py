"""A client that leaves while its conversation is brought back: the slot is the next one's, and nothing comes late.

The workbench compares every answer with the right one, and checks that the engine's slot holds what ours claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.test_checkpoints import FIRST, SYSTEM, every_memory, limits, restarted
from tests.serve.workbench import LIMIT_S, Answer, Workbench, ask, later, no_hook, play, until, words

from strata.serve.request import TurnRequest

OTHER = ask(words(7, 900), system=SYSTEM, namespace="other")


class HeldBlock(SlowDisk):
    """Holds back the first read of a checkpoint's block; what comes before it is its header."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self._reads = 0
        self.fails = self._hold

    def _hold(self, kind: str, path: Path) -> bool:
        if kind == "read" and path.suffix == ".ckpt":
            self._reads += 1
            if self._reads == 2:
                self.reached.set()
                assert self.goes_on.wait(LIMIT_S)
        return False


@every_memory
def test_a_checkpoint_that_is_read_too_late_is_not_applied(tmp_path: Path, memory: str) -> None:
    """Else another conversation's slot, of another API key perhaps, would go on with its state."""
    disk = HeldBlock()

    async def before(bench: Workbench) -> None:
        await bench.whole(FIRST)

    async def after(bench: Workbench) -> None:
        left = asyncio.create_task(bench.turn(FIRST))
        await until(disk.reached.is_set)
        left.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await left
        other = await bench.turn(OTHER)
        assert other is not None
        disk.goes_on.set()
        await bench.check()
        assert (await bench.whole(later(OTHER, other.text))).report.source == "live"

    restarted(tmp_path, memory, before, slots=1)
    restarted(tmp_path, memory, after, slots=1, fs=disk)


async def left_at_each_apply(bench: Workbench, request: TurnRequest, nth: int) -> Answer | None:
    """The client leaves at the engine's nth answer to an apply; the answer when there are not so many."""
    turn = asyncio.create_task(bench.turn(request))
    seen = 0

    def leave(name: str) -> None:
        nonlocal seen
        seen += name == "apply answered"
        if name == "apply answered" and seen == nth:
            turn.cancel()

    bench.engine.on_step = leave
    try:
        return await turn
    except asyncio.CancelledError:
        return None
    finally:
        bench.engine.on_step = no_hook


@pytest.mark.parametrize("memory", ["segments", "checkpoints", "recurrent", "opaque"])
def test_a_slot_holds_what_it_claims_when_a_restore_was_left(tmp_path: Path, memory: str) -> None:
    """It holds the beginning of the prompt already; the rest is brought in behind that."""

    async def scenario(bench: Workbench) -> None:
        first = await bench.whole(FIRST)
        second = later(FIRST, first.text, words(3, 600))
        await bench.whole(second)
        for nth in range(1, 20):
            assert (await bench.whole(FIRST)).text == first.text  # its slot goes back to what both begin with
            answer = await left_at_each_apply(bench, second, nth)
            for slot in bench.slots.all:
                assert len(bench.engine.states[slot.index]) == len(slot.tokens)
            await bench.check()
            if answer is not None:
                assert nth > 1, "nothing was restored"
                return
        raise AssertionError("it never ended")

    play(scenario, tmp_path, memory=memory, slots=1, limits=limits())
