"""Real llama.cpp on memory that cannot be cut: parked in RAM or on disk, restored after the process that held it died.

What the slot holds afterwards is byte for byte what was parked, and it goes on as an engine does that never parked
anything: the same 64 greedy tokens. Placement is controlled: one sequence in an empty pool, read in the same batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engine.rig import Rig

from strata.cache.admission import Floors
from strata.cache.cache import TRANSIENT_BYTES, CacheLimits, ConversationCache
from strata.cache.parking import ParkJob
from strata.cache.put import DiskLimits
from strata.cache.ram import RamLimits
from strata.engine.protocol import EngineSettings
from strata.rules import prefix
from strata.rules.checkpoints import CheckpointLimits
from strata.store.level import Level
from strata.types import MIB, Tokens

# Around the windows of 64 and 128 and around batches of 256; the last ones wrap a pruned ring.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 512, 513, 700)
N_TOKENS = 64
MODELS = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen35", {}),
        ("qwen35", {"layer_split": (1, 1)}),
        ("lfm2", {}),
        ("lfm2_window", {}),
        ("lfm2_window", {"swa_full": False}),
        ("mamba", {}),
        ("gemma3", {}),
        ("gemma3", {"swa_full": False}),
    ],
    ids=["qwen35", "qwen35-staged", "lfm2", "lfm2-swa", "lfm2-swa-pruned", "mamba", "gemma3", "gemma3-pruned"],
)
Start = Callable[[], Rig]


@pytest.fixture
def start(
    name: str, options: dict[str, Any], tiny_paths: dict[str, Path], runner: asyncio.Runner
) -> Iterator[Callable[[], Rig]]:
    """A new engine process with an arena of its own."""
    settings = EngineSettings(
        model_path=str(tiny_paths[name]),
        slots=1,
        context=1024,
        flash_attention="on",
        read_chunk=256,
        threads=1,
        spare_checkpoints=8,
    )
    rigs: list[Rig] = []

    def begin() -> Rig:
        rigs.append(Rig(msgspec.structs.replace(settings, **options), runner))
        rigs[-1].start()
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.close()


def prompt(n: int) -> Tokens:
    """`n` tokens of a conversation of its own, whose last one is still to be read."""
    return np.random.default_rng(n).integers(300, 1900, n).astype(np.int32)


def open_cache(rig: Rig, root: Path, *, ram: bool, transient_bytes: int = TRANSIENT_BYTES) -> ConversationCache:
    async def made() -> ConversationCache:
        limits = CacheLimits(
            floors=Floors(parking_bytes=0, transient_bytes=0),
            park_target="ram" if ram else "disk",
            ram=RamLimits(budget_bytes=64 * MIB, most=100) if ram else None,
            checkpoints=CheckpointLimits(every=200, root=50),
            transient_bytes=transient_bytes,
        )
        levels = [] if ram else [(Level.open(root), DiskLimits(budget_bytes=1 << 40))]
        return ConversationCache(
            engine=rig.client, arena=rig.arena, limits=limits, levels=levels, memory=lambda: 1 << 40
        )

    return rig.do(made())


def contents(rig: Rig, n: int) -> list[bytes]:
    """All that slot 0 holds, canonical: its rows block by block, and its checkpoint."""
    step = rig.info.block_tokens
    rows = [rig.capture(0, at, min(at + step, n)) for at in range(0, n, step)] if step else []
    found = rig.payloads(rows)
    held = rig.do(rig.client.hold(0))
    assert held.ok and held.held == n, held
    found += rig.bytes_of(rig.capture_checkpoint(held.checkpoint, held.payload_bytes))
    rig.free_spans()
    return found


def read(rig: Rig, n: int) -> None:
    """Slot 0 holds the first `n` tokens, and nothing else."""
    assert rig.do(rig.client.trim(0, 0)).held == 0
    assert rig.generate(prompt(n), max_tokens=0).finished.held == n


def go_on(rig: Rig, n: int) -> list[int]:
    """What slot 0, which holds the first `n` tokens, writes behind two more; it is empty afterwards."""
    tokens = np.concatenate([prompt(n), np.array([301, 302], np.int32)])
    reply = rig.generate(tokens, keep=n, max_tokens=N_TOKENS, ignore_eos=True)
    assert rig.do(rig.client.trim(0, 0)).held == 0
    return reply.tokens


def park(rig: Rig, cache: ConversationCache, n: int, *, streamed: bool = False) -> None:
    """Park the first `n` tokens of slot 0. `streamed`: their checkpoint must go to disk at once."""
    root = prefix.root_key(rig.info.fingerprint, "")
    tokens = prompt(n)
    conversation = prefix.conversation_key(root, tokens, rig.info.openers)
    job = ParkJob(slot=0, root=root, tokens=tokens, frontier=None, conversation=conversation)

    async def parked() -> bool:
        nonlocal job
        if streamed:
            assert cache.taker is not None
            captured = await cache.taker.hold(0, root, tokens)
            assert captured is not None and captured.ticket
            job = replace(job, checkpoints=(captured,))
        parking = cache.begin_park(job)
        assert parking is not None
        return await parking.run()

    assert rig.do(parked())


def restore(rig: Rig, cache: ConversationCache, n: int) -> list[str]:
    """Slot 0 holds the first `n` tokens again; where they came from."""
    root = prefix.root_key(rig.info.fingerprint, "")
    tokens = np.append(prompt(n), np.int32(301))

    async def restored() -> list[str]:
        found = cache.lookup(root, tokens, beyond=1)
        assert found is not None and found.upto == n
        done = await cache.restore(0, found, 0)
        assert (done.held, done.failed) == (n, ())
        return done.sources

    return rig.do(restored())


@pytest.fixture
def twin(start: Start) -> list[list[int]]:
    """What an engine that never parked anything goes on with, at each length."""
    rig, replies = start(), []
    for n in LENGTHS:
        read(rig, n)
        replies.append(go_on(rig, n))
    assert len({tuple(reply) for reply in replies}) > len(LENGTHS) // 2, "the model says the same whatever it read"
    return replies


@MODELS
def test_kept_in_ram_while_the_engine_is_killed(start: Start, twin: list[list[int]], tmp_path: Path) -> None:
    rig = start()
    cache = open_cache(rig, tmp_path, ram=True)
    before = []
    for n in LENGTHS:
        read(rig, n)
        before.append(contents(rig, n))
        park(rig, cache, n)
    rig.kill()
    rig.clear()
    cache.live.clear()
    for n, was, reply in zip(LENGTHS, before, twin, strict=True):
        assert restore(rig, cache, n) == ["ram"]
        assert contents(rig, n) == was, f"the bytes differ at {n}"
        assert go_on(rig, n) == reply, f"it goes on differently at {n}"
    assert cache.check() == []
    assert cache.counters.checkpoints_given_up == 0
    cache.close()


@MODELS
def test_kept_on_disk_over_a_restart(start: Start, twin: list[list[int]], tmp_path: Path) -> None:
    rig = start()
    cache = open_cache(rig, tmp_path, ram=False)
    before = []
    for n in LENGTHS:
        read(rig, n)
        before.append(contents(rig, n))
        park(rig, cache, n)
    cache.close()
    rig = start()
    cache = open_cache(rig, tmp_path, ram=False)
    for n, was, reply in zip(LENGTHS, before, twin, strict=True):
        assert restore(rig, cache, n) == ["cold"]
        assert contents(rig, n) == was, f"the bytes differ at {n}"
        assert go_on(rig, n) == reply, f"it goes on differently at {n}"
    assert cache.check() == []
    cache.close()


@pytest.mark.parametrize(("name", "options"), [("mamba", {})])
def test_one_that_has_no_room_to_wait_is_written_at_once(start: Start, twin: list[list[int]], tmp_path: Path) -> None:
    """Parks may have one and a half checkpoints at once here, and half of that to let them wait."""
    rig = start()
    cache = open_cache(rig, tmp_path, ram=False, transient_bytes=3 * rig.info.checkpoint_bytes)
    for n in LENGTHS:
        read(rig, n)
        park(rig, cache, n, streamed=True)
    rig.kill()
    rig.clear()
    cache.live.clear()
    for n, reply in zip(LENGTHS, twin, strict=True):
        assert restore(rig, cache, n) == ["cold"]
        assert go_on(rig, n) == reply, f"it goes on differently at {n}"
    assert cache.check() == []
    cache.close()
