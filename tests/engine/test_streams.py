"""A split pool: the same bytes and tokens as a unified one, on every kind of memory, and nothing shared by mistake.

What test_checkpoints.py says of memory that cannot be cut is said here again of a split pool, by the same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.engine.test_checkpoints import (  # noqa: F401 the tests run here too
    KINDS,
    LIMIT,
    READ,
    TOKENS,
    VARIANTS,
    Bench,
    MakeBench,
    Parked,
    lengths,
    test_a_deferred_copy_is_that_of_its_position,
    test_a_fork_at_a_checkpoint,
    test_a_slot_is_rewound,
    test_bytes_are_equal_in_a_new_engine,
)

from strata.engine import streams
from strata.engine.layout import BadState, parse, recognise
from strata.engine.protocol import EngineSettings, Remembered
from strata.engine.startup import Served, load
from strata.errors import ConfigError

PLAIN = ["smollm2", "qwen2vl"]


class PlainBench(Bench):
    """The same without checkpoints."""

    def __init__(self, served: Served) -> None:
        self.served, self.context, self.slots = served, served.context, served.slots
        self.info, self.room = served.info, served.info.head_room

    def park(self, slot: int) -> Parked:
        return Parked(self.slots.held[slot], self.rows(slot, self.slots.held[slot]), [], 0)

    def put(self, slot: int, parked: Parked, position: int | None = None) -> str | None:
        return None


@pytest.fixture
def pools(tiny_paths: dict[str, Path], smollm2_path: Path) -> Iterator[Callable[..., Bench]]:
    opened: list[Served] = []

    def make(name: str, pool: str, **options: object) -> Bench:
        path = {"smollm2": smollm2_path, **tiny_paths}[name]
        settings = EngineSettings(
            model_path=str(path),
            slots=3,
            context=LIMIT,
            flash_attention="on",
            read_chunk=READ,
            threads=1,
            pool=pool,
        )
        served = load(msgspec.structs.replace(settings, **options), Remembered(), lambda stage, done: None)
        opened.append(served)
        assert served.info.pool == ("unified" if name == "mamba" else pool)
        return PlainBench(served) if served.checkpoints is None else Bench(served)

    yield make
    for served in opened:
        served.context.close()


@pytest.fixture
def bench(pools: Callable[..., Bench]) -> MakeBench:
    """What the tests of test_checkpoints.py run on."""
    return lambda name, **options: pools(name, "split", **options)


OTHER = {"split": "unified", "unified": "split"}
both_ways = pytest.mark.parametrize("pool", OTHER)


@pytest.mark.parametrize("name", [pytest.param("smollm2", marks=pytest.mark.slow), *PLAIN[1:], *KINDS])
@pytest.mark.parametrize("variant", ["flash attention", "none", "q8_0", "three stages", "a pruned window"])
@both_ways
def test_what_one_kind_parked_the_other_restores(
    name: str, variant: str, pool: str, pools: Callable[..., Bench]
) -> None:
    options = VARIANTS[variant]
    first, second = pools(name, pool, **options), pools(name, OTHER[pool], **options)
    assert first.info.fingerprint == second.info.fingerprint
    for n in [1, 257] if name == "smollm2" else lengths(name):
        first.slots.clear(1)
        first.feed(1, n)
        parked = first.park(1)
        second.slots.clear(2)
        second.feed(0, min(n, 50), TOKENS[::-1])
        second.restore(2, parked)
        second.slots.clear(0)
        assert second.payloads(second.park(2)) == first.payloads(parked)


@pytest.mark.parametrize("name", [*PLAIN, "qwen35", "lfm2", "mamba"])
@pytest.mark.parametrize("variant", ["flash attention", "none"])
@both_ways
def test_tokens_equal_those_of_a_twin_that_was_never_parked(
    name: str, variant: str, pool: str, pools: Callable[..., Bench]
) -> None:
    options = VARIANTS[variant]
    for n in (255, 300):
        first, second = pools(name, pool, **options), pools(name, OTHER[pool], **options)
        first.feed(0, n)
        second.restore(0, first.park(0))
        assert second.write(0, 64) == first.write(0, 64)


# -------------------------------------------------------------------------------------------------- what a stream holds


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("variant", ["flash attention", "none"])
def test_a_fork_is_a_copy(name: str, variant: str, pools: Callable[..., Bench]) -> None:
    one = pools(name, "split", **VARIANTS[variant])
    one.feed(0, 300)
    parked = one.park(0)
    assert one.slots.fork(0, 2, 300) is None and one.slots.fork(0, 1, 200) is None
    first = one.write(0, 20)
    assert one.write(2, 20) == first
    assert one.slots.trim(2, 300) is None and one.payloads(one.park(2)) == one.payloads(parked)
    one.feed(1, 300)  # in other batches than slot 0, so only what was copied is the same bytes
    assert one.slots.trim(1, 200) is None
    cut = one.rows(0, 200)
    assert one.payloads(Parked(200, one.rows(1, 200), [], 0)) == one.payloads(Parked(200, cut, [], 0))


def test_a_window_is_only_copied_where_it_is_there(pools: Callable[..., Bench]) -> None:
    one = pools("gemma3", "split")
    one.feed(0, 300)
    parked = one.park(0)
    assert one.slots.fork(0, 1, 300) is None
    assert one.payloads(one.park(1)) == one.payloads(parked)
    assert "did not take" in str(one.slots.fork(0, 1, 200))
    assert one.slots.held == [300, 0, 0] and one.context.last_position(1) == -1


def test_rows_that_were_replaced_are_captured_anew(pools: Callable[..., Bench]) -> None:
    """A capture copies the whole slot once; what the slot is cut back to and given anew is another content."""
    one = pools("qwen2vl", "split")
    one.feed(0, 600)
    before = one.rows(0, 256)  # and a copy of the rest waits for the captures that do not come
    assert one.slots.trim(0, 200) is None
    one.feed(0, 600, TOKENS[::-1])
    after = one.rows(0, 600)
    fresh = one.served.slots.__class__(
        one.context, 3, LIMIT, cuttable=True, format=one.slots._format, stages=one.info.stages
    )
    fresh.held[0] = 600
    for start, end, spans in after:
        again = [np.zeros_like(span) for span in spans]
        assert fresh.capture(0, start, end, again) is None
        assert all(np.array_equal(a[one.room :], b[one.room :]) for a, b in zip(again, spans, strict=True))
    assert not np.array_equal(before[0][2][0][one.room :], after[0][2][0][one.room :])


def test_captures_of_two_slots_in_turns(pools: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    one = pools("qwen2vl", "split")
    one.feed(0, 600)
    one.feed(1, 600, TOKENS[::-1])
    wanted = [one.rows(0, 600), one.rows(1, 600)]
    for bound in (streams._WAITING_BYTES, 0):
        monkeypatch.setattr(streams, "_WAITING_BYTES", bound)
        for i in range(3):
            for slot in (0, 1):
                start, end, spans = wanted[slot][i]
                again = [np.zeros_like(span) for span in spans]
                assert one.slots.capture(slot, start, end, again) is None
                assert np.array_equal(again[0][one.room :], spans[0][one.room :])


@pytest.mark.parametrize("name", PLAIN)
def test_a_restore_goes_on_where_the_slot_is(name: str, pools: Callable[..., Bench]) -> None:
    """Behind what the slot really holds, and with parts of blocks only."""
    one = pools(name, "split")
    one.feed(0, 600)
    parked = one.park(0)
    one.feed(1, 256)
    second, third = parked.blocks[1:]
    assert one.slots.apply(1, *second[:2], 256, 400, second[2], TOKENS[slice(*second[:2])]) is None
    assert one.slots.apply(1, *second[:2], 400, 512, second[2], TOKENS[slice(*second[:2])]) is None
    assert one.slots.apply(1, *third[:2], 512, 600, third[2], TOKENS[slice(*third[:2])]) is None
    assert one.slots.held == [600, 600, 0] and one.context.last_position(1) == 255, "nothing was copied yet"
    assert one.slots.settle(1) is None and one.context.last_position(1) == 599
    assert one.payloads(one.park(1)) == one.payloads(parked)
    assert one.write(1, 20) == one.write(0, 20)


def test_what_is_not_of_this_model_is_refused_at_once(pools: Callable[..., Bench]) -> None:
    one = pools("smollm2", "split")
    one.feed(0, 300)
    parked = one.park(0)
    start, end, spans = parked.blocks[0]
    spans[0][one.room] ^= 0xFF  # the type of the first K
    refusal = one.slots.apply(1, start, end, 0, end, spans, TOKENS[:end])
    assert "tensors are not those of this model" in str(refusal)
    assert one.slots.held[1] == 0 and one.slots.settle(1) is None
    spans[0][one.room] ^= 0xFF
    one.put_rows(1, parked)
    assert one.slots.held[1] == 300
    assert one.slots.trim(1, 0) is None, "what was applied is dropped before it settles"
    assert one.slots.settle(1) is None and one.context.last_position(1) == -1


def test_without_memory_for_a_copy_nothing_is_captured(
    pools: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pools("smollm2", "split")
    one.feed(0, 300)

    class Full:
        available = 1000

    monkeypatch.setattr(streams.psutil, "virtual_memory", Full)
    spans = [one.span(stage.payload_bytes(256)) for stage in one.info.stages]
    assert "MiB are available" in str(one.slots.capture(0, 0, 256, spans))
    assert "did not take" in str(one.slots.fork(0, 1, 300))
    monkeypatch.undo()
    assert one.slots.capture(0, 0, 256, spans) is None and one.slots.held == [300, 0, 0]


def test_sequences_share_nothing_and_rows_do_not_move(pools: Callable[..., Bench]) -> None:
    one = pools("smollm2", "split")
    one.feed(0, 100)
    with pytest.raises(ValueError, match="share nothing"):
        one.context.share(0, 1, 0, 50)
    with pytest.raises(ValueError, match="outside"):
        one.context.state_set(one.context.state(0))  # there is no transfer sequence
    assert "no compaction" in str(one.slots.compact(0, 0, 64))


# ------------------------------------------------------------------------------------------------------------- contexts


def test_every_slot_has_its_context(pools: Callable[..., Bench]) -> None:
    one = pools("qwen2vl", "split", context=700)
    assert (one.info.context, one.info.room_cells, one.info.pool_cells) == (700, 2100, 3 * 768)
    for slot in range(3):
        one.feed(slot, 700)
    assert [one.context.last_position(slot) for slot in range(3)] == [699] * 3
    parked = one.park(2)
    one.slots.clear(1)
    one.restore(1, parked)
    assert one.slots.settle(1) is None and one.payloads(one.park(1)) == one.payloads(parked)


def test_one_slot_recurrent_memory_and_whole_images_need_no_streams(tiny_paths: dict[str, Path]) -> None:
    for name, slots, reason in (
        ("qwen2vl", 1, "one slot"),
        ("mamba", 2, "no attention"),
        ("deepseek32", 2, "whole images"),
    ):
        for pool in ("split", "auto"):
            settings = EngineSettings(model_path=str(tiny_paths[name]), slots=slots, context=300, threads=1, pool=pool)
            served = load(settings, Remembered(split_pool=True), lambda stage, done: None)
            served.context.close()
            assert served.info.pool == "unified" and reason in served.info.pool_reason


def test_settings_that_contradict(smollm2_path: Path) -> None:
    for options, field in (({"pool": "both"}, "--pool"), ({"pool": "split", "pool_cells": 500}, "--pool")):
        settings = EngineSettings(model_path=str(smollm2_path), slots=2, **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=field):
            load(settings, Remembered(), lambda stage, done: None)


def test_a_sequence_in_two_streams_is_no_state(pools: Callable[..., Bench]) -> None:
    one = pools("smollm2", "split")
    one.feed(2, 5)
    blob = one.context.state(2)
    state, cells = recognise(blob, one.context.layout)
    assert state.parts[0].streams == 3 and len(state.parts[0].cells) == 5
    rows = blob[20:]  # behind magic, sequence, streams and the counts of the empty ones: the third stream
    twice = np.concatenate([blob[:12], rows, rows, np.zeros(4, np.uint8)])
    for damaged, why in ((twice, "two streams"), (np.concatenate([blob[:8], twice[8:12] * 0, rows]), "0 streams")):
        with pytest.raises(BadState, match=why):
            parse(damaged, one.context.layout, cells)
