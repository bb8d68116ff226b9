"""The fake engine keeps the contract where tests of other layers rely on it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engine.rig import Reply, collect

from strata.engine.fake import FakeEngine
from strata.engine.interface import Engine
from strata.engine.protocol import Run, Sampling, pack_tokens, unpack_tokens
from strata.errors import BadRequest, EngineGone, RunError
from strata.store.arena import Arena
from strata.types import BLOCK_BYTES, MIB, PAGE, Span, Tokens, pad_to_page

TOKENS: Tokens = np.arange(100, dtype=np.int32) + 20


def do(awaitable: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(awaitable)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Arena(8 * MIB, pretouch=False), stages=2)


def command(tokens: Tokens, slot: int = 0, keep: int = 0, max_tokens: int = 10) -> Run:
    return Run(
        request=0,
        slot=slot,
        keep=keep,
        tokens=pack_tokens(tokens),
        sampling=Sampling(),
        max_tokens=max_tokens,
        limit=1000,
        ignore_eos=True,
    )


def spans(engine: FakeEngine) -> tuple[Span, ...]:
    return tuple(engine._arena.alloc(64 * 1024) for _ in engine.info.stages)


async def reply(engine: FakeEngine, *arguments: Any, **options: Any) -> Reply:
    return await collect(engine.run(command(*arguments, **options)))


def test_it_is_an_engine(engine: FakeEngine) -> None:
    assert isinstance(engine, Engine)


def test_a_parked_conversation_goes_on_as_its_twin(engine: FakeEngine) -> None:
    async def scene() -> None:
        first = await reply(engine, TOKENS)
        assert first.finished.held == 109
        history = np.concatenate([TOKENS, first.tokens]).astype(np.int32)
        where = spans(engine)
        assert (await engine.capture(0, 0, 109, where)).ok
        twin = await reply(engine, history, keep=109)
        engine.kill()
        assert engine.generation == 2
        place = {"start": 0, "end": 109, "spans": where, "tokens": history[:109]}
        assert (await engine.apply(1, from_=0, upto=50, **place)).held == 50
        assert (await engine.apply(1, from_=50, upto=109, **place)).held == 109
        assert (await reply(engine, history, slot=1, keep=109)).tokens == twin.tokens
        assert engine.wrong_restores == 0

    do(scene())


def test_a_wrong_restore_shows(engine: FakeEngine) -> None:
    async def scene() -> None:
        await reply(engine, TOKENS, max_tokens=0)
        where = spans(engine)
        await engine.capture(0, 0, 100, where)
        right = (await reply(engine, TOKENS, keep=99)).tokens
        place = {"start": 0, "end": 100, "from_": 0, "upto": 100, "spans": where}
        assert (await engine.apply(1, tokens=TOKENS[::-1], **place)).ok
        assert engine.wrong_restores
        await engine.trim(1, 0)
        engine._arena.view(where[1])[5000] ^= 1
        engine.wrong_restores = 0
        assert (await engine.apply(1, tokens=TOKENS, **place)).ok
        assert engine.wrong_restores
        assert (await reply(engine, TOKENS, slot=1, keep=99)).tokens != right

    do(scene())


def test_forks_busy_slots_and_deaths(engine: FakeEngine) -> None:
    async def scene() -> None:
        running = engine.run(command(TOKENS))
        await anext(running)
        assert (await engine.fork(0, 1, 30)).held == 30
        assert not (await engine.trim(0, 0)).ok and not (await engine.fork(1, 0, 10)).ok
        with pytest.raises(RunError):
            await collect(engine.run(command(TOKENS)))
        assert (await running.cancel()).reason == "cancelled"
        again = engine.run(command(TOKENS, keep=50))
        engine.kill()
        with pytest.raises(EngineGone):
            await anext(again)
        assert (await engine.trim(0, 0)).held == 0

    do(scene())


def test_prompts(engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hällo"}]
    prepared = do(engine.prepare(messages_json=msgspec.json.encode(messages)))
    tokens = unpack_tokens(prepared.tokens)
    assert tokens[0] == 1 and list(tokens).count(1) == 2
    assert do(engine.detokenize(tokens)) == "user\nhälloassistant\n"
    with pytest.raises(BadRequest):
        do(engine.prepare(messages_json=b"{"))


@pytest.mark.parametrize("memory", ["checkpoints", "recurrent", "opaque"])
def test_checkpoints(memory: str) -> None:
    async def scene() -> None:
        engine = FakeEngine(Arena(128 * MIB, pretouch=False), stages=2, memory=memory, checkpoint_bytes=BLOCK_BYTES + 9)
        asked = msgspec.structs.replace(command(TOKENS), checkpoints=(40, 99), hold_end=True)
        first = await collect(engine.run(asked))
        assert [h.position for h in first.held] == [40, 99, 109] and not (await engine.trim(0, 50)).ok
        rows = spans(engine)
        if rows:
            assert (await engine.capture(0, 0, 99, rows)).ok
        held, sizes = first.held[1], (BLOCK_BYTES, 9)
        blocks = [engine._arena.alloc(PAGE + pad_to_page(size)) for size in sizes]
        for i, span in enumerate(blocks):
            assert span is not None
            assert (await engine.capture_checkpoint(held.checkpoint, i * BLOCK_BYTES, span)).held == 99
        assert (await engine.release_checkpoint(held.checkpoint)).ok
        if rows:
            place = {"start": 0, "end": 99, "from_": 0, "upto": 99, "spans": rows, "tokens": TOKENS[:99]}
            assert (await engine.apply(1, **place)).ok and not (await engine.trim(1, 99)).ok
        for i, span in enumerate(blocks):
            assert span is not None
            where = {"position": 99, "offset": i * BLOCK_BYTES, "total": held.payload_bytes}
            assert (await engine.apply_checkpoint(1, span=span, **where)).ok
        assert (await reply(engine, TOKENS, slot=1, keep=99)).tokens == first.tokens
        assert engine.wrong_restores == 0
        assert (await engine.fork(0, 1, 40, first.held[0].checkpoint)).held == 40
        for _ in range(2):
            assert (await engine.hold(0)).ok
        assert "no spare" in (await engine.hold(0)).reason

    do(scene())
