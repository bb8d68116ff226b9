"""Many clients at once on the fake engine, with everything that can go wrong, in a seeded order.

Conversations share system prompts and API keys; clients leave at any time; the engine dies and comes back; the disk
fails; the arena and the budget are small. Every answer that is given must be right, and so must be the whole state at
the end, on disk too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.workbench import BLOCK, LIMIT_S, Workbench, ask, no_hook, play, ticks, words

from strata.errors import RunError, StrataError
from strata.serve.request import TurnRequest

SYSTEMS = ("", words(100, 230), words(101, 700))
NAMESPACES = ("one", "two")


class Client:
    """One conversation that goes on, is edited, is asked again, or begins anew."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._begin()

    def _begin(self) -> None:
        self._system = self._dice.choice(SYSTEMS)
        self._namespace = self._dice.choice(NAMESPACES)
        self._texts = [self._text()]

    def _text(self) -> str:
        return words(self._dice.randrange(20), self._dice.choice((3, 60, 250, 256, 300, 600)))

    def next(self) -> TurnRequest:
        sort = self._dice.choice(("same", "edit", "new", "go on", "go on", "go on"))
        if sort == "new" or sum(map(len, self._texts)) > 2000:
            self._begin()
        elif sort == "edit":
            self._texts[self._dice.randrange(len(self._texts))] = self._text()
        elif sort == "go on" and len(self._texts) % 2 == 0:
            self._texts.append(self._text())
        return ask(
            *self._texts[: len(self._texts) - 1 + len(self._texts) % 2],
            system=self._system,
            namespace=self._namespace,
            max_tokens=self._dice.choice((1, 5, 40)),
            cache_prompt=self._dice.random() < 0.95,
        )

    def heard(self, reply: str) -> None:
        if len(self._texts) % 2:
            self._texts.append(reply)


class Trouble:
    """What goes wrong, and how often; the dice decide at every step of the engine."""

    def __init__(self, bench: Workbench, disk: SlowDisk, dice: random.Random) -> None:
        self._bench, self._disk, self._dice = bench, disk, dice
        self._deadly = dice.choice((0, 0, 0.002))
        self._faulty = dice.choice((0, 0, 0.01))
        self._coming_back: set[asyncio.Task[None]] = set()
        full = dice.choice((0, 0, 0.05))
        unreadable = dice.choice((0, 0, 0.05))
        own = random.Random(dice.random())  # the disk is used by threads, in no fixed order
        disk.fails = lambda kind, _: own.random() < {"write": full, "read": unreadable}[kind]
        longest = dice.choice((1, 5, 40))
        bench.engine.delay = lambda _: dice.randrange(longest)
        bench.engine.on_step = self._step

    def _step(self, name: str) -> None:
        if self._dice.random() < self._deadly and not self._bench.engine.down:
            self._bench.engine.kill()
            self._coming_back.add(asyncio.ensure_future(self._come_back()))
        if name == "event" and self._dice.random() < self._faulty:
            longest = max(map(len, self._bench.engine.states))
            raise RunError("llama.cpp could not decode", held=self._dice.randrange(longest + 1))

    async def _come_back(self) -> None:
        await ticks(self._dice.randrange(50))
        self._bench.engine.restart()

    async def end(self) -> None:
        self._bench.engine.on_step = no_hook
        self._disk.fails = lambda _, __: False
        await asyncio.gather(*self._coming_back)
        self._bench.engine.restart()


async def lead(bench: Workbench, client: Client, dice: random.Random, turns: int) -> int:
    """Send the client's turns; leave some of them half-way. How many were answered."""
    answered = 0
    for _ in range(turns):
        task = asyncio.create_task(bench.turn(client.next()))
        if dice.random() < 0.2:
            await ticks(dice.randrange(120))
            task.cancel()
        try:
            answer = await asyncio.wait_for(task, LIMIT_S)
        except (asyncio.CancelledError, StrataError):
            continue
        assert answer is not None
        client.heard(answer.text)
        answered += 1
    return answered


@pytest.mark.parametrize("seed", range(60))
def test_every_answer_is_right_whatever_happens(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    disk = SlowDisk()

    async def scenario(bench: Workbench) -> None:
        trouble = Trouble(bench, disk, dice)
        clients = [Client(dice) for _ in range(dice.randrange(2, 7))]
        answered: Sequence[int] = await asyncio.gather(*(lead(bench, client, dice, 8) for client in clients))
        assert sum(answered) > 0
        await trouble.end()
        await bench.check()
        for client in clients:
            await bench.whole(client.next())

    options = {
        "slots": dice.randrange(1, 4),
        "stages": dice.choice((1, 1, 3)),
        "block_tokens": dice.choice((256, 256, 64)),
        "arena_bytes": dice.choice((8 * BLOCK, 24 * BLOCK, 64 << 20)),
        "budget_bytes": dice.choice((6 * BLOCK, 40 * BLOCK, 1 << 40)),
    }
    print(f"seed {seed}: {options}")
    play(scenario, tmp_path, fs=disk, **options)
