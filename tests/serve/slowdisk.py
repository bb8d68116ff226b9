"""A real disk that a test can hold back, or make fail, at any read or write."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.serve.workbench import LIMIT_S

from strata.store.filesystem import Buffer
from strata.store.fs import Disk


class SlowDisk(Disk):
    """A disk that holds its reads or writes back, or fails them, as long as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[str, Path], bool] = lambda _, __: False
        self._open = {"read": threading.Event(), "write": threading.Event()}
        self.waiting = {"read": 0, "write": 0}
        for gate in self._open.values():
            gate.set()

    def _pass(self, kind: str, path: Path) -> None:
        self.waiting[kind] += 1
        assert self._open[kind].wait(LIMIT_S)
        self.waiting[kind] -= 1
        if self.fails(kind, path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def write(self, path: Path, buffers: Sequence[Buffer]) -> int:
        self._pass("write", path)
        return super().write(path, buffers)

    def write_at(self, path: Path, offset: int, view: memoryview) -> None:
        self._pass("write", path)
        super().write_at(path, offset, view)

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        self._pass("read", path)
        super().read_into(path, offset, view)

    @contextmanager
    def held(self, kind: str) -> Iterator[None]:
        """Nothing of this kind goes on meanwhile."""
        self._open[kind].clear()
        try:
            yield
        finally:
            self._open[kind].set()
