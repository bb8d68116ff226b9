"""The reader: outcomes are values, whatever happened to the file."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.samples import conversation, payload, put

from strata.store.format import SegmentHeader
from strata.store.fs import Disk, aligned_buffer
from strata.store.level import Level
from strata.store.names import segment_path
from strata.store.reader import Damaged, Loaded, Missing, Reader, Unreadable
from strata.types import PAGE, Key, pad_to_page

WAIT_S = 20.0
MANIFEST = conversation(1, 400)


@pytest.fixture
def level(tmp_path) -> Iterator[Level]:
    level = Level.open(tmp_path / "level")
    put(level, MANIFEST)
    yield level
    level.close()


@pytest.fixture
def reader(level) -> Iterator[Reader]:
    reader = Reader(level)
    yield reader
    reader.close()


def reader_threads() -> int:
    return sum(thread.name.startswith("reader-") for thread in threading.enumerate())


def test_all_blocks_of_a_conversation_at_once(reader) -> None:
    files = [(segment.key, stage) for segment in MANIFEST.segments for stage in (0, 1)]
    headers = reader.headers(files).result(WAIT_S)
    assert all(isinstance(header, SegmentHeader) for header in headers)
    jobs = []
    for header in headers:
        for i, block in enumerate(header.blocks):
            view = aligned_buffer(pad_to_page(block.length))
            jobs.append((header, i, view, reader.block(header, i, view)))
    for header, i, view, future in jobs:
        loaded = future.result(WAIT_S)
        assert isinstance(loaded, Loaded)
        assert loaded.seconds >= 0
        length = header.blocks[i].length
        assert view[:length] == payload(header, i, length)
    statistics = reader.statistics()
    assert (statistics.headers, statistics.blocks, statistics.failures) == (len(headers), len(jobs), 0)
    assert statistics.bytes_read == sum(block.length for header in headers for block in header.blocks)


def test_there_is_no_thread_before_the_first_job(level) -> None:
    before = reader_threads()
    reader = Reader(level)
    assert reader_threads() == before
    reader.headers([(MANIFEST.keys[0], 0)]).result(WAIT_S)[0]
    assert reader_threads() == before + 1
    reader.close()
    assert reader_threads() == before
    assert reader.headers([(MANIFEST.keys[0], 0)]).result(0)[0] == Unreadable(reason="the reader is closed")
    reader.close()


def test_what_is_not_there_is_missing(reader, level) -> None:
    unknown = reader.headers([(Key(bytes(32)), 0)]).result(WAIT_S)[0]
    assert isinstance(unknown, Missing)
    header = reader.headers([(MANIFEST.keys[0], 0)]).result(WAIT_S)[0]
    level.drop([1], MANIFEST.keys)
    view = aligned_buffer(pad_to_page(header.blocks[0].length))
    assert isinstance(reader.block(header, 0, view).result(WAIT_S), Missing)
    assert reader.statistics().failures == 2


@pytest.mark.parametrize("at", [0, 20, PAGE - 1])
def test_a_damaged_header_is_damage(reader, level, at) -> None:
    flip(level.root / segment_path(MANIFEST.keys[0], 0), at)
    found = reader.headers([(MANIFEST.keys[0], 0)]).result(WAIT_S)[0]
    assert isinstance(found, Damaged)
    assert str(level.root) in found.reason


def test_a_damaged_block_is_damage_and_its_neighbours_are_not(reader, level) -> None:
    header = reader.headers([(MANIFEST.keys[0], 1)]).result(WAIT_S)[0]
    flip(level.root / segment_path(MANIFEST.keys[0], 1), header.blocks[1].offset + 5)
    views = [aligned_buffer(pad_to_page(block.length)) for block in header.blocks]
    outcomes = [reader.block(header, i, view).result(WAIT_S) for i, view in enumerate(views)]
    assert [type(outcome) for outcome in outcomes] == [Loaded, Damaged, Loaded]
    assert "digest" in outcomes[1].reason


def test_a_disk_error_is_not_taken_for_damage(tmp_path) -> None:
    class Broken(Disk):
        def read_into(self, path: Path, offset: int, view: memoryview) -> None:
            raise OSError(errno.EIO, "Input/output error", str(path))

    level = Level.open(tmp_path / "broken", fs=Broken())
    reader = Reader(level)
    found = reader.headers([(MANIFEST.keys[0], 0)]).result(WAIT_S)[0]
    assert isinstance(found, Unreadable)
    assert found.errno == errno.EIO
    reader.close()
    level.close()


def test_a_job_that_breaks_is_an_outcome_too(reader) -> None:
    header = reader.headers([(MANIFEST.keys[0], 0)]).result(WAIT_S)[0]
    assert isinstance(reader.block(header, 0, memoryview(bytearray(3))).result(WAIT_S), Unreadable)
    assert isinstance(reader.block(header, 99, aligned_buffer(PAGE)).result(WAIT_S), Unreadable)
    assert isinstance(reader.headers([(MANIFEST.keys[0], 0)]).result(WAIT_S)[0], SegmentHeader)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
