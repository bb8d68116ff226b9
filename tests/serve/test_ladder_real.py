"""The ladder on the real model: what is left of a damaged conversation is right, and neighbours do not notice.

Answers are compared with a twin that does the same in the same cells: which cells a state lies in changes the last bits
of what is computed from it, and the greedy answer of a small model with them.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.serve.test_bytes import FACTS, GREEDY, state, turn, workshop
from tests.serve.test_forged import forge_payload

from strata.serve.request import Completed, Text, TurnRequest
from strata.serve.turn import Workshop, run_turn
from strata.store.arena import Arena
from strata.store.format import decode_header, decode_manifest, encode_header
from strata.store.names import segment_path
from strata.types import PAGE

BESIDE = "A conversation that lives here. " * 12


async def said(shop: Workshop, text: str) -> tuple[str, Completed]:
    """The greedy answer, and what the request cost."""
    message = {"role": "user", "content": text}
    request = TurnRequest(messages=(message,), sampling=GREEDY, max_tokens=24, ignore_eos=True)
    events = [event async for event in run_turn(shop, request)]
    assert isinstance(events[-1], Completed)
    while shop.parks:
        await asyncio.wait(set(shop.parks))
    assert shop.cache is not None and await shop.cache.flush(30)
    return "".join(event.text for event in events if isinstance(event, Text)), events[-1]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one conversation."""
    root = tmp_path_factory.mktemp("stored") / "cold"

    async def life() -> None:
        async with workshop(root) as (shop, _):
            await said(shop, FACTS)

    asyncio.run(life())
    return root


async def neighbour(shop: Workshop, arena: Arena) -> tuple[int, bytes]:
    """Another conversation: its slot, and every byte of it."""
    slot = await turn(shop, BESIDE, 16)
    return slot, await state(shop, arena, slot, shop.slots.all[slot].tokens)


async def second_life(root: Path, *, ladder: bool) -> tuple[str, Completed, dict[str, int], int]:
    """A neighbour, then the stored conversation: its answer, cost, the rungs used and the files set aside."""
    async with workshop(root, ladder=ladder) as (shop, arena):
        assert shop.cache is not None
        slot, before = await neighbour(shop, arena)
        text, done = await said(shop, FACTS)
        assert await state(shop, arena, slot, shop.slots.all[slot].tokens) == before
        again, warm = await said(shop, FACTS)
        assert warm.cached_tokens == warm.prompt_tokens - 1 and again
        used = {rung: n for rung, n in shop.cache.counters.ladder_used.items() if n}
        return text, done, used, shop.cache.disks[0].counters.quarantined


def files(root: Path) -> list[Path]:
    """The segments of the stored conversation, in order."""
    manifest = decode_manifest(next(root.glob("*.meta")).read_bytes())
    return [root / segment_path(key, 0) for key in manifest.keys]


def test_a_damaged_block_costs_what_lies_behind_it(tmp_path: Path, stored: Path) -> None:
    """The two segments before it stay, and the answer is that of a twin that never had more than those."""
    for name in ("damaged", "twin"):
        shutil.copytree(stored, tmp_path / name)
    victim = files(tmp_path / "damaged")[2]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    for path in files(tmp_path / "twin")[2:]:
        path.unlink()
    text, done, used, quarantined = asyncio.run(second_life(tmp_path / "damaged", ladder=True))
    right, twin, _, _ = asyncio.run(second_life(tmp_path / "twin", ladder=True))
    assert text == right
    assert done.cached_tokens == twin.cached_tokens == 512
    assert (used, quarantined) == ({"good_part": 1}, 1)


@pytest.mark.parametrize("forged", ["random bytes", "the payload of another segment"])
def test_a_forged_payload_harms_no_other_slot(tmp_path: Path, stored: Path, forged: str) -> None:
    """The digest holds, so it reaches the engine: no crash, and every byte of the neighbour is as it was.

    llama.cpp refuses bytes that are no state; a state of other tokens is applied, as nothing can tell.
    """
    shutil.copytree(stored, tmp_path / "cold")
    paths = files(tmp_path / "cold")
    if forged == "random bytes":
        forge_payload(paths[1])
    else:
        data, other = bytearray(paths[1].read_bytes()), paths[0].read_bytes()
        header, header_of_other = decode_header(bytes(data[:PAGE])), decode_header(other[:PAGE])
        data[PAGE:] = other[PAGE:]
        data[:PAGE] = encode_header(header.with_digests([block.digest for block in header_of_other.blocks]))
        paths[1].write_bytes(data)
    _, done, used, quarantined = asyncio.run(second_life(tmp_path / "cold", ladder=True))
    refused = forged == "random bytes"
    assert done.cached_tokens == (256 if refused else done.prompt_tokens - 1)
    assert (used, quarantined) == ({"good_part": 1} if refused else {}, 0)
