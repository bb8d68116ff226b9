"""The volume that a directory lies on: what it has left, whether it takes a file, and whether another shares it.

It knows no level and keeps no state.
"""

from __future__ import annotations

import os
from pathlib import Path

from strata.store.filesystem import Filesystem
from strata.store.names import TEMPORARY
from strata.types import PAGE


class Volume:
    """Of the directory `root`."""

    def __init__(self, fs: Filesystem, root: Path) -> None:
        self._fs = fs
        self._root = root

    def __repr__(self) -> str:
        return f"Volume(of {str(self._root)!r})"

    def free_bytes(self) -> int:
        """Space left for this user."""
        return self._fs.free_bytes(self._root)

    def is_that_of(self, other: Volume) -> bool:
        """Whether both are one, so that a file can be in both without a copy; False when a directory is gone."""
        try:
            mine, theirs = (volume._fs.stat(volume._root).version[:1] for volume in (self, other))
        except OSError:
            return False
        return mine == theirs

    def probe(self) -> None:
        """Make a small file durable and remove it; raises what that raises. The directory is made if it is gone."""
        path = self._root / f"probe.{os.getpid()}{TEMPORARY}"
        self._fs.make_dir(self._root)
        try:
            self._fs.write(path, [bytes(PAGE)])
            self._fs.fsync(path)
        finally:
            if any(entry.name == path.name for entry in self._fs.entries(self._root)):
                self._fs.unlink(path)
