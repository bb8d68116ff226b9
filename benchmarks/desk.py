"""A desk with too little memory, replayed small; and a disk that is slow, which no request must notice.

Eight conversations take turns on four slots, so every one leaves its slot before its next turn. `memory` is injected:
a state never fits above the parking floor. Before: what does not fit above that floor is refused, as it used to be;
after: the transient floor lets it pass through to the disk. Counted are the tokens read again that were known already.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.inprocess import NO_FLOORS, Bench, say
from benchmarks.text import prose
from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits
from strata.cache.ram import RamLimits
from strata.engine.protocol import Sampling
from strata.rules.prefix import shared_prefix
from strata.serve.request import Completed, Started, Text, TurnRequest
from strata.serve.slots import NOTHING, Slots
from strata.serve.turn import Workshop, run_turn
from strata.store.filesystem import Buffer
from strata.store.fs import Disk
from strata.types import MIB, Tokens

SLOTS = 4
CONVERSATIONS = 8
TURNS = 3
CONTEXT = 4096
FLOORS = Floors(parking_bytes=2560 * MIB, transient_bytes=512 * MIB)
AVAILABLE_BYTES = 1024 * MIB
"""With what the arena holds idle it stays below the parking floor, and above the transient one."""
RAM = RamLimits(budget_bytes=512 * MIB, most=64)
WRITE_S = 3.0
"""How long each write and sync of the slow disk takes."""


@dataclass(slots=True, kw_only=True)
class Talk:
    """One conversation as its client knows it. `known`: the tokens that a slot held after its last turn."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    known: Tokens = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn cost. `again`: prompt tokens that were read although they had been held before.

    `waited_s`: of the time to the first token, all but the reading of the prompt in the engine.
    """

    again: int
    prompt_tokens: int
    began_s: float
    first_s: float
    waited_s: float


async def take_turn(shop: Workshop, talk: Talk, question: str, max_tokens: int = 8) -> Turn:
    """One more turn of a conversation."""
    talk.messages.append({"role": "user", "content": question})
    request = TurnRequest(messages=tuple(talk.messages), sampling=Sampling(temperature=0.0), max_tokens=max_tokens)
    began, first_s, pieces, slot = time.perf_counter(), 0.0, [], 0
    async with aclosing(run_turn(shop, request)) as events:
        async for event in events:
            if isinstance(event, Started):
                slot = event.slot
            elif isinstance(event, Text):
                first_s = first_s or time.perf_counter()
                pieces.append(event.text)
            elif isinstance(event, Completed):
                done = event
    talk.messages.append({"role": "assistant", "content": "".join(pieces)})
    held = shop.slots.all[slot].tokens
    again = max(0, min(shared_prefix(held[: done.prompt_tokens], talk.known), done.prompt_tokens) - done.cached_tokens)
    talk.known = held
    return Turn(
        again=again,
        prompt_tokens=done.prompt_tokens,
        began_s=began,
        first_s=first_s,
        waited_s=first_s - began - done.timing.read_s,
    )


def workshop(bench: Bench) -> Workshop:
    return Workshop(
        engine=bench.engine, slots=Slots(bench.engine.info.slots, is_kept=bench.cache.keeps_live), cache=bench.cache
    )


async def settled(shop: Workshop) -> None:
    """Wait until nothing is being parked or written."""
    assert shop.cache is not None, "a benchmark of the cache"
    while shop.parks or shop.cache.under_way:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # they have no event in common


# ------------------------------------------------------------------------------------------------------------- the desk


async def play(folder: Path, floors: Floors) -> tuple[list[Turn], dict[str, int | float]]:
    """Every conversation's turns, four at once; the counters of the cache afterwards."""
    limits = CacheLimits(floors=floors, park_target="ram", ram=RAM)
    async with Bench(
        folder, flash_attention="on", slots=SLOTS, context=CONTEXT, limits=limits, memory=lambda: AVAILABLE_BYTES
    ) as bench:
        shop = workshop(bench)
        talks = [Talk() for _ in range(CONVERSATIONS)]
        turns: list[Turn] = []
        for n in range(TURNS):
            questions = [prose(20 if n == 0 else 4, seed=100 * n + i) for i in range(CONVERSATIONS)]
            for at in range(0, CONVERSATIONS, SLOTS):
                group = range(at, at + SLOTS)
                turns += await asyncio.gather(*(take_turn(shop, talks[i], questions[i]) for i in group))
        await settled(shop)
        return turns, bench.cache.counters.as_dict()


async def replay(folder: Path) -> dict[str, float]:
    refusing = replace(FLOORS, transient_bytes=FLOORS.parking_bytes)
    before, counted_before = await play(folder / "before", refusing)
    after, counted = await play(folder / "after", FLOORS)
    read = [sum(turn.prompt_tokens for turn in turns) for turns in (before, after)]
    say(f"before: {sum(t.again for t in before)} of {read[0]} prompt tokens read again, {counted_before}")
    say(f"after: {sum(t.again for t in after)} of {read[1]}, {counted}")
    return {
        "re_read_tokens_before": sum(turn.again for turn in before),
        "re_read_tokens_after": sum(turn.again for turn in after),
        "discards_before": counted_before["discards"],
        "discards": counted["discards"],
        "parked_disk_transient": counted["parked_disk_transient"],
    }


# -------------------------------------------------------------------------------------------------------- the slow disk


class SlowDisk(Disk):
    """Each write and each sync takes `WRITE_S` longer once `slow` is set. `writes`: when they began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self.writes: list[tuple[float, float]] = []
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Be fast from now on."""
        self.slow = False
        self._given_up.set()

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        began = time.perf_counter()
        if self.slow:
            self._given_up.wait(WRITE_S)
        try:
            yield
        finally:
            self.writes.append((began, time.perf_counter()))

    def write(self, path: Path, buffers: Iterable[Buffer]) -> int:
        with self._held_back():
            return super().write(path, buffers)

    def fsync(self, path: Path) -> None:
        with self._held_back():
            super().fsync(path)


async def slow_disk(folder: Path) -> dict[str, float]:
    """Requests whose time to first token contains a disk write: those that wait as long as a single write takes.

    Both ways of parking. The turns come one after the other on two slots, so each takes a slot whose conversation is
    still on its way to the disk; none waits for a slot. What the engine reads is not counted: it knows no disk.
    """
    turns: list[Turn] = []
    beside = 0
    for target, ram in (("disk", None), ("ram", RAM)):
        limits = CacheLimits(floors=NO_FLOORS, park_target="ram" if ram else "disk", ram=ram)
        disk = SlowDisk()
        async with Bench(
            folder / target, flash_attention="on", slots=2, context=CONTEXT, limits=limits, fs=disk
        ) as bench:
            shop = workshop(bench)
            disk.slow = True
            talks = [Talk() for _ in range(6)]
            new = [await take_turn(shop, talk, prose(8, seed=n)) for n, talk in enumerate(2 * talks)]
            disk.give_up()
            await settled(shop)
        beside += sum(any(a < turn.first_s and b > turn.began_s for a, b in disk.writes) for turn in new)
        turns += new
    slowest_s = max(turn.waited_s for turn in turns)
    say(
        f"a write takes {WRITE_S:.0f} s more: {beside} of {len(turns)} first tokens came while one was under way; "
        f"beyond reading, none took more than {1000 * slowest_s:.0f} ms"
    )
    return {
        "request_waits_for_disk": sum(turn.waited_s >= WRITE_S for turn in turns),
        "requests_beside_a_slow_write": beside,
        "longest_wait_for_first_token_s": slowest_s,
    }
