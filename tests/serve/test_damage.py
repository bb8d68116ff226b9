"""Stored files in every kind of bad shape, and turns that would use them: right answers, a count, nothing deleted.

On the fake engine, so that every kind and region can be tried; test_failures.py does a few on the real server.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.serve.workbench import Workbench, ask, play, segments_of, words

from strata.rules import prefix
from strata.store.format import Manifest, decode_manifest, encode_manifest
from strata.store.names import manifest_name, segment_path
from strata.types import PAGE

FIRST = ask(words(1, 700))
OTHER = ask(words(2, 700))
PREAMBLE_END = 40  # of a manifest: magic, version, length, checksum


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two conversations, closed in order."""
    root = tmp_path_factory.mktemp("stored") / "cold"

    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        await bench.whole(OTHER)

    play(scenario, root, slots=1)
    return root


def first_manifest(root: Path) -> Manifest:
    return decode_manifest((root / manifest_name(1)).read_bytes())


def segment_file(root: Path, i: int) -> Path:
    return root / segment_path(first_manifest(root).keys[i], 0)


def flip(at: int) -> Callable[[Path], None]:
    """Flip one bit; a negative position counts from the end."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)

    return damage


def flip_share(share: float) -> Callable[[Path], None]:
    """Flip a bit of a manifest's body, this far into it."""

    def damage(path: Path) -> None:
        size = path.stat().st_size
        flip(PREAMBLE_END + int(share * (size - PREAMBLE_END)))(path)

    return damage


def truncate(keep: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, keep(path.stat().st_size))


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def link_to_a_copy(path: Path) -> None:
    copy = path.with_name("elsewhere")
    shutil.copy(path, copy)
    path.unlink()
    path.symlink_to(copy)


SHAPES: dict[str, Callable[[Path], None]] = {
    "empty": truncate(lambda _: 0),
    "one byte": truncate(lambda _: 1),
    "half": truncate(lambda size: size // 2),
    "a byte short": truncate(lambda size: size - 1),
    "a byte too long": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "all zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"tokens": [1, 2]})) and None,
    "a directory": replace_by(Path.mkdir),
    "a pipe": replace_by(lambda path: os.mkfifo(path)),
    "a dangling link": replace_by(lambda path: path.symlink_to("/nowhere/at/all")),
    "a link to a copy": link_to_a_copy,
    "gone": Path.unlink,
}
SEGMENT_REGIONS = {
    f"bit in {name}": flip(at)
    for name, at in {
        "the magic": 0,
        "the version": 8,
        "the key": 20,
        "the parent": 60,
        "the stage": 80,
        "the number of blocks": 124,
        "the block table": 140,
        "the header's padding": 3000,
        "the header's checksum": PAGE - 1,
        "the first payload byte": PAGE,
        "the payload": PAGE + 4000,
    }.items()
}
MANIFEST_REGIONS = {
    "bit in the magic": flip(0),
    "bit in the version": flip(8),
    "bit in the length": flip(16),
    "bit in the checksum": flip(30),
    **{f"bit in the body, {n}/16": flip_share(n / 16) for n in range(16)},
    "bit in the last byte": flip(-1),
    "a length of 2^62": lambda path: patch(path, 16, struct.pack("<Q", 1 << 62)),
    "a version from the future": lambda path: patch(path, 8, struct.pack("<Q", 99)),
}


def patch(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def or_set_aside(names: set[str], now: set[str]) -> set[str]:
    """Those of `names` that are there no more, under this name or a quarantined one."""
    return {name for name in names if name not in now and not any(n.startswith(f"{name}.") for n in now)}


# ------------------------------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("kind", [*SHAPES, *SEGMENT_REGIONS])
def test_a_damaged_segment(tmp_path: Path, stored: Path, kind: str, which: int) -> None:
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    victim = segment_file(root, which)
    start = which * 256
    (SHAPES | SEGMENT_REGIONS)[kind](victim)
    before = everything(root)

    async def scenario(bench: Workbench) -> None:
        assert everything(root) >= before, "the start deleted something"
        assert (await bench.whole(OTHER)).completed.cached_tokens > 700, "the other conversation is whole"
        answer = await bench.whole(FIRST)
        assert answer.completed.cached_tokens == max(start, answer.report.reused if start == 0 else 0)
        assert start or answer.completed.cached_tokens < 10, "only what the other conversation in the slot shares"
        await bench.check()
        assert not or_set_aside(before - {manifest_name(1)}, everything(root))
        await bench.whole(OTHER)
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700, "it was written anew"

    play(scenario, root, slots=1)


def test_segments_swapped(tmp_path: Path, stored: Path) -> None:
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    a, b = segment_file(root, 0), segment_file(root, 1)
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)

    async def scenario(bench: Workbench) -> None:
        reached = []
        for _ in range(3):
            reached.append((await bench.whole(FIRST)).completed.cached_tokens)
            await bench.whole(OTHER)
        assert reached[:2] == [0, 256] and reached[2] > 700, "each is found when it is read, and written anew"
        assert bench.disk.counters.quarantined == 2

    play(scenario, root, slots=1)


# ------------------------------------------------------------------------------------------------------------ manifests


@pytest.mark.parametrize("kind", [*SHAPES, *MANIFEST_REGIONS])
def test_a_damaged_manifest(tmp_path: Path, stored: Path, kind: str) -> None:
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    victim = root / manifest_name(1)
    segments = {segment_path(key, 0) for key in first_manifest(root).keys}
    (SHAPES | MANIFEST_REGIONS)[kind](victim)
    before = everything(root)

    async def scenario(bench: Workbench) -> None:
        assert everything(root) >= before, "the start deleted something"
        scan = bench.cache.status()[0]["scan"]
        assert isinstance(scan, dict)
        assert scan["manifests"] == 1
        assert scan["orphans"] == len(segments)
        assert scan["stale"] == (kind not in ("gone", "a directory"))
        assert scan["other"] >= (kind == "a directory")
        answer = await bench.whole(FIRST)
        assert answer.completed.cached_tokens == 0
        assert (await bench.whole(OTHER)).completed.cached_tokens > 700
        await bench.check()
        assert not or_set_aside(before, everything(root))
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700, "it was written anew"

    play(scenario, root, slots=1)


def test_a_manifest_under_another_number(tmp_path: Path, stored: Path) -> None:
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    shutil.copy(root / manifest_name(1), root / manifest_name(77))

    async def scenario(bench: Workbench) -> None:
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700
        await bench.whole(OTHER)
        assert max(c.serial for c in bench.disk.index.conversations()) != 77

    play(scenario, root, slots=1)


def test_a_manifest_of_another_model_is_counted_and_never_served(tmp_path: Path, stored: Path) -> None:
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    path = root / manifest_name(1)
    foreign = msgspec.structs.replace(first_manifest(root), identity=b"another model's fingerprint 0000")
    path.write_bytes(encode_manifest(foreign))
    before = everything(root)

    async def scenario(bench: Workbench) -> None:
        scan = bench.cache.status()[0]["scan"]
        assert isinstance(scan, dict)
        assert (scan["foreign"], scan["manifests"], scan["stale"], scan["orphans"]) == (1, 1, 0, 0)
        answer = await bench.whole(FIRST)
        assert answer.completed.cached_tokens == 0
        await bench.settle()
        assert everything(root) >= before

    play(scenario, root, slots=1)


def test_a_conversation_of_another_model_goes_when_it_is_the_oldest(tmp_path: Path, stored: Path) -> None:
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    old = first_manifest(root)
    identity = b"another model's fingerprint 0000"
    foreign_root = prefix.root_key(identity, "")
    segments = prefix.chain(foreign_root, old.token_ids, old.cuts)
    for before, now in zip(old.keys, segments, strict=True):
        target = root / segment_path(now.key, 0)
        target.parent.mkdir(exist_ok=True)
        (root / segment_path(before, 0)).rename(target)
    keys = tuple(segment.key for segment in segments)
    foreign = msgspec.structs.replace(old, identity=identity, root=foreign_root, keys=keys)
    (root / manifest_name(1)).write_bytes(encode_manifest(foreign))

    async def scenario(bench: Workbench) -> None:
        used = bench.level.used_bytes
        for i in range(3, 5):
            await bench.whole(ask(words(i, 700)))
        assert not (root / manifest_name(1)).exists()
        assert not any((root / segment_path(key, 0)).exists() for key in keys)
        assert bench.level.used_bytes < 1.6 * used

    play(scenario, root, slots=1, budget_bytes=11 * 16 * 1024)


def test_what_was_damaged_can_be_looked_at_afterwards(tmp_path: Path, stored: Path) -> None:
    """A quarantined file keeps its bytes, is counted by the next start, and is not served."""
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    victim = segment_file(root, 1)
    flip(PAGE + 9)(victim)
    damaged = victim.read_bytes()

    async def meets_it(bench: Workbench) -> None:
        await bench.whole(FIRST)

    async def after(bench: Workbench) -> None:
        scan = bench.cache.status()[0]["scan"]
        assert isinstance(scan, dict)
        assert (scan["bad"], scan["stale"]) == (1, 0)
        assert (await bench.whole(FIRST)).completed.cached_tokens > 700

    play(meets_it, root, slots=1)
    (aside,) = victim.parent.glob(f"{victim.name}*.bad")
    assert aside.read_bytes() == damaged
    play(after, root, slots=1)
    assert aside.read_bytes() == damaged


def test_what_was_set_aside_goes_before_what_is_sound(tmp_path: Path, stored: Path) -> None:
    root = tmp_path / "cold"
    shutil.copytree(stored, root)
    flip(PAGE + 9)(segment_file(root, 1))

    async def scenario(bench: Workbench) -> None:
        await bench.whole(FIRST)
        (aside,) = bench.level.quarantined()
        sound = len(bench.disk.index.conversations())
        bench.disk.limits = replace(bench.disk.limits, budget_bytes=bench.level.used_bytes - 1)
        bench.disk.make_room(0)
        await bench.settle()
        assert not (root / aside).exists() and bench.disk.counters.quarantined_dropped == 1
        assert len(bench.disk.index.conversations()) == sound and bench.disk.counters.disk_evictions == 0

    play(scenario, root, slots=1)


def test_the_index_of_the_stored_conversations_is_what_was_stored(tmp_path: Path, stored: Path) -> None:
    """The fixture is as intended: two conversations of four segments, nothing else."""
    root = tmp_path / "cold"
    shutil.copytree(stored, root)

    async def scenario(bench: Workbench) -> None:
        assert [len(segments_of(c)) for c in bench.disk.index.conversations()] == [4, 4]
        scan = bench.cache.status()[0]["scan"]
        assert scan == {
            "manifests": 2, "foreign": 0, "stale": 0, "orphans": 0, "temporary": 0, "bad": 0, "other": 0
        }  # fmt: skip

    play(scenario, root, slots=1)
