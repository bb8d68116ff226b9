"""A disk in memory that can stop at every operation and enumerate what it may be left with.

The model is deliberately pessimistic (ext4, XFS and APFS are each kinder in some way):

- kill: everything done stays; the write in progress may be torn.
- power cut: a file that was not fsynced is empty, torn, all zeros, or whole, under each of its names alike; the changes
  to a directory's names since its last `sync_dir` happened up to some point, independently for each directory; an fsync
  of a file says nothing about its names.

It does not model reordering within one directory, bit rot, or a device that ignores flushes.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from strata.errors import DamagedFile
from strata.store.filesystem import Buffer, Entry, Lock
from strata.types import PAGE, pad_to_page


class PowerCut(BaseException):
    """No Exception, so that no handler in the code under test can swallow it."""


@dataclass
class _File:
    data: bytes
    synced: bool = False

    def versions(self) -> list[bytes]:
        """What may be on the device after a power cut."""
        if self.synced:
            return [self.data]
        torn = self.data[: len(self.data) // 2]
        return list(dict.fromkeys((b"", torn, bytes(len(self.data)), self.data)))


@dataclass
class _Change:
    """One change of a directory: `name` now means `file` (None: nothing), and `gone` means nothing."""

    name: str
    file: _File | Literal["dir"] | None
    gone: str | None = None


State = Callable[[], "CrashFS"]
"""Makes the disk in one of the states that it may be left in."""
Names = dict[str, "_File | Literal['dir']"]


@dataclass
class _Directory:
    durable: Names = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def after(self, n_changes: int) -> Names:
        names = dict(self.durable)
        for change in self.pending[:n_changes]:
            if change.gone is not None:
                names.pop(change.gone, None)
            if change.file is None:
                names.pop(change.name, None)
            else:
                names[change.name] = change.file
        return names

    @property
    def live(self) -> Names:
        return self.after(len(self.pending))


class CrashFS:
    """Implements `Filesystem`; paths are taken as they are. Every operation that changes anything is one step."""

    def __init__(self, cut_at: int | None = None, volumes: tuple[Path, ...] = ()) -> None:
        """`volumes`: directories that are mount points of volumes of their own, next to the one at the root."""
        self.steps = 0
        self._volumes = volumes
        self._cut_at = cut_at
        self._directories: dict[Path, _Directory] = {Path("/"): _Directory()}
        self._writing: tuple[Path, bytes] | None = None
        self._locked: set[Path] = set()

    # --------------------------------------------------------------------------------------------------- the operations

    def make_dir(self, path: Path, *, durable: bool = True) -> bool:
        if path in self._directories:
            return False
        self.make_dir(path.parent)
        self._step()
        self._directories[path] = _Directory()
        self._directories[path.parent].pending.append(_Change(path.name, "dir"))
        if durable:
            self.sync_dir(path.parent)
        return True

    def write(self, path: Path, buffers: Iterable[Buffer]) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        if path.name in self._names(path):
            raise FileExistsError(17, "File exists", str(path))
        self._writing = (path, data)
        self._step()
        self._writing = None
        self._directories[path.parent].pending.append(_Change(path.name, _File(data)))
        return len(data)

    def write_at(self, path: Path, offset: int, view: memoryview) -> None:
        self._step()
        file = self._file(path)
        file.data = file.data[:offset].ljust(offset, b"\0") + bytes(view) + file.data[offset + len(view) :]
        file.synced = False

    def fsync(self, path: Path) -> None:
        self._step()
        self._file(path).synced = True

    def link(self, src: Path, dst: Path) -> None:
        if self._volume(src) != self._volume(dst):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(src), None, str(dst))
        if dst.name in self._names(dst):
            raise FileExistsError(17, "File exists", str(dst))
        self._step()
        self._directories[dst.parent].pending.append(_Change(dst.name, self._file(src)))

    def replace(self, src: Path, dst: Path) -> None:
        assert src.parent == dst.parent, "the level renames within a directory only"
        self._step()
        file = self._file(src)
        self._directories[dst.parent].pending.append(_Change(dst.name, file, gone=src.name))

    def unlink(self, path: Path) -> None:
        self._step()
        self._file(path)
        self._directories[path.parent].pending.append(_Change(path.name, None))

    def sync_dir(self, path: Path) -> None:
        self._step()
        directory = self._directories[path]
        self._directories[path] = _Directory(durable=directory.live)

    def read(self, path: Path, max_bytes: int) -> bytes:
        data = self._file(path).data
        if len(data) > max_bytes:
            raise DamagedFile(f"{path} has {len(data)} bytes", field="size")
        return data

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        data = self._file(path).data[offset : offset + len(view)]
        if len(data) < len(view):
            raise DamagedFile(f"{path} ends early", field="size")
        view[:] = data

    def entries(self, path: Path) -> list[Entry]:
        if path not in self._directories:
            raise FileNotFoundError(2, "No such directory", str(path))
        return [_entry(name, file) for name, file in sorted(self._directories[path].live.items())]

    def stat(self, path: Path) -> Entry:
        return (
            _entry(path.name, self._names(path)[path.name]) if path.name in self._names(path) else self._missing(path)
        )

    def free_bytes(self, path: Path) -> int:
        return 1 << 40

    def lock(self, directory: Path) -> Lock:
        assert directory not in self._locked
        self._locked.add(directory)
        return _Held(self._locked, directory)

    def _volume(self, path: Path) -> Path | None:
        return next((volume for volume in self._volumes if path.is_relative_to(volume)), None)

    def _step(self) -> None:
        if self.steps == self._cut_at:
            raise PowerCut
        self.steps += 1

    def _names(self, path: Path) -> Names:
        directory = self._directories.get(path.parent)
        return directory.live if directory else {}

    def _file(self, path: Path) -> _File:
        file = self._names(path).get(path.name)
        if not isinstance(file, _File):
            self._missing(path)
        return file

    def _missing(self, path: Path) -> Entry:
        raise FileNotFoundError(2, "No such file", str(path))

    # ------------------------------------------------------------------------------------------------------- the oracle

    def after_kill(self) -> Iterator[State]:
        """Every state that a new process may find after kill -9."""
        live = {path: directory.live for path, directory in self._directories.items()}
        yield partial(self._rebuilt, live, {})
        if self._writing is not None:
            path, data = self._writing
            for torn in (b"", data[: len(data) // 2]):
                names = {**live, path.parent: {**live[path.parent], path.name: _File(torn)}}
                yield partial(self._rebuilt, names, {})

    def after_power_cut(self) -> Iterator[State]:
        """Every state that may be found after the power went."""
        paths = list(self._directories)
        depths = [range(len(self._directories[path].pending) + 1) for path in paths]
        for chosen in itertools.product(*depths):
            names = {path: self._directories[path].after(n) for path, n in zip(paths, chosen, strict=True)}
            files = {id(f): f for below in names.values() for f in below.values() if isinstance(f, _File)}
            for contents in itertools.product(*(file.versions() for file in files.values())):
                yield partial(self._rebuilt, names, dict(zip(files, contents, strict=True)))

    def _rebuilt(self, names: dict[Path, Names], contents: dict[int, bytes]) -> CrashFS:
        """A disk with these names, all durable, and the files' contents replaced where given."""
        disk = CrashFS(volumes=self._volumes)
        disk._directories = {path: _Directory() for path in names if _exists(path, names)}
        files: dict[int, _File] = {}  # a file with two names stays one file
        for path, directory in disk._directories.items():
            for name, file in names[path].items():
                if isinstance(file, _File):
                    data = contents.get(id(file), file.data)
                    directory.durable[name] = files.setdefault(id(file), _File(data, synced=True))
                else:
                    directory.durable[name] = file
        return disk


def _exists(path: Path, names: dict[Path, Names]) -> bool:
    return path == path.parent or (path.name in names[path.parent] and _exists(path.parent, names))


def _entry(name: str, file: _File | Literal["dir"]) -> Entry:
    if not isinstance(file, _File):
        return Entry(name=name, kind="dir", size=PAGE, allocated_bytes=PAGE)
    return Entry(name=name, kind="file", size=len(file.data), allocated_bytes=pad_to_page(len(file.data)))


@dataclass
class _Held:
    locked: set[Path]
    directory: Path

    def is_in_place(self) -> bool:
        return True

    def release(self) -> None:
        self.locked.discard(self.directory)
