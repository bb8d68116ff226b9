"""Portable session files: everything comes back, and no damage, cut or change goes unnoticed or leaves something.

Damage is done to the bytes on disk, and again with every checksum above it put right, so that each check is reached.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.store.crashfs import CrashFS, PowerCut
from tests.store.samples import BLOCK_TOKENS, STAGES, conversation, files_below

from strata.errors import DamagedFile, DiskRefused, LevelError
from strata.store.format import MAX_CHECKPOINT_BYTES, Manifest, decode_manifest, digest, encode_manifest
from strata.store.fs import Disk, aligned_buffer
from strata.store.session import SessionFile, SessionFolder
from strata.store.session_format import (
    DIGEST_BYTES,
    MAX_SESSION_BLOCKS,
    CheckpointPart,
    Rows,
    SessionPlan,
    decode_head,
    encode_foot,
    most_manifest_bytes,
    plan_session,
)
from strata.store.session_names import session_name_problem
from strata.types import BLOCK_BYTES, MIB, PAGE, StageShape, pad_to_page

MOST_TOKENS = 4096
NAME = "talk.bin"


def plan_of(manifest: Manifest) -> SessionPlan:
    return plan_session(manifest, manifest_bytes=len(encode_manifest(manifest)), kv="f16")


def payload(index: int, n_bytes: int) -> bytes:
    return np.random.default_rng(index).bytes(n_bytes)


def any_block(plan: SessionPlan) -> memoryview:
    """Memory that any one block fits."""
    return aligned_buffer(max(block.padded for block in plan.blocks))


def payloads(plan: SessionPlan, fail_at: int | None = None) -> Iterator[memoryview]:
    """Dirty memory that is used again and again, as the arena is."""
    view = any_block(plan)
    for i, block in enumerate(plan.blocks):
        if i == fail_at:
            raise RuntimeError("no more")
        view[:] = b"\xaa" * len(view)
        view[: block.length] = payload(i, block.length)
        yield view


def save(folder: SessionFolder, manifest: Manifest, name: str = NAME, owner: str = "") -> int:
    return folder.write(owner, name, manifest, "f16", payloads(plan_of(manifest)))


def load(folder: SessionFolder, name: str = NAME, owner: str = "") -> tuple[SessionFile, list[bytes]]:
    """Both passes."""
    file = folder.open_file(owner, name, most_tokens=MOST_TOKENS)
    view = any_block(file.plan)
    folder.check_blocks(file, view)
    folder.check_unchanged(file)
    blocks = []
    for i, block in enumerate(file.plan.blocks):
        folder.read_block(file, i, view)
        blocks.append(bytes(view[: block.length]))
    return file, blocks


MANIFEST = conversation(1, 300, frontier=280)


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    return SessionFolder.open(tmp_path / "sessions")


def saved(folder: SessionFolder, manifest: Manifest = MANIFEST) -> Path:
    save(folder, manifest)
    return folder.root / NAME


WITH_CHECKPOINT = conversation(1, 300, frontier=280, checkpoints=[(300, 9000)])
CHECKPOINT_ALONE = conversation(1, 300, frontier=280, stages=(), checkpoints=[(300, 9000)])
every_memory = pytest.mark.parametrize(
    "manifest", [MANIFEST, WITH_CHECKPOINT, CHECKPOINT_ALONE], ids=["rows", "rows and a checkpoint", "a checkpoint"]
)


# ---------------------------------------------------------------------------------------------------------- all is well


@pytest.mark.parametrize("n_tokens", [1, 99, 100, 256, 300, 1024])
@pytest.mark.parametrize(("stages", "checkpoint_bytes"), [(STAGES, 0), (STAGES, 5000), ((), BLOCK_BYTES + 1)])
def test_what_was_written_comes_back(
    folder: SessionFolder, n_tokens: int, stages: tuple[StageShape, ...], checkpoint_bytes: int
) -> None:
    at_the_end = [(n_tokens, checkpoint_bytes)] if checkpoint_bytes else []
    manifest = conversation(1, n_tokens, stages=stages, checkpoints=at_the_end)
    size = save(folder, manifest)
    file, blocks = load(folder)
    assert file.plan.manifest == manifest
    assert file.head.kv == "f16"
    assert size == file.plan.file_bytes == (folder.root / NAME).stat().st_size
    assert blocks == [payload(i, block.length) for i, block in enumerate(file.plan.blocks)]
    assert all(block.offset % PAGE == 0 and block.length <= BLOCK_BYTES for block in file.plan.blocks)
    parts = [piece.length for piece in file.plan.pieces if isinstance(piece, CheckpointPart)]
    assert sum(parts) == checkpoint_bytes and len(parts) == -(-checkpoint_bytes // BLOCK_BYTES)


def test_pieces_and_their_blocks() -> None:
    plan = plan_of(conversation(1, 300, frontier=280, checkpoints=[(300, BLOCK_BYTES + 7)]))
    ranges = ((0, 100), (100, 200), (200, 256), (256, 280), (280, 300))
    rows = [Rows(start=a, end=b) for a, b in ranges]
    last = [CheckpointPart(offset=0, length=BLOCK_BYTES), CheckpointPart(offset=BLOCK_BYTES, length=7)]
    assert list(plan.pieces) == [*rows, *last]
    lengths = [[plan.blocks[i].length for i in plan.blocks_of(p)] for p in range(len(plan.pieces))]
    assert lengths == [*([s.payload_bytes(b - a) for s in STAGES] for a, b in ranges), [BLOCK_BYTES], [7]]
    assert [i for p in range(len(plan.pieces)) for i in plan.blocks_of(p)] == list(range(plan.n_blocks))


@pytest.mark.parametrize("positions", [[299], [280, 300], [1]])
def test_a_checkpoint_lies_at_the_end_and_there_is_one(folder: SessionFolder, positions: list[int]) -> None:
    with pytest.raises(DamagedFile) as error:
        plan_of(conversation(1, 300, frontier=280, checkpoints=[(at, 100) for at in positions]))
    assert error.value.field == "checkpoints"


def test_it_is_private_and_replaced_in_one_step(folder: SessionFolder) -> None:
    old = os.umask(0)
    try:
        path = saved(folder)
        save(folder, conversation(1, 200), owner="0" * 32)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((folder.root / ("0" * 32)).stat().st_mode) == 0o700
    assert load(folder)[0].plan.manifest == MANIFEST
    save(folder, conversation(1, 500))
    assert load(folder)[0].plan.manifest.n_tokens == 500
    assert set(files_below(folder.root)) == {NAME, "0" * 32 + "/" + NAME}


def test_owners_do_not_share_names(folder: SessionFolder) -> None:
    save(folder, MANIFEST, owner="a" * 32)
    with pytest.raises(FileNotFoundError):
        load(folder)
    with pytest.raises(FileNotFoundError):
        load(folder, owner="b" * 32)
    assert load(folder, owner="a" * 32)


# --------------------------------------------------------------------------------------------------------------- damage


def refused(folder: SessionFolder) -> str:
    """The field at fault."""
    with pytest.raises(DamagedFile) as error:
        load(folder)
    assert error.value.field
    return error.value.field


@every_memory
def test_every_flipped_byte_is_noticed(folder: SessionFolder, manifest: Manifest) -> None:
    path = saved(folder, manifest)
    good = path.read_bytes()
    plan = plan_of(manifest)
    edges = {block.offset for block in plan.blocks} | {block.offset + block.length for block in plan.blocks}
    places = {*range(200), *range(PAGE, PAGE + plan.manifest_bytes, 7), *range(0, len(good), 997)}
    places |= {plan.table_offset + i for i in range(plan.table_bytes)} | {plan.foot_offset + i for i in range(80)}
    places |= {at + d for at in (*edges, plan.table_offset, plan.foot_offset, len(good)) for d in (-1, 0)}
    for at in sorted(place for place in places if 0 <= place < len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        refused(folder)
    path.write_bytes(good)
    load(folder)


@every_memory
def test_every_truncation_and_extension_is_noticed(folder: SessionFolder, manifest: Manifest) -> None:
    path = saved(folder, manifest)
    good = path.read_bytes()
    for size in {*range(0, len(good), 509), *range(0, len(good), PAGE), len(good) - 1, 1, PAGE - 1, PAGE + 1}:
        with path.open("r+b") as file:
            file.truncate(size)
        refused(folder)
        path.write_bytes(good)
    for more in (b"\0", bytes(PAGE), good):
        path.write_bytes(good + more)
        refused(folder)


def rewritten(
    good: bytes,
    *,
    manifest: bytes | None = None,
    head: Callable[[bytearray], None] | None = None,
    of: Manifest = MANIFEST,
) -> bytes:
    """The file of `of` with another manifest or head, and all checksums right again."""
    old = decode_head(good[:PAGE])
    body = good[PAGE : PAGE + old.manifest_bytes] if manifest is None else manifest
    rest = good[PAGE + pad_to_page(old.manifest_bytes) : -PAGE]
    page = bytearray(good[:PAGE])
    page[16:24] = len(body).to_bytes(8, "little")
    size = PAGE + pad_to_page(len(body)) + len(rest) + PAGE
    page[40:48] = size.to_bytes(8, "little")
    if head is not None:
        head(page)
    page[-DIGEST_BYTES:] = digest(bytes(page[:-DIGEST_BYTES]))
    plan = plan_of(of)
    table = good[plan.table_offset : plan.table_offset + plan.table_bytes]
    foot = encode_foot(file_bytes=size, head=bytes(page), manifest=body, table=table)
    return bytes(page) + body.ljust(pad_to_page(len(body)), b"\0") + rest + foot


def put(at: int, value: int) -> Callable[[bytearray], None]:
    def change(page: bytearray) -> None:
        page[at : at + 8] = value.to_bytes(8, "little")

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (put(8, 0), "version"),
        (put(8, 2), "version"),
        (put(16, 0), "manifest_bytes"),
        (put(16, 1 << 60), "manifest_bytes"),
        (put(16, 1 << 27), "tokens"),
        (put(24, 0), "blocks"),
        (put(24, 1), "blocks"),
        (put(24, MAX_SESSION_BLOCKS), "blocks"),
        (put(24, MAX_SESSION_BLOCKS + 1), "blocks"),
        (put(24, (1 << 64) - 1), "blocks"),
        (put(32, 1), "checkpoint_bytes"),
        (put(32, 1 << 63), "checkpoint_bytes"),
        (put(40, 0), "size"),
        (put(40, 1 << 62), "size"),
        (put(48, 0), "kv"),
        (put(48, 0xFFFFFFFFFFFFFFFF), "kv"),
        (put(200, 7), "padding"),
    ],
)
def test_every_number_of_the_head_is_checked(
    folder: SessionFolder, change: Callable[[bytearray], None], field: str
) -> None:
    path = saved(folder)
    path.write_bytes(rewritten(path.read_bytes(), head=change))
    assert refused(folder) == field


def test_a_manifest_that_does_not_fit_its_blocks_is_refused(folder: SessionFolder) -> None:
    path = saved(folder)
    good = path.read_bytes()
    assert rewritten(good) == good
    for manifest in (conversation(1, 301, frontier=280), conversation(1, 300), conversation(1, 700)):
        path.write_bytes(rewritten(good, manifest=encode_manifest(manifest)))
        assert refused(folder) in {"blocks", "file_bytes", "digest"}
    longer = encode_manifest(conversation(1, MOST_TOKENS * 8))
    path.write_bytes(rewritten(good, manifest=longer))
    assert refused(folder) == "tokens"
    path.write_bytes(rewritten(good, manifest=b"x" * 500))
    assert refused(folder) == "magic"


def test_a_manifest_that_does_not_fit_its_checkpoint_is_refused(folder: SessionFolder) -> None:
    path = saved(folder, WITH_CHECKPOINT)
    good = path.read_bytes()
    assert rewritten(good, of=WITH_CHECKPOINT) == good
    for checkpoints, field in (
        ([], "checkpoint_bytes"),
        ([(300, 8999)], "checkpoint_bytes"),
        ([(300, 9001)], "checkpoint_bytes"),
        ([(299, 9000)], "checkpoints"),
        ([(280, 9000), (300, 9000)], "checkpoints"),
    ):
        other = encode_manifest(conversation(1, 300, frontier=280, checkpoints=checkpoints))
        path.write_bytes(rewritten(good, manifest=other, of=WITH_CHECKPOINT))
        assert refused(folder) == field
    for value in (0, 8999, 9001, MAX_CHECKPOINT_BYTES, MAX_CHECKPOINT_BYTES + 1, 1 << 63):
        path.write_bytes(rewritten(good, head=put(32, value), of=WITH_CHECKPOINT))
        assert refused(folder) == "checkpoint_bytes"


def test_too_many_or_too_large_blocks_are_refused_before_they_are_listed() -> None:
    many = tuple(StageShape(layer_first=i, layer_end=i + 1, base_bytes=0, token_bytes=1) for i in range(64))
    manifest = conversation(1, 20_000, stages=many, block_tokens=1)
    with pytest.raises(DamagedFile, match="blocks"):
        plan_of(manifest)
    large = (StageShape(layer_first=0, layer_end=1, base_bytes=0, token_bytes=MIB),)
    with pytest.raises(DamagedFile, match="block_tokens"):
        plan_of(conversation(1, 100, stages=large, block_tokens=17))


@pytest.mark.parametrize("n_tokens", [1, 255, 256, 257, 4096, 100_000])
def test_the_bound_of_the_manifest_holds(n_tokens: int) -> None:
    stages = tuple(StageShape(layer_first=i, layer_end=i + 1, base_bytes=8, token_bytes=512) for i in range(64))
    manifest = conversation(1, n_tokens, stages=stages, frontier=n_tokens - 1 or None)
    manifest = msgspec.structs.replace(manifest, model_name="é" * 1024)
    assert len(encode_manifest(manifest)) <= most_manifest_bytes(n_tokens)


def test_a_changed_file_is_noticed_between_the_passes(folder: SessionFolder) -> None:
    path = saved(folder)
    good = path.read_bytes()
    view = aligned_buffer(PAGE * 16)

    def changes() -> Iterator[None]:
        path.write_bytes(good)  # the same bytes, but written again
        yield
        other = path.with_name("other")
        other.write_bytes(good)
        other.replace(path)
        yield
        path.unlink()
        yield
        path.write_bytes(good[:-PAGE])
        yield
        save(folder, conversation(1, 300, seed=2))
        yield

    file = folder.open_file("", NAME, most_tokens=MOST_TOKENS)
    folder.check_unchanged(file)
    for _ in changes():
        with pytest.raises(DamagedFile) as error:
            folder.check_unchanged(file)
        assert error.value.field == "changed"
    # The digests of the first pass hold in the second: another payload is refused even behind an unchanged time.
    path.write_bytes(good[: file.plan.blocks[0].offset] + b"!" + good[file.plan.blocks[0].offset + 1 :])
    with pytest.raises(DamagedFile, match="digest"):
        folder.read_block(file, 0, view)


def test_what_is_no_regular_file_is_refused_and_never_waited_for(folder: SessionFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"keep me")
    (folder.root / "link").symlink_to(outside)
    (folder.root / "dir").mkdir()
    os.mkfifo(folder.root / "fifo")
    for name in ("link", "dir", "fifo"):
        with pytest.raises(DamagedFile) as error:
            load(folder, name)
        assert error.value.field == "kind"
        with pytest.raises(DamagedFile) as error:
            save(folder, MANIFEST, name)
        assert error.value.field == "filename"
    assert outside.read_bytes() == b"keep me"
    assert not list(folder.root.glob(".*"))


def test_an_empty_or_foreign_file_is_refused(folder: SessionFolder) -> None:
    path = folder.root / NAME
    for content in (b"", b"x", bytes(PAGE * 8), b"GGUF" * 8192):
        path.write_bytes(content)
        assert refused(folder) in {"size", "magic"}
        assert path.read_bytes() == content


# ---------------------------------------------------------------------------------------------------------------- disk


class FullDisk(Disk):
    """`free`: what it says is free. `refuse_after`: bytes after which a write fails with `error`."""

    def __init__(self) -> None:
        super().__init__(pwritev=self._write)
        self.free = 1 << 40
        self.refuse_after: int | None = None
        self.error = errno.ENOSPC

    def free_bytes(self, path: Path) -> int:
        return self.free

    def _write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if self.refuse_after is not None and offset + len(views[0]) > self.refuse_after:
            raise OSError(self.error, os.strerror(self.error))
        return os.pwritev(fd, views, offset)


def test_the_reserve_stays_free_and_nothing_is_left_behind(tmp_path: Path) -> None:
    disk = FullDisk()
    folder = SessionFolder.open(tmp_path, min_free_bytes=100 * MIB, fs=disk)
    size = plan_of(MANIFEST).file_bytes
    disk.free = 100 * MIB + size - 1
    with pytest.raises(DiskRefused, match="--session-min-free-mib 100"):
        save(folder, MANIFEST)
    assert files_below(tmp_path) == {}
    disk.free += 1
    assert save(folder, MANIFEST) == size


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_half_way_leaves_the_old_session(tmp_path: Path, error: int) -> None:
    disk = FullDisk()
    folder = SessionFolder.open(tmp_path, fs=disk)
    save(folder, MANIFEST)
    before = files_below(tmp_path)
    disk.error = error
    for after in range(0, plan_of(MANIFEST).file_bytes, 3 * PAGE):
        disk.refuse_after = after
        with pytest.raises(DiskRefused, match=NAME):
            save(folder, conversation(1, 300, seed=9))
        assert files_below(tmp_path) == before
    disk.refuse_after = None
    disk.free = 0
    with pytest.raises(DiskRefused):
        SessionFolder.open(tmp_path, min_free_bytes=1, fs=disk).write("", NAME, MANIFEST, "f16", iter(()))
    assert files_below(tmp_path) == before


def test_payloads_that_end_early_leave_nothing(folder: SessionFolder) -> None:
    plan = plan_of(MANIFEST)
    for at in (0, 1, plan.n_blocks - 1):
        with pytest.raises(RuntimeError, match="no more"):
            folder.write("", NAME, MANIFEST, "f16", payloads(plan, fail_at=at))
    with pytest.raises(ValueError, match="shorter"):
        folder.write("", NAME, MANIFEST, "f16", iter(()))
    assert files_below(folder.root) == {}


def test_temporary_files_of_dead_writers_go_those_of_live_ones_stay(tmp_path: Path) -> None:
    owner = tmp_path / ("a" * 32)
    owner.mkdir()
    dead, live = 2**22 - 3, os.getppid()
    for root in (tmp_path, owner):
        (root / f".{NAME}.{dead}-0123abcd.tmp").write_bytes(b"x")
        (root / f".{NAME}.{live}-0123abcd.tmp").write_bytes(b"x")
        (root / ".somebody's.tmp").write_bytes(b"x")
        (root / NAME).write_bytes(b"x")
    SessionFolder.open(tmp_path)
    left = {f".{NAME}.{live}-0123abcd.tmp", ".somebody's.tmp", NAME}
    assert {path.name for path in tmp_path.iterdir()} == {*left, owner.name}
    assert {path.name for path in owner.iterdir()} == left


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(LevelError, match="not a directory"):
        SessionFolder.open(tmp_path / "file")


class NoFsync(CrashFS):
    def fsync(self, path: Path) -> None:
        self._step()


def states_after(disk: type[CrashFS], crash: str) -> Iterator[tuple[int, int | None]]:
    """Save two sessions under one name and stop at every step: tokens acknowledged, and tokens a new process finds.

    None: what is found there is damaged.
    """
    root = Path("/data/sessions")
    for cut_at in range(60):
        fs, acknowledged = disk(cut_at), 0
        with suppress(PowerCut):
            folder = SessionFolder.open(root, fs=fs)
            for n_tokens in (300, 500):
                save(folder, conversation(1, n_tokens))
                acknowledged = n_tokens
        for state in getattr(fs, crash)():
            after = state()
            folder = SessionFolder.open(root, fs=after)
            assert {entry.name for entry in after.entries(root)} <= {NAME}
            try:
                yield acknowledged, load(folder)[0].plan.manifest.n_tokens
            except FileNotFoundError:
                yield acknowledged, 0
            except DamagedFile:
                yield acknowledged, None


@pytest.mark.parametrize("crash", ["after_kill", "after_power_cut"])
def test_what_was_acknowledged_survives_every_crash(crash: str) -> None:
    states = set(states_after(CrashFS, crash))
    assert all(found is not None and found >= acknowledged for acknowledged, found in states)
    assert {acknowledged for acknowledged, _ in states} == {0, 300, 500}


def test_the_same_check_catches_a_disk_that_loses_data() -> None:
    assert any(found is None for _, found in states_after(NoFsync, "after_power_cut"))


# --------------------------------------------------------------------------------------------------------------- names


GOOD_NAMES = (
    """a, slot1.bin, My talk (2).bin, über 🦉.bin, %2e%2e%2fx, a..b, CONSOLE, COM10.bin, com.bin, nul1, -rf, ~"""
)
BAD_NAMES = """., .., ../x, /etc/x, ..\\x, a/b, C:x, .hidden, x., a"b, a<b, a>b, a|b, a?b, a*b, CON, con, nul.bin,
    NUL .txt, aux, PRN.a.b, COM1, com0.x, LPT9, lpt¹, CONIN$, conout$.x, a\u2215b, a\uff0fb, a\u2044b, \ufeffx,
    x\u202ey, \ud800, x\u2028, x\0y, x\x7f, x\x85y"""


@pytest.mark.parametrize("name", [*GOOD_NAMES.split(", "), "x" * 200, "é" * 100])
def test_good_names(name: str) -> None:
    assert session_name_problem(name) == ""


@pytest.mark.parametrize("name", [*re.split(r",[ \n]+", BAD_NAMES), "", "x ", " x", "x\ny", "é" * 101, "x" * 201])
def test_bad_names(name: str) -> None:
    assert session_name_problem(name)


def test_the_sample_has_all_kinds_of_blocks() -> None:
    assert len(STAGES) > 1 and 256 % BLOCK_TOKENS
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST
