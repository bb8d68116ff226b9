"""The real engine with a cache on it, used in this process without HTTP: what benchmarks of parks and restores share.

Covers starting both, generating, and moving blocks between slots and the arena, also of states that nobody read.
It measures nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits, ConversationCache
from strata.cache.capturing import AHEAD, block_lengths
from strata.cache.put import DiskLimits
from strata.cli.process import share_the_interpreter
from strata.engine.client import EngineClient
from strata.engine.process import RunHandle
from strata.engine.protocol import Delta, EngineSettings, Run, Sampling, pack_tokens, unpack_tokens
from strata.rules import prefix
from strata.serve.wiring import find_model
from strata.store.arena import Arena
from strata.store.filesystem import Filesystem
from strata.store.level import Level
from strata.store.memory import available_memory
from strata.types import MIB, Span, Tokens

NO_FLOORS = Floors(parking_bytes=0, transient_bytes=0)
TO_DISK = CacheLimits(floors=NO_FLOORS, park_target="disk")
"""Every park goes to the disk."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A token range of a slot and its spans in the arena, one per stage."""

    start: int
    end: int
    spans: tuple[Span, ...]


class Bench:
    """One engine, and a cache with one disk level in `folder`. Use it as a context."""

    def __init__(
        self,
        folder: Path,
        *,
        flash_attention: str = "auto",
        slots: int = 1,
        context: int | None = None,
        limits: CacheLimits = TO_DISK,
        memory: Callable[[], int | None] = available_memory,
        arena_mib: int = 768,
        reserved_mib: int | None = None,
        fs: Filesystem | None = None,
        measure_idle_cells: bool = False,
    ) -> None:
        """`reserved_mib`: what of the arena is touched from the start; half of it when not given."""
        self.arena = Arena(arena_mib * MIB)
        self.arena.reserve((arena_mib // 2 if reserved_mib is None else reserved_mib) * MIB)
        settings = EngineSettings(
            model_path=str(find_model("demo")),
            slots=slots,
            context=context,
            flash_attention=flash_attention,
            measure_idle_cells=measure_idle_cells,
        )
        self.engine = EngineClient(settings, self.arena)
        self.level = Level.open(folder, fs=fs)
        self._limits = limits
        self._memory = memory
        self._cache: ConversationCache | None = None

    async def __aenter__(self) -> Bench:
        share_the_interpreter()  # as the server does
        await self.engine.start()
        self._cache = ConversationCache(
            engine=self.engine,
            arena=self.arena,
            limits=self._limits,
            levels=[(self.level, DiskLimits(budget_bytes=8192 * MIB))],
            memory=self._memory,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        if self._cache is not None:
            self._cache.close()
        self.arena.close()

    @property
    def cache(self) -> ConversationCache:
        assert self._cache is not None, "not started"
        return self._cache

    # --------------------------------------------------------------------------------------------------------- tokens

    async def tokens_of(self, text: str) -> Tokens:
        return unpack_tokens((await self.engine.prepare(text=text)).tokens)

    def run(self, slot: int, tokens: Tokens, keep: int, n: int) -> RunHandle:
        """Greedy continuation by exactly `n` tokens of `tokens`, of which the slot holds the first `keep`."""
        command = Run(
            request=0,
            slot=slot,
            keep=keep,
            tokens=pack_tokens(tokens),
            sampling=Sampling(temperature=0.0),
            max_tokens=n,
            limit=self.engine.info.context,
            ignore_eos=True,
        )
        return self.engine.run(command)

    async def generate(self, tokens: Tokens, keep: int, n: int, *, slot: int = 0) -> Tokens:
        run = self.run(slot, tokens, keep, n)
        return np.concatenate([unpack_tokens(event.tokens) async for event in run if isinstance(event, Delta)])

    # --------------------------------------------------------------------------------------------------------- blocks

    def blocks(self, n_tokens: int) -> list[Block]:
        """Arena spans for the first `n_tokens` of a slot, block by block."""
        found = []
        for start, end in prefix.blocks(0, n_tokens, self.engine.info.block_tokens):
            spans = [
                self.arena.alloc(length) for length in block_lengths(self.engine, end - start, self.engine.info.stages)
            ]
            assert all(span is not None for span in spans), "the benchmark's arena is too small"
            found.append(Block(start=start, end=end, spans=tuple(span for span in spans if span is not None)))
        return found

    def free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            for span in block.spans:
                self.arena.free(span)

    async def capture_all(self, blocks: Sequence[Block], *, slot: int = 0) -> float:
        """Capture every block, pipe included, as many sent ahead as a park does; the seconds inside the engine."""
        ahead = asyncio.Semaphore(AHEAD)

        async def capture(block: Block) -> float:
            async with ahead:
                done = await self.engine.capture(slot, block.start, block.end, block.spans)
                assert done.ok, done.reason
                return done.seconds

        return sum(await asyncio.gather(*map(capture, blocks)))

    def payloads(self, blocks: Sequence[Block]) -> list[memoryview]:
        info = self.engine.info
        return [
            self.arena.view(span)[info.head_room : info.head_room + stage.payload_bytes(block.end - block.start)]
            for block in blocks
            for span, stage in zip(block.spans, info.stages, strict=True)
        ]

    async def state_bytes(self, n_tokens: int) -> list[bytes]:
        blocks = self.blocks(n_tokens)
        await self.capture_all(blocks)
        state = [bytes(payload) for payload in self.payloads(blocks)]
        self.free(blocks)
        return state

    async def fill(self, slot: int, n_tokens: int, sample: Tokens) -> Tokens:
        """Let an empty slot hold `n_tokens` without reading them: one block is read, and repeated. Returns the ids.

        `sample`: text to read, of at least a block. Times of decodes and moves do not depend on what the bytes are.
        """
        info = self.engine.info
        unit = sample[: info.block_tokens]
        await self.generate(np.concatenate([unit, unit[:1]]), 0, 1, slot=slot)
        first = self.blocks(len(unit))
        await self.capture_all(first, slot=slot)
        done = await self.engine.trim(slot, 0)
        assert done.ok, done.reason
        for start in range(0, n_tokens, len(unit)):
            upto = min(start + len(unit), n_tokens)
            done = await self.engine.apply(
                slot, start=start, end=start + len(unit), from_=start, upto=upto, spans=first[0].spans, tokens=unit
            )
            assert done.ok, done.reason
        self.free(first)
        return np.tile(unit, -(-n_tokens // len(unit)))[:n_tokens]
