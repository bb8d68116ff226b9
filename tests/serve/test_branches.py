"""Edits and branches: an edited earlier turn resumes where it differs, and the old branch outlives a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.workbench import Workbench, ask, play, segments_of, words

from strata.rules.prefix import shared_prefix
from strata.rules.restore import LEAST_RESTORE_TOKENS
from strata.types import SEGMENT_TOKENS

TEXTS = [words(i, 400) for i in range(5)]
TRUNK = ask(*TEXTS)
OTHER = ask(words(50, 700))


@pytest.mark.parametrize("ladder_breaks", [False, True], ids=["sound", "the old tail is damaged"])
@pytest.mark.parametrize("changed", [0, 1, 2, 3, 4])
def test_an_edited_turn_resumes_at_the_divergence_and_both_branches_outlive_a_restart(
    tmp_path: Path, changed: int, ladder_breaks: bool
) -> None:
    edited = ask(*TEXTS[:changed], TEXTS[changed][:150] + words(77, 100), *TEXTS[changed + 1 :])

    async def first_life(bench: Workbench) -> None:
        await bench.whole(TRUNK)
        await bench.whole(OTHER)
        answer = await bench.whole(edited)
        assert answer.completed.cached_tokens == await shared(bench)
        await bench.whole(OTHER)
        assert (await bench.whole(TRUNK)).completed.cached_tokens == len(await bench.prompt_of(TRUNK)) - 1

    async def shared(bench: Workbench) -> int:
        return shared_prefix(await bench.prompt_of(TRUNK), await bench.prompt_of(edited))

    async def second_life(bench: Workbench) -> None:
        for request in (edited, TRUNK):
            whole = len(await bench.prompt_of(request)) - 1
            answer = await bench.whole(request)
            assert answer.completed.cached_tokens == whole, "of either branch everything but the last token"
            assert "cold" in answer.report.source
            await bench.whole(OTHER)

    async def damaged_life(bench: Workbench) -> None:
        """The trunk loses what only it has: what it shares with the edit still serves (rung 3)."""
        at, prompt = await shared(bench), await bench.prompt_of(TRUNK)
        trunk = max(bench.disk.index.conversations(), key=lambda c: shared_prefix(c.tokens, prompt))
        bad = next(segment.key for segment in segments_of(trunk) if segment.end > at)
        (path,) = bench.disk.level.root.rglob(f"{bad.hex()}.s0.seg")
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        answer = await bench.whole(TRUNK)
        worth = at % SEGMENT_TOKENS >= LEAST_RESTORE_TOKENS
        assert answer.completed.cached_tokens == (at if worth else at - at % SEGMENT_TOKENS)
        assert sum(bench.cache.counters.ladder_used.values()) == 1
        await bench.whole(OTHER)
        assert (await bench.whole(edited)).completed.cached_tokens == len(await bench.prompt_of(edited)) - 1

    play(first_life, tmp_path, slots=1)
    play(damaged_life if ladder_breaks else second_life, tmp_path, slots=1)
