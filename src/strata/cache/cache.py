"""The conversation cache: look a prompt up, restore it into a slot, park a slot's state. RAM and disk levels.

Owns the index of every level (event loop only, no locks), and puts the parts together: parking, spilling, the cascade.
It decides nothing about slots, and makes no request wait for a disk write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from strata.cache.admission import Admission, Floors, Memory
from strata.cache.blocks import BlockPool
from strata.cache.cascade import Archive, Cascade
from strata.cache.checkpoint_room import CheckpointRoom
from strata.cache.checkpoints import CheckpointTaker
from strata.cache.counters import CacheCounters
from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation
from strata.cache.kept import Kept
from strata.cache.ladder import Found, Ladder, Restored
from strata.cache.lookup import HitRules, Lookup
from strata.cache.parking import Desk, Parking, ParkJob
from strata.cache.placing import Placing
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLevel, RamLimits
from strata.cache.resuming import Resuming
from strata.cache.spilling import Spiller
from strata.cache.status import disk_status, ram_status
from strata.cache.story import Story
from strata.cache.streaming import Streaming
from strata.cache.system_prompts import SystemPromptLimits, SystemPrompts
from strata.cache.write_levels import WriteLevels
from strata.engine.interface import Engine
from strata.rules.checkpoints import CheckpointLimits
from strata.rules.placement import Target
from strata.store.arena import Arena
from strata.store.level import Level
from strata.types import MIB, Key, Tokens

log = logging.getLogger("strata.cache")

EVERYTHING = 1 << 62
"""More bytes than there are."""
TRANSIENT_BYTES = 512 * MIB
"""Most arena bytes of blocks on their way between engine and disk."""
RESTORE_RESERVE_BYTES = 96 * MIB
"""The part of them that parks leave to restores: the read-ahead window of the largest blocks, with head room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What is kept where. A level is on when it is given; `park_target`: after "auto" is resolved.

    `similarity`, `n_min`: the weakest hit that is accepted (SPEC §2). `spill_on_evict`: RAM parks are written when RAM
    drops them, not at once. `ladder`: a restore that fails goes on with the next best thing (SPEC §7).
    """

    floors: Floors
    park_target: Target = "ram"
    ram: RamLimits | None = None
    similarity: float = 0.0
    n_min: int = 0
    spill_on_evict: bool = False
    throttle_s: float = 0.0
    transient_bytes: int = TRANSIENT_BYTES
    ladder: bool = False
    checkpoints: CheckpointLimits = field(default_factory=CheckpointLimits)


class ConversationCache:
    """Conversations of one engine on RAM and disk levels."""

    def __init__(
        self,
        *,
        engine: Engine,
        arena: Arena,
        limits: CacheLimits,
        levels: Sequence[tuple[Level, DiskLimits]],
        archive: tuple[Level, DiskLimits, bool] | None = None,
        system_prompts: tuple[Level, SystemPromptLimits] | None = None,
        memory: Memory,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`levels`: fast to slow. `archive`: with whether it keeps ids only.

        Scans the directories. Raises OSError when one cannot be listed.
        """
        identity = engine.info.fingerprint
        self.counters = CacheCounters()
        self.story = Story()
        keep = limits.checkpoints.keep
        own = [(level, replace(limit, checkpoints=keep)) for level, limit in levels]
        self.disks = tuple(DiskLevel(level, limit, identity, clock) for level, limit in own)
        shelf = None
        if archive is not None:
            shelf = Archive(level=DiskLevel(archive[0], archive[1], identity, clock), ids_only=archive[2])
        self._write_levels = WriteLevels(self.disks)
        self.cascade = Cascade(self.disks, shelf, story=self.story, clock=clock)
        self._engine = engine
        self._limits = limits
        transient = min(limits.transient_bytes, arena.limit_bytes)
        self._pool = BlockPool(
            arena,
            transient_bytes=transient,
            reserve_bytes=min(RESTORE_RESERVE_BYTES, transient // 2),
            head_room=engine.info.head_room,
        )
        self.ram = RamLevel(self._pool, limits.ram, clock=clock) if limits.ram is not None else None
        self._admission = Admission(
            memory=memory,
            floors=limits.floors,
            target=limits.park_target,
            pool=self._pool,
            counters=self.counters,
        )
        self.system_prompts = self._make_system_prompts(system_prompts, clock)
        self.ladder = self._make_ladder(clock)
        self.kept = Kept(self.ram, self.disks, counters=self.counters, story=self.story, clock=clock)
        self._lookup = self._make_lookup()
        self.taker = self._make_taker()
        """Takes checkpoints; None for memory that can be cut."""
        self.live = self.kept.live
        self.spiller = self._make_spiller(clock)
        self._placing = Placing(self._make_desk(clock), self.spiller)
        self._connect()

    def _connect(self) -> None:
        """Let the levels ask, and tell, each other."""
        if self.ram is not None:
            self.ram.is_last = not self.disks
            self.ram.is_durable = lambda entry: self.kept.is_durable(entry.whole)
            self.ram.is_live = lambda entry: self.kept.is_live(entry.whole)
            self._admission.promised_bytes = lambda: self.ram.promised_bytes if self.ram is not None else 0
        for disk in self.disks:
            disk.on_recorded = partial(self._became_durable, disk)
        if self.taker is not None:
            self.cascade.checkpoints_of = self.taker.for_adopted
            for disk in self.disks:
                disk.index.root_of = self.taker.root_of
        self.ladder.system_prompts = self.system_prompts
        if self.system_prompts is not None:
            self.system_prompts.taker = self.taker

    def _make_system_prompts(
        self, given: tuple[Level, SystemPromptLimits] | None, clock: Callable[[], float]
    ) -> SystemPrompts | None:
        if given is None:
            return None
        return SystemPrompts(
            level=given[0],
            limits=given[1],
            engine=self._engine,
            pool=self._pool,
            admission=self._admission,
            counters=self.counters,
            story=self.story,
            clock=clock,
        )

    def _make_taker(self) -> CheckpointTaker | None:
        prompts = self.system_prompts.disk if self.system_prompts is not None else None
        if self._engine.info.cuttable or (self.ram or self.write_level or prompts) is None:
            return None
        ram, disk, streaming = self.ram, self.write_level or prompts, None
        if self.write_level is not None:
            level = self.write_level
            streaming = Streaming(engine=self._engine, pool=self._pool, disk=level, counters=self.counters)
        return CheckpointTaker(
            engine=self._engine,
            room=CheckpointRoom(pool=self._pool, ram=ram, disk=disk, admission=self._admission, kept=self.kept),
            ram=ram,
            disk=disk,
            counters=self.counters,
            limits=self._limits.checkpoints,
            streaming=streaming,
        )

    def _make_ladder(self, clock: Callable[[], float]) -> Ladder:
        make = Ladder if self._engine.info.cuttable else Resuming
        return make(
            engine=self._engine,
            ram=self.ram,
            disks=self.disks,
            pool=self._pool,
            admission=self._admission,
            counters=self.counters,
            story=self.story,
            clock=clock,
            climbs=self._limits.ladder,
        )

    def _make_lookup(self) -> Lookup:
        return Lookup(
            engine=self._engine,
            ram=self.ram,
            disks=self.disks,
            system_prompts=self.system_prompts,
            rules=HitRules(similarity=self._limits.similarity, n_min=self._limits.n_min),
            ladder=self.ladder,
            admission=self._admission,
            counters=self.counters,
        )

    def _make_desk(self, clock: Callable[[], float]) -> Desk:
        limits = self._limits
        return Desk(
            engine=self._engine,
            pool=self._pool,
            admission=self._admission,
            counters=self.counters,
            story=self.story,
            clock=clock,
            ram=self.ram,
            levels=self._write_levels,
            kept=self.kept,
            spiller=self.spiller if not limits.spill_on_evict else None,
            mirror=not limits.spill_on_evict,
            taker=self.taker,
        )

    def _make_spiller(self, clock: Callable[[], float]) -> Spiller | None:
        if self.ram is None or self.write_level is None:
            return None
        return Spiller(
            engine=self._engine,
            pool=self._pool,
            ram=self.ram,
            levels=self._write_levels,
            counters=self.counters,
            story=self.story,
            clock=clock,
            throttle_s=self._limits.throttle_s,
            taker=self.taker,
        )

    def __repr__(self) -> str:
        return f"ConversationCache({self.ram!r}, {list(self.disks)!r})"

    @property
    def write_level(self) -> DiskLevel | None:
        """The disk level that parks go to: the fastest one."""
        return self.disks[0] if self.disks else None

    # ------------------------------------------------------------------------------------------------------ look up

    def lookup(self, root: Key, tokens: Tokens, *, beyond: int, held: int | None = None) -> Found | None:
        """The longest stored prefix of `tokens`, of at least `beyond` tokens and accepted by the hit rules (SPEC §2).

        RAM before warm before cold among equally long ones, and a system prompt of its own only when it is longer.
        `held`: what the slot has already, and restoring the rest must pay. What does not pay, or what no memory admits
        from disk, is looked for in RAM.
        """
        return self._lookup.find(root, tokens, beyond=beyond, held=held)

    # ------------------------------------------------------------------------------------------------------ restore

    async def restore(self, slot: int, found: Found, keep: int) -> Restored:
        """Bring `slot`, which holds exactly [0, keep), up to `found.upto`, or as far as the ladder reaches."""
        restored = await self.ladder.restore(slot, found, keep)
        if self.system_prompts is not None:
            disk = self.system_prompts.disk
            n_loaded = restored.tokens_by_level.get(disk.name, 0)
            self.system_prompts.note_restore(found.root, found.tokens, n_loaded, asked=found.disk is disk)
        return restored

    def resume_point(self, root: Key, tokens: Tokens) -> int:
        """Where a slot that holds all of `tokens` but the last can be brought back to (memory that cannot be cut)."""
        found = self._lookup.deepest(root, tokens)
        return 0 if found is None else found.upto

    async def go_back(self, slot: int, root: Key, tokens: Tokens) -> int:
        """Bring a slot that holds all of `tokens` but the last to their deepest checkpoint; what it holds then."""
        found = self._lookup.deepest(root, tokens)
        if found is None or not isinstance(self.ladder, Resuming):
            await self._engine.trim(slot, 0)
            return 0
        return (await self.ladder.go_back(slot, found, rows=len(tokens) - 1)).held

    # --------------------------------------------------------------------------------------------------------- park

    def keeps_live(self, slot: int) -> bool:
        """Whether what was parked last from a slot, and lies there still, is kept outside the engine too."""
        return slot in self.live and self.kept.anywhere(self.live[slot])

    def restore_s(self, slot: int, n_tokens: int) -> float | None:
        """What bringing back the `n_tokens` parked from a slot costs, as measured; None: they are not kept."""
        level = self.kept.level_of(self.live[slot]) if slot in self.live else None
        n_bytes = n_tokens * sum(stage.token_bytes for stage in self._engine.info.stages)
        return None if level is None else self.ladder.costs.restore_s(level, n_bytes)

    def left(self, slot: int) -> None:
        """The slot holds something else from now on."""
        self.live.pop(slot, None)

    @property
    def parks(self) -> bool:
        """Whether conversations are kept at all: with the system-prompt cache alone they are not."""
        return self.ram is not None or bool(self.disks)

    def begin_park(self, job: ParkJob) -> Parking | None:
        """A park of the job's state; `Parking.run` must follow. None: nothing to do, or no way to do it."""
        return self._placing.begin(job) if self.parks else None

    def checkpoints_to_take(self, root: Key, tokens: Tokens, held: int) -> tuple[int, ...]:
        """Where, while a prompt is read into a slot that holds its first `held` tokens; none if memory can be cut."""
        if self.taker is None:
            return ()
        wanted = set(self.taker.positions(root, tokens, held)) if self.parks else set()
        prompt = self.system_prompts.wants_checkpoint(root, tokens) if self.system_prompts is not None else None
        return tuple(sorted(wanted | ({prompt} if prompt is not None and prompt > held else set())))

    def _became_durable(self, level: DiskLevel, entry: Conversation) -> None:
        """What was parked before and is continued by it is not needed in RAM, nor on another level."""
        if self.ram is not None:
            old = self.ram.superseded_by(entry.conversation, entry.root, entry.tokens, born=entry.born - 1)
            self.ram.drop(old)
            self.counters.ram_superseded += len(old)
            if self.spiller is not None:
                self.spiller.collapse(old)
        self.cascade.supersede_elsewhere(level, entry)

    # ------------------------------------------------------------------------------------------------------ upkeep

    def tick(self) -> None:
        """Every few seconds: what could not leave its level, or not be written, tries again; what is too old goes."""
        self.cascade.tick()
        if self.system_prompts is not None:
            self.system_prompts.tick()
        if self.spiller is not None:
            self.spiller.wake()

    @property
    def unwritten(self) -> int:
        """Conversations in RAM that are to be written and are not durable yet."""
        return 0 if self.spiller is None else self.spiller.waiting

    @property
    def under_way(self) -> int:
        """Writes, moves between levels and deletions that have not ended."""
        spilling = self.spiller is not None and self.spiller.is_writing
        disks = self._all_disks()
        return sum(d.puts_under_way + len(d.moving) + d.writer.statistics().waiting_jobs for d in disks) + spilling

    async def flush(self, timeout_s: float) -> bool:
        """Write what only RAM has, and wait until nothing moves; False when the limit passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                if self.spiller is not None:
                    self.spiller.offer_oldest(self.kept.only_in_ram(), EVERYTHING)
                    await self.spiller.flush()
                await self.cascade.settle()
                for disk in self._all_disks():
                    while not await asyncio.to_thread(disk.writer.flush, 0.2):
                        pass
        except TimeoutError:
            return False
        return True

    def _levels(self) -> list[DiskLevel]:
        archive = self.cascade.archive
        return [*self.disks, *([archive.level] if archive is not None else [])]

    def _all_disks(self) -> list[DiskLevel]:
        return [*self._levels(), *([self.system_prompts.disk] if self.system_prompts is not None else [])]

    def check(self) -> list[str]:
        """Every inconsistency found between and in the indexes, in words; empty when all is well."""
        wrong = [f"{disk.name}: {text}" for disk in self._all_disks() for text in disk.index.check()]
        if self.ram is not None:
            wrong += [f"ram: {text}" for text in self.ram.check()]
        return wrong

    def status(self) -> list[dict[str, object]]:
        """What each level holds now, for /v1/status: no text, no token, no client's key."""
        levels = [] if self.ram is None else [ram_status(self.ram)]
        return levels + [disk_status(disk) for disk in self._levels()]

    def close(self) -> None:
        """End the threads and release the directories."""
        if self.spiller is not None:
            self.spiller.close()
        if self.ram is not None:
            self.ram.close()
        for disk in self._all_disks():
            disk.close()
