"""What puts into one level are writing, so that another put that names the same waits for it instead of writing it."""

from __future__ import annotations

import asyncio

from strata.cache.put import Put
from strata.cache.state import LevelIndex
from strata.types import Key


class Coming:
    """Segments and checkpoints under way: who writes each, and whether it became durable."""

    def __init__(self, index: LevelIndex) -> None:
        self._index = index
        self._puts: dict[Key, tuple[int, asyncio.Future[bool]]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._puts

    def begin(self, key: Key, ticket: int) -> None:
        self._puts[key] = ticket, asyncio.get_running_loop().create_future()

    def end(self, key: Key, *, durable: bool) -> None:
        self._puts.pop(key)[1].set_result(durable)

    async def arrived(self, put: Put, reached: int) -> int:
        """How many of the first `reached` segments can be named: those that other puts write must have become durable.

        Waits for puts that began earlier only: a segment that was lost meanwhile may be coming again from a later one,
        which may be waiting for this one.
        """
        for i, key in enumerate(put.manifest.keys[:reached] if put.manifest.stages else ()):
            if key not in put.missing and not await self._is_here(put, key):
                return i
        return reached

    async def lost_checkpoints(self, put: Put) -> set[int]:
        """Positions of the checkpoints that cannot be named, by the rule of `arrived`."""
        lost: set[int] = set()
        for entry, key in zip(put.manifest.checkpoints, put.manifest.checkpoint_keys, strict=True):
            here = key not in put.unwritten if key in put.missing else await self._is_here(put, key)
            if not here:
                lost.add(entry.position)
        return lost

    async def _is_here(self, put: Put, key: Key) -> bool:
        ticket, coming = self._puts.get(key, (put.ticket, None))
        if coming is not None and ticket < put.ticket:
            await asyncio.shield(coming)
        return self._index.holds(key)
