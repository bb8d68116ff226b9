"""--layer-split on the real model: what one split wrote comes back under every other, in bytes and in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.engine.rig import collect
from tests.engine.tiny_models import write_tiny_models
from tests.serve.running import RunningServer, refusal
from tests.serve.test_bytes import FACTS, GREEDY, turn, workshop
from tests.serve.test_restart import FIRST, ask, cached, next_turn, said

from strata.cache.capturing import block_lengths
from strata.engine.protocol import Run, pack_tokens
from strata.rules import prefix
from strata.serve.turn import Workshop
from strata.serve.wiring import find_model
from strata.store.arena import Arena
from strata.types import Key, Tokens

Split = tuple[float, ...]


async def rows(shop: Workshop, arena: Arena, slot: int, tokens: Tokens) -> list[bytes]:
    """All that a slot holds, whatever the split: of each block every layer's K, then every layer's V."""
    info, found = shop.engine.info, []
    for start, end in prefix.blocks(0, len(tokens), info.block_tokens):
        spans = tuple(
            span for n in block_lengths(shop.engine, end - start, info.stages) if (span := arena.alloc(n)) is not None
        )
        assert (await shop.engine.capture(slot, start, end, spans)).ok
        payloads = [
            arena.view(span)[info.head_room :][: stage.payload_bytes(end - start)].tobytes()
            for span, stage in zip(spans, info.stages, strict=True)
        ]
        half = [len(payload) // 2 for payload in payloads]  # K and V of this model have rows of one size
        found.append(b"".join(payload[:n] for payload, n in zip(payloads, half, strict=True)))
        found.append(b"".join(payload[n:] for payload, n in zip(payloads, half, strict=True)))
        for span in spans:
            arena.free(span)
    return found


async def sequel(shop: Workshop, slot: int, tokens: Tokens) -> list[int]:
    """64 greedy tokens behind what a slot holds."""
    prompt = pack_tokens([*tokens, 33])
    run = Run(request=0, slot=slot, keep=len(tokens), tokens=prompt, sampling=GREEDY, max_tokens=64, limit=1024)
    return (await collect(shop.engine.run(run))).tokens


@pytest.mark.parametrize(
    "splits",
    [[(1, 1, 2), (1, 1), (), (1, 1, 2)], [(), (1, 1, 2)], [(1, 1), (1, 1, 2)]],
    ids=lambda splits: " then ".join(",".join(map(str, split)) or "none" for split in splits),
)
def test_bytes_and_greedy_tokens_are_equal_under_every_split(splits: Sequence[Split], tmp_path: Path) -> None:
    async def first(split: Split) -> tuple[Tokens, Key, list[bytes], list[int]]:
        async with workshop(tmp_path, layer_split=split) as (shop, arena):
            index = await turn(shop, FACTS, 32)
            slot = shop.slots.all[index]
            assert slot.root is not None and len(shop.engine.info.stages) == max(1, len(split))
            held = await rows(shop, arena, index, slot.tokens)
            return slot.tokens, slot.root, held, await sequel(shop, index, slot.tokens)

    async def later(split: Split, tokens: Tokens, root: Key, held: list[bytes], text: list[int]) -> None:
        async with workshop(tmp_path, layer_split=split) as (shop, arena):
            cache = shop.cache
            assert cache is not None and cache.disks[0].scan.stale == ()
            assert len(shop.engine.info.stages) == max(1, len(split))
            await turn(shop, "A conversation that lives here, so that the cells are others. " * 6, 8)
            match = cache.lookup(root, np.append(tokens, np.int32(33)), beyond=1)
            assert match is not None and match.upto == len(tokens)
            assert (await cache.restore(2, match, 0)).held == len(tokens)
            assert await rows(shop, arena, 2, tokens) == held
            assert await sequel(shop, 2, tokens) == text

    async def lives() -> None:
        known = await first(splits[0])
        for split in splits[1:]:
            await later(split, *known)

    asyncio.run(lives())


def stages_on_disk(cold: Path) -> dict[str, int]:
    """How many stage files each segment has."""
    names = [path.name.split(".")[0] for path in cold.rglob("*.seg")]
    return {name: names.count(name) for name in names}


def test_a_conversation_goes_on_from_split_to_split_through_the_server(tmp_path: Path) -> None:
    cold, more = tmp_path / "cold", "And which holds the fewest?"
    with RunningServer(tmp_path / "twin") as twin:
        second = next_turn(ask(twin, FIRST))
        expected = ask(twin, second, max_tokens=64, ignore_eos=True)
        third = [*second, {"role": "assistant", "content": said(expected)}, {"role": "user", "content": more}]
        last = said(ask(twin, third, max_tokens=64, ignore_eos=True))
    with RunningServer(tmp_path / "log", "--layer-split=1,1,2", cold=cold) as server:
        ask(server, FIRST)
        kept = server.settled()["newest"][0]["tokens"]
        assert set(stages_on_disk(cold).values()) == {3}
        server.stop()
    with RunningServer(tmp_path / "log", "--layer-split=1,1", cold=cold) as server:
        answer = ask(server, second, max_tokens=64, ignore_eos=True)
        assert cached(answer) == kept and said(answer) == said(expected)
        server.settled()
        assert set(stages_on_disk(cold).values()) == {2, 3}
        assert server.level["used_bytes"] == sum(p.stat().st_blocks * 512 for p in cold.rglob("*") if p.is_file())
        server.stop()
    with RunningServer(tmp_path / "log", cold=cold) as server:
        answer = ask(server, third, max_tokens=64, ignore_eos=True)
        assert cached(answer) > 0.95 * answer.usage.prompt_tokens and said(answer) == last
        assert server.counters["restore_failures"] == 0
        server.stop()
    with RunningServer(tmp_path / "log", "--layer-split=1,1,2", cold=cold) as server:
        assert cached(ask(server, FIRST)) > 1300
        assert server.counters["restore_failures"] == 0
        server.stop()


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_models(tmp_path_factory.mktemp("tiny"), vocabulary_of=find_model("demo"))["qwen2vl"]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("0,0", "not all of them 0"),
        ("-1,2", "numbers from 0"),
        ("1,one", "numbers from 0"),
        ("", "numbers from 0"),
        (",".join("1" * 17), "at most 16"),
        ("1,1,1,1,1,1", "6 parts, more than the model's 5 layers"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(split: str, words: str, five_layers: Path) -> None:
    code, output = refusal(f"--model={five_layers}", f"--layer-split={split}")
    assert code == 2 and "--layer-split" in output and words in output and "Traceback" not in output, output
