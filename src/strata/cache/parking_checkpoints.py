"""The checkpoints of one park: those captured during its turn, and those that RAM has of the same tokens.

They are leased in RAM, or wait in their blocks, until the park has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.cache.checkpoints import Captured, CheckpointTaker
from strata.cache.disk import DiskLevel
from strata.cache.ram import RamLevel
from strata.cache.writing import PutWriter
from strata.rules import prefix
from strata.store.format import CheckpointEntry
from strata.types import Key, Tokens


class ParkingCheckpoints:
    """Of a state of `tokens`. `give_back` must follow."""

    def __init__(
        self, taker: CheckpointTaker, ram: RamLevel | None, captured: Sequence[Captured], root: Key, tokens: Tokens
    ) -> None:
        self._taker = taker
        self._ram = ram
        self._root = root
        self._tokens = tokens
        self._captured = {one.position: one for one in captured}
        found = ram.index.checkpoints_along(root, tokens) if ram is not None else ()
        self._leased = [checkpoint.key for checkpoint in found]
        if ram is not None:
            ram.lease(self._leased)

    @property
    def passing_bytes(self) -> int:
        """Arena bytes of those that wait in blocks that pass through."""
        return sum(one.room.arena_bytes for one in self._captured.values() if one.room is not None)

    @property
    def has_tickets(self) -> bool:
        """Whether some of them are on the write level already."""
        return any(one.ticket for one in self._captured.values())

    async def complete(self, slot: int) -> None:
        """Without one of the end, take it now: the slot is idle still."""
        if not self.has_end:
            captured = await self._taker.hold(slot, self._root, self._tokens)
            self._captured |= {len(self._tokens): captured} if captured is not None else {}

    @property
    def has_end(self) -> bool:
        """Whether the one of the end was captured, or RAM has it."""
        if len(self._tokens) in self._captured:
            return True
        key = prefix.checkpoint_key(self._root, self._tokens, len(self._tokens))
        return self._ram is not None and self._ram.index.holds(key)

    async def into_ram(self, slot: int) -> tuple[tuple[int, Key], ...]:
        """Let RAM have them all; position and key of those that the conversation is to name there.

        None when there are none, or when RAM cannot have that of the end, which was not known before.
        """
        planned_bytes = self.passing_bytes
        await self.complete(slot)
        if self.passing_bytes > planned_bytes or self.has_tickets:
            return ()
        for position, captured in self._captured.items():
            self._captured[position] = self._taker.into_ram(captured, self._root, self._tokens)
        return self._taker.for_ram(self._root, self._tokens)

    def for_disk(self, disk: DiskLevel) -> tuple[CheckpointEntry, ...]:
        """Those that the manifest is to name there."""
        return self._taker.for_disk(disk, self._root, self._tokens, tuple(self._captured.values()))

    def hand_over(self, writing: PutWriter) -> list[Key]:
        """Have what waits in blocks written, if it is missing; those that are not come back. Keys of what RAM has."""
        named = set(writing.put.manifest.checkpoint_keys) & writing.put.missing
        for position in [at for at, one in self._captured.items() if one.room is not None or one.ticket]:
            captured = self._captured.pop(position)
            if captured.key not in named:
                self._taker.give_back(captured)
            elif captured.room is not None:
                self._taker.room.handed_on(captured.room)
                writing.write_checkpoint(captured.key, position, captured.n_bytes, captured.room.spans)
            else:
                writing.take_checkpoint(captured.key, captured.ticket)
            named.discard(captured.key)
        return [key for key in named if self._ram is not None and self._ram.index.holds(key)]

    def give_back(self) -> None:
        """The park has ended."""
        while self._captured:
            self._taker.give_back(self._captured.popitem()[1])
        if self._ram is not None:
            self._ram.release(self._leased)
        self._leased = []
