"""What the files of one level take on disk, and what was done to the disk: plain counts.

Covers arithmetic only; `level.py` says what happened, after it did. A file with a second name in another level counts
in both, as `du` of either directory does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WriteCounts:
    """Monotonic counts of what a Level did to the disk; kept by the writing thread, read by any."""

    bytes_written: int = 0  # a linked file adds nothing
    files_written: int = 0
    files_linked: int = 0
    fsyncs: int = 0


class Vanished(FileNotFoundError):
    """Someone removed files of a level, or all of it, while it was in use. The account is right again."""


class Account:
    """What each file takes on disk. The one place where `used_bytes` changes."""

    def __init__(self, files: dict[str, int]) -> None:
        self._files = files
        self.used_bytes = sum(files.values())

    def __repr__(self) -> str:
        return f"Account({len(self._files)} files, {self.used_bytes} bytes)"

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def of(self, path: str) -> int:
        return self._files.get(path, 0)

    def set(self, path: str, allocated_bytes: int) -> None:
        self.used_bytes += allocated_bytes - self._files.get(path, 0)
        self._files[path] = allocated_bytes

    def drop(self, path: str) -> int:
        """Forget a file; returns what it took."""
        allocated = self._files.pop(path, 0)
        self.used_bytes -= allocated
        return allocated
