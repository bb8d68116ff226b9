"""Who has room in the K/V pool: the requests that run, and those that wait for room, by age. See rules/pool.py.

Counts tokens only, as the front knows them; it moves nothing. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from strata.rules.pool import Room


class Claim:
    """A request in the pool's books. `tokens`: its prompt and reply so far. `age`: lower is older."""

    def __init__(self, pool: Pool, age: int, slot: int, tokens: int) -> None:
        self._pool = pool
        self.age = age
        self.slot = slot
        self.tokens = tokens
        self.turn: asyncio.Future[None] | None = None

    def wrote(self, n_tokens: int) -> None:
        self.tokens += n_tokens
        self._pool.on_written(n_tokens)

    def __repr__(self) -> str:
        return f"Claim({self.age}, slot {self.slot}, {self.tokens} tokens)"


class Pool:
    """`cells`: what all slots together may hold; `limit`: what one may."""

    def __init__(self, cells: int, limit: int) -> None:
        self.room = Room(cells=cells, limit=limit)
        self.running: list[Claim] = []
        self.waiting: list[Claim] = []
        """The oldest first."""
        self.asides = 0
        """How often a request that ran had to wait for room."""
        self.on_written: Callable[[int], None] = lambda _: None
        """Told of tokens that any request has written."""
        self._ages = itertools.count()

    def __repr__(self) -> str:
        return f"Pool({self.room.cells} cells, {len(self.running)} run, {len(self.waiting)} wait)"

    def claim(self, slot: int, tokens: int) -> Claim:
        """For a request that is to run in `slot`; `leave` must follow."""
        return Claim(self, next(self._ages), slot, tokens)

    def enters(self, claim: Claim) -> bool:
        """Let it run now, if there is room and nobody older waits."""
        if any(other.age < claim.age for other in self.waiting) or not self._has_room(claim):
            return False
        self.running.append(claim)
        return True

    def enter_anyway(self, claim: Claim) -> None:
        """For what holds its cells already, and is no request."""
        self.running.append(claim)

    async def wait(self, claim: Claim) -> None:
        """Until it may run; if it runs, it stops. Who waits holds no cells."""
        if claim in self.running:
            self.running.remove(claim)
            self.asides += 1
        claim.turn = asyncio.get_running_loop().create_future()
        self.waiting.append(claim)
        self.waiting.sort(key=lambda waiter: waiter.age)
        self._wake()
        await claim.turn

    def leave(self, claim: Claim) -> None:
        """It runs no more, or does not wait any more; also when it did neither."""
        for claims in (self.running, self.waiting):
            if claim in claims:
                claims.remove(claim)
        self._wake()

    def excess(self, others: int) -> int:
        """Cells too many, if slots that do not run hold `others`."""
        return self.room.excess([claim.tokens for claim in self.running], others)

    def status(self) -> dict[str, object]:
        """For /v1/status."""
        return {
            "cells": self.room.cells,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "stepped_aside": self.asides,
        }

    def _has_room(self, claim: Claim) -> bool:
        return self.room.may_start(claim.tokens, [other.tokens for other in self.running])

    def _wake(self) -> None:
        while self.waiting and self._has_room(self.waiting[0]):
            claim = self.waiting.pop(0)
            self.running.append(claim)
            if claim.turn is not None and not claim.turn.done():
                claim.turn.set_result(None)
