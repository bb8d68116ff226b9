"""Restore what a lookup found, and climb down the ladder rung by rung when something of it cannot be used (SPEC §7).

After a failure: what is bad is set aside, once, never to be served again; the rung is counted, logged and told; then
the next one is tried if it reaches further than what is verified already. Without the ladder the slot is cut back to
what it held before. Which rung that is, and whether restoring pays, is decided in rules/restore.py; how blocks get from
a level into the engine is in restoring.py.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from strata.cache.admission import Admission
from strata.cache.blocks import BlockPool
from strata.cache.costs import Costs
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.entries import HeldSegment, Match
from strata.cache.ram import RamLevel
from strata.cache.restoring import Applied, BadSegment, Fault, Planned, Restoring, need_bytes, planned_bytes
from strata.cache.story import Story
from strata.cache.system_prompts import SystemPrompts
from strata.engine.interface import Engine
from strata.errors import EngineGone
from strata.rules import prefix
from strata.rules.restore import Offer, Rung, next_rung
from strata.types import Key, Tokens

log = logging.getLogger("strata.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The longest stored prefix of a prompt (`tokens`). `disk`: the level that has all of it; None when RAM has."""

    root: Key
    tokens: Tokens
    match: Match
    disk: DiskLevel | None

    @property
    def upto(self) -> int:
        return self.match.upto

    def level_of_checkpoint(self, ram: RamLevel | None) -> RamLevel | DiskLevel:
        """Where its checkpoint is to come from: RAM, if that has it too."""
        assert self.match.checkpoint is not None, "memory that can be cut needs none"
        if self.disk is not None and (ram is None or not ram.index.holds(self.match.checkpoint.key)):
            return self.disk
        assert ram is not None, "found in a RAM level that is off"
        return ram


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """`held`: positions the slot holds now; `kept` of them it held before. `bytes_by_level`: payload of what was used,
    in the order of first use; `tokens_by_level`: how many tokens that was. `failed`: what could not be used, rung by
    rung; `bad`: the segments at fault.
    """

    held: int
    kept: int
    seconds: float
    bytes_by_level: dict[str, int]
    tokens_by_level: dict[str, int]
    failed: tuple[str, ...] = ()
    bad: tuple[BadSegment, ...] = ()

    @property
    def n_bytes(self) -> int:
        return sum(self.bytes_by_level.values())

    @property
    def sources(self) -> list[str]:
        """The levels that gave something, as shown in the x-strata-cache header."""
        return list(self.bytes_by_level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one rung is to do: positions [0, upto) out of these segments."""

    rung: Rung
    path: tuple[Planned, ...]
    upto: int


@dataclass(slots=True, kw_only=True)
class Climb:
    """One restore under way. `before`: positions the slot held when it began (0 if the engine lost them meanwhile);
    `held`: those that it holds now, all verified.
    """

    slot: int
    found: Found
    before: int
    held: int
    bytes_by_level: Counter[str] = field(default_factory=Counter)
    tokens_by_level: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    bad: list[BadSegment] = field(default_factory=list)
    used: list[Rung] = field(default_factory=list)

    def forget_sources(self) -> None:
        """Nothing that was applied is left."""
        self.bytes_by_level.clear()
        self.tokens_by_level.clear()


class Ladder:
    """Restores into slots of one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        ram: RamLevel | None,
        disks: Sequence[DiskLevel],
        pool: BlockPool,
        admission: Admission,
        counters: CacheCounters,
        story: Story,
        clock: Callable[[], float],
        climbs: bool,
    ) -> None:
        """`climbs`: the ladder is on."""
        self.climbs = climbs
        self.costs = Costs()
        self.system_prompts: SystemPrompts | None = None
        """Asked last (rung 4)."""
        self._engine = engine
        self._ram = ram
        self._disks = tuple(disks)
        self._pool = pool
        self._admission = admission
        self._counters = counters
        self._story = story
        self._clock = clock

    def __repr__(self) -> str:
        return f"Ladder({'on' if self.climbs else 'off'}, {self.costs!r})"

    # ----------------------------------------------------------------------------------------------------- does it pay

    def pays(self, found: Found, held: int) -> bool:
        """Whether to restore `found` into a slot that holds [0, held). If reading is cheaper: counted and told."""
        plan = self._plan_of(found)
        bytes_by_level = self._bytes(plan, held)
        if found.match.checkpoint is not None:
            level = found.level_of_checkpoint(self._ram)
            bytes_by_level[level.name] = bytes_by_level.get(level.name, 0) + found.match.checkpoint.n_bytes
        verdict = self.costs.verdict(plan.upto - held, bytes_by_level)
        if not verdict.pays:
            self._counters.not_worth_it += 1
            self.costs.note_refused(bytes_by_level)
            self._tell(found, "restore", f"not worth it, read again: {verdict.text()}")
        return verdict.pays

    def _bytes(self, plan: Plan, held: int) -> dict[str, int]:
        return planned_bytes(self._engine, plan.path, held, plan.upto)

    # --------------------------------------------------------------------------------------------------------- restore

    async def restore(self, slot: int, found: Found, keep: int) -> Restored:
        """Bring `slot`, which holds exactly [0, keep), up to `found.upto`, or as far as a rung of the ladder reaches.

        Raises EngineGone when the engine ends meanwhile; everything else is in the outcome.
        """
        began = time.perf_counter()
        climb = Climb(slot=slot, found=found, before=keep, held=keep)
        if found.disk is not None:
            found.disk.counters.hits += 1
        plan: Plan | None = self._plan_of(found)
        while plan is not None:
            plan = await self._rung(climb, plan)
        restored = Restored(
            held=climb.held,
            kept=climb.before,
            seconds=time.perf_counter() - began,
            bytes_by_level=dict(climb.bytes_by_level),
            tokens_by_level=dict(climb.tokens_by_level),
            failed=tuple(climb.failed),
            bad=tuple(climb.bad),
        )
        self._count(climb, restored)
        return restored

    async def _rung(self, climb: Climb, plan: Plan) -> Plan | None:
        """One rung; the next one when it failed and there is a better one."""
        at = climb.held
        with self._leased(climb.found, plan):
            applied = await self._apply(climb, plan)
            climb.bytes_by_level.update(applied.bytes_by_level)
            climb.tokens_by_level.update(_tokens_by_level(plan.path, at, applied.held))
            climb.held = applied.held
            if plan.rung is not Rung.WHOLE and applied.held > at:
                climb.used.append(plan.rung)
            if applied.bad is None and applied.held == max(at, plan.upto):
                return None
            self._fail(climb, plan, applied.bad)
            await self._cut_back(climb, applied.held)
        # Without memory, or after an error that nobody foresaw, another rung would fail in the same way.
        may_climb = applied.bad is not None and applied.bad.fault is not Fault.NO_MEMORY
        plans = self._offers(climb, plan, applied.bad) if applied.bad is not None and self.climbs and may_climb else []
        offers = [self._offer(climb, plan) for plan in plans]
        step = next_rung(before=climb.before, held=climb.held, offers=offers, climbs=self.climbs)
        if step.offer is not None:
            return plans[step.offer]
        if step.upto < climb.held:
            await self._cut_back(climb, step.upto)
        if not climb.used:
            climb.used.append(step.rung)
        return None

    async def _apply(self, climb: Climb, plan: Plan) -> Applied:
        """The seam where whatever goes wrong in a rung ends that rung, and not the request."""
        restoring = Restoring(engine=self._engine, ram=self._ram, blocks=self._pool, slot=climb.slot)
        try:
            return await restoring.run(plan.path, climb.held, plan.upto)
        except EngineGone:
            raise
        except Exception:
            log.exception("a restore broke; what the slot held before is kept, the rest is read")
            return Applied(held=climb.before, bytes_by_level={})

    async def _cut_back(self, climb: Climb, n: int) -> None:
        """Make the slot hold exactly [0, n), as the engine must confirm; else what it held before, else nothing."""
        done = await self._engine.trim(climb.slot, n)
        if not done.ok or done.held != n:
            self._counters.restore_unproved += 1
            self._tell(climb.found, "restore", f"the slot holds {done.held} tokens instead of {n}: it is cut back")
            n = min(n, climb.before)
            done = await self._engine.trim(climb.slot, n)
        if not done.ok or done.held != n:
            n = 0
            await self._engine.trim(climb.slot, 0)
        climb.held, climb.before = n, min(n, climb.before)
        if n == climb.before:
            climb.forget_sources()

    # ----------------------------------------------------------------------------------------------------- failures

    def _fail(self, climb: Climb, plan: Plan, bad: BadSegment | None) -> None:
        """A rung failed: set aside what is at fault; count, log and tell it."""
        reason = "the engine did not confirm it" if bad is None else bad.text()
        self._note_failure(climb, plan.rung, reason)
        climb.bad += [] if bad is None else [bad]
        if bad is not None and self._set_aside(bad):
            self._tell(climb.found, "quarantine", bad.text())

    def _note_failure(self, climb: Climb, rung: Rung, reason: str) -> None:
        self._counters.ladder_failed[rung.label] += 1
        text = f"rung {rung.value} ({rung.label}) failed: {reason}"
        climb.failed.append(text)
        log.warning("%s", text)

    def _set_aside(self, bad: BadSegment) -> bool:
        """Never serve it again from this level; whether it was damaged. Not what is another segment by now."""
        disk, key = bad.planned.disk, bad.planned.held.key
        level = disk if disk is not None else self._ram
        if bad.fault is Fault.NO_MEMORY or level is None or level.index.held(key) is not bad.planned.held:
            return False
        is_damaged = bad.fault is Fault.DAMAGED
        if disk is not None:
            disk.set_aside(key, bad.stages)
        elif self._ram is not None:
            self._ram.quarantine(key)
            self._counters.ram_quarantined += is_damaged
        return is_damaged

    def _count(self, climb: Climb, restored: Restored) -> None:
        counts, gained = self._counters, max(0, restored.held - climb.before)
        counts.restores += gained > 0
        counts.restored_tokens += gained
        counts.restored_bytes += restored.n_bytes
        counts.restore_s += restored.seconds
        counts.restore_failures += bool(climb.failed)
        if not climb.failed:
            self.costs.note_restore(restored.bytes_by_level, restored.seconds)
        if climb.failed and self.climbs:
            for rung in climb.used:
                counts.ladder_used[rung.label] += 1
            counts.ladder_tokens_saved += gained
        sources = " and ".join(restored.sources) or "nothing"
        text = f"{gained} tokens from {sources} in {restored.seconds * 1000:.1f} ms"
        if climb.failed and self.climbs:
            text += f" by {', '.join(f'rung {rung.value} ({rung.label})' for rung in climb.used)}"
        self._tell(climb.found, "restore", "; ".join([text, *climb.failed]))

    def _tell(self, found: Found, verb: str, detail: str) -> None:
        conversation = prefix.conversation_key(found.root, found.tokens, self._engine.info.openers)
        self._story.tell(self._clock(), conversation, verb, detail)

    # ------------------------------------------------------------------------------------------------------- offers

    def _offers(self, climb: Climb, failed: Plan, bad: BadSegment) -> list[Plan]:
        """What the levels can bring the slot to now: rungs 1, 3 and 4."""
        found, key = climb.found, bad.planned.held.key
        plans = [self._gathered(Rung.OTHER_LEVEL, [p.held for p in failed.path], failed.upto, self._disks)]
        indexes = [level.index for level in (self._ram, *self._disks) if level is not None]
        if indexes:
            match = indexes[0].lookup(found.root, found.tokens, *indexes[1:])
            keys = {held.key for held in match.path}
            rung = Rung.OTHER_LEVEL if key in keys else Rung.OTHER_CONVERSATION
            if keys <= {planned.held.key for planned in failed.path} - {key}:
                rung = Rung.GOOD_PART  # once more: the engine lost it
            plans.append(self._gathered(rung, match.path, match.upto, self._disks))
        if self.system_prompts is not None:
            match = self.system_prompts.find(found.root, found.tokens)
            disks = (*self._disks, self.system_prompts.disk)
            plans.append(self._gathered(Rung.SYSTEM_PROMPT, match.path, match.upto, disks))
        return plans

    def _offer(self, climb: Climb, plan: Plan) -> Offer:
        """A plan as the rule sees it."""
        gain = plan.upto - climb.held
        pays = gain > 0 and self.costs.verdict(gain, self._bytes(plan, climb.held)).pays
        if pays and climb.found.disk is None and any(p.disk is not None for p in plan.path):
            what = "system-prompt" if plan.rung is Rung.SYSTEM_PROMPT else "conversation"
            pays = self._admission.read(what, self._need_bytes(plan), counted=False).admitted
        return Offer(rung=plan.rung, upto=plan.upto, pays=pays)

    def _need_bytes(self, plan: Plan) -> int:
        return need_bytes(self._engine, Match(path=tuple(planned.held for planned in plan.path), upto=plan.upto))

    def _plan_of(self, found: Found) -> Plan:
        """The whole entry: from RAM what RAM has, the rest from the level that has it all."""
        disks = () if found.disk is None else (found.disk,)
        return self._gathered(Rung.WHOLE, found.match.path, found.upto, disks)

    def _gathered(self, rung: Rung, path: Sequence[HeldSegment], upto: int, disks: Sequence[DiskLevel]) -> Plan:
        """Each segment from the fastest level that has it; up to the first that none has."""
        plan: list[Planned] = []
        for wanted in path:
            held = self._ram.index.held(wanted.key) if self._ram is not None else None
            disk = None
            if held is None:
                disk = next((disk for disk in disks if disk.index.holds(wanted.key)), None)
                held = None if disk is None else disk.index.held(wanted.key)
            if held is None:
                return Plan(rung=rung, path=tuple(plan), upto=plan[-1].held.segment.end if plan else 0)
            plan.append(Planned(held=held, disk=disk))
        return Plan(rung=rung, path=tuple(plan), upto=upto)

    # ------------------------------------------------------------------------------------------------------- leases

    @contextmanager
    def _leased(self, found: Found, plan: Plan, *more: Key) -> Iterator[None]:
        """Nothing of the plan, nor what `more` names, leaves its level meanwhile."""
        keys = [*(planned.held.key for planned in plan.path), *more]
        disks = {id(disk): disk for disk in (found.disk, *(planned.disk for planned in plan.path)) if disk is not None}
        levels = [level for level in (self._ram, *disks.values()) if level is not None]
        for level in levels:
            level.index.lease(keys)
        try:
            yield
        finally:
            for level in levels:
                level.release(keys)


def _tokens_by_level(path: Sequence[Planned], start: int, end: int) -> Counter[str]:
    """Of positions [start, end), how many each level gave."""
    found = Counter[str]()
    for planned in path:
        segment = planned.held.segment
        found[planned.level] += max(0, min(segment.end, end) - max(segment.start, start))
    return found
