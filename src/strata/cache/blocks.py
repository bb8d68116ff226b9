"""Arena blocks for parks, restores and the RAM level, each with a share of its own.

What passes through (parks to disk, restores) shares `transient_bytes`; a park may wait there for the writer to give its
blocks back, a restore must never wait for a disk write, so the last `reserve_bytes` are out of a park's reach. What the
RAM level keeps is bounded by its own budget, and only counted here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from strata.store.arena import Arena
from strata.types import Span, pad_to_page

Purpose = Literal["park", "restore", "ram"]


class BlockPool:
    """Spans of the arena, handed out and taken back on the event loop. `head_room`: bytes in front of a payload."""

    def __init__(self, arena: Arena, *, transient_bytes: int, reserve_bytes: int, head_room: int) -> None:
        self._arena = arena
        self._transient_bytes = transient_bytes
        self._park_bytes = transient_bytes - reserve_bytes
        self.head_room = head_room
        self._passing: set[Span] = set()  # spans that are not the RAM level's
        self._passing_bytes = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"BlockPool({self._arena!r}, {self._passing_bytes} passing, {len(self._waiters)} waiting)"

    @property
    def idle_bytes(self) -> int:
        """Memory that the process has already and nothing uses: taking it costs the system nothing."""
        return self._arena.idle_bytes

    @property
    def is_passing(self) -> bool:
        """Whether blocks are under way that will come back by themselves."""
        return bool(self._passing)

    @property
    def park_bytes(self) -> int:
        """Most that parks to disk hold at once."""
        return self._park_bytes

    def can_ever_park(self, lengths: tuple[int, ...]) -> bool:
        """Whether a park to disk can have these spans at once when everything else has come back."""
        return sum(lengths) <= self._park_bytes

    def try_take(self, lengths: tuple[int, ...], purpose: Purpose) -> tuple[Span, ...] | None:
        """One span per length, all or none."""
        limit = {"park": self._park_bytes, "restore": self._transient_bytes, "ram": None}[purpose]
        if limit is not None and self._passing_bytes + sum(map(pad_to_page, lengths)) > limit:
            return None
        spans: list[Span] = []
        for length in lengths:
            span = self._arena.alloc(length)
            if span is None:
                for taken in spans:
                    self._arena.free(taken)
                return None
            spans.append(span)
        if purpose != "ram":
            self._passing.update(spans)
            self._passing_bytes += sum(span.length for span in spans)
        return tuple(spans)

    async def take(self, lengths: tuple[int, ...]) -> tuple[Span, ...] | None:
        """Spans for a restore; waits until other blocks come back. None when there are none to wait for."""
        while (spans := self.try_take(lengths, "restore")) is None and self._passing:
            await self.returned()
        return spans

    async def returned(self) -> None:
        """Wait until the next block comes back, or `wake` is called."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def stay(self, spans: Iterable[Span]) -> None:
        """Spans that passed through belong to the RAM level from now on."""
        for span in spans:
            if span in self._passing:
                self._passing.remove(span)
                self._passing_bytes -= span.length
        self.wake()

    def give_back(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span in self._passing:
                self._passing.remove(span)
                self._passing_bytes -= span.length
            self._arena.free(span)
        self.wake()

    def wake(self) -> None:
        """Let every waiter look again."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def payload(self, span: Span, n_bytes: int) -> memoryview:
        """A captured payload and its padding up to a whole page, which the level zeroes before it writes."""
        return self._arena.view(span)[self.head_room : self.head_room + pad_to_page(n_bytes)]

    def copy(self, source: Sequence[Span], target: Sequence[Span]) -> None:
        """Copy spans, head room included; on any thread, without the interpreter's lock."""
        for one, other in zip(source, target, strict=True):
            np.copyto(np.frombuffer(self._arena.view(other), np.uint8), np.frombuffer(self._arena.view(one), np.uint8))

    def place(self, span: Span) -> memoryview:
        """Where the payload of a block is to be read to: everything behind the head room."""
        return self._arena.view(span)[self.head_room :]
