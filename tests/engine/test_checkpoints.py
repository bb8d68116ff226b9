"""Memory that cannot be cut: parked and restored by rows and a checkpoint, on every kind of it; and damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.engine.rig import GREEDY

from strata.engine import checkpoints, selftest
from strata.engine.layout import BadState, Bytes
from strata.engine.llama import Sampler
from strata.engine.protocol import EngineSettings, Remembered
from strata.engine.startup import Served, load
from strata.types import BLOCK_BYTES, PAGE, Tokens, pad_to_page

LIMIT = 700
TOKENS: Tokens = ((np.arange(LIMIT) * 37 + 5) % 2000).astype(np.int32)
KINDS = ["gemma3", "qwen35", "lfm2", "lfm2_window", "mamba"]
ATTEND = ["gemma3", "qwen35", "lfm2"]
WINDOW = {"gemma3": 64, "lfm2_window": 128}
READ = 256
every_kind = pytest.mark.parametrize("name", KINDS)


@dataclass(frozen=True)
class Parked:
    """A conversation outside the engine: blocks of rows, one span per stage each, and the checkpoint's blocks."""

    position: int
    blocks: list[tuple[int, int, list[Bytes]]]
    checkpoint: list[Bytes]
    total: int


class Bench:
    """A loaded model, used without a loop."""

    def __init__(self, served: Served) -> None:
        self.served, self.context, self.slots = served, served.context, served.slots
        assert served.checkpoints is not None
        self.checkpoints = served.checkpoints
        self.info = served.info
        self.room = served.info.head_room

    def feed(self, slot: int, n: int, tokens: Tokens = TOKENS) -> None:
        """Let a slot hold tokens[:n], read in chunks that end at multiples of READ."""
        while (held := self.slots.held[slot]) < n:
            end = min(n, (held // READ + 1) * READ)
            self.context.feed(slot, tokens[held:end], held)
            self.slots.held[slot] = end

    def write(self, slot: int, n: int) -> list[int]:
        """Greedy tokens behind what a slot holds; the first input is TOKENS at that place."""
        sampler = Sampler(self.served.model.vocabulary, GREEDY, TOKENS[:0])
        token, written = int(TOKENS[self.slots.held[slot]]), []
        for _ in range(n):
            self.context.feed(slot, [token], self.slots.held[slot])
            self.slots.held[slot] += 1
            token = self.context.sample(sampler, 0)
            written.append(token)
        sampler.close()
        return written

    def hold(self, slot: int) -> int:
        held = self.checkpoints.hold(slot)
        assert isinstance(held, int), held
        return held

    def span(self, n_bytes: int) -> Bytes:
        return np.full(self.room + pad_to_page(n_bytes), 0xA5, np.uint8)

    def take(self, checkpoint: int) -> tuple[list[Bytes], int]:
        """A held checkpoint's blocks and its size; it is released."""
        total = self.checkpoints.pending[checkpoint].payload_bytes
        spans = []
        for offset in range(0, total, BLOCK_BYTES):
            spans.append(self.span(min(BLOCK_BYTES, total - offset)))
            assert self.checkpoints.capture(checkpoint, offset, spans[-1]) is None
        assert self.checkpoints.release(checkpoint) is None
        return spans, total

    def rows(self, slot: int, upto: int) -> list[tuple[int, int, list[Bytes]]]:
        blocks = []
        step = self.info.block_tokens
        for start in range(0, upto, step) if step else ():
            end = min(start + step, upto)
            spans = [self.span(stage.payload_bytes(end - start)) for stage in self.info.stages]
            assert self.slots.capture(slot, start, end, spans) is None
            blocks.append((start, end, spans))
        return blocks

    def park(self, slot: int) -> Parked:
        position = self.slots.held[slot]
        checkpoint, total = self.take(self.hold(slot))
        return Parked(position, self.rows(slot, position), checkpoint, total)

    def put_rows(self, slot: int, parked: Parked) -> None:
        for start, end, spans in parked.blocks:
            refusal = self.slots.apply(slot, start, end, start, end, spans, TOKENS[start:end])
            assert refusal is None, refusal

    def put(self, slot: int, parked: Parked, position: int | None = None) -> str | None:
        position = parked.position if position is None else position
        refusal = None
        for i, span in enumerate(parked.checkpoint):
            refusal = self.checkpoints.apply(slot, position, i * BLOCK_BYTES, parked.total, span)
        return refusal

    def restore(self, slot: int, parked: Parked) -> None:
        self.put_rows(slot, parked)
        assert self.put(slot, parked) is None
        assert self.slots.settle(slot) is None  # as a request does
        assert self.slots.held[slot] == parked.position and not self.slots.bare

    def payloads(self, parked: Parked) -> list[bytes]:
        """What goes to disk."""
        spans = [span for _, _, stages in parked.blocks for span in stages] + parked.checkpoint
        return [span[self.room :].tobytes() for span in spans]


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(tiny_paths: dict[str, Path]) -> Iterator[MakeBench]:
    opened: list[Served] = []

    def make(name: str, **options: object) -> Bench:
        settings = EngineSettings(
            model_path=str(tiny_paths[name]), slots=3, context=LIMIT, flash_attention="on", read_chunk=READ, threads=1
        )
        opened.append(load(msgspec.structs.replace(settings, **options), Remembered(), lambda stage, done: None))
        assert opened[-1].info.mode == "checkpoints", opened[-1].info.mode_reason
        return Bench(opened[-1])

    yield make
    for served in opened:
        served.context.close()


VARIANTS: dict[str, dict[str, object]] = {
    "flash attention": {},
    "none": {"flash_attention": "off"},
    "q8_0": {"kv_k": "q8_0", "kv_v": "q8_0"},
    "q4_0 K and V": {"kv_k": "q4_0", "kv_v": "q4_0"},
    "q8_0 K without flash attention": {"kv_k": "q8_0", "flash_attention": "off"},
    "three stages": {"layer_split": (1, 1, 1)},
    "three stages without flash attention": {"layer_split": (1, 1, 1), "flash_attention": "off"},
    "a pruned window": {"swa_full": False},
    "a pruned window without flash attention": {"swa_full": False, "flash_attention": "off"},
}


def lengths(name: str) -> list[int]:
    """Around the window and around multiples of a batch."""
    window = WINDOW.get(name, 64)
    return sorted({1, 2, window - 1, window, window + 1, 2 * window + 1, READ - 1, READ, READ + 1, 2 * READ + 1})


@every_kind
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_equal_in_a_new_engine(name: str, variant: str, bench: MakeBench) -> None:
    options = VARIANTS[variant]
    first, second = bench(name, **options), bench(name, **options)
    for n in lengths(name):
        first.slots.clear(0)
        first.feed(0, n)
        parked = first.park(0)
        assert parked.total <= first.info.checkpoint_bytes
        second.slots.clear(1)
        second.feed(2, min(n, 50), TOKENS[::-1])  # the low cells are taken
        second.restore(1, parked)
        second.slots.clear(2)
        assert second.payloads(second.park(1)) == first.payloads(parked)


@every_kind
@pytest.mark.parametrize("variant", ["flash attention", "none", "three stages"])
def test_tokens_equal_those_of_a_twin_that_was_never_parked(name: str, variant: str, bench: MakeBench) -> None:
    options = VARIANTS[variant]
    for n in lengths(name)[2:]:
        first, second = bench(name, **options), bench(name, **options)
        first.feed(0, n)
        parked = first.park(0)
        second.put_rows(0, parked)
        others = n - WINDOW.get(name, n + 1) + 1
        if others > 0:  # the window's cells shall lie where they lay: behind as many others
            second.feed(1, others, TOKENS[::-1])
        assert second.put(0, parked) is None
        assert second.write(0, 64) == first.write(0, 64)


@every_kind
def test_a_deferred_copy_is_that_of_its_position(name: str, bench: MakeBench) -> None:
    one = bench(name)
    one.feed(0, 300)
    at_once = one.park(0)
    held = one.hold(0)
    one.write(0, 200)
    one.feed(1, 400)  # other slots may use what the slot gave up
    checkpoint, total = one.take(held)
    assert total == at_once.total and all(map(np.array_equal, checkpoint, at_once.checkpoint))
    assert one.rows(0, 300)[-1:] == [] or one.payloads(Parked(300, one.rows(0, 300), checkpoint, total)) == (
        one.payloads(at_once)
    )


@every_kind
def test_a_slot_is_rewound(name: str, bench: MakeBench) -> None:
    one = bench(name)
    one.feed(0, 300)
    parked = one.park(0)
    first = one.write(0, 20)
    refusal = one.slots.trim(0, 300) if name != "gemma3" else "its whole window is kept"
    assert refusal is not None and one.slots.held[0] == 320
    assert one.put(0, parked) is None
    assert one.slots.held[0] == 300
    assert one.payloads(one.park(0)) == one.payloads(parked)
    if name not in WINDOW:  # there the cells of the window lie elsewhere now
        assert one.write(0, 20) == first


@every_kind
def test_a_fork_at_a_checkpoint(name: str, bench: MakeBench) -> None:
    one = bench(name)
    one.feed(0, 300)
    parked = one.park(0)
    held = one.hold(0)
    first = one.write(0, 20)
    one.feed(1, 10)
    assert one.checkpoints.fork(held, 0, 1) is None
    assert one.slots.held[:2] == [320, 300]
    assert one.write(1, 20) == first
    assert one.checkpoints.fork(held, 0, 2) is None
    assert one.checkpoints.release(held) is None
    assert one.payloads(one.park(2)) == one.payloads(parked)
    assert one.checkpoints.fork(held, 0, 2) == f"checkpoint {held} is not held"
    one.slots.clear(0)
    if one.info.stages:
        again = one.hold(2)
        assert "holds 0 tokens" in str(one.checkpoints.fork(again, 0, 1))


def test_a_restore_goes_on_where_the_slot_is(bench: MakeBench) -> None:
    """Rows behind what a slot really holds, then the checkpoint there; and a checkpoint before the last row."""
    for name in ATTEND:
        one = bench(name)
        one.feed(0, 256)
        middle = one.park(0)
        one.feed(0, 400)
        late = one.park(0)
        one.slots.clear(0)
        one.feed(1, 256)
        start, end, spans = late.blocks[1]
        assert one.slots.apply(1, start, end, 256, 400, spans, TOKENS[start:end]) is None
        assert 1 in one.slots.bare
        assert one.put(1, late) is None
        assert one.payloads(one.park(1)) == one.payloads(late)
        one.put_rows(2, late)
        assert one.put(2, middle) is None
        assert one.slots.held[2] == 256
        assert one.payloads(one.park(2)) == one.payloads(middle)


def test_a_checkpoint_of_many_blocks(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blocks were two pages: they come one by one, in order, or not at all."""
    one = bench("qwen35")
    monkeypatch.setattr(checkpoints, "BLOCK_BYTES", 2 * PAGE)
    one.feed(0, 100)
    held = one.hold(0)
    total = one.checkpoints.pending[held].payload_bytes
    offsets = range(0, total, 2 * PAGE)
    spans = [one.span(2 * PAGE) for _ in offsets]
    for _ in range(2):
        for offset, span in zip(offsets, spans, strict=True):
            assert one.checkpoints.capture(held, offset, span) is None
    last = total - offsets[-1]
    assert len(spans) > 5 and not spans[-1][one.room + last : one.room + pad_to_page(last)].any()
    rows = one.rows(0, 100)
    one.put_rows(1, Parked(100, rows, [], total))
    for order in ([1], [0, 2], [0, 1, 1]):
        answers = [one.checkpoints.apply(1, 100, offsets[i], total, spans[i]) for i in order]
        assert answers[-1] == f"the block at {offsets[order[-1]]} does not follow the one before it"
    assert one.slots.held[1] == 100 and 1 in one.slots.bare
    for offset, span in zip(offsets, spans, strict=True):
        assert one.checkpoints.apply(1, 100, offset, total, span) is None
    assert not one.slots.bare and one.write(1, 8) == one.write(0, 8)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ATTEND)
def test_bare_rows_are_of_no_use(name: str, bench: MakeBench) -> None:
    one = bench(name)
    one.feed(0, 100)
    parked = one.park(0)
    one.put_rows(1, parked)
    assert one.slots.held[1] == 100
    for refusal in (one.slots.trim(1, 100), one.slots.trim(1, 50), one.slots.fork(1, 2, 100)):
        assert refusal == "slot 1 holds rows without their checkpoint"
    assert "nothing that can be resumed" in str(one.checkpoints.hold(1))
    assert one.slots.trim(1, 0) is None and not one.slots.bare
    one.put_rows(1, parked)
    one.slots.clear(1)
    assert one.put(1, parked) == "slot 1 holds the rows of 0 tokens, not 100"


def test_spares_run_out_and_come_back(bench: MakeBench) -> None:
    one = bench("lfm2", spare_checkpoints=2)
    assert one.info.spare_checkpoints == 2
    one.feed(0, 50)
    first, _ = one.hold(0), one.hold(0)
    assert one.checkpoints.hold(0) == "no spare sequence: capture or release a checkpoint first"
    assert one.checkpoints.release(first) is None
    assert one.checkpoints.release(first) == f"checkpoint {first} is not held"
    assert one.hold(0) not in (first,)
    assert one.checkpoints.hold(1) == "slot 1 holds nothing that can be resumed"


@every_kind
def test_damage_in_every_field_is_refused(name: str, bench: MakeBench) -> None:
    """Every byte of heads and cells, and many others, one at a time; the neighbour and the slot are what they were."""
    one = bench(name)
    one.feed(0, 200)
    one.feed(1, 90)
    parked, neighbour = one.park(0), one.payloads(one.park(1))
    one.slots.clear(0)
    one.put_rows(0, parked)
    (span,) = parked.checkpoint
    payload = span[one.room : one.room + parked.total]
    refused = 0
    for at in range(min(1200, parked.total)):
        payload[at] ^= 0x41
        if _is_data(one, payload):
            payload[at] ^= 0x41
            continue
        assert "not usable" in str(one.put(0, parked)), at
        payload[at] ^= 0x41
        refused += 1
    assert refused > 20
    assert one.slots.held[0] == (200 if one.info.stages else 0)
    assert one.payloads(one.park(1)) == neighbour
    assert one.put(0, parked) is None
    assert one.payloads(one.park(0)) == one.payloads(parked)
    assert one.payloads(one.park(1)) == neighbour


def _is_data(one: Bench, payload: Bytes) -> bool:
    """Whether it still is a checkpoint of its position: only numbers in its rows changed. Those a checksum covers."""
    try:
        one.checkpoints._format.check(payload, 200)
    except BadState:
        return False
    return True


@every_kind
def test_other_sizes_and_positions_are_refused(name: str, bench: MakeBench) -> None:
    one = bench(name)
    one.feed(0, 200)
    one.feed(1, 90)
    parked, neighbour = one.park(0), one.payloads(one.park(1))
    for position in (1, 150, 199):
        assert "not usable" in str(one.put(0, parked, position))
    assert one.slots.held[0] == 200
    short = Parked(200, parked.blocks, parked.checkpoint, parked.total - 1)
    assert "not usable" in str(one.put(0, short))
    for position, offset, total in ((0, 0, 10), (LIMIT + 1, 0, 10), (200, 0, 0), (200, 5, 100), (200, 0, 1 << 40)):
        with pytest.raises(ValueError):
            one.checkpoints.apply(0, position, offset, total, parked.checkpoint[0])
    with pytest.raises(ValueError):
        one.checkpoints.apply(0, 200, 0, parked.total, parked.checkpoint[0][: one.room])
    assert one.payloads(one.park(1)) == neighbour
    assert one.payloads(one.park(0)) == one.payloads(parked)


def test_what_llama_refuses_leaves_the_slot_empty(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KINDS:
        one = bench(name)
        one.feed(0, 200)
        one.feed(1, 90)
        parked, neighbour = one.park(0), one.payloads(one.park(1))
        monkeypatch.setattr(type(one.checkpoints._format), "check", lambda self, payload, position: None)
        parked.checkpoint[0][one.room] ^= 1
        assert one.put(0, parked) == "llama.cpp refused the checkpoint at 200"
        monkeypatch.undo()
        assert one.slots.held[0] == 0 and one.context.last_position(0) == -1
        assert one.payloads(one.park(1)) == neighbour
        parked.checkpoint[0][one.room] ^= 1
        one.restore(0, parked)


def test_rows_of_damaged_blocks_are_refused(bench: MakeBench) -> None:
    for name in ATTEND:
        one = bench(name)
        one.feed(0, 200)
        one.feed(1, 90)
        parked, neighbour = one.park(0), one.payloads(one.park(1))
        one.slots.clear(0)
        (start, end, spans) = parked.blocks[0]
        spans[0][one.room] ^= 0x41  # the type of the first K
        assert "refused" in str(one.slots.apply(0, start, end, 0, end, spans, TOKENS[start:end]))
        assert one.slots.held[0] == 0 and not one.slots.bare
        assert one.payloads(one.park(1)) == neighbour


# --------------------------------------------------------------------------------------------------- windows and images


@pytest.mark.parametrize("swa_full", [True, False])
def test_a_window_can_be_cut_only_while_it_is_there(swa_full: bool, bench: MakeBench) -> None:
    one = bench("gemma3", swa_full=swa_full)
    one.feed(0, 650)
    one.feed(1, 650)
    one.feed(2, 650)
    if swa_full:
        assert one.slots.trim(0, 300) is None
        assert one.slots.fork(0, 1, 100) is None
        parked = one.park(0)
        one.slots.clear(0)
        one.restore(0, parked)
    assert "window is gone" in str(one.slots.trim(0, 150))
    assert "did not take" in str(one.slots.fork(0, 1, 150))
    assert one.slots.held[1] == 0


@every_kind
def test_a_model_of_unknown_layout_is_kept_as_images(
    name: str, tiny_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(blob: Bytes, layout: object) -> None:
        raise BadState("not today")

    monkeypatch.setattr(selftest, "recognise", unknown)
    settings = EngineSettings(
        model_path=str(tiny_paths[name]), slots=3, context=LIMIT, flash_attention="on", read_chunk=READ, threads=1
    )
    served = load(settings, Remembered(), lambda stage, done: None)
    try:
        one = Bench(served)
        assert one.info.mode == "opaque" and "not today" in one.info.mode_reason and not one.info.cuttable
        assert one.info.stages == () and one.info.checkpoint_bytes > 0
        one.feed(0, 300)
        one.feed(1, 90)
        parked, neighbour = one.park(0), one.payloads(one.park(1))
        twin = one.write(0, 12)
        one.slots.clear(0)
        one.restore(0, parked)
        assert len(one.write(0, 12)) == len(twin)
        one.restore(2, parked)
        assert one.put(2, parked) is None  # over itself
        parked.checkpoint[0][one.room] ^= 1
        assert "not usable" in str(one.put(2, parked)) and one.slots.held[2] == 300
        parked.checkpoint[0][one.room] ^= 1
        assert one.payloads(one.park(1)) == neighbour
    finally:
        served.context.close()


def test_nothing_that_can_be_kept(tiny_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object, tokens: Sequence[int]) -> str:
        return "no"

    monkeypatch.setattr(selftest._Trip, "go", refused)
    served = load(
        EngineSettings(model_path=str(tiny_paths["mamba"]), slots=1, context=LIMIT),
        Remembered(),
        lambda stage, done: None,
    )
    assert (served.info.mode, served.info.checkpoint_bytes, served.checkpoints) == ("opaque", 0, None)
    assert served.info.mode_reason == "the self-test failed: no; nor can its whole image be applied: no"
    served.context.close()
