"""Files and directories: the only module that opens, renames, fsyncs and locks.

Covers private, link-free, exclusive creation; O_DIRECT with a buffered fallback; durable renames and directories; the
lock of a level's directory; free space. It knows no file format and no file name but the lock's.
Every OSError carries its path.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from strata.errors import DamagedFile, LevelError
from strata.store.filesystem import LOCK_NAME, Buffer, Entry, Kind, Lock
from strata.store.reads import DIRECT, read_all, read_direct, stop_direct
from strata.types import PAGE

# No link is followed, no FIFO is waited for, no child process inherits the descriptor.
_SAFE: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_LOCK_BYTE = 1 << 30  # Windows locks bytes, not files: one far behind the holder's name, so that it stays readable
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_buffer(n_bytes: int) -> memoryview:
    """Zeroed memory that starts at a page, as O_DIRECT wants it."""
    room = np.zeros(n_bytes + PAGE, np.uint8)
    start = -_address(room.data) % PAGE
    return room.data[start : start + n_bytes]


# ------------------------------------------------------------------------------------------------------- system calls


def _system_pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    if sys.platform == "win32":
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, buffers[0])
    return os.pwritev(fd, buffers, offset)


def _flush(fd: int) -> None:
    if sys.platform == "darwin":  # fsync there leaves the data in the drive's cache
        import fcntl

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def _lock_now(fd: int) -> bool:
    """Take the lock that ends with this descriptor; False when someone else has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, _LOCK_BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            os.lseek(fd, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


# ------------------------------------------------------------------------------------------------------------- details


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a regular file, closed at the end. Never waits for a FIFO, never follows a link."""
    try:
        fd = os.open(path, flags | _SAFE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedFile(f"{path} is no regular file", field="kind") from error
        raise
    try:
        _require_file(fd, path)
        yield fd
    finally:
        os.close(fd)


def _require_file(fd: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise DamagedFile(f"{path} is no regular file", field="kind")


def _entry(name: str, status: os.stat_result) -> Entry:
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    blocks: int | None = getattr(status, "st_blocks", None)  # in units of 512 bytes, whatever the filesystem's block is
    allocated = status.st_size if blocks is None else blocks * 512
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    version = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return Entry(name=name, kind=kind, size=status.st_size, allocated_bytes=allocated, version=version)


def _address(view: Buffer) -> int:
    array = np.frombuffer(view, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


def _is_aligned(view: Buffer) -> bool:
    return len(view) > 0 and len(view) % PAGE == 0 and _address(view) % PAGE == 0


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the path into OSErrors of calls that only know a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


_REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space, or name another directory",
    errno.EDQUOT: "the disk quota is used up: free some space, or name another directory",
    errno.EROFS: "the filesystem is read-only: remount it, or name another directory",
    errno.EACCES: "no permission: change its owner or mode, or name another directory",
    errno.EPERM: "no permission: change its owner or mode, or name another directory",
    errno.ENOTDIR: "a part of the path is not a directory: correct it",
    errno.ELOOP: "it is a symbolic link: remove it",
    errno.EISDIR: "it is a directory: move it away",
    errno.ENXIO: "it is no regular file: move it away",
}


@contextmanager
def _as_level_error(path: Path) -> Iterator[None]:
    """Turn what the system says about a level's directory into a message with a remedy."""
    try:
        yield
    except DamagedFile as error:
        raise LevelError(f"{error.message}: move it away") from error
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "name another directory")
        raise LevelError(f"{path} cannot be used ({error.strerror}): {remedy}") from error


# -------------------------------------------------------------------------------------------------------- the disk


PWriteV = Callable[[int, Sequence[memoryview], int], int]
"""Like os.pwritev: (descriptor, buffers, offset) -> bytes written."""


class _FileLock:
    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self._path = path

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_in_place(self) -> bool:
        try:
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), self._path.lstat())
        except FileNotFoundError:
            return False


class Disk:
    """The real thing."""

    def __init__(self, *, direct: bool = True, pwritev: PWriteV = _system_pwritev) -> None:
        """`direct` False never tries O_DIRECT. `pwritev` replaces the system call (tests)."""
        self._direct = direct and DIRECT != 0
        self._pwritev = pwritev
        self._buffered_dirs: set[Path] = set()  # directories whose filesystem refused O_DIRECT

    def __repr__(self) -> str:
        return f"Disk(direct={self._direct}, {len(self._buffered_dirs)} directories buffered)"

    def make_dir(self, path: Path, *, durable: bool = True) -> bool:
        with _as_level_error(path):
            kind = self._kind(path)
            if kind is None:
                if not path.parent.exists() or not path.parent.is_dir():
                    self.make_dir(path.parent)
                path.mkdir(mode=0o700, exist_ok=True)
                if durable:
                    self.sync_dir(path.parent)
            elif kind == "link":
                raise LevelError(f"{path} is a symbolic link: name the directory it points to ({path.readlink()})")
            elif kind != "dir":
                raise LevelError(f"{path} is not a directory: name another one, or move this file away")
            elif not os.access(path, os.W_OK | os.X_OK):
                raise LevelError(f"{path} is not writable for this user: change its owner or mode, or name another one")
            return kind is None

    def write(self, path: Path, buffers: Iterable[Buffer]) -> int:
        # What is there already goes to the system in one call.
        batches = [buffers] if isinstance(buffers, Sequence) else ([buffer] for buffer in buffers)
        with _naming(path):
            fd, done = self._create(path, direct=self._try_direct(path)), 0
            try:
                for batch in batches:
                    if not all(_is_aligned(buffer) for buffer in batch):
                        stop_direct(fd)
                    done += self._write_all(fd, path, [memoryview(buffer) for buffer in batch if buffer], done)
                return done
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise
            finally:
                os.close(fd)

    def write_at(self, path: Path, offset: int, view: memoryview) -> None:
        direct = self._try_direct(path) and offset % PAGE == 0 and _is_aligned(view)
        with _naming(path), _opened(path, os.O_WRONLY | (DIRECT if direct else 0)) as fd:
            self._write_all(fd, path, [view] if view else [], offset)

    def fsync(self, path: Path) -> None:
        with _naming(path), _opened(path, os.O_RDWR) as fd:
            _flush(fd)

    def link(self, src: Path, dst: Path) -> None:
        os.link(src, dst, follow_symlinks=os.link not in os.supports_follow_symlinks)

    def replace(self, src: Path, dst: Path) -> None:
        src.replace(dst)
        with suppress(FileNotFoundError):  # POSIX renames nothing when both names are the same file
            src.unlink()

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_dir(self, path: Path) -> None:
        if sys.platform == "win32":  # a directory cannot be opened there; NTFS journals the rename
            return
        with _naming(path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some network filesystems cannot sync a directory at all
                    raise
            finally:
                os.close(fd)

    def read(self, path: Path, max_bytes: int) -> bytes:
        with _naming(path), _opened(path, os.O_RDONLY) as fd:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise DamagedFile(f"{path} has {size} bytes, more than the {max_bytes} allowed", field="size")
            data = bytearray(size)
            read_all(fd, path, 0, memoryview(data))
            return bytes(data)

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        direct = self._try_direct(path) and offset % PAGE == 0 and _is_aligned(view)
        with _naming(path):
            if direct:
                try:
                    with _opened(path, os.O_RDONLY | DIRECT) as fd:
                        read_direct(fd, path, offset, view)
                        return
                except OSError as error:
                    if error.errno not in _NO_DIRECT:
                        raise
                    self._buffered_dirs.add(path.parent)
            with _opened(path, os.O_RDONLY) as fd:
                read_all(fd, path, offset, view)

    def entries(self, path: Path) -> list[Entry]:
        with os.scandir(path) as entries:
            found = [_entry(item.name, item.stat(follow_symlinks=False)) for item in entries]
        return sorted(found, key=lambda entry: entry.name)

    def stat(self, path: Path) -> Entry:
        return _entry(path.name, path.lstat())

    def free_bytes(self, path: Path) -> int:
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free

    def lock(self, directory: Path) -> Lock:
        path = directory / LOCK_NAME
        with _as_level_error(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)
            try:
                _require_file(fd, path)
                if not _lock_now(fd):
                    holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
                    raise LevelError(f"{directory} is in use by {holder}: stop it, or name another directory")
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                os.ftruncate(fd, 0)
                os.write(fd, f"process {os.getpid()} on {platform.node()} since {since}\n".encode())
            except BaseException:
                os.close(fd)
                raise
        return _FileLock(fd, path)

    def _kind(self, path: Path) -> Kind | None:
        try:
            return self.stat(path).kind
        except FileNotFoundError:
            return None

    def _try_direct(self, path: Path) -> bool:
        return self._direct and path.parent not in self._buffered_dirs

    def _create(self, path: Path, *, direct: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        if direct:
            try:
                return os.open(path, flags | DIRECT, 0o600)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._buffered_dirs.add(path.parent)
                with suppress(FileNotFoundError):  # some filesystems create it before they refuse
                    path.unlink()
        return os.open(path, flags, 0o600)

    def _write_all(self, fd: int, path: Path, views: list[memoryview], offset: int) -> int:
        """Write until nothing is left, whatever the system takes at a time; returns the bytes written."""
        done = 0
        while views:
            try:
                n = self._pwritev(fd, views, offset + done)
            except OSError as error:
                if error.errno not in _NO_DIRECT or not stop_direct(fd):
                    raise
                self._buffered_dirs.add(path.parent)
                continue
            if n == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += n
            while views and n >= len(views[0]):
                n -= len(views.pop(0))
            if n:
                views[0] = views[0][n:]
                if n % PAGE:
                    stop_direct(fd)
        return done
