"""Checkpoints on their way from the engine to a level: captured while a turn runs, kept when it is parked.

One that goes to RAM is there as soon as it is captured, leased until its park has ended; one that goes to disk waits in
blocks that pass through, or is written at once. What memory there is decides which (cache/checkpoint_room.py). One that
can be had nowhere is given up, with the reason, and its position cannot be resumed later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from strata.cache.checkpoint_room import CheckpointRoom, Room, Through
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.ram import RamLevel
from strata.cache.streaming import Streaming
from strata.engine.interface import Engine
from strata.errors import StrataError
from strata.rules import prefix
from strata.rules.checkpoints import CheckpointLimits, kept, root_position, to_take
from strata.rules.prefix import shared_prefix
from strata.store.format import CheckpointEntry, Manifest
from strata.types import BLOCK_BYTES, Key, Span, Tokens

log = logging.getLogger("strata.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A checkpoint of `n_bytes`: in `room`, or written under `ticket`, or, without either, leased in the RAM level."""

    key: Key
    position: int
    n_bytes: int
    room: Room | None = None
    ticket: int = 0


class CheckpointTaker:
    """Captures checkpoints and keeps them until they are parked or given up. Of one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        room: CheckpointRoom,
        ram: RamLevel | None,
        disk: DiskLevel | None,
        counters: CacheCounters,
        limits: CheckpointLimits,
        streaming: Streaming | None,
    ) -> None:
        """`disk`: the write level; `streaming`: to it."""
        self.limits = limits
        self.room = room
        self._ram = ram
        self._disk = disk
        self._engine = engine
        self._counters = counters
        self._streaming = streaming

    def __repr__(self) -> str:
        return f"CheckpointTaker({self.limits}, {self.room!r})"

    # ---------------------------------------------------------------------------------------------------- what to keep

    def positions(self, root: Key, tokens: Tokens, held: int) -> tuple[int, ...]:
        """Where to take some while a prompt is read into a slot that holds its first `held` tokens."""
        on_disk = self._on_disk(self._disk, root, tokens) if self._disk is not None else {}
        stored = on_disk | self._in_ram(root, tokens)
        return to_take(len(tokens), self._openers_at(tokens), self.limits, held=held, stored=stored)

    def for_disk(
        self, disk: DiskLevel, root: Key, tokens: Tokens, captured: Sequence[Captured] = (), *, coming: bool = True
    ) -> tuple[CheckpointEntry, ...]:
        """Those that a state of `tokens` is to have on `disk`: of what is there, what RAM has and what was captured.

        `coming`: and of what is on its way there, which may fail.
        """
        sizes = {new.position: new.n_bytes for new in captured}
        sizes |= self._in_ram(root, tokens) | self._on_disk(disk, root, tokens, coming=coming)
        return self._entries(tokens, sizes)

    def for_adopted(self, disk: DiskLevel, manifest: Manifest) -> tuple[CheckpointEntry, ...]:
        """Those that a state of another level is to have on `disk`: of its own, and of what is there already.

        Without the latter each state would lack what the one before it has there, and none would ever supersede it.
        """
        there = self._on_disk(disk, manifest.root, manifest.token_ids, coming=False)
        if not there:
            return manifest.checkpoints
        sizes = {entry.position: entry.n_bytes for entry in manifest.checkpoints} | there
        return self._entries(manifest.token_ids, sizes)

    def _entries(self, tokens: Tokens, sizes: dict[int, int]) -> tuple[CheckpointEntry, ...]:
        return tuple(CheckpointEntry(position=at, n_bytes=sizes[at]) for at in self._kept(tokens, sizes))

    def for_ram(self, root: Key, tokens: Tokens) -> tuple[tuple[int, Key], ...]:
        """Those that a state of `tokens` is to have in RAM, of what is there: position and key."""
        assert self._ram is not None, "asked for a level that is off"
        there = {found.position: found.key for found in self._ram.index.checkpoints_along(root, tokens)}
        return tuple((at, there[at]) for at in self._kept(tokens, there))

    def _kept(self, tokens: Tokens, positions: dict[int, int] | dict[int, Key]) -> tuple[int, ...]:
        return kept(positions, root=self.root_of(tokens), keep=self.limits.keep)

    def root_of(self, tokens: Tokens) -> int | None:
        """Where a state of these tokens has its root."""
        return root_position(self._openers_at(tokens), self.limits.root)

    def _openers_at(self, tokens: Tokens) -> list[int]:
        return [int(at) for at in prefix.opener_positions(tokens, self._engine.info.openers)]

    def _in_ram(self, root: Key, tokens: Tokens) -> dict[int, int]:
        """Position and payload bytes of what RAM has of `tokens`."""
        found = self._ram.index.checkpoints_along(root, tokens) if self._ram is not None else ()
        return {checkpoint.position: checkpoint.n_bytes for checkpoint in found}

    def _on_disk(self, disk: DiskLevel, root: Key, tokens: Tokens, *, coming: bool = True) -> dict[int, int]:
        """The same of a disk level, or of what it is about to have."""
        stored = {found.position: found.n_bytes for found in disk.index.checkpoints_along(root, tokens)}
        for manifest in disk.manifests_under_way if coming else ():
            shared = shared_prefix(manifest.token_ids, tokens) if manifest.root == root else 0
            stored |= {entry.position: entry.n_bytes for entry in manifest.checkpoints if entry.position <= shared}
        return stored

    # --------------------------------------------------------------------------------------------------------- capture

    async def hold(self, slot: int, root: Key, tokens: Tokens) -> Captured | None:
        """Capture one of what an idle slot holds, which must be `tokens`. None: it cannot be had, as is logged."""
        generation, position = self._engine.generation, len(tokens)
        try:
            done = await self._engine.hold(slot)
        except StrataError as error:
            self.given_up(position, error.message)
            return None
        if not done.ok:
            self.given_up(position, done.reason)
            return None
        if done.held != position:
            await self.release(done.checkpoint, generation)
            self.given_up(position, f"the slot holds {done.held} tokens by now")
            return None
        return await self.take(done.checkpoint, root, tokens, done.payload_bytes, generation)

    async def take(self, checkpoint: int, root: Key, tokens: Tokens, n_bytes: int, generation: int) -> Captured | None:
        """Capture what the engine process `generation` holds as `checkpoint` behind `tokens`, and release that.

        None: it was given up, as is logged.
        """
        path = self._ram.index.lookup(root, tokens).path if self._ram is not None else ()
        room = self.room.take(n_bytes, frozenset(held.key for held in path))
        key = prefix.checkpoint_key(root, tokens, len(tokens))
        captured = Captured(key=key, position=len(tokens), n_bytes=n_bytes)
        reason = room if isinstance(room, str) else ""
        if isinstance(room, Room):
            reason = await self._capture(checkpoint, room, generation)
            captured = replace(captured, room=room)
        elif isinstance(room, Through) and self._streaming is not None:
            ticket = await self._streaming.run(checkpoint, key, len(tokens), n_bytes, generation)
            reason, captured = (ticket, captured) if isinstance(ticket, str) else ("", replace(captured, ticket=ticket))
        await self.release(checkpoint, generation)
        if reason:
            self.given_up(len(tokens), reason)
            return None
        self._counters.checkpoints_taken += 1
        self._counters.captured_bytes += n_bytes
        return self.into_ram(captured, root, tokens) if isinstance(room, Room) and room.stays else captured

    async def _capture(self, checkpoint: int, room: Room, generation: int) -> str:
        """Why that failed, and then the memory is given back; empty when it did not."""
        reason = await self._capture_into(checkpoint, room.spans, generation)
        if reason:
            self.room.give_back(room)
        return reason

    async def _capture_into(self, checkpoint: int, spans: Sequence[Span], generation: int) -> str:
        try:
            for i, span in enumerate(spans):
                if self._engine.generation != generation:
                    return "the engine was replaced; the new one does not hold it"
                done = await self._engine.capture_checkpoint(checkpoint, i * BLOCK_BYTES, span)
                if not done.ok:
                    return done.reason or "the engine refused the capture"
                self._counters.capture_s += done.seconds
        except StrataError as error:
            return error.message
        return ""

    def into_ram(self, captured: Captured, root: Key, tokens: Tokens) -> Captured:
        """Let the RAM level have one of `tokens`, leased."""
        assert self._ram is not None, "memory of a RAM level that is off"
        room = captured.room
        if room is None:
            return captured
        self.room.to_ram(room)
        place = prefix.checkpoint_place(root, tokens, captured.position)
        self._ram.add_checkpoint(captured.key, place, captured.n_bytes, room.spans)
        self._ram.lease([captured.key])
        return replace(captured, room=None)

    def _spans(self, captured: Captured) -> tuple[Span, ...]:
        """Where one lies that was not streamed."""
        if captured.room is not None:
            return captured.room.spans
        assert self._ram is not None, "held by a RAM level that is off"
        return tuple(row[0] for row in self._ram.blocks(captured.key))

    async def copy(self, captured: Captured) -> Captured | None:
        """The same once more, for another level; its blocks belong to the caller.

        None: there is no room for it, or it went to disk and is not in memory any more.
        """
        room = None if captured.ticket else await self.room.copy(self._spans(captured))
        return None if room is None else replace(captured, room=room)

    async def put_back(self, slot: int, captured: Captured) -> int:
        """Bring a slot, which still holds its rows, back to a captured checkpoint; the positions it holds then."""
        for i, span in enumerate(self._spans(captured)):
            done = await self._engine.apply_checkpoint(
                slot, position=captured.position, offset=i * BLOCK_BYTES, total=captured.n_bytes, span=span
            )
            if not done.ok:
                break
        return done.held

    async def release(self, checkpoint: int, generation: int) -> None:
        """Give the spare of that engine process back; one that is gone has none."""
        if self._engine.generation != generation:
            return
        with suppress(StrataError):
            await self._engine.release_checkpoint(checkpoint)

    def given_up(self, position: int, reason: str) -> None:
        """There will be none at `position`."""
        self._counters.checkpoints_given_up += 1
        log.warning("no checkpoint at %d tokens, which cannot be resumed later: %s", position, reason)

    def give_back(self, captured: Captured) -> None:
        """Nobody needs it for a park any more; RAM keeps it if a conversation there names it."""
        if captured.room is not None:
            self.room.give_back(captured.room)
        elif captured.ticket and self._streaming is not None:
            self._streaming.give_up(captured.ticket)
        elif self._ram is not None:
            self._ram.release([captured.key])
