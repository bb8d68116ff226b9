"""RAM -> disk: one cell per conversation, the newest state wins, and nothing that waits is lost.

A state that was parked in RAM is offered here. One task writes the cells one after the other: those of a state that was
superseded meanwhile collapse into the newer one, throttled ones wait, a failing disk is tried again after a while; the
copy in RAM stays until then. Nobody waits for it but the shutdown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from strata.cache.blocks import BlockPool
from strata.cache.counters import CacheCounters
from strata.cache.disk import RETRY_S, DiskLevel
from strata.cache.ram import RamLevel
from strata.cache.state import Conversation
from strata.cache.story import Story
from strata.cache.writing import PutWriter, manifest_of
from strata.engine.protocol import Engine
from strata.rules import prefix

log = logging.getLogger("strata.cache")


@dataclass(slots=True, kw_only=True)
class _Cell:
    """`not_before_s`: on the spiller's clock; a throttled or failed one waits until then."""

    serial: int
    not_before_s: float


class Spiller:
    """Writes RAM conversations to the write level."""

    def __init__(
        self,
        *,
        engine: Engine,
        pool: BlockPool,
        ram: RamLevel,
        disk: DiskLevel,
        counters: CacheCounters,
        story: Story,
        clock: Callable[[], float],
        throttle_s: float,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._ram = ram
        self._disk = disk
        self._counters = counters
        self._story = story
        self._clock = clock
        self._throttle_s = throttle_s
        self._cells: dict[int, _Cell] = {}  # by serial in RAM, in the order they came
        self._written_s: dict[bytes, float] = {}  # when a conversation was last written
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._hurried = False
        self._given_up = 0  # could not be written in the last attempt

    def __repr__(self) -> str:
        return f"Spiller({len(self._cells)} waiting)"

    @property
    def waiting(self) -> int:
        """Conversations that have yet to be written, or could not be at the end."""
        return len(self._cells) + self._given_up

    @property
    def is_writing(self) -> bool:
        """Whether something is being written, or is due."""
        return self._task is not None

    def offer(self, serial: int, *, instead_of: Iterable[int] = ()) -> None:
        """Write a RAM conversation soon. `instead_of`: what it superseded, which need not be written any more."""
        for old in instead_of:
            self._counters.collapsed += self._cells.pop(old, None) is not None
        if serial in self._cells:
            return
        conversation = self._ram.index.conversation(serial).conversation
        not_before_s = 0.0
        if self._throttle_s and conversation in self._written_s:
            not_before_s = self._written_s[conversation] + self._throttle_s
            self._counters.throttled += not_before_s > self._clock()
        self._cells[serial] = _Cell(serial=serial, not_before_s=not_before_s)
        self.wake()

    def wake(self) -> None:
        """Write what is due; sleep until the next is."""
        if self._task is not None or not self._cells:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due() is not None:
            self._task = asyncio.create_task(self._run(), name="spiller")
            return
        wait_s = max(0.0, min(cell.not_before_s for cell in self._cells.values()) - self._clock())
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.wake)

    def _due(self) -> _Cell | None:
        now = self._clock()
        return next((cell for cell in self._cells.values() if self._hurried or cell.not_before_s <= now), None)

    async def _run(self) -> None:
        try:
            while (cell := self._due()) is not None:
                del self._cells[cell.serial]
                if not self._ram.index.has_conversation(cell.serial):
                    continue
                if not await self._spill(self._ram.index.conversation(cell.serial)):
                    if self._hurried:  # this was the last attempt
                        self._given_up += 1
                        continue
                    cell.not_before_s = self._clock() + RETRY_S
                    self._cells[cell.serial] = cell
        finally:
            self._task = None
        self.wake()

    async def flush(self) -> None:
        """Write everything that waits, throttled or not; what fails now is given up."""
        self._hurried = True
        self.wake()
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _spill(self, entry: Conversation) -> bool:
        """Write one conversation; False when it did not become durable."""
        if self._disk.index.stores(entry.keys):
            self._counters.skipped += 1
            return True
        segments = prefix.chain(entry.root, entry.tokens, prefix.cuts(len(entry.tokens), entry.frontier or None))
        manifest = manifest_of(
            self._engine,
            tokens=entry.tokens,
            frontier=entry.frontier or None,
            conversation=entry.conversation,
            segments=segments,
        )
        if refusal := self._disk.refuses(sum(manifest.file_bytes)):
            self._disk.counters.rejected += 1
            return self._failed(entry, refusal)
        self._ram.lease(entry.keys)
        put = self._disk.begin_put(manifest, whole=True)
        writing = PutWriter(put, disk=self._disk, engine=self._engine, pool=self._pool)
        reached, reason = 0, "the copy in RAM was damaged"
        try:
            for segment in segments:
                if segment.key in put.missing:
                    if not self._ram.index.holds(segment.key):
                        break
                    await writing.from_ram(segment, self._ram)
                reached += 1
        finally:
            outcome = await self._disk.finish_put(put, reached, reason)
            self._ram.release(entry.keys)
        if not outcome.durable:
            return self._failed(entry, outcome.reason)
        self._counters.spilled += 1
        self._written_s[entry.conversation] = self._clock()
        self._story.tell(
            self._clock(), entry.conversation, "spill", f"{outcome.tokens} tokens, ram -> {self._disk.name}"
        )
        return True

    def _failed(self, entry: Conversation, reason: str) -> bool:
        self._counters.spill_failed += 1
        log.warning("spill of %d tokens to %s failed: %s; they stay in RAM", len(entry.tokens), self._disk.name, reason)
        return False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
