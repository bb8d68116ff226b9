"""Restore memory that cannot be cut: rows up to a checkpoint, then the checkpoint; and go back in a slot that lives.

The ladder of such memory: what is damaged is set aside, and the deepest checkpoint that is left takes its place, with
the rows that were verified already. When none is left, or without the ladder, the slot keeps what it could go on with
before, or is emptied and the prompt is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from strata.cache.checkpoint_sources import BadCheckpoint, DiskSource, RamSource, Source
from strata.cache.disk import DiskLevel
from strata.cache.entries import HeldCheckpoint
from strata.cache.ladder import Climb, Found, Ladder, Plan, Restored
from strata.cache.ram import RamLevel
from strata.cache.restoring import Applied, Fault, Restoring
from strata.errors import EngineGone
from strata.rules.restore import Rung
from strata.types import BLOCK_BYTES, Span

log = logging.getLogger("strata.cache")


class Resuming(Ladder):
    """The ladder of an engine whose memory cannot be cut."""

    async def restore(self, slot: int, found: Found, keep: int) -> Restored:
        """Bring `slot`, which holds exactly [0, keep), to the checkpoint of `found`, or to an earlier one.

        Raises EngineGone when the engine ends meanwhile; everything else is in the outcome.
        """
        climb = Climb(slot=slot, found=found, before=keep, held=keep)
        restored = await self._whole(climb, rows=keep)
        self._count(climb, restored)
        return restored

    async def go_back(self, slot: int, found: Found, rows: int) -> Restored:
        """Bring `slot` back to the checkpoint of `found`: its first `rows` tokens are the prompt's, and no more.

        Where rows are missing for an earlier checkpoint or it is damaged, it ends empty.
        """
        return await self._whole(Climb(slot=slot, found=found, before=0, held=0), rows=rows)

    async def _whole(self, climb: Climb, rows: int) -> Restored:
        began = time.perf_counter()
        try:
            await self._climb(climb, rows)
        except EngineGone:
            raise
        except Exception:  # the seam where whatever goes wrong in a restore ends that, and not the request
            log.exception("a restore broke; the prompt is read")
            climb.failed.append("it broke")
            await self._fall_back(climb)
        return Restored(
            held=climb.held,
            kept=climb.before,
            seconds=time.perf_counter() - began,
            bytes_by_level=dict(climb.bytes_by_level),
            tokens_by_level=dict(climb.tokens_by_level),
            failed=tuple(climb.failed),
            bad=tuple(climb.bad),
        )

    async def _climb(self, climb: Climb, rows: int) -> None:
        found: Found | None = climb.found
        rung = Rung.WHOLE
        while found is not None:
            plan, checkpoint = replace(self._plan_of(found), rung=rung), found.match.checkpoint
            if checkpoint is None or plan.upto != checkpoint.position:
                break
            if found.disk is not None:
                found.disk.counters.hits += rung is Rung.WHOLE
            source = self._source(found, checkpoint)
            with self._leased(found, plan, checkpoint.key):
                fault, rows = await self._resume(climb, plan, source, rows)
            if fault is None:
                climb.held = checkpoint.position
                climb.tokens_by_level[source.level.name] += checkpoint.position - climb.before
                climb.used += [] if rung is Rung.WHOLE else [rung]
                return
            found = self._next(climb) if self.climbs and fault is not Fault.NO_MEMORY else None
            rung = Rung.SYSTEM_PROMPT if found is not None and found.disk not in self._disks else Rung.GOOD_PART
        await self._fall_back(climb)

    def _next(self, climb: Climb) -> Found | None:
        """What reaches furthest now, if that is further than what the slot held before."""
        at = climb.found
        levels: list[tuple[RamLevel | DiskLevel, DiskLevel | None]] = [(disk, disk) for disk in self._disks]
        if self._ram is not None:
            levels.insert(0, (self._ram, None))
        offers = [replace(at, match=level.index.resume_point(at.root, at.tokens), disk=disk) for level, disk in levels]
        if self.system_prompts is not None:
            match = self.system_prompts.find(at.root, at.tokens)
            offers.append(replace(at, match=match, disk=self.system_prompts.disk))
        best = max(offers, key=lambda found: found.upto, default=at)
        return best if best.upto > climb.before and best is not at else None

    async def _fall_back(self, climb: Climb) -> None:
        """What the slot held before, if it can still go on with that; else nothing."""
        done = await self._engine.trim(climb.slot, climb.before)
        if not done.ok or done.held != climb.before:
            climb.before = 0
            await self._engine.trim(climb.slot, 0)
        climb.held = climb.before
        climb.forget_sources()
        climb.used.append(Rung.READ)

    # ----------------------------------------------------------------------------------------------------- one attempt

    def _source(self, found: Found, checkpoint: HeldCheckpoint) -> Source:
        level = found.level_of_checkpoint(self._ram)
        if isinstance(level, RamLevel):
            return RamSource(level, checkpoint, counters=self._counters)
        return DiskSource(level, checkpoint, pool=self._pool)

    async def _resume(self, climb: Climb, plan: Plan, source: Source, rows: int) -> tuple[Fault | None, int]:
        """What kept the slot from resuming at a checkpoint, None when it did; and the rows that it holds then."""
        bad = await source.open()
        if bad is not None:
            return self._lose(climb, plan, source, bad), rows
        if self._engine.info.stages and rows < plan.upto:
            applied = await self._apply_rows(climb, plan, rows)
            climb.bytes_by_level.update(applied.bytes_by_level)
            rows = applied.held
            if applied.bad is not None or rows < plan.upto:
                self._fail(climb, plan, applied.bad)
                return (applied.bad.fault if applied.bad is not None else Fault.NO_MEMORY), rows
        for i in range(source.n_blocks):
            bad = await self._put(climb.slot, source, i)
            if bad is not None:
                return self._lose(climb, plan, source, bad), rows
        climb.bytes_by_level[source.level.name] += source.checkpoint.n_bytes
        return None, rows

    async def _apply_rows(self, climb: Climb, plan: Plan, rows: int) -> Applied:
        restoring = Restoring(engine=self._engine, ram=self._ram, blocks=self._pool, slot=climb.slot)
        return await restoring.run(plan.path, rows, plan.upto)

    async def _put(self, slot: int, source: Source, index: int) -> BadCheckpoint | None:
        """Apply one verified block; the engine must confirm the last one.

        When nobody waits any more, the read goes on, since the threads use its memory until then, and nothing is
        applied: the slot may be another request's by then.
        """
        reading = asyncio.ensure_future(source.block(index))
        try:
            span = await asyncio.shield(reading)
            return span if isinstance(span, BadCheckpoint) else await self._apply_block(slot, source, index, span)
        finally:
            reading.add_done_callback(lambda _: source.done(index))

    async def _apply_block(self, slot: int, source: Source, index: int, span: Span) -> BadCheckpoint | None:
        generation, checkpoint = self._engine.generation, source.checkpoint
        done = await self._engine.apply_checkpoint(
            slot, position=checkpoint.position, offset=index * BLOCK_BYTES, total=checkpoint.n_bytes, span=span
        )
        is_last = index == source.n_blocks - 1
        if done.ok and (not is_last or done.held == checkpoint.position):
            return None
        if self._engine.generation != generation:
            raise EngineGone("the engine was replaced during a restore; send the request again", retry_after_s=1)
        reason = done.reason or f"the slot holds {done.held} positions instead of {checkpoint.position}"
        return BadCheckpoint(fault=Fault.REFUSED, reason=reason)

    def _lose(self, climb: Climb, plan: Plan, source: Source, bad: BadCheckpoint) -> Fault:
        """A checkpoint cannot be used: set it aside, once; count, log and tell it."""
        text = f"the checkpoint at {source.checkpoint.position} of {source.level.name}: {bad.reason}"
        self._note_failure(climb, plan.rung, text)
        if bad.fault is not Fault.NO_MEMORY and source.level.index.holds(source.checkpoint.key):
            source.set_aside(bad)
            if bad.fault is Fault.DAMAGED:
                self._tell(climb.found, "quarantine", text)
        return bad.fault
