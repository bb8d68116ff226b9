"""Directories and session files written under one layer split and read under another; damage to one of their stages.

On the fake engine: every answer is compared with the right one, and after every life each file of each segment.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.serve.test_sessions import folder_of, sessions_of
from tests.serve.workbench import LIMIT_S, Workbench, ask, default_limits, later, play, segments_of, words

from strata.cache.ram import RamLimits
from strata.errors import SessionRefused
from strata.store.filesystem import Buffer
from strata.store.format import digest
from strata.store.fs import Disk, aligned_buffer
from strata.store.names import segment_path
from strata.store.session import SessionFolder
from strata.store.session_format import plan_session
from strata.types import BLOCK_BYTES, MIB, PAGE, Key

FIRST = ask(words(1, 700))
OTHER = ask(words(2, 700))
_LAYER_END = 16 + 76  # where a header says it


def key_at(bench: Workbench, start: int) -> Key:
    """The key of the segment of the oldest conversation that starts at `start`."""
    conversation = bench.disk.index.conversations()[0]
    return next(segment.key for segment in segments_of(conversation) if segment.start == start)


def files(bench: Workbench) -> dict[str, tuple[int, int]]:
    """Every segment file by its name: inode and time of its last change."""
    found = {path.name: path.stat() for path in bench.level.root.rglob("*.seg")}
    return {name: (at.st_ino, at.st_mtime_ns) for name, at in found.items()}


def splits_held(bench: Workbench) -> list[int]:
    """The number of stages of each segment of the newest conversation, in order."""
    newest = max(bench.disk.index.conversations(), key=lambda c: c.stamp_s)
    held = (bench.disk.index.held(segment.key) for segment in segments_of(newest))
    return [len(one.stages) for one in held if one is not None]


class Lives:
    """One directory in one process after another."""

    def __init__(self, root: Path, **options: Any) -> None:
        self._root = root
        self._options = {"slots": 1, **options}

    def live(self, scenario: Any, stages: int, **options: Any) -> None:
        play(scenario, self._root, **{**self._options, "stages": stages, **options})


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 3), (3, 1), (4, 12)])
def test_what_one_split_wrote_another_reads_and_goes_on_with(tmp_path: Path, before: int, after: int) -> None:
    lives, replies = Lives(tmp_path), list[str]()

    async def write(bench: Workbench) -> None:
        replies.append((await bench.whole(FIRST)).text)
        assert splits_held(bench) == [before] * len(splits_held(bench))

    async def go_on(bench: Workbench) -> None:
        found = files(bench)
        assert bench.disk.scan.stale == () and bench.disk.scan.orphans == ()
        answer = await bench.whole(later(FIRST, replies[0]))
        assert answer.completed.cached_tokens > 700 and answer.report.source == "cold"
        assert splits_held(bench)[:2] == [before, before] and splits_held(bench)[-1] == after
        kept = {name: at for name, at in files(bench).items() if name in found}
        assert len(kept) >= 2 * before and all(found[name] == at for name, at in kept.items()), "not written again"
        replies.append(answer.text)

    async def read(bench: Workbench) -> None:
        assert bench.disk.scan.stale == () and bench.disk.scan.orphans == ()
        answer = await bench.whole(later(later(FIRST, replies[0]), replies[1]))
        assert answer.completed.cached_tokens > 720
        assert bench.cache.counters.restore_failures == 0

    lives.live(write, before)
    lives.live(go_on, after)
    lives.live(read, before)
    lives.live(read, 6)


@pytest.mark.parametrize("archive", ["off", "state"])
def test_segments_of_every_split_move_down_and_into_the_archive(tmp_path: Path, archive: str) -> None:
    lives = Lives(tmp_path, warm_bytes=60 * 16 * 1024, archive=archive)
    replies: list[str] = []

    async def write(bench: Workbench) -> None:
        replies.append((await bench.whole(FIRST)).text)

    async def go_on(bench: Workbench) -> None:
        replies.append((await bench.whole(later(FIRST, replies[0]))).text)
        for i in range(8):
            await bench.whole(ask(words(10 + i, 700)))
            await bench.check()
        warm, cold = bench.cache.disks
        assert warm.counters.degraded > 0 and warm.counters.degrade_failed == 0
        counts = {len(held.stages) for held in cold.index._segments.values()}
        assert counts == {2, 3}, "the oldest conversation, of both splits, is there"

    async def read(bench: Workbench) -> None:
        assert all(disk.scan.stale == () for disk in bench.cache.disks)
        answer = await bench.whole(later(later(FIRST, replies[0]), replies[1]))
        assert answer.report.source == "cold" and answer.completed.cached_tokens > 720

    lives.live(write, 3)
    lives.live(go_on, 2)
    lives.live(read, 1)


def test_what_waits_in_ram_names_the_segments_that_the_disk_has_in_another_split(tmp_path: Path) -> None:
    lives, replies = Lives(tmp_path), list[str]()

    async def write(bench: Workbench) -> None:
        replies.append((await bench.whole(FIRST)).text)

    async def spill(bench: Workbench) -> None:
        answer = await bench.whole(later(FIRST, replies[0]))
        assert bench.cache.counters.parked_ram == 1 and bench.cache.counters.spilled == 1
        assert splits_held(bench)[0] == 3 and splits_held(bench)[-1] == 1
        again = await bench.whole(OTHER)
        assert again.completed.cached_tokens < 10
        assert (await bench.whole(later(later(FIRST, replies[0]), answer.text))).report.source == "live+ram"

    lives.live(write, 3)
    lives.live(spill, 1, ram=RamLimits(budget_bytes=64 * MIB, most=100))
    lives.live(write, 2)


# -------------------------------------------------------------------------------------------------------------- damage


def forge_range(path: Path) -> None:
    """Let a header claim one more layer, with its checksum right."""
    data = bytearray(path.read_bytes())
    (end,) = struct.unpack_from("<I", data, _LAYER_END)
    struct.pack_into("<I", data, _LAYER_END, end + 1)
    data[PAGE - 16 : PAGE] = digest(bytes(data[: PAGE - 16]))
    path.write_bytes(data)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[PAGE + 40] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [Path.unlink, flip, forge_range], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("ladder", [True, False], ids=["ladder", "no ladder"])
@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_bad_stage_of_another_split_is_set_aside_and_the_segment_written_in_this_one(
    tmp_path: Path, harm: Any, ladder: bool, after: int
) -> None:
    lives, reply = Lives(tmp_path, limits=default_limits(ladder=ladder)), list[str]()

    async def write(bench: Workbench) -> None:
        reply.append((await bench.whole(FIRST)).text)

    async def fail(bench: Workbench) -> None:
        key = key_at(bench, 256)
        bad = bench.level.root / segment_path(key, 1)
        harm(bad)
        bench.level._walk()
        answer = await bench.whole(later(FIRST, reply[0]))
        assert answer.completed.cached_tokens == (256 if ladder else 0)
        assert bench.cache.counters.restore_failures == 1
        asides = sorted(path.name.split(".")[1] for path in bad.parent.glob("*.bad"))
        in_the_way = [f"s{stage}" for stage in range(after, 3)]
        assert asides == (["s1"] if harm is not Path.unlink else []) + in_the_way
        assert bench.disk.counters.quarantined == (harm is not Path.unlink)
        held = bench.disk.index.held(key)
        assert held is not None and len(held.stages) == after
        reply[0] = reply[0] + "|" + answer.text

    async def read(bench: Workbench) -> None:
        assert bench.disk.scan.stale == ()
        texts = reply[0].split("|")
        answer = await bench.whole(later(later(FIRST, texts[0]), texts[1]))
        assert answer.completed.cached_tokens > 720 and bench.cache.counters.restore_failures == 0

    lives.live(write, 3)
    lives.live(fail, after)
    lives.live(read, 3)


def test_a_stage_that_is_missing_at_the_start_costs_its_segment(tmp_path: Path) -> None:
    lives = Lives(tmp_path)

    async def read(bench: Workbench) -> None:
        (stale,) = bench.disk.scan.stale
        assert "segment 1 of" in stale.reason and "number of stages" in stale.reason
        answer = await bench.whole(FIRST)
        assert answer.completed.cached_tokens == 256
        await bench.check()

    async def again(bench: Workbench) -> None:
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700

    async def leave_damage(bench: Workbench) -> None:
        await bench.whole(FIRST)
        path = bench.level.root / segment_path(key_at(bench, 256), 2)
        path.unlink()

    asyncio.run(_unchecked(leave_damage, tmp_path, stages=3))
    lives.live(read, 2)
    lives.live(again, 3)


async def _unchecked(scenario: Any, root: Path, **options: Any) -> None:
    """A life that ends with a directory that is not in order."""
    bench = Workbench(root, slots=1, **options)
    try:
        await scenario(bench)
    finally:
        bench.close()


def test_another_conversation_that_wrote_a_bad_segment_anew_serves_the_first_one_too(tmp_path: Path) -> None:
    """The first manifest says a split that its segment is not in any more."""
    lives, reply = Lives(tmp_path), list[str]()
    branch = ask(words(1, 600) + words(9, 100))

    async def write(bench: Workbench) -> None:
        reply.append((await bench.whole(FIRST)).text)

    async def rewrite(bench: Workbench) -> None:
        flip(bench.level.root / segment_path(key_at(bench, 256), 0))
        answer = await bench.whole(branch)
        assert answer.completed.cached_tokens == 256

    async def read(bench: Workbench) -> None:
        answer = await bench.whole(later(FIRST, reply[0]))
        assert answer.completed.cached_tokens > 700 and bench.cache.counters.restore_failures == 0

    lives.live(write, 3)
    lives.live(rewrite, 2)
    lives.live(read, 3)


# ------------------------------------------------------------------------------------------------------------- session


def test_a_session_file_of_one_split_is_restored_under_another(tmp_path: Path) -> None:
    lives, reply = Lives(tmp_path / "level"), list[str]()

    async def save(bench: Workbench) -> None:
        reply.append((await bench.whole(FIRST)).text)
        await sessions_of(bench).save(0, "talk.bin", "")

    async def restore(bench: Workbench) -> None:
        assert (await sessions_of(bench).restore(0, "talk.bin", "")).n_tokens > 700
        answer = await bench.whole(later(FIRST, reply[0]))
        assert answer.completed.cached_tokens > 700 and answer.report.source.startswith("session")

    lives.live(save, 3)
    for stages in (1, 2, 4):
        lives.live(restore, stages)


def test_a_session_with_blocks_that_no_model_has_is_refused_before_the_engine_hears_of_it(tmp_path: Path) -> None:
    async def scenario(bench: Workbench) -> None:
        await bench.whole(ask("hi"))
        sessions = sessions_of(bench)
        await sessions.save(0, "talk.bin", "")
        folder = SessionFolder.open(folder_of(bench))
        manifest = folder.open_file("", "talk.bin", most_tokens=1000).plan.manifest
        large = tuple(msgspec.structs.replace(stage, token_bytes=60_000) for stage in manifest.stages)
        sizes = manifest.with_splits([large] * len(manifest.keys)).file_bytes
        forged = msgspec.structs.replace(manifest, stages=large, file_bytes=sizes)
        payloads = itertools.repeat(aligned_buffer(BLOCK_BYTES))
        plan = plan_session(forged, manifest_bytes=1, kv="f16")
        folder.write("", "talk.bin", forged, "f16", itertools.islice(payloads, plan.n_blocks))
        steps = list[str]()
        bench.engine.on_step = steps.append
        with pytest.raises(SessionRefused, match="larger blocks") as refused:
            await sessions.restore(0, "talk.bin", "")
        assert refused.value.field == "stages" and steps == []

    Lives(tmp_path / "level").live(scenario, 3)


# ------------------------------------------------------------------------------------------------------------ parallel


class Pairs(Disk):
    """A disk on which a segment file is only written, and a block only read, together with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = {kind: threading.Barrier(2, timeout=LIMIT_S) for kind in ("read", "write")}

    def write(self, path: Path, buffers: Iterable[Buffer]) -> int:
        if ".seg." in path.name:
            self.pairs["write"].wait()
        return super().write(path, buffers)

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        if path.suffix == ".seg" and offset >= PAGE:
            self.pairs["read"].wait()
        super().read_into(path, offset, view)


def test_the_stages_of_a_segment_are_written_and_read_at_the_same_time(tmp_path: Path) -> None:
    short = ask(words(3, 100))

    async def write(bench: Workbench) -> None:
        await bench.whole(short)
        assert bench.disk.writer.statistics().failures == 0

    async def read(bench: Workbench) -> None:
        answer = await bench.turn(short)
        assert answer is not None and answer.completed.cached_tokens > 100

    asyncio.run(_unchecked(write, tmp_path, stages=2, fs=Pairs()))
    asyncio.run(_unchecked(read, tmp_path, stages=2, fs=Pairs()))
