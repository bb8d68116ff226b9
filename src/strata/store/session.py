"""The folder of portable sessions: write one file in one pass, check one, read its blocks.

Covers private names per owner, the order that makes a file durable, the space that must stay free, and the removal of
what dead writers left. All calls block and belong to a thread; none keeps a payload: blocks pass through the memory of
the caller. Owners are folders: sessions of different API keys never share a name, and without keys files lie in the
folder itself.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from strata.errors import DamagedFile, DiskRefused
from strata.store.filesystem import Buffer, Filesystem
from strata.store.format import Manifest, decode_manifest, digest, encode_manifest
from strata.store.fs import Disk, aligned_buffer
from strata.store.session_format import (
    SessionHead,
    SessionPlan,
    check_head,
    decode_foot,
    decode_head,
    decode_table,
    encode_foot,
    encode_head,
    encode_table,
    most_manifest_bytes,
    plan_session,
)
from strata.types import MIB, PAGE, pad_to_page

_TEMPORARY = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.tmp")
_ZEROS = bytes(PAGE)


@dataclass(frozen=True, kw_only=True)
class SessionFile:
    """A session whose structure holds: everything but its blocks was read and checked.

    `version`: what the file system says of it, and its last page; both differ once the file was changed or replaced.
    """

    path: Path
    head: SessionHead
    plan: SessionPlan
    digests: tuple[bytes, ...]
    version: tuple[object, ...]

    def __repr__(self) -> str:
        return f"SessionFile({self.path.name!r}, {self.plan!r})"


class SessionFolder:
    """The sessions in one directory. Get one from `SessionFolder.open`."""

    def __init__(self, root: Path, *, min_free_bytes: int, fs: Filesystem) -> None:
        self.root = root
        self._min_free_bytes = min_free_bytes
        self._fs = fs

    @classmethod
    def open(cls, root: Path, *, min_free_bytes: int = 0, fs: Filesystem | None = None) -> SessionFolder:
        """Make the directory if it is missing, and remove the temporary files of writers that live no more.

        Raises LevelError, naming the path and a remedy, when it cannot be used.
        """
        folder = cls(root, min_free_bytes=min_free_bytes, fs=fs or Disk())
        folder._fs.make_dir(root)
        folder._remove_temporaries(root)
        for entry in folder._fs.entries(root):
            if entry.kind == "dir" and re.fullmatch("[0-9a-f]{32}", entry.name):
                folder._remove_temporaries(root / entry.name)
        return folder

    def __repr__(self) -> str:
        return f"SessionFolder({str(self.root)!r})"

    def _remove_temporaries(self, folder: Path) -> None:
        for entry in self._fs.entries(folder):
            found = _TEMPORARY.fullmatch(entry.name)
            if (
                found
                and entry.kind == "file"
                and (int(found[1]) == os.getpid() or not psutil.pid_exists(int(found[1])))
            ):
                with suppress(OSError):
                    self._fs.unlink(folder / entry.name)

    def _path(self, owner: str, name: str) -> Path:
        return self.root / owner / name if owner else self.root / name

    # ------------------------------------------------------------------------------------------------------- writing

    def write(self, owner: str, name: str, manifest: Manifest, kv: str, payloads: Iterator[memoryview]) -> int:
        """Write a session, durable and under its name when this returns; its size. One of the same name is replaced.

        `payloads`: one per block in the order of `SessionPlan.blocks`, at least as long as the block padded to pages,
        writable, each free to be reused when the next is asked for; the bytes behind its length are set to zero.
        Raises DiskRefused (also when less than the reserve would stay free), DamagedFile for a name that is no file,
        and whatever `payloads` raises; then nothing is left behind, and a session of this name is as it was.
        """
        path = self._path(owner, name)
        self._check_name(path)
        body = encode_manifest(manifest)
        plan = plan_session(manifest, manifest_bytes=len(body), kv=kv)
        temporary = path.with_name(f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        with _disk_errors(path):
            self._check_space(plan.file_bytes)
            self._fs.make_dir(path.parent)
            try:
                size = self._fs.write(temporary, self._content(plan, body, payloads))
                self._fs.fsync(temporary)
                self._fs.replace(temporary, path)
                self._fs.sync_dir(path.parent)
            except BaseException:
                with suppress(OSError):
                    self._fs.unlink(temporary)
                raise
        return size

    def _check_name(self, path: Path) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            if self._fs.stat(path).kind != "file":
                raise DamagedFile(f"{path.name} is no regular file", field="filename")

    def _check_space(self, needed_bytes: int) -> None:
        free = self._fs.free_bytes(self.root)
        if free - needed_bytes < self._min_free_bytes:
            raise DiskRefused(
                f"the session needs {needed_bytes / MIB:.1f} MiB more, and --session-min-free-mib "
                f"{self._min_free_bytes // MIB} must stay free, but the disk has {free // MIB} MiB: free some space"
            )

    def _content(self, plan: SessionPlan, body: bytes, payloads: Iterator[memoryview]) -> Iterator[Buffer]:
        head = encode_head(plan)
        yield _aligned(head)
        yield _aligned(body)
        digests: list[bytes] = []
        for block, payload in zip(plan.blocks, payloads, strict=True):
            self._check_space(plan.file_bytes - block.offset)  # others write to this disk too
            digests.append(digest(payload[: block.length]))
            payload[block.length : block.padded] = _ZEROS[: block.padded - block.length]
            yield payload[: block.padded]
        table = encode_table(digests)
        yield _aligned(table)
        yield _aligned(encode_foot(file_bytes=plan.file_bytes, head=head, manifest=body, table=table))

    # ------------------------------------------------------------------------------------------------------- reading

    def open_file(self, owner: str, name: str, *, most_tokens: int) -> SessionFile:
        """Read and check everything but the blocks. `most_tokens` bounds what is allocated for the manifest.

        Raises DamagedFile naming the field at fault, FileNotFoundError, or another OSError.
        """
        path = self._path(owner, name)
        entry = self._fs.stat(path)
        _require(entry.kind == "file", "kind", f"{name} is no regular file")
        _require(entry.size >= 4 * PAGE, "size", f"only {entry.size} bytes")
        _require(entry.size % PAGE == 0, "size", f"{entry.size} bytes are no whole pages")
        page = self._read(path, 0, PAGE)
        head = decode_head(page)
        _require(head.file_bytes == entry.size, "size", f"{entry.size} bytes instead of {head.file_bytes}")
        most = most_manifest_bytes(most_tokens)
        if head.manifest_bytes > most:
            raise DamagedFile(f"tokens: more than the {most_tokens} of this server's context", field="tokens")
        foot_page = self._read(path, entry.size - PAGE, PAGE)
        foot = decode_foot(foot_page)
        _require(foot.file_bytes == entry.size, "size", f"{entry.size} bytes instead of {foot.file_bytes}")
        _require(foot.head_digest == digest(page), "head", "the foot belongs to another one")
        body = self._part(path, PAGE, head.manifest_bytes, entry.size, "manifest")
        _require(foot.manifest_digest == digest(body), "manifest", "the foot belongs to another one")
        plan = plan_session(decode_manifest(body), manifest_bytes=head.manifest_bytes, kv=head.kv)
        check_head(head, plan)
        table = self._part(path, plan.table_offset, plan.table_bytes, entry.size, "table")
        _require(foot.table_digest == digest(table), "table", "the foot belongs to another one")
        version = (*entry.version, entry.size, foot_page)
        return SessionFile(path=path, head=head, plan=plan, digests=decode_table(table), version=version)

    def read_block(self, file: SessionFile, index: int, view: memoryview) -> None:
        """Read block `index` into `view`, as long as the block padded to pages, and verify it.

        Raises DamagedFile or OSError.
        """
        block = file.plan.blocks[index]
        self._fs.read_into(file.path, block.offset, view[: block.padded])
        _require(digest(view[: block.length]) == file.digests[index], "digest", f"block {index} does not match it")
        padding = bytes(view[block.length : block.padded])
        _require(padding == _ZEROS[: len(padding)], "padding", f"of block {index} is not zero")

    def check_blocks(self, file: SessionFile, view: memoryview) -> None:
        """Read and verify every block, one after the other into `view`. Raises DamagedFile or OSError."""
        for index in range(file.plan.n_blocks):
            self.read_block(file, index, view)
        self.check_unchanged(file)

    def check_unchanged(self, file: SessionFile) -> None:
        """Raises DamagedFile (field "changed") when the file is not the one that was opened any more."""
        try:
            entry = self._fs.stat(file.path)
            foot_page = self._read(file.path, max(0, entry.size - PAGE), PAGE)
        except (FileNotFoundError, DamagedFile) as error:
            raise DamagedFile(f"changed: {error}", field="changed") from error
        if (*entry.version, entry.size, foot_page) != file.version:
            raise DamagedFile("changed: the file was written to while it was read", field="changed")

    def _part(self, path: Path, offset: int, n_bytes: int, size: int, part: str) -> bytes:
        """`n_bytes` at `offset`, whose padding must be zero."""
        padded = pad_to_page(n_bytes)
        _require(offset + padded < size, part, f"{n_bytes} bytes at {offset} do not lie in the file")
        data = self._read(path, offset, padded)
        _require(not any(data[n_bytes:]), "padding", f"of the {part} is not zero")
        return data[:n_bytes]

    def _read(self, path: Path, offset: int, n_bytes: int) -> bytes:
        view = aligned_buffer(n_bytes)
        self._fs.read_into(path, offset, view)
        return bytes(view)


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise DamagedFile(f"{field}: {problem}", field=field)


def _aligned(data: bytes) -> memoryview:
    """The data as whole pages in memory that O_DIRECT takes."""
    view = aligned_buffer(pad_to_page(len(data)))
    view[: len(data)] = data
    return view


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn what the system says into DiskRefused."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if full else "check the disk and the rights of --slot-save-path"
        raise DiskRefused(f"{path.name} cannot be written ({error.strerror or error}): {remedy}") from error
