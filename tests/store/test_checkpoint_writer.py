"""Checkpoints through the threads of a level: written, read, adopted and set aside, and whose fault a failure is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.store.samples import IDENTITY, checkpoint_plans, conversation, payload, payloads, plans, verify

from strata.store.format import CheckpointHeader
from strata.store.fs import aligned_buffer
from strata.store.level import Level
from strata.store.names import checkpoint_path
from strata.store.reader import Damaged, Loaded, Missing, Reader
from strata.store.writer import OK, Adopted, Committed, Failed, Quarantined, Writer, Written
from strata.types import PAGE, pad_to_page

WAIT_S = 20.0
ENTRY = conversation(1, 300, checkpoints=((100, 9000), (300, 5000)))


@pytest.fixture
def giver(tmp_path) -> Iterator[Level]:
    level = Level.open(tmp_path / "warm", name="warm")
    writer = Writer(level)
    jobs = [writer.write_segment(1, h, payloads(h)) for s in ENTRY.segments for h in plans(ENTRY, s)]
    jobs += [writer.write_checkpoint(1, header, payloads(header)) for header in checkpoint_plans(ENTRY)]
    assert isinstance(writer.commit(1, ENTRY).result(WAIT_S), Committed)
    assert [job.result() for job in jobs[-2:]] == [Written(bytes=4 * PAGE), Written(bytes=3 * PAGE)]
    assert writer.close(WAIT_S)
    yield level
    level.close()


@pytest.fixture
def writer(tmp_path) -> Iterator[Writer]:
    level = Level.open(tmp_path / "cold")
    writer = Writer(level)
    yield writer
    assert writer.close(WAIT_S)
    assert level.used_bytes == level.usage()
    level.close()


def adopt(writer: Writer, giver: Level, *, may_link: bool = True) -> tuple[list[Adopted | Failed], object]:
    """Outcomes of the checkpoints, and of a commit of those that arrived."""
    for key in ENTRY.keys:
        for stage in range(len(ENTRY.stages)):
            writer.adopt_segment(1, giver, key, stage, may_link=may_link)
    jobs = [writer.adopt_checkpoint(1, giver, key, may_link=may_link) for key in ENTRY.checkpoint_keys]
    outcomes = [job.result(WAIT_S) for job in jobs]
    pairs = zip(ENTRY.checkpoints, outcomes, strict=True)
    lost = {entry.position for entry, outcome in pairs if isinstance(outcome, Failed)}
    return outcomes, writer.commit(1, ENTRY.without_checkpoints(lost)).result(WAIT_S)


def test_what_was_written_can_be_read(giver) -> None:
    verify(giver, ENTRY)
    reader = Reader(giver)
    for planned in checkpoint_plans(ENTRY):
        header = reader.checkpoint_header(planned.key).result(WAIT_S)
        assert isinstance(header, CheckpointHeader)
        assert header.has_digests
        for i, block in enumerate(header.blocks):
            view = aligned_buffer(pad_to_page(block.length))
            assert isinstance(reader.block(header, i, view).result(WAIT_S), Loaded)
            assert view[: block.length] == payload(header, i, block.length)
    assert (reader.statistics().headers, reader.statistics().bytes_read) == (2, 14_000)
    (giver.root / checkpoint_path(ENTRY.checkpoint_keys[0])).write_bytes(b"damaged")
    assert isinstance(reader.checkpoint_header(ENTRY.checkpoint_keys[0]).result(WAIT_S), Damaged)
    assert isinstance(reader.checkpoint_header(ENTRY.keys[0]).result(WAIT_S), Missing)
    reader.close()


@pytest.mark.parametrize("may_link", [True, False])
def test_another_level_adopts(writer, giver, may_link) -> None:
    outcomes, committed = adopt(writer, giver, may_link=may_link)
    assert outcomes == [Adopted(bytes=entry.file_bytes, linked=may_link) for entry in ENTRY.checkpoints]
    assert isinstance(committed, Committed)
    verify(writer._level, ENTRY)


@pytest.mark.parametrize("kind", [Damaged, Missing])
def test_a_checkpoint_that_the_giver_cannot_give_does_not_fail_the_ticket(writer, giver, kind) -> None:
    path = giver.root / checkpoint_path(ENTRY.checkpoint_keys[0])
    if kind is Damaged:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    (failed, adopted), committed = adopt(writer, giver)
    assert isinstance(failed, Failed)
    assert isinstance(failed.giver, kind)
    assert isinstance(adopted, Adopted)
    assert isinstance(committed, Committed)
    assert (writer.state, writer.statistics().failures) == (OK, 0)
    verify(writer._level, ENTRY.without_checkpoints({100}))


def test_a_checkpoint_that_cannot_be_written_fails_the_ticket(writer) -> None:
    header = checkpoint_plans(ENTRY)[0]
    job = writer.write_checkpoint(1, header, payloads(header)[:1])
    assert isinstance(job.result(WAIT_S), Failed)
    assert isinstance(writer.commit(1, ENTRY).result(WAIT_S), Failed)
    scan = writer._level.scan(IDENTITY)
    assert (scan.manifests, scan.checkpoints, scan.temporary) == ((), {}, ())


def test_set_aside(writer, giver) -> None:
    adopt(writer, giver)
    key = ENTRY.checkpoint_keys[0]
    assert writer.quarantine_checkpoint(key).result(WAIT_S) == Quarantined(found=True)
    assert writer.quarantine_checkpoint(key).result(WAIT_S) == Quarantined(found=False)
    scan = writer._level.scan(IDENTITY)
    assert (len(scan.bad), [lost.position for lost in scan.lost_checkpoints]) == (1, [100])


# ------------------------------------------------------------------------------------------------------ block by block


def write_blocks(writer: Writer, ticket: int, header: CheckpointHeader, n: int | None = None) -> list[Written | Failed]:
    """The outcomes of its first `n` blocks."""
    views = payloads(header)[:n]
    jobs = [writer.write_block(ticket, header, i, view) for i, view in enumerate(views)]
    return [job.result(WAIT_S) for job in jobs]


def write_segments_of(writer: Writer, ticket: int) -> None:
    for segment in ENTRY.segments:
        for header in plans(ENTRY, segment):
            writer.write_segment(ticket, header, payloads(header))


def test_block_by_block_gives_the_same_file(writer, giver) -> None:
    write_segments_of(writer, 1)
    for header in checkpoint_plans(ENTRY):
        assert write_blocks(writer, 1, header) == [Written(bytes=block.length) for block in header.blocks]
    assert isinstance(writer.commit(1, ENTRY).result(WAIT_S), Committed)
    verify(writer._level, ENTRY)
    for key in ENTRY.checkpoint_keys:
        path = checkpoint_path(key)
        assert (writer._level.root / path).read_bytes() == (giver.root / path).read_bytes()


def test_a_ticket_takes_over_what_another_one_wrote(writer) -> None:
    for ticket, header in enumerate(checkpoint_plans(ENTRY), 2):
        write_blocks(writer, ticket, header)
    write_segments_of(writer, 1)
    joined = [writer.join(1, ticket).result(WAIT_S) for ticket in (2, 3)]
    assert joined == [Written(bytes=entry.file_bytes) for entry in ENTRY.checkpoints]
    assert isinstance(writer.commit(1, ENTRY).result(WAIT_S), Committed)
    verify(writer._level, ENTRY)


@pytest.mark.parametrize("n", [1, 2])
def test_one_that_is_not_whole_costs_itself_alone(writer, n) -> None:
    first, second = checkpoint_plans(ENTRY)
    write_segments_of(writer, 1)
    write_blocks(writer, 2, first, n)
    write_blocks(writer, 3, second)
    assert isinstance(writer.join(1, 2).result(WAIT_S), Failed)
    assert isinstance(writer.join(1, 3).result(WAIT_S), Written)
    rest = ENTRY.without_checkpoints({100})
    assert isinstance(writer.commit(1, rest).result(WAIT_S), Committed)
    verify(writer._level, rest)
    assert writer._level.scan(IDENTITY).temporary == ()


def test_one_that_is_not_whole_is_never_committed(writer) -> None:
    write_segments_of(writer, 1)
    for header in checkpoint_plans(ENTRY):
        write_blocks(writer, 1, header, 1)
    assert isinstance(writer.commit(1, ENTRY).result(WAIT_S), Failed)
    scan = writer._level.scan(IDENTITY)
    assert (scan.manifests, scan.segments, scan.checkpoints, scan.temporary) == ((), {}, {}, ())


def test_an_abandoned_one_leaves_nothing(writer) -> None:
    write_blocks(writer, 2, checkpoint_plans(ENTRY)[0], 2)
    writer.abandon(2).result(WAIT_S)
    assert writer._level.scan(IDENTITY).temporary == ()


def test_blocks_out_of_order_fail(writer) -> None:
    header = checkpoint_plans(ENTRY)[0]
    write_blocks(writer, 2, header, 1)
    assert isinstance(writer.write_block(2, header, 2, payloads(header)[2]).result(WAIT_S), Failed)
    assert writer._level.scan(IDENTITY).temporary == ()
