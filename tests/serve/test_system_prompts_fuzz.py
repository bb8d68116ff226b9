"""The system-prompt cache under everything that can go wrong (test_turn_fuzz.py), beside a cold level and alone.

Every answer is compared with the right one, also after a restart, and files, index, leases and blocks are checked.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.serve.slowdisk import SlowDisk
from tests.serve.test_turn_fuzz import NAMESPACES, Client, Trouble, lead
from tests.serve.workbench import BLOCK, Workbench, default_limits, play

from strata.cache.system_prompts import SystemPromptLimits
from strata.engine.fake_model import OPENER
from strata.rules.checkpoints import CheckpointLimits
from strata.rules.prefix import root_key
from strata.rules.system_prompts import variant_root


def check_variants(bench: Workbench, limits: SystemPromptLimits) -> None:
    """None but whole system prompts of the two API keys, no two alike, and no more than may be."""
    prompts = bench.cache.system_prompts
    assert prompts is not None
    bench.cache.tick()
    stored = prompts.disk.index.conversations()
    assert len({c.conversation for c in stored}) == len(stored) <= limits.most
    identity = bench.engine.info.fingerprint
    assert {c.root for c in stored} <= {variant_root(root_key(identity, name), limits.declared) for name in NAMESPACES}
    for entry in stored:
        assert len(entry.tokens) >= limits.least
        assert not (entry.tokens[limits.least :] == OPENER).any(), "it reaches over the first turn"
    counts = prompts.status()
    assert counts["variants"] == len(stored)
    assert (counts["tokens_saved"] > 0) == (counts["hits"] > 0)  # type: ignore[operator]


@pytest.mark.parametrize("memory", ["segments", "checkpoints", "recurrent"])
@pytest.mark.parametrize("seed", range(16))
def test_every_answer_is_right_whatever_happens(tmp_path: Path, memory: str, seed: int) -> None:
    dice = random.Random(seed)
    disk = SlowDisk()
    limits = SystemPromptLimits(
        budget_bytes=dice.choice((4 * BLOCK, 1 << 40)),
        most=dice.choice((1, 2, 20)),
        declared=dice.choice(("", "v2")),
        least=dice.choice((200, 500)),
    )

    async def scenario(bench: Workbench) -> None:
        trouble = Trouble(bench, disk, dice)
        clients = [Client(dice) for _ in range(dice.randrange(2, 6))]
        await asyncio.gather(*(lead(bench, client, dice, 6) for client in clients))
        await trouble.end()
        await bench.check()
        check_variants(bench, limits)
        for client in clients:
            await bench.whole(client.next())

    options: dict[str, Any] = {
        "slots": dice.randrange(1, 4),
        "block_tokens": dice.choice((256, 64)),
        "arena_bytes": dice.choice((24 * BLOCK, 64 << 20)),
        "conversations": dice.choice((True, False)),
        "limits": replace(default_limits(), checkpoints=CheckpointLimits(every=300, root=limits.least)),
        "memory": memory,
        "system_prompts": limits,
    }
    print(f"seed {seed}: {options}")
    for _ in range(2):
        play(scenario, tmp_path, fs=disk, **options)
