"""Real llama.cpp on memory that cannot be cut: a turn is parked, a new process restores it, and the next one is right.

The twin is an engine that never parked anything and read the same tokens in the same batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tests.engine.rig import GREEDY, collect
from tests.serve.running import RunningServer

from strata.cache.admission import Floors
from strata.cache.cache import CacheLimits, ConversationCache
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLimits
from strata.engine.client import EngineClient
from strata.engine.protocol import EngineSettings, Run, pack_tokens, unpack_tokens
from strata.rules import prefix
from strata.rules.checkpoints import CheckpointLimits
from strata.serve.request import Completed, Reading, Text, TurnRequest
from strata.serve.slots import Slots
from strata.serve.turn import Workshop, run_turn
from strata.store.arena import Arena
from strata.store.level import Level
from strata.types import MIB, Tokens

WORDS = "the old mill by the river turns when it rains and stands still in the summer "
FIRST = ({"role": "system", "content": WORDS * 8}, {"role": "user", "content": WORDS * 24})
SECOND = (*FIRST, {"role": "assistant", "content": "It does."}, {"role": "user", "content": "Go on."})
LIMITS = CacheLimits(
    floors=Floors(parking_bytes=0, transient_bytes=0),
    park_target="disk",
    ladder=True,
    checkpoints=CheckpointLimits(every=300, root=50),
)


def settings(path: Path, **options: object) -> EngineSettings:
    # More spares than anybody needs: a tiny model reads from one checkpoint to the next before the first is captured.
    plain = EngineSettings(
        model_path=str(path),
        slots=1,
        context=2048,
        flash_attention="on",
        read_chunk=256,
        threads=1,
        spare_checkpoints=8,
    )
    return msgspec.structs.replace(plain, **options)


@asynccontextmanager
async def engine(wanted: EngineSettings) -> AsyncIterator[tuple[EngineClient, Arena]]:
    arena = Arena(192 * MIB, pretouch=False)
    client = EngineClient(wanted, arena)
    await client.start()
    try:
        yield client, arena
    finally:
        await client.close()
        arena.close()


@asynccontextmanager
async def shop(wanted: EngineSettings, root: Path, limits: CacheLimits = LIMITS) -> AsyncIterator[Workshop]:
    """A new process on the directory."""
    async with engine(wanted) as (client, arena):
        assert not client.info.cuttable, client.info.mode_reason
        levels = [(Level.open(root), DiskLimits(budget_bytes=1 << 40))]
        cache = ConversationCache(engine=client, arena=arena, limits=limits, levels=levels, memory=lambda: 1 << 40)
        slots = Slots(1, is_kept=cache.keeps_live)
        slots.resume_point = cache.resume_point
        try:
            yield Workshop(engine=client, slots=slots, cache=cache)
            assert cache.check() == []
            assert arena.used_bytes == (cache.ram.used_bytes if cache.ram is not None else 0)
        finally:
            cache.close()


async def turn(shop: Workshop, messages: tuple[dict[str, str], ...]) -> tuple[str, Completed]:
    request = TurnRequest(messages=messages, sampling=GREEDY, max_tokens=32, ignore_eos=True)
    text, last = "", None
    async with aclosing(run_turn(shop, request)) as events:
        async for event in events:
            text += event.text if isinstance(event, Text) else ""
            last = event
    while shop.parks:
        await asyncio.wait(set(shop.parks))
    assert shop.cache is not None and await shop.cache.flush(30)
    assert isinstance(last, Completed)
    return text, last


async def prompt(client: EngineClient, messages: tuple[dict[str, str], ...]) -> Tokens:
    return unpack_tokens((await client.prepare(messages_json=msgspec.json.encode(messages))).tokens)


async def twin(wanted: EngineSettings, stops: list[int]) -> str:
    """The text of the second turn in an engine that stopped where the first one had its checkpoints."""
    async with engine(wanted) as (client, _):
        first, second = await prompt(client, FIRST), await prompt(client, SECOND)
        at = 0
        for stop in stops:
            run = Run(
                request=0,
                slot=0,
                keep=at,
                tokens=pack_tokens(first[:stop]),
                sampling=GREEDY,
                max_tokens=0,
                limit=client.info.context,
            )
            at = (await collect(client.run(run))).finished.held
        run = msgspec.structs.replace(run, keep=at, tokens=pack_tokens(second), max_tokens=32, ignore_eos=True)
        return (await collect(client.run(run))).text


@pytest.mark.parametrize(
    ("name", "options", "split"),
    [
        ("qwen35", {}, ()),
        ("qwen35", {"layer_split": (1, 1, 1, 1)}, (1, 1)),  # in stages 0 and 2 no layer attends
        ("qwen35", {"layer_split": (1, 1)}, ()),
        ("qwen35", {}, (1, 1, 1, 1)),
        ("lfm2", {}, ()),
        ("lfm2", {"layer_split": (1, 1, 2)}, (1, 1)),
        ("lfm2_window", {}, (1, 1)),
        ("mamba", {"layer_split": (1, 1, 2)}, ()),
        ("gemma3", {}, (1, 1)),
        ("gemma3", {"swa_full": False, "layer_split": (1, 1, 2)}, (1, 1)),
        ("deepseek32", {}, ()),
    ],
)
def test_the_next_turn_is_right_in_a_new_process(
    name: str, options: dict[str, object], split: tuple[int, ...], tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    """`split`: of the layers, in the new process."""
    wanted = settings(tiny_paths[name], **options)

    async def body() -> None:
        async with shop(wanted, tmp_path) as before:
            _, first = await turn(before, FIRST)
            assert first.cached_tokens == 0
            assert before.cache is not None and before.cache.counters.checkpoints_given_up == 0
            (stored,) = before.cache.disks[0].index.conversations()
            frontier = prefix.frontier(await prompt(before.engine, FIRST), before.engine.info.openers)
            stops = [at for at, _ in stored.checkpoints if at <= (frontier or 0)]
            assert len(stops) >= 3 and stops[-1] == frontier
        async with shop(msgspec.structs.replace(wanted, layer_split=split), tmp_path) as after:
            text, second = await turn(after, SECOND)
            assert second.cache.source == "cold"
            assert second.cached_tokens == frontier
            assert second.cached_tokens >= 0.95 * second.prompt_tokens
            assert after.cache is not None and after.cache.counters.restore_failures == 0
            # And live: the slot goes back to the frontier by its checkpoint.
            _, third = await turn(after, (*FIRST, {"role": "assistant", "content": "No."}, SECOND[-1]))
            assert third.cache.source == "live" and third.cached_tokens == frontier
        assert text == await twin(wanted, stops)

    asyncio.run(body())


@pytest.mark.parametrize("ram", [False, True], ids=["disk", "ram"])
@pytest.mark.parametrize("name", ["qwen35", "lfm2_window", "mamba", "gemma3"])
def test_reading_stops_where_a_checkpoint_is_due_and_nowhere_else(
    name: str, ram: bool, tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    """The root, every 400 tokens, the frontier on its opener, and the end of the turn; batches have 256 tokens."""
    limits = replace(LIMITS, checkpoints=CheckpointLimits(every=400, root=50))
    if ram:
        limits = replace(limits, park_target="ram", ram=RamLimits(budget_bytes=64 * MIB, most=4))

    async def body() -> None:
        async with shop(settings(tiny_paths[name]), tmp_path, limits) as server:
            tokens = await prompt(server.engine, FIRST)
            openers = prefix.opener_positions(tokens, server.engine.info.openers)
            root, frontier = next(int(at) for at in openers if at >= 50), int(openers[-1])
            assert int(tokens[frontier]) in server.engine.info.openers
            read_to, completed = [0], None
            request = TurnRequest(messages=FIRST, sampling=GREEDY, max_tokens=32, ignore_eos=True)
            async with aclosing(run_turn(server, request)) as events:
                async for event in events:
                    read_to += [event.held] if isinstance(event, Reading) else []
                    completed = event
            while server.parks:
                await asyncio.wait(set(server.parks))
            assert isinstance(completed, Completed) and server.cache is not None
            await server.cache.flush(30)
            due = sorted({root, frontier, *range(400, len(tokens), 400)})
            ends = [i for i in range(1, len(tokens) + 1) if i in due or i == len(tokens)]
            stops = sorted({*ends, *(a + n for a, b in pairwise([0, *ends]) for n in range(256, b - a, 256))})
            assert read_to[1:] == stops
            index = server.cache.ram.index if ram and server.cache.ram is not None else server.cache.disks[0].index
            (stored,) = index.conversations()
            end = completed.prompt_tokens + completed.completion_tokens - 1
            assert [at for at, _ in stored.checkpoints] == [*due, end]
            assert server.cache.counters.checkpoints_given_up == 0
            (durable,) = server.cache.disks[0].index.conversations()
            assert durable.checkpoints == stored.checkpoints

    asyncio.run(body())


def ask_server(server: RunningServer, messages: tuple[dict[str, str], ...]) -> tuple[int, int]:
    """Tokens that were not read again, and all of the prompt."""
    answer = server.client.chat.completions.create(model="any", messages=list(messages), max_tokens=4)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens


def flags_of(path: Path) -> tuple[str, ...]:
    return (f"--model={path}", "--prompt-cache-root=50", "--threads=1")


def test_the_server_keeps_a_hybrid_over_a_restart(tiny_paths: dict[str, Path], tmp_path: Path) -> None:
    log, flags = tmp_path / "log", flags_of(tiny_paths["qwen35"])
    with RunningServer(log, *flags, "--conversation-cache-mib=64", cold=tmp_path / "cold") as server:
        assert ask_server(server, FIRST)[0] == 0
        server.settled()
        counters = server.counters
        assert (counters["parked_ram"], counters["checkpoints_given_up"]) == (1, 0)
        server.stop()
    with RunningServer(log, *flags, cold=tmp_path / "cold") as server:
        cached, total = ask_server(server, SECOND)
        assert cached >= 0.95 * total
        assert server.counters["restores"] == 1
        server.stop()


@pytest.mark.parametrize("name", ["qwen35", "lfm2_window", "mamba", "gemma3"])
def test_the_server_keeps_them_in_ram_alone_when_its_engine_is_killed(
    name: str, tiny_paths: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--conversation-cache-mib=64", "--conversation-cache-min-free-mib=0")
    with RunningServer(tmp_path / "log", *flags_of(tiny_paths[name]), *flags) as server:
        assert ask_server(server, FIRST)[0] == 0
        server.settled()
        server.wait_for_engine_after(server.kill_engine())
        cached, total = ask_server(server, SECOND)
        assert cached >= 0.95 * total
        counters = server.counters
        assert (counters["ram_hits"], counters["restore_failures"], counters["discards"]) == (1, 0, 0)
        server.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"log"}
