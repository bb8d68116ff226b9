"""Checkpoints as the levels of the cache see them: counted, leased, evicted, handed down and lost like segments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.store.samples import IDENTITY, checkpoint_plans, conversation, payloads, plans, put, verify

from strata.cache.cascade import Cascade
from strata.cache.disk import DiskLevel
from strata.cache.put import DiskLimits, PutOutcome
from strata.cache.story import Story
from strata.store.format import Manifest
from strata.store.level import Level
from strata.store.names import checkpoint_path
from strata.types import MIB, Key

HYBRID = conversation(1, 300, shared=256, checkpoints=((100, 9000), (256, 1), (300, 5000)))
BRANCH = conversation(2, 310, seed=2, shared=256, checkpoints=((100, 9000), (256, 1), (310, 77)))
ROWLESS = conversation(3, 300, seed=3, stages=(), checkpoints=((200, 9000), (300, 4096)))
BOTH = pytest.mark.parametrize("manifest", [HYBRID, ROWLESS], ids=["with rows", "without rows"])


@pytest.fixture
def open_level(tmp_path) -> Iterator[Callable[..., DiskLevel]]:
    opened: list[DiskLevel] = []

    def open_one(name: str, *stored: Manifest, budget_bytes: int = MIB, damage: Callable[[Path], object] | None = None):
        store = Level.open(tmp_path / name, name=name)
        for manifest in stored:
            put(store, manifest, without=store.scan(IDENTITY).checkpoints.keys() | store.scan(IDENTITY).segments.keys())
        if damage is not None:
            damage(store.root)
        level = DiskLevel(store, DiskLimits(budget_bytes=budget_bytes), IDENTITY, clock=lambda: 1000.0)
        opened.append(level)
        return level

    yield open_one
    for level in opened:
        assert level.index.check() == []
        level.close()


async def write(
    level: DiskLevel, manifest: Manifest, *, whole: bool = False, without: tuple[Key, ...] = ()
) -> PutOutcome:
    """Put a conversation the way a park does; checkpoints in `without` are not brought."""
    writing = level.begin_put(manifest, whole=whole)
    segments = (header for segment in manifest.segments for header in plans(manifest, segment))
    for header in segments:
        if header.key in writing.missing:
            await asyncio.wrap_future(level.writer.write_segment(writing.ticket, header, payloads(header)))
            writing.unwritten.pop(header.key, None)
    for checkpoint in checkpoint_plans(manifest):
        if checkpoint.key in writing.missing and checkpoint.key not in without:
            await asyncio.wrap_future(level.writer.write_checkpoint(writing.ticket, checkpoint, payloads(checkpoint)))
            del writing.unwritten[checkpoint.key]
    return await level.finish_put(writing, len(manifest.keys), "")


def positions(level: DiskLevel, serial: int) -> list[int]:
    return [position for position, _ in level.index.usable_checkpoints(serial)]


@BOTH
def test_a_put_makes_them_durable(open_level, manifest) -> None:
    level = open_level("cold")
    outcome = asyncio.run(write(level, manifest))
    assert outcome.durable == frozenset(manifest.objects)
    assert outcome.reason == ""
    (entry,) = level.index.conversations()
    assert entry.checkpoints == tuple(
        zip((c.position for c in manifest.checkpoints), manifest.checkpoint_keys, strict=True)
    )
    assert positions(level, entry.serial) == [c.position for c in manifest.checkpoints]
    assert level.used_bytes == level.level.used_bytes == level.level.usage()
    verify(level.level, manifest)


@BOTH
def test_a_restart_finds_them(open_level, manifest) -> None:
    level = open_level("cold", manifest)
    assert positions(level, manifest.serial) == [c.position for c in manifest.checkpoints]
    assert all(level.index.holds(key) for key in manifest.objects)


def test_a_lost_one_is_not_offered(open_level) -> None:
    key = HYBRID.checkpoint_keys[1]
    level = open_level("cold", HYBRID, damage=lambda root: (root / checkpoint_path(key)).unlink())
    assert positions(level, 1) == [100, 300]
    assert not level.index.holds(key)


def test_what_was_not_brought_is_not_named(open_level) -> None:
    level = open_level("cold")
    outcome = asyncio.run(write(level, HYBRID, without=HYBRID.checkpoint_keys[1:]))
    assert "2 of its checkpoints" in outcome.reason
    (entry,) = level.index.conversations()
    assert [position for position, _ in entry.checkpoints] == [100]
    assert level.level.read_manifest(entry.serial).checkpoints == HYBRID.checkpoints[:1]


@pytest.mark.parametrize(("whole", "n_lost"), [(True, 1), (False, 3)])
def test_without_what_it_needs_nothing_becomes_durable(open_level, whole, n_lost) -> None:
    level = open_level("cold")

    async def run() -> None:
        assert (await write(level, HYBRID, whole=whole, without=HYBRID.checkpoint_keys[:n_lost])).durable == frozenset()
        await asyncio.wrap_future(level.writer.drop((), ()))

    asyncio.run(run())
    scan = level.level.scan(IDENTITY)
    assert (scan.manifests, scan.segments, scan.checkpoints, scan.temporary) == ((), {}, {}, ())


def test_shared_ones_stay_with_the_last_that_names_them(open_level) -> None:
    level = open_level("cold", HYBRID, BRANCH)

    async def run() -> None:
        level.drop([1])
        await asyncio.wrap_future(level.writer.drop((), ()))

    asyncio.run(run())
    assert positions(level, 2) == [100, 256, 310]
    verify(level.level, BRANCH)
    assert not level.index.holds(HYBRID.checkpoint_keys[2])
    assert level.used_bytes == level.level.usage()


def test_a_newer_state_with_fewer_does_not_replace_them(open_level) -> None:
    poorer = conversation(2, 310, shared=256, checkpoints=((310, 9000),))
    others = conversation(4, 315, shared=256, checkpoints=((100, 9000), (256, 1), (300, 5000), (315, 1)))
    richer = conversation(
        3, 320, shared=256, checkpoints=((100, 9000), (256, 1), (300, 5000), (310, 9000), (315, 1), (320, 77))
    )
    poorer, others, richer = (replace(m, conversation=HYBRID.conversation) for m in (poorer, others, richer))
    level = open_level("cold", HYBRID)

    async def run() -> None:
        await write(level, poorer)
        assert sorted(positions(level, c.serial) for c in level.index.conversations()) == [[100, 256, 300], [310]]
        await write(level, others)
        assert sorted(positions(level, c.serial) for c in level.index.conversations()) == [[100, 256, 300, 315], [310]]
        await write(level, richer)

    asyncio.run(run())
    (entry,) = level.index.conversations()
    assert positions(level, entry.serial) == [100, 256, 300, 310, 315, 320]


@BOTH
def test_the_oldest_makes_room_unless_its_checkpoint_is_leased(open_level, manifest) -> None:
    level = open_level("cold", manifest)

    async def run() -> None:
        lease = manifest.checkpoint_keys[-1:]
        level.index.lease(lease)
        level.make_room(MIB)
        assert level.index.has_conversation(manifest.serial)
        level.index.release(lease)
        level.make_room(MIB)
        assert not level.index.has_conversation(manifest.serial)
        await asyncio.wrap_future(level.writer.drop((), ()))

    asyncio.run(run())
    assert level.level.scan(IDENTITY).checkpoints == {}
    assert level.index.segment_count() == 0
    assert level.used_bytes == level.level.usage()


def degrade(giver: DiskLevel, receiver: DiskLevel, serial: int) -> None:
    async def run() -> None:
        cascade = Cascade([giver, receiver], None, story=Story(), clock=lambda: 2000.0)
        giver.let_go([serial], "budget")
        await cascade.settle()
        await asyncio.wrap_future(giver.writer.drop((), ()))

    asyncio.run(run())


@BOTH
def test_a_degrade_hands_them_down(open_level, manifest) -> None:
    giver, receiver = open_level("warm", manifest), open_level("cold")
    degrade(giver, receiver, manifest.serial)
    assert giver.index.conversations() == ()
    assert giver.level.scan(IDENTITY).checkpoints == {}
    (entry,) = receiver.index.conversations()
    assert positions(receiver, entry.serial) == [c.position for c in manifest.checkpoints]
    verify(receiver.level, manifest)
    assert (giver.counters.degraded, receiver.counters.adopted) == (1, 1)
    assert receiver.writer.statistics().bytes_written < 2 * 4096, "linked, but for the manifest"


def test_one_that_the_giver_lost_costs_itself_alone(open_level) -> None:
    giver, receiver = open_level("warm", HYBRID), open_level("cold")
    (giver.level.root / checkpoint_path(HYBRID.checkpoint_keys[0])).write_bytes(b"damaged")
    degrade(giver, receiver, 1)
    (entry,) = receiver.index.conversations()
    assert positions(receiver, entry.serial) == [256, 300]
    assert giver.index.conversations() == ()
    assert giver.counters.quarantined == 1
    verify(receiver.level, HYBRID.without_checkpoints({100}))


@BOTH
def test_one_that_lost_them_all_is_nothing(open_level, manifest) -> None:
    giver, receiver = open_level("warm", manifest), open_level("cold")
    for key in manifest.checkpoint_keys:
        (giver.level.root / checkpoint_path(key)).unlink()
    degrade(giver, receiver, manifest.serial)
    assert giver.index.conversations() == receiver.index.conversations() == ()
    assert giver.counters.unreadable == 1
    assert receiver.level.scan(IDENTITY).segments == {}


def test_one_set_aside_is_not_served_again_until_it_is_written_anew(open_level) -> None:
    level = open_level("cold", HYBRID)
    key = HYBRID.checkpoint_keys[2]

    async def run() -> None:
        level.set_aside_checkpoint(key, damaged=True)
        assert positions(level, 1) == [100, 256]
        assert (await write(level, HYBRID)).reason == ""
        assert level.index.holds(key)

    asyncio.run(run())
    assert len(level.level.scan(IDENTITY).bad) == 1
    verify(level.level, HYBRID)
