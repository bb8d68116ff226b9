"""When an idle conversation leaves the pool, and what is moved then, on the fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.serve.test_pool_turns import RAM, Turn, anyio_backend
from tests.serve.workbench import Workbench, ask, until, words

from strata.rules.pool import leaves_pool
from strata.serve.parks import Workshop
from strata.serve.tax import PoolTax

__all__ = ["anyio_backend"]
pytestmark = pytest.mark.anyio


@asynccontextmanager
async def taxed(root: Path, *, cell_s: float | None, kept: bool = True) -> AsyncIterator[tuple[Workbench, PoolTax]]:
    bench = Workbench(root, slots=3, ram=RAM)
    bench.engine.info = msgspec.structs.replace(bench.engine.info, idle_cell_s=cell_s)
    bench.shop = Workshop(engine=bench.engine, slots=bench.slots, cache=bench.cache if kept else None)
    tax = PoolTax(bench.shop)
    bench.shop.pool.on_written = tax.wrote
    try:
        yield bench, tax
        await bench.check()
    finally:
        bench.close()


def test_it_leaves_once_it_has_cost_more_than_it_will() -> None:
    assert not leaves_pool(held=1000, cell_s=1e-6, rows=100, restore_s=0.1)
    assert leaves_pool(held=1000, cell_s=1e-6, rows=101, restore_s=0.1)
    assert not leaves_pool(held=1000, cell_s=0.0, rows=10**9, restore_s=0.1)


async def test_an_idle_conversation_leaves_and_the_writer_is_compacted(tmp_path: Path) -> None:
    async with taxed(tmp_path, cell_s=1e-5) as (bench, tax):
        idle = Turn(bench, ask(words(1, 700), max_tokens=3))
        await idle.is_right()
        writer = Turn(bench, ask(words(2, 300), max_tokens=90))
        await writer.is_right()
        await until(lambda: not tax.tasks)
        assert tax.left == 1 and not bench.engine.states[0]
        starts = [(slot, start) for slot, start, _ in bench.engine.compacted if slot == 1]
        assert starts == [(1, 0), (1, 256), (1, 0)]
        again = Turn(bench, ask(words(1, 700), max_tokens=3))
        await again.is_right()
        assert again.completed.cached_tokens > 512


@pytest.mark.parametrize("why", ["not measured", "nothing keeps it", "cheap"])
async def test_otherwise_it_stays(tmp_path: Path, why: str) -> None:
    cell_s = {"not measured": None, "nothing keeps it": 1e-3, "cheap": 1e-12}[why]
    async with taxed(tmp_path, cell_s=cell_s, kept=why != "nothing keeps it") as (bench, tax):
        await Turn(bench, ask(words(1, 700), max_tokens=3)).is_right()
        await Turn(bench, ask(words(2, 300), max_tokens=90)).is_right()
        assert tax.left == 0 and not tax.tasks and len(bench.engine.states[0]) > 700
        assert bench.engine.compacted == []


async def test_an_engine_that_dies_meanwhile_breaks_nothing(tmp_path: Path) -> None:
    async with taxed(tmp_path, cell_s=1e-5) as (bench, tax):
        await Turn(bench, ask(words(1, 700), max_tokens=3)).is_right()
        writer = Turn(bench, ask(words(2, 300), max_tokens=200))
        await until(lambda: bool(tax.tasks))
        bench.engine.kill()
        bench.engine.restart()
        await until(lambda: not tax.tasks and writer.task.done())
        await Turn(bench, ask(words(3, 300), max_tokens=20)).is_right()
