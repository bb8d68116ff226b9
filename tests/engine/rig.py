"""An engine process with an arena around it, driven from plain test functions."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from strata.engine.client import EngineClient
from strata.engine.interface import Generation
from strata.engine.protocol import (
    Delta,
    Done,
    EngineInfo,
    EngineSettings,
    Finished,
    Held,
    Loading,
    Progress,
    Run,
    Sampling,
    pack_tokens,
    unpack_tokens,
)
from strata.errors import EngineGone
from strata.store.arena import Arena
from strata.types import BLOCK_BYTES, MIB, Span, Tokens, pad_to_page

_T = TypeVar("_T")
GREEDY = Sampling(temperature=0)
PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class Block:
    start: int
    end: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole generation. `events` without the deltas' texts; `text` is all of them and the rest."""

    tokens: list[int]
    text: str
    finished: Finished
    progress: list[Progress]
    held: list[Held]


class Rig:
    def __init__(self, settings: EngineSettings, runner: asyncio.Runner, arena_mib: int = 192) -> None:
        self.arena = Arena(arena_mib * MIB, pretouch=False)
        self.loading: list[Loading] = []
        self.restarts: list[EngineInfo] = []
        self.client = EngineClient(
            settings, self.arena, on_loading=self.loading.append, on_restart=self.restarts.append
        )
        self._runner = runner
        self._spans: list[Span] = []

    def do(self, awaitable: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(asyncio.wait_for(awaitable, PATIENCE_S))

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    def start(self) -> EngineInfo:
        return self.do(self.client.start())

    def close(self) -> None:
        self.do(self.client.close())
        self.arena.close()

    def clear(self) -> None:
        """Empty every slot, free every span; after a kill, wait for the new process first."""
        self.do(self.client.wait_ready())
        for slot in range(self.info.slots):
            assert self.do(self.client.trim(slot, 0)).held == 0
        self.free_spans()

    def free_spans(self) -> None:
        """Free every span that was taken for blocks."""
        for span in self._spans:
            self.arena.free(span)
        self._spans.clear()

    # -------------------------------------------------------------------------------------------------------- processes

    def kill(self) -> None:
        """SIGKILL the engine process and wait until the client has noticed."""
        assert self.client.pid is not None
        os.kill(self.client.pid, signal.SIGKILL)

        async def noticed() -> None:
            with suppress(EngineGone):
                while True:
                    await self.client.trim(0, 0)

        self.do(noticed())

    # ------------------------------------------------------------------------------------------------------- generation

    def tokens(self, text: str) -> Tokens:
        return unpack_tokens(self.do(self.client.prepare(text=text)).tokens)

    def chat(self, *contents: str) -> Tokens:
        """Tokens of a chat whose turns alternate between user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        return unpack_tokens(self.do(self.client.prepare(messages_json=msgspec.json.encode(messages))).tokens)

    def run(self, tokens: Tokens | Sequence[int], *, slot: int = 0, keep: int = 0, **options: Any) -> Generation:
        options = {"sampling": GREEDY, "max_tokens": 16, "limit": self.info.context, **options}
        return self.client.run(Run(request=0, slot=slot, keep=keep, tokens=pack_tokens(tokens), **options))

    def generate(self, tokens: Tokens | Sequence[int], **options: Any) -> Reply:
        async def all_of_it() -> Reply:
            return await collect(self.run(tokens, **options))

        return self.do(all_of_it())

    # ----------------------------------------------------------------------------------------------------------- blocks

    def alloc(self, n: int) -> tuple[Span, ...]:
        """Spans for a block of `n` tokens, one per stage, filled with bytes that are no state."""
        spans = []
        for stage in self.info.stages:
            span = self.arena.alloc(self.info.head_room + pad_to_page(stage.payload_bytes(n)))
            assert span is not None, "the rig's arena is too small"
            self.arena.view(span)[:] = b"\xa5" * span.length
            spans.append(span)
        self._spans += spans
        return tuple(spans)

    def capture(self, slot: int, start: int, end: int) -> Block:
        block = Block(start, end, self.alloc(end - start))
        done = self.do(self.client.capture(slot, start, end, block.spans))
        assert done.ok, done
        return block

    def park(self, slot: int, held: int) -> list[Block]:
        """Capture positions [0, held) in full blocks."""
        step = self.info.block_tokens
        return [self.capture(slot, at, min(at + step, held)) for at in range(0, held, step)]

    def restore(self, slot: int, blocks: Sequence[Block], tokens: Tokens | Sequence[int]) -> None:
        for block in blocks:
            done = self.do(self.apply(slot, block, tokens))
            assert done.ok and done.held == block.end, done

    async def apply(
        self, slot: int, block: Block, tokens: Tokens | Sequence[int], from_: int | None = None, upto: int | None = None
    ) -> Any:
        return await self.client.apply(
            slot,
            start=block.start,
            end=block.end,
            from_=block.start if from_ is None else from_,
            upto=block.end if upto is None else upto,
            spans=block.spans,
            tokens=np.asarray(tokens[block.start : block.end], np.int32),
        )

    def payload(self, block: Block) -> bytes:
        """What of a block goes to disk: every stage's payload and padding."""
        room = self.info.head_room
        return b"".join(bytes(self.arena.view(span)[room:]) for span in block.spans)

    def capture_checkpoint(self, checkpoint: int, total: int) -> list[Span]:
        """A held checkpoint, block by block; it is released."""
        spans = []
        for offset in range(0, total, BLOCK_BYTES):
            span = self.arena.alloc(self.info.head_room + pad_to_page(min(BLOCK_BYTES, total - offset)))
            assert span is not None, "the rig's arena is too small"
            self._spans.append(span)
            spans.append(span)
            done = self.do(self.client.capture_checkpoint(checkpoint, offset, span))
            assert done.ok, done
        assert self.do(self.client.release_checkpoint(checkpoint)).ok
        return spans

    def apply_checkpoint(self, slot: int, position: int, total: int, spans: Sequence[Span]) -> Done:
        for i, span in enumerate(spans):
            offset = i * BLOCK_BYTES
            done = self.do(self.client.apply_checkpoint(slot, position=position, offset=offset, total=total, span=span))
        return done

    def bytes_of(self, spans: Sequence[Span]) -> list[bytes]:
        return [bytes(self.arena.view(span)[self.info.head_room :]) for span in spans]

    def payloads(self, blocks: Sequence[Block]) -> list[bytes]:
        return [self.payload(block) for block in blocks]


async def collect(generation: Generation) -> Reply:
    tokens: list[int] = []
    text, progress, held, finished = "", [], [], None
    async for event in generation:
        if isinstance(event, Delta):
            tokens += unpack_tokens(event.tokens).tolist()
            text += event.text
        elif isinstance(event, Progress):
            progress.append(event)
        elif isinstance(event, Held):
            held.append(event)
        else:
            finished = event
            text += event.text
    assert finished is not None
    return Reply(tokens, text, finished, progress, held)
