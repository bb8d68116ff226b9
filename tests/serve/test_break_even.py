"""Restoring only when it pays: what was measured decides, and says so; one wrong measurement decides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.test_ladder import LIVE, told
from tests.serve.workbench import Workbench, ask, play, words

from strata.rules.restore import DISK_COST, TRUSTED_SAMPLES, Estimate, RestoreCost

LONG = ask(words(1, 3500))
OTHER = ask(words(2, 700))


def known(value: float) -> Estimate:
    return Estimate(start=value, recent=(value,) * TRUSTED_SAMPLES)


async def reads_cost(bench: Workbench, token_s: float) -> None:
    """Let enough requests be read that the cost is known."""
    bench.engine.read_token_s = token_s
    for i in range(TRUSTED_SAMPLES):
        await bench.whole(ask(words(90 + i, 300)))
    assert bench.cache.ladder.costs.read.known
    assert bench.cache.ladder.costs.read.value == pytest.approx(token_s)


def test_what_costs_more_than_reading_is_read_again_and_told_with_both_numbers(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(LONG)
        await reads_cost(bench, 1e-6)  # 3.5 ms for all of it
        bench.cache.ladder.costs.levels["cold"] = RestoreCost(fixed=known(0.02), byte=known(1e-9))
        answer = await bench.whole(LONG)
        assert (answer.report.source, answer.completed.cached_tokens) == ("live", LIVE)
        counts = bench.cache.counters
        assert (counts.not_worth_it, counts.restores, counts.disk_hits) == (1, 0, 0)
        assert answer.report.restore_s is None
        gained = answer.completed.prompt_tokens - 1 - LIVE
        assert f"restoring {gained} tokens costs about 20.1 ms, reading them 3.5 ms" in told(bench, "restore")[-1]

    play(scenario, tmp_path, slots=1)


def test_a_slow_model_restores_even_a_few_tokens(tmp_path: Path) -> None:
    """2 tokens at 100 ms, where nothing measured would have asked for 16."""

    async def scenario(bench: Workbench) -> None:
        few = ask("ab")
        await bench.whole(few)
        await reads_cost(bench, 0.1)
        bench.cache.ladder.costs.levels["cold"] = RestoreCost(fixed=known(0.005), byte=known(1e-9))
        await bench.whole(OTHER)
        answer = await bench.whole(few)
        assert answer.report.source == "live+cold"
        assert 0 < answer.completed.cached_tokens - LIVE < 16

    play(scenario, tmp_path, slots=1)


def test_a_level_that_was_slow_for_a_while_is_tried_again(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(LONG)
        await reads_cost(bench, 0.004)
        cost = DISK_COST
        for _ in range(5):
            cost = cost.measured(1000, 3600.0)
        bench.cache.ladder.costs.levels["cold"] = cost
        sources = []
        while "live+cold" not in sources:
            sources.append((await bench.whole(LONG)).report.source)
            await bench.whole(OTHER)
            assert len(sources) < 15
        assert bench.cache.counters.not_worth_it >= len(sources) - 1 > 0
        for _ in range(4):
            assert (await bench.whole(LONG)).report.source == "live+cold", "measured anew, it pays"
            await bench.whole(OTHER)

    play(scenario, tmp_path, slots=1)


def test_restores_and_reads_are_measured_as_they_happen(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        costs = bench.cache.ladder.costs
        assert costs.status() == {"read_ms_per_token": None, "restore": {}}
        await bench.whole(LONG)
        await reads_cost(bench, 0.002)
        for _ in range(TRUSTED_SAMPLES):
            await bench.whole(LONG)
            await bench.whole(OTHER)
        status = costs.status()
        assert status["read_ms_per_token"] == pytest.approx(2.0)
        assert isinstance(status["restore"], dict)
        assert 0 < status["restore"]["cold"]["fixed_ms"] < 1000
        assert status["restore"]["cold"]["mib_per_s"] is None, "nothing large was restored"

    play(scenario, tmp_path, slots=1)
