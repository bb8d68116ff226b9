"""Everything a turn works with, around the fake engine: an arena, a level on disk, the cache, the slots.

The engine answers a few turns of the event loop after a job was sent, calls a hook at every step (`on_step`), and can
die and come back. `check` holds what must be true whenever nothing runs: DESIGN §5, and CASES' invariants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits, ConversationCache
from strata.cache.disk import DiskLevel
from strata.cache.entries import Conversation, HeldSegment
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLevel, RamLimits
from strata.cache.system_prompts import LEVEL_NAME, SystemPromptLimits
from strata.engine.fake import CHECKPOINT_HEAD_BYTES, FakeEngine, FakeRun
from strata.engine.fake_model import BASE_BYTES, next_state
from strata.engine.protocol import Delta, Done, Finished, Held, Paused, Prepared, Progress, Run, Sampling, unpack_tokens
from strata.errors import EngineGone, RunError
from strata.rules import prefix
from strata.rules.placement import Target
from strata.serve.request import CacheReport, Completed, Started, Text, TurnEvent, TurnRequest
from strata.serve.slots import Slots
from strata.serve.turn import Workshop, run_turn
from strata.store.arena import Arena
from strata.store.filesystem import Filesystem
from strata.store.fs import aligned_buffer
from strata.store.level import Level
from strata.store.names import SYSTEM_PROMPTS_FOLDER
from strata.types import MIB, Segment, Span, Tokens, pad_to_page

LIMIT_S = 30.0
"""Longest a test waits for anything."""
BLOCK = 16 << 10
"""What a full block of the fake engine takes in the arena: head room and payload."""
GREEDY = Sampling(temperature=0)

T = TypeVar("T")
Hook = Callable[[str], None]


def no_hook(_: str) -> None:
    """Nothing happens at any step."""


async def ticks(n: int) -> None:
    """Let everything else run, `n` times."""
    for _ in range(n):
        await asyncio.sleep(0)


class HookedEngine(FakeEngine):
    """Jobs are carried out when they are sent and answered later. `delay`: turns of the loop until the answer."""

    def __init__(self, arena: Arena, *, slots: int, stages: int, context: int = 4096, memory: str = "segments") -> None:
        super().__init__(arena, slots=slots, stages=stages, context=context, memory=memory)
        self.on_step: Hook = no_hook
        self.delay: Callable[[str], int] = lambda _: 1
        self.down = False
        self.on_restart: Callable[[], None] = lambda: None

    def kill(self) -> None:
        """The process is gone; `restart` brings a new one."""
        super().kill()
        self.down = True

    def restart(self) -> None:
        if self.down:
            self.down = False
            self.on_restart()

    def step(self, name: str) -> None:
        self.on_step(name)
        if self.down:
            raise EngineGone("the engine process ended (signal 9); a new one is starting, send the request again")

    async def _job(self, name: str, work: Callable[[], Any]) -> Any:
        self.step(name)
        born = self.generation
        outcome = await work()
        await ticks(self.delay(name))
        self.step(f"{name} answered")
        await asyncio.sleep(0)
        if self.generation != born:
            raise EngineGone("the engine process ended (signal 9); a new one is starting, send the request again")
        return outcome

    async def prepare(
        self, *, messages_json: bytes | None = None, text: str | None = None, owner: str | None = None
    ) -> Prepared:
        work = super().prepare
        return await self._job("prepare", lambda: work(messages_json=messages_json, text=text, owner=owner))

    async def fork(self, source: int, target: int, n: int) -> Done:
        work = super().fork
        return await self._job("fork", lambda: work(source, target, n))

    async def trim(self, slot: int, n: int) -> Done:
        work = super().trim
        return await self._job("trim", lambda: work(slot, n))

    async def capture(self, slot: int, start: int, end: int, spans: tuple[Span, ...]) -> Done:
        work = super().capture
        return await self._job("capture", lambda: work(slot, start, end, spans))

    async def apply(self, slot: int, **block: Any) -> Done:
        work = super().apply
        return await self._job("apply", lambda: work(slot, **block))

    async def hold(self, slot: int) -> Done:
        work = super().hold
        return await self._job("hold", lambda: work(slot))

    async def capture_checkpoint(self, checkpoint: int, offset: int, span: Span) -> Done:
        work = super().capture_checkpoint
        return await self._job("capture", lambda: work(checkpoint, offset, span))

    async def release_checkpoint(self, checkpoint: int) -> Done:
        work = super().release_checkpoint
        return await self._job("release", lambda: work(checkpoint))

    async def apply_checkpoint(self, slot: int, *, position: int, offset: int, total: int, span: Span) -> Done:
        work = super().apply_checkpoint
        return await self._job("apply", lambda: work(slot, position=position, offset=offset, total=total, span=span))

    def run(self, command: Run) -> HookedRun:
        self.step("run")
        return HookedRun(self, super().run(command), command.slot)


class HookedRun:
    """A run of a HookedEngine. A RunError that the hook raises ends it, as an engine error does.

    Memory that cannot be cut keeps all that it held then, or loses everything (engine/slots.py `repair`).
    """

    def __init__(self, engine: HookedEngine, inner: FakeRun, slot: int) -> None:
        self._engine, self._inner, self._slot = engine, inner, slot
        self._error: RunError | None = None

    @property
    def checkpoints(self) -> list[Held]:
        return self._inner.checkpoints

    def __aiter__(self) -> HookedRun:
        return self

    async def __anext__(self) -> Progress | Delta | Held | Paused | Finished:
        try:
            self._engine.step("event")
        except RunError as error:
            self._engine.running.pop(self._slot, None)
            states = self._engine.states[self._slot]
            held = min(error.held, len(states))
            del states[held if self._engine._can_stop(self._slot, held) else 0 :]
            self._error = RunError(error.message, held=len(states))
            raise self._error from None
        await ticks(self._engine.delay("event"))
        return await anext(self._inner)

    def resume(self, keep: int) -> None:
        self._engine.step("resume")
        self._inner.resume(keep)

    async def cancel(self) -> Finished:
        self._engine.step("cancel")
        if self._error is not None:
            raise self._error
        await ticks(self._engine.delay("cancel"))
        return await self._inner.cancel()


# ---------------------------------------------------------------------------------------------------- the right answers


def states_of(tokens: Tokens) -> list[bytes]:
    """The state of every position: what a slot that read `tokens` holds."""
    states: list[bytes] = []
    for token in tokens:
        states.append(next_state(states[-1] if states else b"", int(token)))
    return states


def right_answer(prompt: Tokens, max_tokens: int) -> str:
    """What an engine that reads all of `prompt` replies, greedily and past any end."""
    state, text = states_of(prompt)[-1], ""
    for _ in range(max_tokens):
        letter = ord("a") + state[1] % 26
        text += chr(letter)
        state = next_state(state, letter + 10)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a turn gave."""

    text: str
    report: CacheReport
    completed: Completed


def ask(
    *messages: str, system: str = "", namespace: str = "", max_tokens: int = 4, cache_prompt: bool = True
) -> TurnRequest:
    """A conversation: `system`, then user and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    head = [{"role": "system", "content": system}] if system else []
    return TurnRequest(
        namespace=namespace,
        messages=(*head, *turns),
        sampling=GREEDY,
        max_tokens=max_tokens,
        ignore_eos=True,
        cache_prompt=cache_prompt,
    )


def later(request: TurnRequest, reply: str, text: str = "go on") -> TurnRequest:
    """The next turn of a conversation."""
    assert request.messages is not None
    texts = [str(m["content"]) for m in request.messages if m["role"] != "system"]
    system = str(request.messages[0]["content"]) if request.messages[0]["role"] == "system" else ""
    return ask(*texts, reply, text, system=system, namespace=request.namespace)


def words(seed: int, n_chars: int) -> str:
    """Text of exactly `n_chars` characters (tokens of the fake engine) that no other seed gives."""
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, n_chars)
    return "".join(map(chr, letters))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 what it waits for has no event, and may be in another thread
            await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------------------ the bench


class Workbench:
    """A workshop whose parts a test can reach. Make it inside a running event loop; `close` at the end."""

    def __init__(
        self,
        root: Path,
        *,
        slots: int = 2,
        stages: int = 1,
        block_tokens: int = 256,
        arena_bytes: int = 64 * MIB,
        budget_bytes: int = 1 << 40,
        fs: Filesystem | None = None,
        ram: RamLimits | None = None,
        warm_bytes: int | None = None,
        archive: str = "off",
        limits: CacheLimits | None = None,
        disk_limits: DiskLimits | None = None,
        fingerprint: bytes = b"f" * 32,
        clock_step_s: float = 1.0,
        memory: str = "segments",
        system_prompts: SystemPromptLimits | None = None,
        conversations: bool = True,
    ) -> None:
        """`warm_bytes`: a second level above, in `root`/warm. `archive`: "off", "ids" or "state". `conversations`
        False: no level keeps any. System prompts are kept in a folder of `root`.

        `clock_step_s`: how far the clock goes on each time somebody looks at it.
        """
        self.arena = Arena(arena_bytes, MIB, pretouch=False, large_pages=False)
        self.free_bytes: int | None = 1 << 50
        self.engine = HookedEngine(self.arena, slots=slots, stages=stages, memory=memory)
        block_tokens = block_tokens if self.engine.info.stages else 0
        self.engine.info = msgspec.structs.replace(self.engine.info, block_tokens=block_tokens, fingerprint=fingerprint)
        disk_limits = disk_limits or DiskLimits(budget_bytes=budget_bytes)
        levels = []
        if conversations:
            levels.append((Level.open(root if warm_bytes is None else root / "cold", fs=fs), disk_limits))
        if warm_bytes is not None:
            warm = Level.open(root / "warm", name="warm", fs=fs)
            levels.insert(0, (warm, replace(disk_limits, budget_bytes=warm_bytes)))
        shelf = None
        if archive != "off":
            shelf_limits = DiskLimits(budget_bytes=1 << 40, is_archive=True, keep=4)
            shelf = (Level.open(root / "archive", name="archive", fs=fs), shelf_limits, archive == "ids")
        prompts = None
        if system_prompts is not None:
            prompts = (Level.open(root / SYSTEM_PROMPTS_FOLDER, name=LEVEL_NAME, fs=fs), system_prompts)
        self._now = 0.0
        self._clock_step_s = clock_step_s
        self.cache = ConversationCache(
            engine=self.engine,
            arena=self.arena,
            limits=limits or default_limits(ram),
            levels=levels,
            archive=shelf,
            system_prompts=prompts,
            memory=lambda: self.free_bytes,
            clock=self._clock,
        )
        disks = [*self.cache.disks, *([self.cache.system_prompts.disk] if self.cache.system_prompts else [])]
        self.disk = disks[0]
        """The write level; without one, that of the system prompts."""
        self.level = levels[-1][0] if levels else self.disk.level
        self.slots = Slots(slots, self._clock, is_kept=self.cache.keeps_live)
        if not self.engine.info.cuttable:
            self.slots.resume_point = self.cache.resume_point
        self.engine.on_restart = self._on_restart
        self.shop = Workshop(engine=self.engine, slots=self.slots, cache=self.cache)

    def _on_restart(self) -> None:
        self.slots.forget_all()
        self.cache.live.clear()

    def _clock(self) -> float:
        self._now += self._clock_step_s
        return self._now

    # -------------------------------------------------------------------------------------------------------------- use

    async def prompt_of(self, request: TurnRequest) -> Tokens:
        """The request's prompt as tokens, past the hooks."""
        hook, self.engine.on_step = self.engine.on_step, no_hook
        down, self.engine.down = self.engine.down, False
        try:
            return (await self._prepare(request)).copy()
        finally:
            self.engine.on_step, self.engine.down = hook, down

    async def _prepare(self, request: TurnRequest) -> Tokens:
        messages = msgspec.json.encode(request.messages)
        return unpack_tokens((await FakeEngine.prepare(self.engine, messages_json=messages)).tokens)

    async def turn(self, request: TurnRequest, *, stop_after: int | None = None) -> Answer | None:
        """Run a turn and compare its text with the right answer; None when it was left after `stop_after` events."""
        text, report = "", None
        async with asyncio.timeout(LIMIT_S), aclosing(run_turn(self.shop, request)) as events:
            seen = 0
            async for event in events:
                text += event.text if isinstance(event, Text) else ""
                report = event.cache if isinstance(event, Started) else report
                if isinstance(event, Completed):
                    assert report is not None
                    await self._check_answer(request, text, event)
                    return Answer(text=text, report=report, completed=event)
                seen += 1
                if stop_after is not None and seen > stop_after:
                    return None
        raise AssertionError("a turn ended without Completed")

    async def _check_answer(self, request: TurnRequest, text: str, completed: Completed) -> None:
        prompt = await self.prompt_of(request)
        assert request.max_tokens is not None
        assert text == right_answer(prompt, request.max_tokens), completed
        assert completed.prompt_tokens == len(prompt)
        assert 0 <= completed.cached_tokens < len(prompt)

    async def whole(self, request: TurnRequest) -> Answer:
        """A turn that must complete, with all its parks done."""
        answer = await self.turn(request)
        assert answer is not None
        await self.settle()
        return answer

    async def events(self, request: TurnRequest) -> list[TurnEvent]:
        async with asyncio.timeout(LIMIT_S), aclosing(run_turn(self.shop, request)) as events:
            return [event async for event in events]

    async def settle(self) -> None:
        """Wait until every turn and park is done and the writer has nothing left."""
        async with asyncio.timeout(LIMIT_S):
            # A turn whose client left at its very end settles on its own, and begins its park then.
            await until(lambda: not any(slot.busy for slot in self.slots.all))
            while self.shop.parks:
                await asyncio.wait(set(self.shop.parks))
            assert await self.cache.flush(LIMIT_S)
            await until(lambda: self._passing_bytes() == 0)  # callbacks of threads

    def _passing_bytes(self) -> int:
        ram = self.cache.ram
        return self.arena.used_bytes - (0 if ram is None else ram.used_bytes)

    # ----------------------------------------------------------------------------------------------------------- checks

    async def check(self) -> None:
        """Everything that must be true when nothing runs."""
        await self.settle()
        assert self.cache.check() == []
        assert self._passing_bytes() == 0
        assert self.slots.waiting == 0
        assert self.engine.wrong_restores == 0
        assert self.engine.running == {}
        counts = self.cache.counters
        assert counts.lookups == counts.hits + counts.misses
        assert counts.hits + counts.disk_hits_refused >= (
            counts.ram_hits + counts.disk_hits + counts.disk_hits_transient
        )
        for slot in self.slots.all:
            assert (slot.busy, slot.doing, slot.parkings, slot.writings) == (False, "idle", set(), set())
            held, right = self.engine.states[slot.index][: len(slot.tokens)], states_of(slot.tokens)
            if not self.engine.info.stages:  # what a checkpoint brings is the last state alone
                held, right = held[-1:], right[-1:]
            assert held == right, f"{slot!r} does not hold what it claims"
            if not self.engine.info.cuttable and len(slot.tokens):
                assert len(self.engine.states[slot.index]) == len(slot.tokens), f"{slot!r} cannot be cut"
        assert not self.engine.held_checkpoints, "spares leak"
        for disk in self.cache.disks:
            self._check_level(disk)
        if self.cache.system_prompts is not None:
            self._check_level(self.cache.system_prompts.disk)
        if self.cache.ram is not None:
            self._check_ram(self.cache.ram)

    def _check_ram(self, ram: RamLevel) -> None:
        """Nothing is leased, and every checkpoint that a conversation names holds the state of its position."""
        assert not ram.index._leases, "something in RAM is still leased"
        assert ram.promised_bytes == 0
        for conversation in ram.index.conversations():
            states = states_of(conversation.tokens)
            for position, key in ram.index.usable_checkpoints(conversation.serial):
                held = bytes(ram.payloads(key)[0][0][:CHECKPOINT_HEAD_BYTES])
                assert held == position.to_bytes(8, "little") + states[position - 1], f"checkpoint at {position}"

    def _check_level(self, disk: DiskLevel) -> None:
        level, index = disk.level, disk.index
        assert level.used_bytes == level.usage() == disk.used_bytes
        everything = index.plan_eviction(used_bytes=level.used_bytes, need_bytes=0, budget_bytes=0)
        assert len(everything.serials) == len(index.conversations()), "something is still leased"
        for conversation in index.conversations():
            for segment in segments_of(conversation):
                if (held := index.held(segment.key)) is not None:
                    self._check_segment(level, conversation, held)
        scan = level.scan(self.engine.info.fingerprint)
        readable = {stale.serial for stale in scan.stale if stale.manifest is not None}
        on_disk = {stored.manifest.serial for stored in scan.manifests} | {foreign.serial for foreign in scan.foreign}
        assert on_disk | readable == {c.serial for c in index.conversations()}
        assert scan.temporary == ()
        unknown = [key for key in scan.orphans if not index.bytes_of(key)]
        assert not unknown, f"{len(unknown)} segments on disk that nobody would ever delete"

    def _check_segment(self, level: Level, conversation: Conversation, held: HeldSegment) -> None:
        """The files of a segment, one per stage, hold exactly the states of its tokens."""
        segment = held.segment
        states = states_of(conversation.tokens[: segment.end])[segment.start :]
        assert level.stages_of(segment.key) == list(range(len(held.stages)))
        for stage in range(len(held.stages)):
            header = level.read_header(segment.key, stage)
            for i, block in enumerate(header.blocks):
                view = aligned_buffer(pad_to_page(block.length))
                level.read_block(header, i, view)
                rows = b"".join(states[block.start - segment.start : block.end - segment.start])
                assert bytes(view[: block.length]) == bytes([stage]) * BASE_BYTES + rows, f"{segment!r}"

    def close(self) -> None:
        for task in self.shop.parks:
            task.cancel()
        self.cache.close()


def default_limits(ram: RamLimits | None = None, *, ladder: bool = True) -> CacheLimits:
    """Everything goes to disk, or to RAM first if there is a RAM level; memory floors are out of the way."""
    target: Target = "disk" if ram is None else "ram"
    return CacheLimits(floors=Floors(parking_bytes=0, transient_bytes=0), park_target=target, ram=ram, ladder=ladder)


def play(scenario: Callable[[Workbench], Awaitable[None]], root: Path, **options: Any) -> None:
    """Run a scenario on a new workbench, and check everything afterwards."""

    async def body() -> None:
        bench = Workbench(root, **options)
        try:
            await scenario(bench)
            await bench.check()
        finally:
            bench.close()

    asyncio.run(body())


def segments_of(conversation: Conversation) -> Sequence[Segment]:
    ends = prefix.cuts(len(conversation.tokens), conversation.frontier or None)
    return prefix.chain(conversation.root, conversation.tokens, ends)
