"""Everything that can happen to parked conversations, in any order, against an oracle that knows nothing of the cache.

Hypothesis drives the real cache on the fake engine, with real directories and tiny budgets: parks, leaves, restores,
cancelled requests, dying engines, failing disks, memory that comes and goes, damage, crashes and restarts. The oracle
keeps the states that it was told are kept; whatever is missing when all is quiet must have been told in the story,
superseded by a later state that was kept, or lost with the RAM of a crashed process.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.serve.slowdisk import SlowDisk
from tests.serve.workbench import BLOCK, LIMIT_S, Workbench, states_of

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits, ConversationCache
from strata.cache.checkpoints import Captured
from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation
from strata.cache.parking import Parking, ParkJob
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLimits
from strata.cache.room import own_bytes
from strata.cache.status import over_budget
from strata.engine.fake import CHECKPOINT_HEAD_BYTES
from strata.engine.fake_model import BASE_BYTES, OPENER
from strata.rules import prefix
from strata.rules.checkpoints import CheckpointLimits
from strata.types import MIB, Key, Tokens

SLOTS = 3
PARKING_FLOOR, TRANSIENT_FLOOR = 8 * MIB, 1 * MIB
MEMORY = {"plenty": 1 << 40, "only transient": 4 * MIB, "none": MIB // 2, "unknown": None}
ROOT = prefix.root_key(b"f" * 32, "")
REWRITE_LIMIT = 300
AGE_S = 3000.0
EVERY = 300  # tokens from one checkpoint to the next


def folder() -> Path:
    """In memory where that can be had: a machine makes hundreds of directories."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="strata-machine-", dir=shm if shm.is_dir() else None))


def numbers(cache: ConversationCache) -> dict[str, float]:
    return {name: n for name, n in cache.counters.as_dict().items() if isinstance(n, int | float)}


def turn_of(seed: int, n: int) -> Tokens:
    body = np.random.default_rng(seed).integers(10, 200, n).astype(np.int32)
    return np.concatenate([np.array([OPENER], np.int32), body])


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a slot holds. `turns`: its text; the last one is the reply."""

    turns: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> Tokens:
        return np.concatenate([turn_of(*turn) for turn in self.turns])

    @property
    def frontier(self) -> int | None:
        return prefix.frontier(self.tokens, (OPENER,))

    @property
    def conversation(self) -> bytes:
        return prefix.conversation_key(ROOT, self.tokens, (OPENER,))

    @property
    def keys(self) -> tuple[Key, ...]:
        n = len(self.tokens)
        return tuple(s.key for s in prefix.chain(ROOT, self.tokens, prefix.cuts(n, self.frontier)))

    @property
    def whole(self) -> tuple[Key, ...]:
        """What of memory that cannot be cut must be kept: the segments, and the checkpoint of the end."""
        return (*self.keys, prefix.checkpoint_key(ROOT, self.tokens, len(self.tokens)))

    @property
    def checkpoint_keys(self) -> set[Key]:
        """Of all positions where one may have been taken."""
        tokens = self.tokens
        openers = prefix.opener_positions(tokens, (OPENER,)).tolist()
        positions = {*openers, *range(EVERY, len(tokens), EVERY), len(tokens)}
        return {prefix.checkpoint_key(ROOT, tokens, at) for at in positions}

    def makes_superfluous(self, old: State) -> bool:
        """As SPEC §6 has it: one conversation, and all of the old one up to its last turn is here too."""
        upto = old.frontier or len(old.tokens)
        mine = self.tokens
        return self.conversation == old.conversation and np.array_equal(mine[:upto], old.tokens[:upto])

    def rewrites(self, old: State) -> bool:
        shared = prefix.shared_prefix(self.tokens, old.tokens)
        return self.conversation == old.conversation and shared < REWRITE_LIMIT <= len(old.tokens)


@dataclass(slots=True, kw_only=True)
class Oracle:
    """States that were said to be kept, in the order of their parks, and what may explain that one is gone."""

    kept: dict[tuple[Key, ...], tuple[int, State]] = field(default_factory=dict)
    attempted: list[tuple[int, State]] = field(default_factory=list)
    damaged: set[bytes] = field(default_factory=set)
    begun: int = 0

    def may_be_gone(self, born: int, state: State, lost: set[str]) -> bool:
        later = [other for n, other in self.attempted if n > born]
        return (
            state.conversation.hex()[:12] in lost
            or state.conversation in self.damaged
            or any(other.makes_superfluous(state) or other.rewrites(state) for other in later)
        )

    def must_be_gone(self, born: int, state: State) -> bool:
        later = [other for n, other in self.kept.values() if n > born]
        return any(other.makes_superfluous(state) for other in later)


class Machine(RuleBasedStateMachine):
    """See the module. `memories`: the kinds of memory that the engine may have."""

    memories: tuple[str, ...] = ("segments",)

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = folder()
        self.disk = SlowDisk()
        self.oracle = Oracle()
        self.slots: list[State | None] = [None] * SLOTS
        self.parkings: list[set[Parking]] = [set() for _ in range(SLOTS)]
        self.tasks: set[asyncio.Task[None]] = set()
        self.newest: dict[int, State] = {}
        self.seeds = 0
        self.is_failing = False
        self.errors: list[str] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, LIMIT_S))

    # ------------------------------------------------------------------------------------------------------ begin, end

    @initialize(
        ram_blocks=st.sampled_from((0, 6, 12, 60)),
        most=st.sampled_from((1, 2, 50)),
        warm_blocks=st.sampled_from((None, 5, 14)),
        cold_blocks=st.sampled_from((6, 20, 200)),
        archive=st.sampled_from(("off", "off", "ids", "state")),
        goal=st.sampled_from(("ram", "ram", "disk")),
        evict=st.booleans(),
        throttle_s=st.sampled_from((0.0, 0.0, 40.0)),
        rejects=st.sampled_from((False, False, False, True)),
        rewrites=st.booleans(),
        ages=st.booleans(),
        ladder=st.booleans(),
        arena_blocks=st.sampled_from((8, 24, 400)),
        memory=st.integers(0, 1),
        keep=st.sampled_from((1, 2, 6)),
    )
    def begin(
        self,
        *,
        ram_blocks: int,
        most: int,
        warm_blocks: int | None,
        cold_blocks: int,
        archive: str,
        goal: Any,
        evict: bool,
        throttle_s: float,
        rejects: bool,
        rewrites: bool,
        ages: bool,
        ladder: bool,
        arena_blocks: int,
        memory: int,
        keep: int,
    ) -> None:
        ram = RamLimits(budget_bytes=ram_blocks * BLOCK, most=most) if ram_blocks else None
        self.archive, self.has_ram = archive, ram is not None
        self.options: dict[str, Any] = {
            "slots": SLOTS,
            "clock_step_s": 1e-6,
            "fs": self.disk,
            "arena_bytes": arena_blocks * BLOCK,
            "warm_bytes": None if warm_blocks is None else warm_blocks * BLOCK,
            "archive": archive,
            "memory": self.memories[memory % len(self.memories)],
            "limits": CacheLimits(
                floors=Floors(parking_bytes=PARKING_FLOOR, transient_bytes=TRANSIENT_FLOOR),
                park_target=goal if ram is not None else "disk",
                ram=ram,
                spill_on_evict=evict,
                throttle_s=throttle_s,
                ladder=ladder,
                checkpoints=CheckpointLimits(keep=keep, every=EVERY, root=40),
            ),
            "disk_limits": DiskLimits(
                budget_bytes=cold_blocks * BLOCK,
                rejects=rejects,
                divergence_tokens=REWRITE_LIMIT if rewrites else 0,
                max_age_s=AGE_S if ages else 0.0,
            ),
        }
        self.run(self._open(0.0))

    async def _open(self, now: float) -> None:
        self.just_opened = True
        self.loop.set_exception_handler(lambda _, context: self.errors.append(str(context)))
        self.bench = Workbench(self.root, **self.options)
        self.bench._now = now
        self.cache = self.bench.cache
        self.slots = [None] * SLOTS
        self.parkings = [set() for _ in range(SLOTS)]
        self.captured: list[list[Captured]] = [[] for _ in range(SLOTS)]
        self.oracle.begun = 0
        self.cache.story._events = deque()  # all of them
        self.before = numbers(self.cache)

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self._heal()
            self.a_tick()
            self.all_is_quiet()
            self.run(self._close())
        self.loop.close()
        shutil.rmtree(self.root)

    async def _close(self) -> None:
        self.bench.close()
        await asyncio.sleep(0)

    # ----------------------------------------------------------------------------------------------------------- rules

    @rule(chat=st.integers(0, 3), n=st.sampled_from((20, 150, 260, 500)), slot=st.integers(0, SLOTS - 1))
    def a_turn(self, chat: int, n: int, slot: int) -> None:
        """A conversation goes on, wherever its state is, and is parked at the end."""
        old = self.newest.get(chat)
        turns = old.turns if old is not None and len(old.tokens) < 1500 else ((chat, 30), (chat + 50, 20))
        self.seeds += 1
        state = State(turns=(*turns, (1000 + self.seeds, n), (5000 + self.seeds, 30)))
        self.newest[chat] = state
        self.run(self._take(slot, state))
        self._park(slot)

    @rule(chat=st.integers(0, 3), slot=st.integers(0, SLOTS - 1), back=st.integers(1, 3))
    def another_reply(self, chat: int, slot: int, back: int) -> None:
        """The same prompt is answered anew, or an earlier turn was edited."""
        old = self.newest.get(chat)
        if old is None or len(old.turns) < back + 2:
            return
        self.seeds += 1
        state = State(turns=(*old.turns[:-back], (9000 + self.seeds, 40)))
        self.newest[chat] = state
        self.run(self._take(slot, state))
        self._park(slot)

    @rule(chat=st.integers(0, 3), slot=st.integers(0, SLOTS - 1))
    def the_same_again(self, chat: int, slot: int) -> None:
        if chat in self.newest:
            self.run(self._take(slot, self.newest[chat]))
            self._park(slot)

    @rule(chat=st.integers(0, 3), slot=st.integers(0, SLOTS - 1))
    def a_cancelled_request(self, chat: int, slot: int) -> None:
        """It leaves its slot at the last opener that was read."""
        old = self.newest.get(chat)
        if old is None or not self.is_cuttable:
            return
        self.seeds += 1
        self.run(self._take(slot, State(turns=(*old.turns, (7000 + self.seeds, 100)))))
        self._park(slot, provisional=True)
        self.slots[slot] = None  # nothing is owed to it
        self.run(self._take(slot, None))

    @rule(slot=st.integers(0, SLOTS - 1))
    def a_slot_is_emptied(self, slot: int) -> None:
        self.run(self._take(slot, None))

    @rule(chat=st.integers(0, 3), slot=st.integers(0, SLOTS - 1), n=st.integers(1, 5))
    def a_restore(self, chat: int, slot: int, n: int) -> None:
        if chat in self.newest:
            self.run(self._restore(slot, self.newest[chat], n))

    @rule(kind=st.sampled_from(sorted(MEMORY)))
    def memory_changes(self, kind: str) -> None:
        self.bench.free_bytes = MEMORY[kind]

    @rule(where=st.sampled_from(("warm", "cold", "archive", "")))
    def a_disk_fails(self, where: str) -> None:
        root = self.root / where if self.options["warm_bytes"] is not None or where == "archive" else self.root
        self.is_failing = True
        self.disk.fails = lambda kind, path: kind == "write" and path.is_relative_to(root)

    @precondition(lambda self: self.is_failing)
    @rule()
    def the_disk_recovers(self) -> None:
        self._heal()

    def _heal(self) -> None:
        self.is_failing = False
        self.disk.fails = lambda _, __: False
        self.bench.free_bytes = MEMORY["plenty"]
        for disk in self.cache.disks:
            disk.health.has_failed = False  # the pause after a failure is over

    @rule()
    def a_tick(self) -> None:
        async def tick() -> None:
            self.cache.tick()
            self.just_opened = False
            await asyncio.sleep(0)

        self.run(tick())

    @rule(seconds=st.sampled_from((50.0, 1000.0, 2 * AGE_S)))
    def time_passes(self, seconds: float) -> None:
        self.bench._now += seconds

    @rule()
    def the_engine_dies(self) -> None:
        async def die() -> None:
            self.bench.engine.kill()
            self.bench.engine.restart()
            await asyncio.sleep(0)

        self._explain(self._told())
        for state in self.slots:
            if state is not None and not self.is_kept(state):
                self.oracle.kept.pop(state.keys, None)  # its RAM copy gave way to others while it was in its slot
        self.slots = [None] * SLOTS
        self.run(die())

    @rule(n=st.integers(0, 1000))
    def a_byte_changes_in_ram(self, n: int) -> None:
        """In the shared memory, as a dying engine may do."""
        ram = self.cache.ram
        held = [(key, entry) for key, entry in ram._held.items() if entry.payloads] if ram is not None else []
        if not held:
            return
        key, entry = held[n % len(held)]
        if not entry.digests.done():
            return
        view = entry.payloads[0][0]
        view[n % BASE_BYTES] ^= 1
        self._note_damage(key)

    @rule(n=st.integers(0, 1000))
    def a_byte_changes_on_disk(self, n: int) -> None:
        self.run(self._quiet())
        disk = self.cache.disks[n % len(self.cache.disks)]
        paths = sorted([*disk.level.root.glob("seg/*/*.seg"), *disk.level.root.glob("seg/*/*.ckpt")])
        if not paths:
            return
        path = paths[n % len(paths)]
        data = bytearray(path.read_bytes())
        data[4096 + n % BASE_BYTES] ^= 1
        path.unlink()  # a file of two names is two copies on a real disk
        path.write_bytes(data)
        keys = {key for disk in self.cache.disks for c in disk.index.conversations() for key in c.objects}
        for key in keys:
            if path.name.startswith(key.hex()):
                self._note_damage(key)

    def _note_damage(self, key: Key) -> None:
        for _, state in self.oracle.attempted:
            if key in state.keys or (not self.is_cuttable and key in state.checkpoint_keys):
                self.oracle.damaged.add(state.conversation)

    @rule()
    def all_is_quiet(self) -> None:
        self.run(self._quiet())
        self._check()

    @rule(flush=st.booleans(), stages=st.sampled_from((1, 1, 2, 3)))
    def a_restart(self, flush: bool, stages: int) -> None:
        """With `flush` the server stopped; else the process was killed. The next one splits the layers so."""
        self.options["stages"] = stages
        self.run(self._restart(flush))

    # ----------------------------------------------------------------------------------------------------- what they do

    @property
    def is_cuttable(self) -> bool:
        return self.bench.engine.info.cuttable

    def is_kept(self, state: State) -> bool:
        return self.cache.kept.anywhere(state.keys if self.is_cuttable else state.whole)

    async def _take(self, slot: int, state: State | None) -> None:
        """As a turn does: what the slot holds leaves, and is parked if nothing else keeps it."""
        if self.slots[slot] is not None and not self.parkings[slot] and not self.cache.keeps_live(slot):
            self._park(slot, leaving=True)
        self.cache.left(slot)
        await asyncio.gather(*(parking.give_way() for parking in self.parkings[slot]))
        self.bench.engine.bare.discard(slot)
        if state is not None and self.cache.taker is not None:
            await self._read(slot, state)
        self.bench.engine.states[slot] = states_of(state.tokens) if state is not None else []
        self.slots[slot] = state

    async def _read(self, slot: int, state: State) -> None:
        """Take the checkpoints that a turn would have taken."""
        taker, tokens = self.cache.taker, state.tokens
        assert taker is not None
        states = states_of(tokens)
        for at in taker.positions(ROOT, tokens[: (state.frontier or 0) + 1], 0):
            self.bench.engine.states[slot] = states[:at]
            taken = await taker.hold(slot, ROOT, tokens[:at])
            self.captured[slot] += [taken] if taken is not None else []

    def _park(self, slot: int, *, provisional: bool = False, leaving: bool = False) -> None:
        async def begin() -> None:
            self._begin_park(slot, provisional=provisional, leaving=leaving)
            await asyncio.sleep(0)

        if self.loop.is_running():
            self._begin_park(slot, provisional=provisional, leaving=leaving)
        else:
            self.run(begin())

    def _begin_park(self, slot: int, *, provisional: bool, leaving: bool) -> None:
        state = self.slots[slot]
        assert state is not None
        frontier = state.frontier
        tokens = state.tokens[:frontier] if provisional else state.tokens
        job = ParkJob(
            slot=slot,
            root=ROOT,
            tokens=tokens,
            frontier=prefix.frontier(tokens, (OPENER,)),
            conversation=prefix.conversation_key(ROOT, tokens, (OPENER,)),
            provisional=provisional,
            leaving=leaving,
            checkpoints=tuple(self.captured[slot]),
        )
        self.captured[slot] = []
        oracle = self.oracle
        oracle.begun += 1
        born = len(oracle.attempted)
        if not provisional:
            oracle.attempted.append((born, state))
        parking = self.cache.begin_park(job)
        if parking is None:
            for unused in job.checkpoints:
                assert self.cache.taker is not None
                self.cache.taker.give_back(unused)
            if not provisional and self.is_kept(state):
                oracle.kept.setdefault(state.keys, (born, state))
            return
        self.parkings[slot].add(parking)
        task = asyncio.ensure_future(self._finish(slot, parking, None if provisional else (born, state)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _finish(self, slot: int, parking: Parking, owed: tuple[int, State] | None) -> None:
        parkings = self.parkings[slot]
        try:
            if await parking.run() and owed is not None:
                self.oracle.kept[owed[1].keys] = owed
        finally:
            parkings.discard(parking)

    async def _restore(self, slot: int, state: State, n: int) -> None:
        await self._take(slot, None)
        prompt = np.concatenate([state.tokens, np.full(n, 300, np.int32)])
        found = self.cache.lookup(ROOT, prompt, beyond=16)
        if found is None:
            return
        assert found.upto <= len(state.tokens)
        restored = await self.cache.restore(slot, found, 0)
        right = states_of(state.tokens[: restored.held])
        if self.bench.engine.info.stages:
            assert self.bench.engine.states[slot] == right
        else:  # what a checkpoint brings is the last state alone
            assert self.bench.engine.states[slot][-1:] == right[-1:]
            assert len(self.bench.engine.states[slot]) == restored.held
        assert restored.held == found.upto or restored.failed
        assert self.is_cuttable or slot not in self.bench.engine.bare
        assert not any("damage" in text for text in restored.failed) or state.conversation in self.oracle.damaged
        self.bench.engine.states[slot] = []

    async def _quiet(self) -> None:
        while self.tasks:
            await asyncio.wait(set(self.tasks))
        for _ in range(1000):
            under_way = self.cache.under_way or self.bench._passing_bytes()
            if not under_way and all(disk.removals.n_bytes == 0 for disk in self.cache._all_disks()):
                if all(disk.writer.flush(LIMIT_S) for disk in self.cache._all_disks()):
                    await asyncio.sleep(0)
                break
            await asyncio.sleep(0.001)
        else:
            raise AssertionError(f"not quiet: {self.cache!r}, {self.cache.under_way}, {self.bench.arena!r}")

    async def _restart(self, flush: bool) -> None:
        oracle = self.oracle
        if flush:
            while self.tasks:
                await asyncio.wait(set(self.tasks))
            assert await self.cache.flush(LIMIT_S)
            await self._quiet()
        else:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
        lost = self._told()
        durable = {c.keys for disk in self.cache.disks for c in disk.index.conversations()}
        doomed = {
            disk.index.conversation(s).keys for disk in self.cache.disks for s in disk.moving
        }  # may leave while the threads end
        self._explain(lost)
        if flush and not self.is_failing and not self.options["disk_limits"].rejects and self.cache.unwritten:
            raise AssertionError(f"{self.cache.unwritten} were not written")
        self.bench.close()
        await self._open(self.bench._now)
        there = {c.keys for disk in self.cache.disks for c in disk.index.conversations()}
        assert durable - doomed <= there, "an acknowledged conversation is gone after a restart"
        oracle.kept = {keys: owed for keys, owed in oracle.kept.items() if keys in there}

    # ----------------------------------------------------------------------------------------------------------- checks

    def _told(self) -> set[str]:
        """Conversations of which the story says, since the last check, that a state of them is gone."""
        return {e.conversation for e in self.cache.story.events() if e.verb in ("delete", "discard")}

    def _explain(self, lost: set[str]) -> None:
        """Every state that was kept is kept still, or there is a reason."""
        oracle = self.oracle
        for keys, (born, state) in list(oracle.kept.items()):
            if self.is_kept(state) or state in self.slots:
                continue
            assert oracle.may_be_gone(born, state, lost), f"{state} is gone and nobody said so"
            del oracle.kept[keys]

    def _check(self) -> None:
        cache, bench = self.cache, self.bench
        assert not self.errors, self.errors
        assert cache.check() == []
        assert bench.engine.wrong_restores == 0
        self._explain(self._told())
        self._check_counters()
        for disk in cache._all_disks():
            assert not disk.moving, "something still moves"
            assert not disk.index._leases, "something is leased"
            assert disk.level.used_bytes == disk.level.usage() == disk.used_bytes
            assert disk.used_bytes <= disk.limits.budget_bytes or over_budget(disk)
            guests = {
                c.serial for c in disk.index.conversations() if own_bytes(disk.index, c) > disk.limits.budget_bytes
            }
            excused = disk.stuck or guests or disk.limits.rejects or self.is_failing or self.oracle.damaged
            excused = excused or self.just_opened or disk.scan.temporary
            assert disk.used_bytes <= disk.limits.budget_bytes or excused, over_budget(disk)
        assert not bench.engine.held_checkpoints, "spares leak"
        if cache.ram is not None:
            assert not cache.ram.index._leases, "something is leased"
            assert cache.ram.used_bytes == bench.arena.used_bytes
            assert cache.ram.promised_bytes == 0
        self._check_superseded()
        if not self.oracle.damaged:
            self._check_bytes()

    def _check_counters(self) -> None:
        cache = self.cache
        now = numbers(cache)
        assert all(now[name] >= self.before[name] for name in now), "a counter went back"
        self.before = now
        ends = ("parked_ram", "parked_disk", "parked_disk_transient", "skipped", "provisional", "provisional_dropped")
        assert sum(now[name] for name in (*ends, "deferred", "discards")) == self.oracle.begun + self._spill_discards()
        assert sum(d.counters.degraded for d in cache.disks) == sum(d.counters.adopted for d in cache.disks)
        for disk in cache.disks[:-1]:
            assert (disk.counters.disk_evictions, disk.counters.age_evictions) == (0, 0)
        for disk in cache._all_disks():
            told = [e for e in cache.story.events() if e.verb == "delete" and f"from {disk.name}:" in e.detail]
            reasons = [e for e in told if "over its budget" in e.detail or "older than" in e.detail]
            if disk in cache.disks:
                assert len(reasons) == disk.counters.disk_evictions + disk.counters.age_evictions

    def _spill_discards(self) -> int:
        return len([e for e in self.cache.story.events() if e.verb == "discard" and "damaged" in e.detail])

    def _check_superseded(self) -> None:
        """What a later state made superfluous is on no level any more that has the later one."""
        if self.is_failing or self.archive != "off":
            return
        levels = [*([self.cache.ram] if self.cache.ram is not None else []), *self.cache.disks]
        for level in levels:
            entries = [c for c in level.index.conversations() if c.born]
            for old in entries:
                keep = level.limits.checkpoints if isinstance(level, DiskLevel) else 0
                if level.index.is_outdated(old, keep) and not getattr(level, "stuck", {}):
                    provisional = self.cache.ram is not None and old.serial in self.cache.ram.provisional
                    assert provisional, f"{old} is outdated on {level!r}"

    def _check_bytes(self) -> None:
        for disk in self.cache.disks:
            self.bench._check_level(disk)
        ram = self.cache.ram
        for conversation in ram.index.conversations() if ram is not None else ():
            self._check_ram(conversation)

    def _check_ram(self, conversation: Conversation) -> None:
        ram = self.cache.ram
        assert ram is not None
        states = states_of(conversation.tokens)
        ends = prefix.cuts(len(conversation.tokens), conversation.frontier or None)
        for position, key in ram.index.usable_checkpoints(conversation.serial):
            held = bytes(ram.payloads(key)[0][0][:CHECKPOINT_HEAD_BYTES])
            assert held == position.to_bytes(8, "little") + states[position - 1]
        rows = prefix.chain(conversation.root, conversation.tokens, ends) if self.bench.engine.info.stages else ()
        for segment in rows:
            (payloads,) = ram.payloads(segment.key)
            body = b"".join(states[segment.start : segment.end])
            assert bytes(payloads[0][BASE_BYTES : BASE_BYTES + len(body)]) == body


class CheckpointMachine(Machine):
    """The same of memory that cannot be cut: what it keeps are rows (if any) and checkpoints, in RAM and on disk."""

    memories = ("checkpoints", "recurrent")


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestMachine = Machine.TestCase
TestMachine.settings = SETTINGS
TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = SETTINGS
