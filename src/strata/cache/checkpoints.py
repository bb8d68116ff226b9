"""Checkpoints on their way from the engine to disk: captured while a turn runs, written when it is parked.

They wait in blocks of the arena, half of what parks may have at most; one for which there is no room is given up, with
the reason, and its position cannot be resumed later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.engine.protocol import Engine
from strata.errors import StrataError
from strata.rules import prefix
from strata.rules.checkpoints import CheckpointLimits, kept, root_position, to_take
from strata.rules.prefix import shared_prefix
from strata.store.format import CheckpointEntry
from strata.types import BLOCK_BYTES, Key, Span, Tokens, pad_to_page

log = logging.getLogger("strata.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A checkpoint of `n_bytes` in the arena, one span per block."""

    position: int
    n_bytes: int
    spans: tuple[Span, ...]


class CheckpointTaker:
    """Captures checkpoints and keeps them until they are written or given up. Of one engine."""

    def __init__(
        self, *, engine: Engine, pool: BlockPool, disk: DiskLevel, counters: CacheCounters, limits: CheckpointLimits
    ) -> None:
        """`disk`: the write level."""
        self._disk = disk
        self.limits = limits
        self._engine = engine
        self._pool = pool
        self._counters = counters
        self._waiting_bytes = 0

    def __repr__(self) -> str:
        return f"CheckpointTaker({self.limits}, {self._waiting_bytes} bytes wait)"

    def positions(self, root: Key, tokens: Tokens, held: int) -> tuple[int, ...]:
        """Where to take some while a prompt is read into a slot that holds its first `held` tokens."""
        openers_at = prefix.opener_positions(tokens, self._engine.info.openers)
        stored = self._stored(root, tokens)
        return to_take(len(tokens), openers_at.tolist(), self.limits, held=held, stored=stored)

    def _stored(self, root: Key, tokens: Tokens) -> dict[int, int]:
        """Position and payload bytes of what the write level has of `tokens`, or is about to have."""
        stored = {found.position: found.n_bytes for found in self._disk.index.checkpoints_along(root, tokens)}
        for manifest in self._disk.manifests_under_way:
            shared = shared_prefix(manifest.token_ids, tokens) if manifest.root == root else 0
            stored |= {entry.position: entry.n_bytes for entry in manifest.checkpoints if entry.position <= shared}
        return stored

    def entries(self, root: Key, tokens: Tokens, captured: Sequence[Captured]) -> tuple[CheckpointEntry, ...]:
        """Those that a state of `tokens` is to have on the write level: of what is there and what was captured."""
        sizes = self._stored(root, tokens)
        sizes |= {new.position: new.n_bytes for new in captured if new.position not in sizes}
        openers_at = prefix.opener_positions(tokens, self._engine.info.openers).tolist()
        stay = kept(sizes, root=root_position(openers_at, self.limits.root), keep=self.limits.keep)
        return tuple(CheckpointEntry(position=at, n_bytes=sizes[at]) for at in stay)

    async def hold(self, slot: int, position: int) -> Captured | None:
        """Capture one of what an idle slot holds, which must be `position`. None: it cannot be had, as is logged."""
        generation = self._engine.generation
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
        return await self.take(done.checkpoint, position, done.payload_bytes, generation)

    async def take(self, checkpoint: int, position: int, n_bytes: int, generation: int) -> Captured | None:
        """Capture what the engine process `generation` holds as `checkpoint`, and release that.

        None: it was given up, as is logged.
        """
        room = self._engine.info.head_room
        lengths = tuple(room + pad_to_page(min(BLOCK_BYTES, n_bytes - at)) for at in range(0, n_bytes, BLOCK_BYTES))
        fits = self._waiting_bytes + sum(lengths) <= self._pool.park_bytes // 2
        spans = self._pool.try_take(lengths, "park") if fits else None
        if spans is None:
            await self.release(checkpoint, generation)
            self.given_up(position, f"there is no room for its {n_bytes} bytes")
            return None
        captured = Captured(position=position, n_bytes=n_bytes, spans=spans)
        self._waiting_bytes += _arena_bytes(captured)
        reason = await self._capture(checkpoint, spans, generation)
        await self.release(checkpoint, generation)
        if reason:
            self.give_back(captured)
            self.given_up(position, reason)
            return None
        self._counters.checkpoints_taken += 1
        self._counters.captured_bytes += n_bytes
        return captured

    async def copy(self, captured: Captured) -> Captured | None:
        """The same once more, for another level; its blocks belong to the caller. None: there is no room for it."""
        spans = self._pool.try_take(tuple(span.length for span in captured.spans), "park")
        if spans is None:
            return None
        await asyncio.to_thread(self._pool.copy, captured.spans, spans)
        return replace(captured, spans=spans)

    async def put_back(self, slot: int, captured: Captured) -> int:
        """Bring a slot, which still holds its rows, back to a captured checkpoint; the positions it holds then."""
        for i, span in enumerate(captured.spans):
            done = await self._engine.apply_checkpoint(
                slot, position=captured.position, offset=i * BLOCK_BYTES, total=captured.n_bytes, span=span
            )
            if not done.ok:
                break
        return done.held

    async def _capture(self, checkpoint: int, spans: Sequence[Span], generation: int) -> str:
        """Why that failed; empty when it did not."""
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

    def handed_on(self, captured: Captured) -> None:
        """Its blocks belong to somebody else from now on."""
        self._waiting_bytes -= _arena_bytes(captured)

    def give_back(self, captured: Captured) -> None:
        """It will not be written."""
        self.handed_on(captured)
        self._pool.give_back(captured.spans)


class ParkCheckpoints:
    """The checkpoints of one park: those captured during its turn, until the writer has them or they are given up."""

    def __init__(self, taker: CheckpointTaker, captured: Sequence[Captured]) -> None:
        self._taker = taker
        self._captured = {one.position: one for one in captured}

    async def complete(self, slot: int, position: int) -> None:
        """Without one of the end, take it now: the slot is idle still."""
        if position not in self._captured:
            end = await self._taker.hold(slot, position)
            self._captured |= {position: end} if end is not None else {}

    def entries(self, root: Key, tokens: Tokens) -> tuple[CheckpointEntry, ...]:
        """Those that the manifest is to name."""
        return self._taker.entries(root, tokens, tuple(self._captured.values()))

    def hand_over(self, named: Mapping[int, Key], missing: Collection[Key]) -> Iterator[tuple[Key, Captured]]:
        """What is to be written; it belongs to the caller. `named`: key by position."""
        for position, key in named.items():
            if key in missing and position in self._captured:
                captured = self._captured.pop(position)
                self._taker.handed_on(captured)
                yield key, captured

    def give_back(self) -> None:
        """What was not handed over is not needed."""
        while self._captured:
            self._taker.give_back(self._captured.popitem()[1])


def _arena_bytes(captured: Captured) -> int:
    return sum(span.length for span in captured.spans)
