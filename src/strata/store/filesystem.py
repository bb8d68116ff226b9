"""What a level asks of a disk: the contract that `fs.Disk` fulfils, and in tests a disk that loses power.

Covers the handful of operations and what each promises about durability. It does nothing.

POSIX promises neither that a rename reaches the disk after the data it names nor that it reaches it at all: to publish
a file, `write` it under another name, `fsync` it, `replace`, then `sync_dir`, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

LOCK_NAME = "strata.lock"

Kind = Literal["file", "dir", "link", "other"]
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One directory entry, links not followed. `allocated_bytes` is what `du` counts.

    `version`: another one once the file was replaced or written to.
    """

    name: str
    kind: Kind
    size: int
    allocated_bytes: int
    version: tuple[int, ...] = ()


class Lock(Protocol):
    """An exclusive lock; it also ends with the process that holds it, however that ends."""

    def release(self) -> None: ...

    def is_in_place(self) -> bool:
        """Whether the directory still is the one that was locked; False when it was removed or replaced."""


class Filesystem(Protocol):
    """What a level asks of a disk. Everything raises OSError, with the path, when the disk refuses."""

    def make_dir(self, path: Path, *, durable: bool = True) -> bool:
        """Make `path` and its missing parents, private and durable; False when it is there already.

        LevelError when it cannot serve as a directory. `durable` False leaves the parent's `sync_dir` to the caller.
        """

    def write(self, path: Path, buffers: Iterable[Buffer]) -> int:
        """Create `path`, private, from the buffers; returns its size. FileExistsError if it exists. Not durable yet.

        From an iterator the buffers are written one by one: each may be reused when it is asked for the next. What it
        raises leaves no file behind.
        """

    def write_at(self, path: Path, offset: int, view: memoryview) -> None:
        """Write `view` into a file that is there, over what is at `offset` or behind its end. Not durable yet."""

    def link(self, src: Path, dst: Path) -> None:
        """Give a file a second name. Durable after `sync_dir`. OSError when it cannot have one: copy it instead."""

    def fsync(self, path: Path) -> None:
        """Return once the file's content is on the device."""

    def replace(self, src: Path, dst: Path) -> None:
        """Rename, over an existing file too, and over another name of the same file. Durable after `sync_dir`."""

    def unlink(self, path: Path) -> None:
        """Remove a name. Durable after `sync_dir`."""

    def sync_dir(self, path: Path) -> None:
        """Return once the names in the directory are on the device."""

    def read(self, path: Path, max_bytes: int) -> bytes:
        """The whole file. DamagedFile when it is larger than `max_bytes` (before anything is allocated) or no file."""

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`. DamagedFile when the file ends before, or is no file."""

    def entries(self, path: Path) -> list[Entry]:
        """The entries of a directory, by name."""

    def stat(self, path: Path) -> Entry:
        """The entry of one path; FileNotFoundError when there is none."""

    def free_bytes(self, path: Path) -> int:
        """Free space for this user on the volume that `path` is on, or will be on once it exists."""

    def lock(self, directory: Path) -> Lock:
        """Lock the directory for this process. LevelError naming the holder when another one has it."""
