"""The arena: allocation against an oracle, limits, refusals, sharing with a child process, pre-touching."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from strata.store import arena as arena_module
from strata.store.arena import Arena, large_pages_wanted, map_chunk, platform_backing
from strata.store.spans import LARGE_PAGE, FreeList, plan_chunk
from strata.types import MIB, PAGE, Span

CHUNK = 16 * PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 * CHUNK, CHUNK)
    yield made
    made.close()


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.001)


# ----------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("length", "chunk", "room", "expected"),
    [
        (PAGE, 64 * MIB, 1 << 40, 64 * MIB),
        (64 * MIB, 64 * MIB, 1 << 40, 64 * MIB),
        (64 * MIB + PAGE, 64 * MIB, 1 << 40, 66 * MIB),
        (64 * MIB + PAGE, 64 * MIB, 64 * MIB + PAGE, 64 * MIB + PAGE),
        (64 * MIB + PAGE, 64 * MIB, 64 * MIB, None),
        (PAGE, 64 * MIB, 3 * PAGE, 3 * PAGE),
        (PAGE, 64 * MIB, 0, None),
        (4 * PAGE, 64 * MIB, 3 * PAGE, None),
    ],
)
def test_the_size_of_a_new_chunk(length: int, chunk: int, room: int, expected: int | None) -> None:
    assert plan_chunk(length, chunk, room) == expected


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 30), st.integers(0, 1 << 36))
def test_a_new_chunk_holds_the_request_and_respects_the_limit(length: int, chunk: int, room: int) -> None:
    size = plan_chunk(length, chunk, room)
    assert (size is None) == (length > room)
    if size is not None:
        assert length <= size <= room
        assert size <= max(chunk, length + LARGE_PAGE)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"STRATA_NO_LARGEPAGES": "1"}, False),
        ({"STRATA_NO_LARGEPAGES": "0"}, True),
        ({"STRATA_NO_LARGEPAGES": ""}, True),
    ],
)
def test_large_pages_are_asked_for_unless_told_otherwise(environ: dict[str, str], expected: bool) -> None:
    assert large_pages_wanted(environ) is expected


class FreeListMachine(RuleBasedStateMachine):
    """The free list against a row of flags, one per unit."""

    taken = Bundle("taken")
    SIZE = 24

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeList(self.SIZE)
        self.units = [False] * self.SIZE

    @rule(target=taken, length=st.integers(1, 24), below=st.integers(0, 24))
    def take(self, length: int, below: int) -> tuple[int, int] | None:
        fits = (i for i in range(below - length + 1) if not any(self.units[i : i + length]))
        start = self.free.take(length, below)
        assert start == next(fits, None)
        if start is None:
            return None
        self.units[start : start + length] = [True] * length
        return start, length

    @rule(piece=consumes(taken))
    def give(self, piece: tuple[int, int] | None) -> None:
        if piece is not None:
            start, length = piece
            self.units[start : start + length] = [False] * length
            self.free.give(start, length)

    @invariant()
    def the_whole_is_there_once_all_is_free(self) -> None:
        if not any(self.units):
            assert repr(self.free) == f"FreeList([(0, {self.SIZE})])"


TestFreeList = FreeListMachine.TestCase
TestFreeList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------------------------------------------------------- spans


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * PAGE), st.integers(0, 50)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_spans_never_overlap_and_keep_their_bytes(steps: list[tuple[bool, int, int]]) -> None:
    arena = Arena(6 * CHUNK, CHUNK, pretouch=False)
    live: list[tuple[Span, int]] = []
    for number, (wants, length, which) in enumerate(steps):
        if wants:
            span = arena.alloc(length)
            if span is not None:
                assert span.length >= length
                assert span.length % PAGE == span.offset % PAGE == 0
                arena.view(span)[:] = bytes([number % 256]) * span.length
                live.append((span, number % 256))
        elif live:
            span, mark = live.pop(which % len(live))
            assert arena.view(span) == bytes([mark]) * span.length
            arena.free(span)
        assert arena.used_bytes == sum(span.length for span, _ in live) <= arena.reserved_bytes <= arena.limit_bytes
    for span, mark in live:
        assert arena.view(span) == bytes([mark]) * span.length
        arena.free(span)
    assert arena.used_bytes == 0
    arena.close()


def test_all_of_the_limit_can_be_had_and_had_again(arena) -> None:
    for _ in range(3):
        spans = [arena.alloc(CHUNK // 2) for _ in range(8)]
        assert None not in spans
        assert arena.alloc(1) is None
        assert arena.used_bytes == arena.reserved_bytes == arena.limit_bytes == 4 * CHUNK
        for span in spans[::2] + spans[1::2]:
            arena.free(span)
        assert arena.used_bytes == 0


def test_a_request_larger_than_a_chunk_gets_its_own(arena) -> None:
    small = arena.alloc(1)
    large = arena.alloc(2 * CHUNK)
    assert small.chunk != large.chunk
    assert large.length == 2 * CHUNK
    assert arena.alloc(2 * CHUNK) is None


def test_a_limit_that_is_no_whole_chunk_is_used_to_the_last_page() -> None:
    arena = Arena(CHUNK + 3 * PAGE + 100, CHUNK, pretouch=False)
    assert arena.limit_bytes == CHUNK + 3 * PAGE
    assert arena.alloc(CHUNK) is not None
    assert arena.alloc(3 * PAGE) is not None
    assert arena.alloc(1) is None
    arena.close()


def test_nothing_can_be_had_from_nothing() -> None:
    arena = Arena(0)
    assert arena.alloc(1) is None
    assert arena.reserve(1 << 40) == 0
    arena.close()


def test_wrong_spans_are_refused(arena) -> None:
    span = arena.alloc(2 * PAGE)
    other = arena.alloc(PAGE)
    arena.free(other)
    wrong = [other, Span(0, 0, PAGE), Span(0, PAGE, PAGE), Span(9, 0, 2 * PAGE), Span(-1, 0, 2 * PAGE)]
    for bad in wrong:
        with pytest.raises(ValueError, match="not a live span"):
            arena.free(bad)
        with pytest.raises(ValueError, match="not a live span"):
            arena.view(bad)
    arena.free(span)
    with pytest.raises(ValueError, match="not a live span"):
        arena.free(span)
    for length in (0, -1):
        with pytest.raises(ValueError, match="positive"):
            arena.alloc(length)


@pytest.mark.parametrize(("limit", "chunk"), [(-1, CHUNK), (CHUNK, 0), (CHUNK, PAGE + 1)])
def test_a_senseless_size_is_refused(limit: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Arena(limit, chunk)


# ------------------------------------------------------------------------------------------------ the system's refusals


class Stingy:
    """Backs chunks with real memory, except when told to refuse."""

    def __init__(self, refused: set[int]) -> None:
        self.calls = 0
        self._refused = refused

    def __call__(self, size: int, *, large_pages: bool):
        self.calls += 1
        if self.calls in self._refused:
            raise OSError(12, "Cannot allocate memory")
        return platform_backing()(size, large_pages=large_pages)


@pytest.mark.parametrize("refused", [{1}, {2}, {1, 2, 3}, {4}, set()])
def test_a_refused_chunk_is_no_crash_and_is_tried_again(refused: set[int]) -> None:
    backing = Stingy(refused)
    arena = Arena(4 * CHUNK, CHUNK, pretouch=False, backing=backing)
    spans = [arena.alloc(CHUNK) for _ in range(4 + len(refused))]
    assert [i + 1 for i, span in enumerate(spans) if span is None] == sorted(refused)
    assert arena.last_error == ("[Errno 12] Cannot allocate memory" if refused else None)
    assert arena.used_bytes == 4 * CHUNK
    arena.close()


def test_reserving_stops_at_a_refusal() -> None:
    arena = Arena(4 * CHUNK, CHUNK, pretouch=False, backing=Stingy({3}))
    assert arena.reserve(4 * CHUNK) == 2 * CHUNK
    assert arena.reserve(4 * CHUNK) == 4 * CHUNK
    assert arena.reserve(9 * CHUNK) == 4 * CHUNK
    arena.close()


# ------------------------------------------------------------------------------------------------- chunks and processes


def test_every_chunk_is_announced_once(arena) -> None:
    early: list[tuple[int, int]] = []
    arena.on_chunk(lambda chunk, size, fd, name: early.append((chunk, size)))
    assert early == []
    arena.reserve(2 * CHUNK)
    late: list[tuple[int, int]] = []
    arena.on_chunk(lambda chunk, size, fd, name: late.append((chunk, size)))
    assert late == [(0, CHUNK), (1, CHUNK)]
    arena.reserve(3 * CHUNK)
    assert early == late == [(0, CHUNK), (1, CHUNK), (2, CHUNK)]


CHILD = """
import sys
from strata.store.arena import map_chunk
fd, name, size, offset, length = eval(sys.argv[1])
chunk = map_chunk(fd, name, size)
view = chunk.view[offset:offset + length]
assert bytes(view[:6]) == b"parent", bytes(view[:6])
view[:6] = b"child!"
view.release()
chunk.close()
"""


@pytest.mark.parametrize("has_memfd", [True, False], ids=["by descriptor", "by name"])
def test_a_child_process_maps_the_same_memory(has_memfd: bool) -> None:
    arena = Arena(4 * CHUNK, CHUNK, backing=platform_backing(has_memfd=has_memfd))
    chunks = []
    arena.on_chunk(lambda chunk, size, fd, name: chunks.append((fd, name, size)))
    arena.alloc(3 * PAGE)
    span = arena.alloc(2 * PAGE)
    arena.view(span)[:6] = b"parent"
    fd, name, size = chunks[span.chunk]
    assert (fd is None) is (name is not None)
    where = repr((fd, name, size, span.offset, span.length))
    passed = () if fd is None else (fd,)
    for _ in range(2):  # a second engine process finds the chunk as the first one did
        arena.view(span)[:6] = b"parent"
        done = subprocess.run([sys.executable, "-c", CHILD, where], pass_fds=passed, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert arena.view(span)[:6] == b"child!"
    arena.close()


def test_a_mapping_needs_a_descriptor_or_a_name() -> None:
    with pytest.raises(ValueError, match="descriptor or a name"):
        map_chunk(None, None, CHUNK)
    with pytest.raises(OSError, match=r"Errno"):
        map_chunk(None, "strata-no-such-chunk", CHUNK)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks with MADV_HUGEPAGE")
def test_bytes_for_which_large_pages_were_asked() -> None:
    for asks in (True, False):
        arena = Arena(4 * CHUNK, CHUNK, large_pages=asks)
        arena.reserve(2 * CHUNK)
        assert arena.asked_large_bytes == (2 * CHUNK if asks else 0)
        arena.close()


def test_descriptors_are_not_inherited_by_accident(arena) -> None:
    arena.on_chunk(lambda chunk, size, fd, name: fds.append(fd))
    fds: list[int] = []
    arena.reserve(CHUNK)
    assert [os.get_inheritable(fd) for fd in fds] == [False]


def test_closing_with_views_still_out_is_no_error() -> None:
    arena = Arena(CHUNK, CHUNK)
    view = arena.view(arena.alloc(PAGE))
    view[:4] = b"kept"
    arena.close()
    assert view[:4] == b"kept"
    assert arena.alloc(1) is None
    arena.close()


# ------------------------------------------------------------------------------------------------------------ pre-touch


def touch_threads() -> int:
    return sum(thread.name == "arena-touch" for thread in threading.enumerate())


def test_there_is_no_thread_without_a_chunk() -> None:
    before = touch_threads()
    arena = Arena(4 * CHUNK, CHUNK)
    assert touch_threads() == before
    arena.reserve(CHUNK)
    assert touch_threads() == before + 1
    arena.close()
    assert touch_threads() == before


def test_nothing_is_touched_unless_asked() -> None:
    before = touch_threads()
    arena = Arena(4 * CHUNK, CHUNK, pretouch=False)
    arena.reserve(4 * CHUNK)
    assert (touch_threads(), arena.touched_bytes) == (before, 0)
    arena.close()


@pytest.mark.parametrize("populate", [True, False], ids=["populate", "read a byte per page"])
def test_new_chunks_become_resident_and_keep_their_bytes(populate: bool, monkeypatch) -> None:
    if not populate:
        monkeypatch.setattr(arena_module, "_populate", lambda view: False)
    arena = Arena(32 * MIB, 16 * MIB, large_pages=False)
    span = arena.alloc(16 * MIB)
    view = arena.view(span)
    view[: 16 * PAGE] = b"\x5a" * (16 * PAGE)
    arena.reserve(32 * MIB)
    wait_until(lambda: arena.touched_bytes == 32 * MIB)
    assert view[: 16 * PAGE] == b"\x5a" * (16 * PAGE)
    assert not any(view[16 * PAGE : 64 * PAGE])
    arena.close()


def test_resident_memory_is_handed_out_first() -> None:
    arena = Arena(2 * CHUNK, CHUNK, pretouch=False)
    arena.reserve(2 * CHUNK)
    arena._chunks[1].touched = 4 * PAGE
    assert arena.alloc(2 * PAGE) == Span(1, 0, 2 * PAGE)
    assert arena.alloc(2 * PAGE) == Span(1, 2 * PAGE, 2 * PAGE)
    assert arena.alloc(2 * PAGE) == Span(0, 0, 2 * PAGE)
    arena.close()


def test_closing_does_not_wait_for_the_touching_of_all() -> None:
    arena = Arena(64 << 30, 1 << 30, large_pages=False)
    arena.reserve(4 << 30)
    started = time.monotonic()
    arena.close()
    assert time.monotonic() - started < 1.0
