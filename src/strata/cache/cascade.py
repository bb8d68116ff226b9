"""Level -> next level, and what a level drops -> archive: entries move, and are dropped only once they arrived.

A level says which entries must leave and why. Over its budget it hands them down (degrade, adopt) when there is a level
below, and only the last one deletes; what the discard paths drop goes to the archive if one is on. All or nothing: an
entry whose receiver refuses, fails or is killed half-way stays where it was, whole, until the next tick.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation
from strata.cache.put import Leaving, Put
from strata.cache.splits import as_held
from strata.cache.story import Story
from strata.cache.tasks import watched
from strata.store.format import CheckpointEntry, Manifest
from strata.store.reader import Damaged, Missing
from strata.store.writer import Failed

log = logging.getLogger("strata.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """`arrived`: the receiver has all of it that could be read. `reason`: why not, or what is missing from it.

    `unreadable`: nothing of it can be read any more. `serial`: at the receiver.
    """

    arrived: bool
    reason: str = ""
    unreadable: bool = False
    serial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Where dropped entries go. `ids_only`: their manifests alone, without segments."""

    level: DiskLevel
    ids_only: bool


class Cascade:
    """The disk levels from fast to slow, and the archive."""

    def __init__(
        self, levels: Sequence[DiskLevel], archive: Archive | None, *, story: Story, clock: Callable[[], float]
    ) -> None:
        self.levels = tuple(levels)
        self.archive = archive
        self._story = story
        self._clock = clock
        self.checkpoints_of: Callable[[DiskLevel, Manifest], tuple[CheckpointEntry, ...]] = _its_own
        """Which a level is to name for a state that it adopts."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = {level.name: asyncio.Lock() for level in levels}
        for level in self.levels:
            level.on_leaving = self.leave
            level.below = self._next(level)

    def __repr__(self) -> str:
        return f"Cascade({' -> '.join(level.name for level in self.levels)}, {len(self._tasks)} moving)"

    def _next(self, level: DiskLevel) -> DiskLevel | None:
        at = self.levels.index(level)
        return self.levels[at + 1] if at + 1 < len(self.levels) else None

    def leave(self, level: DiskLevel, serials: Sequence[int], why: Leaving) -> None:
        """Take over entries that must leave `level`."""
        below = level.below
        if why == "budget" and below is not None:
            for serial in serials:
                self._start(level, serial, self._degrade(level, below, serial))
        elif self.archive is not None:
            for serial in serials:
                self._start(level, serial, self._put_away(level, self.archive, serial, why))
        else:
            for serial in serials if why in ("budget", "age") else ():
                self._tell(level, serial, "delete", f"from {level.name}: {_WHY[why]}")
            level.remove_now(serials, why)

    def _start(self, level: DiskLevel, serial: int, work: Coroutine[Any, Any, None]) -> None:
        level.begin_leaving(serial)
        watched(work, f"moving a conversation out of {level.name}", self._tasks)

    def supersede_elsewhere(self, durable: DiskLevel, entry: Conversation) -> None:
        """A conversation is durable on one level: older states of it on the others are not needed."""
        at = self.levels.index(durable)
        for level in self.levels[:at]:
            level.supersede(entry, spare=level.moving)  # it may come from there, and what comes after it is compared
        for level in self.levels[at + 1 :]:
            level.supersede(entry)

    async def settle(self) -> None:
        """Wait until nothing moves."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def tick(self) -> None:
        """Let what could not leave try again, and what is too old go. Called every few seconds."""
        for level in self.levels:
            level.retry_stuck()
        for last in self.levels[-1:]:
            last.age_out()
        if self.archive is not None:
            self.archive.level.retry_stuck()
            self.archive.level.age_out()

    # --------------------------------------------------------------------------------------------------------- degrade

    async def _degrade(self, giver: DiskLevel, receiver: DiskLevel, serial: int) -> None:
        moved = _Moved(arrived=False, reason="it was interrupted")
        try:
            async with self._turns[giver.name]:
                if not giver.index.has_conversation(serial):
                    return
                moved = await self._move(giver, receiver, serial, may_link_shared=False)
        finally:
            doomed = giver.end_leaving(serial, "budget", left=moved.arrived or moved.unreadable)
        if moved.unreadable:
            giver.counters.unreadable += 1
            self._tell(giver, serial, "delete", f"from {giver.name}: nothing of it can be read: {moved.reason}")
        elif moved.arrived:
            giver.counters.degraded += 1
            receiver.counters.adopted += 1
            note = f", cut short: {moved.reason}" if moved.reason else ""
            self._tell(giver, serial, "degrade", f"{giver.name} -> {receiver.name}{note}")
        else:
            giver.counters.degrade_failed += 1
            log.warning("%s -> %s: a conversation stays: %s", giver.name, receiver.name, moved.reason)
            return
        giver.drop([serial])
        if doomed is not None and moved.serial and receiver.index.has_conversation(moved.serial):
            receiver.let_go([moved.serial], doomed)
        giver.make_room(0)

    # --------------------------------------------------------------------------------------------------------- archive

    async def _put_away(self, giver: DiskLevel, archive: Archive, serial: int, why: Leaving) -> None:
        moved = _Moved(arrived=False, reason="it was interrupted")
        try:
            async with self._turns[giver.name]:
                if not giver.index.has_conversation(serial):
                    return
                if archive.ids_only:
                    moved = await self._move_ids(giver, archive.level, serial)
                else:
                    moved = await self._move(giver, archive.level, serial, may_link_shared=True)
        finally:
            giver.end_leaving(serial, why, left=moved.arrived or moved.unreadable)
        if not moved.arrived and not moved.unreadable:
            giver.counters.archive_failed += 1
            log.warning("%s -> archive: a conversation stays: %s", giver.name, moved.reason)
            return
        giver.counters.archived += moved.arrived
        giver.counters.leave(1, why)
        where = "it is in the archive" if moved.arrived else f"nothing of it can be read: {moved.reason}"
        self._tell(giver, serial, "delete", f"from {giver.name}: {_WHY[why]}; {where}")
        giver.drop([serial])

    async def _move_ids(self, giver: DiskLevel, receiver: DiskLevel, serial: int) -> _Moved:
        manifest = await self._manifest(giver, serial)
        if isinstance(manifest, _Moved):
            return manifest
        if refusal := receiver.refuses(0):
            return _Moved(arrived=False, reason=refusal)
        reason = await receiver.put_ids(manifest)
        return _Moved(arrived=not reason, reason=reason)

    # ------------------------------------------------------------------------------------------------------------ move

    async def _move(self, giver: DiskLevel, receiver: DiskLevel, serial: int, *, may_link_shared: bool) -> _Moved:
        """Bring an entry of `giver` into `receiver`; the giver's stays for now."""
        entry = giver.index.conversation(serial)
        giver.index.lease(entry.objects)
        try:
            manifest = await self._manifest(giver, serial)
            if isinstance(manifest, _Moved):
                return manifest
            manifest = as_held(giver.index, manifest)
            if refusal := _refusal(giver, receiver, manifest):
                return _Moved(arrived=False, reason=refusal)
            wanted, damage = len(manifest.keys), ""
            while True:
                put = receiver.begin_put(self._named(receiver, manifest, wanted), whole=False, born=entry.born)
                reached, reason, unreadable = 0, "it was interrupted", False
                try:
                    reached, reason, unreadable = await self._adopt(giver, receiver, put, wanted, may_link_shared)
                finally:
                    # A put of which a segment failed cannot be made durable: what precedes it gets another one.
                    outcome = await receiver.finish_put(put, 0 if unreadable else reached, reason or damage)
                if not unreadable or not reached:
                    break
                wanted, damage = reached, reason
            return _Moved(
                arrived=bool(outcome.durable), reason=outcome.reason, unreadable=unreadable, serial=outcome.serial
            )
        finally:
            giver.index.release(entry.objects)

    def _named(self, receiver: DiskLevel, manifest: Manifest, wanted: int) -> Manifest:
        """`manifest`, of whose segments the first `wanted` can be read, as the receiver is to have it."""
        if receiver.limits.is_archive:
            return manifest
        return replace(manifest, checkpoints=self.checkpoints_of(receiver, manifest.first(wanted)))

    async def _manifest(self, giver: DiskLevel, serial: int) -> Manifest | _Moved:
        found = await asyncio.wrap_future(giver.reader.manifest(serial))
        if isinstance(found, Manifest):
            return found
        gone = isinstance(found, Damaged | Missing)
        if gone:
            giver.quarantine_manifest(serial)
        return _Moved(arrived=False, reason=found.reason, unreadable=gone)

    async def _adopt(
        self, giver: DiskLevel, receiver: DiskLevel, put: Put, wanted: int, may_link_shared: bool
    ) -> tuple[int, str, bool]:
        """How many of the first `wanted` segments arrived, why not all, and whether that is the giver's fault.

        When the receiver is at fault, none count: all or nothing. What the giver cannot read ends the entry there.
        """
        if receiver.is_over_budget:
            return 0, f"{receiver.name} cannot make room: what it holds is in use", False
        for i, key in enumerate(put.manifest.keys[:wanted]):
            if key not in put.missing:
                continue
            may_link = may_link_shared or giver.index.names_alone(key)
            for stage in range(len(put.manifest.stages_of(i))):
                job = receiver.writer.adopt_segment(put.ticket, giver.level, key, stage, may_link=may_link)
                failed = await asyncio.wrap_future(job)
                if not isinstance(failed, Failed):
                    continue
                if failed.giver is None or not isinstance(failed.giver, Damaged | Missing):
                    return 0, failed.reason, False
                giver.set_aside(key, [stage] if isinstance(failed.giver, Damaged) else [])
                return i, failed.reason, True
            put.unwritten.pop(key, None)
        return await self._adopt_checkpoints(giver, receiver, put, wanted, may_link_shared)

    async def _adopt_checkpoints(
        self, giver: DiskLevel, receiver: DiskLevel, put: Put, wanted: int, may_link_shared: bool
    ) -> tuple[int, str, bool]:
        """The rest of `_adopt`: one that the giver cannot read costs itself alone, but with the last one goes all."""
        reason, keys = "", put.manifest.first(wanted).checkpoint_keys
        for key in keys:
            if key not in put.missing:
                continue
            may_link = may_link_shared or giver.index.names_alone(key)
            job = receiver.writer.adopt_checkpoint(put.ticket, giver.level, key, may_link=may_link)
            failed = await asyncio.wrap_future(job)
            if not isinstance(failed, Failed):
                put.unwritten.pop(key, None)
            elif failed.giver is None or not isinstance(failed.giver, Damaged | Missing):
                return 0, failed.reason, False
            else:
                giver.set_aside_checkpoint(key, damaged=isinstance(failed.giver, Damaged))
                reason = failed.reason
        if put.manifest.checkpoints and all(key in put.unwritten for key in keys):
            return 0, reason or "no checkpoint of it is left", True
        return wanted, reason, False

    def _tell(self, level: DiskLevel, serial: int, verb: str, detail: str) -> None:
        if level.index.has_conversation(serial):
            entry = level.index.conversation(serial)
            self._story.tell(self._clock(), entry.conversation, verb, f"{len(entry.tokens)} tokens {detail}")


_WHY = {
    "superseded": "a newer state of it is durable",
    "compacted": "its history was rewritten",
    "budget": "the oldest of a level over its budget",
    "age": "older than the limit",
}


def _its_own(_: DiskLevel, manifest: Manifest) -> tuple[CheckpointEntry, ...]:
    return manifest.checkpoints


def _refusal(giver: DiskLevel, receiver: DiskLevel, manifest: Manifest) -> str:
    """Why a receiver cannot take an entry; empty when it can."""
    missing = (n for key, n in manifest.objects.items() if not receiver.index.holds(key))
    n_bytes = sum(missing)
    if not receiver.health.usable:
        return f"{receiver.name} is {receiver.health.state}"
    if n_bytes > receiver.limits.budget_bytes:
        return f"it is larger than the budget of {receiver.name}"
    if refusal := receiver.refuses(n_bytes):
        receiver.counters.rejected += 1
        return refusal
    if giver.level.volume.is_that_of(receiver.level.volume):
        return ""  # links take no space
    return receiver.health.no_space_for(n_bytes)
