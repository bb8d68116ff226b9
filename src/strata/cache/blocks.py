"""Arena blocks for parks and restores, with a share that only restores may use.

A park may wait for the writer to give its blocks back; a restore must never wait for a disk write, so the last
`reserve_bytes` of the arena are out of a park's reach.
"""

from __future__ import annotations

import asyncio
from collections import deque

from strata.store.arena import Arena
from strata.types import Span, pad_to_page


class BlockPool:
    """Spans of the arena, handed out and taken back on the event loop."""

    def __init__(self, arena: Arena, *, reserve_bytes: int) -> None:
        self._arena = arena
        self._park_limit_bytes = arena.limit_bytes - reserve_bytes
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"BlockPool({self._arena!r}, {len(self._waiters)} waiting)"

    def can_ever_park(self, lengths: tuple[int, ...]) -> bool:
        """Whether a park can have these spans at once when everything else has come back."""
        return sum(lengths) <= self._park_limit_bytes

    def try_take(self, lengths: tuple[int, ...], *, restoring: bool) -> tuple[Span, ...] | None:
        """One span per length, all or none."""
        if not restoring and self._arena.used_bytes + sum(lengths) > self._park_limit_bytes:
            return None
        spans: list[Span] = []
        for length in lengths:
            span = self._arena.alloc(length)
            if span is None:
                for taken in spans:
                    self._arena.free(taken)
                return None
            spans.append(span)
        return tuple(spans)

    async def take(self, lengths: tuple[int, ...]) -> tuple[Span, ...]:
        """Spans for a restore; waits until other blocks come back."""
        while (spans := self.try_take(lengths, restoring=True)) is None:
            await self.returned()
        return spans

    async def returned(self) -> None:
        """Wait until the next block comes back, or `wake` is called."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def give_back(self, spans: tuple[Span, ...]) -> None:
        for span in spans:
            self._arena.free(span)
        self.wake()

    def wake(self) -> None:
        """Let every waiter look again."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def payload(self, span: Span, head_room: int, n_bytes: int) -> memoryview:
        """A captured payload and its padding up to a whole page, which the level zeroes before it writes."""
        return self._arena.view(span)[head_room : head_room + pad_to_page(n_bytes)]

    def place(self, span: Span, head_room: int) -> memoryview:
        """Where the payload of a block is to be read to: everything behind the head room."""
        return self._arena.view(span)[head_room:]
