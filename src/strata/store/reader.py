"""The threads that read from one level.

Covers reading and verifying headers and blocks off the event loop. Every job answers with a value, never with an
exception: what was read, or that it is damaged, missing or unreadable. It repairs and quarantines nothing, and decides
no order: blocks may be read several at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from strata.errors import DamagedFile
from strata.store.format import CheckpointHeader, FileHeader, Manifest, SegmentHeader
from strata.store.level import Level
from strata.types import Key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The block lies in the view, and its digest holds."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """The file is there and wrong: quarantine it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """There is no such file."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """The operating system refused; that says nothing about the file."""

    reason: str
    errno: int | None = None


_CLOSED = Unreadable(reason="the reader is closed")

THREADS = 4  # two or three read, which keeps a disk busy, while the others copy and hash

NotRead = Damaged | Missing | Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStatistics:
    """Monotonic."""

    headers: int
    blocks: int
    bytes_read: int
    failures: int
    seconds: float  # summed over the threads


T = TypeVar("T")


class Reader:
    """Jobs start in the order given and may finish in any. The threads exist from the first job on."""

    def __init__(self, level: Level, threads: int = THREADS) -> None:
        self._level = level
        self._threads = threads
        self._lock = threading.Lock()  # guards everything below
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._headers = self._blocks = self._bytes = self._failures = 0
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"Reader({self._level.name!r}, {self.statistics()})"

    def statistics(self) -> ReaderStatistics:
        with self._lock:
            return ReaderStatistics(
                headers=self._headers,
                blocks=self._blocks,
                bytes_read=self._bytes,
                failures=self._failures,
                seconds=self._seconds,
            )

    def headers(self, files: Sequence[tuple[Key, int]]) -> Future[list[SegmentHeader | NotRead]]:
        """The headers of these segment files, each named by key and stage, in one job (see `Level.read_header`).

        A job costs as much as a header: a plan of many segments asks for several at a time.
        """

        def job() -> list[SegmentHeader | NotRead]:
            return [self._header(partial(self._level.read_header, key, stage)) for key, stage in files]

        return self._submit(job, [_CLOSED for _ in files])

    def checkpoint_header(self, key: Key) -> Future[CheckpointHeader | NotRead]:
        """The header of a checkpoint file (see `Level.read_checkpoint_header`)."""
        return self._submit(lambda: self._header(lambda: self._level.read_checkpoint_header(key)), _CLOSED)

    def _header(self, read: Callable[[], T]) -> T | NotRead:
        def work() -> T:
            header = read()
            with self._lock:
                self._headers += 1
            return header

        return self._attempt(work)

    def manifest(self, serial: int) -> Future[Manifest | NotRead]:
        """A manifest (see `Level.read_manifest`)."""
        return self._submit(lambda: self._attempt(lambda: self._level.read_manifest(serial)), _CLOSED)

    def block(self, header: FileHeader, index: int, view: memoryview) -> Future[Loaded | NotRead]:
        """Read and verify one block of a file (see `Level.read_block`). The view must stay alive until it is done."""

        def work() -> Loaded:
            started = time.monotonic()
            self._level.read_block(header, index, view)
            with self._lock:
                self._blocks += 1
                self._bytes += header.blocks[index].length
            return Loaded(seconds=time.monotonic() - started)

        return self._submit(lambda: self._attempt(work), _CLOSED)

    def close(self) -> None:
        """Finish the jobs that wait and end the threads."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _attempt(self, work: Callable[[], T]) -> T | NotRead:
        """What `work` gives, or why it gives nothing; counted. The seam of these threads."""
        started = time.monotonic()
        failed = 0
        try:
            return work()
        except Exception as error:  # whatever happens is an outcome
            failed = 1
            return not_read(error)
        finally:
            with self._lock:
                self._failures += failed
                self._seconds += time.monotonic() - started

    def _submit(self, job: Callable[[], T], closed: T) -> Future[T]:
        """`closed`: the outcome once the threads have ended."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # the view is written to until the job is done
        with self._lock:
            if self._closed:
                future.set_result(closed)
                return future
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, f"reader-{self._level.name}")
            self._pool.submit(lambda: future.set_result(job()))
        return future


def not_read(error: Exception) -> NotRead:
    """What an exception of `Level.read_header` or `Level.read_block` says about the file."""
    if isinstance(error, DamagedFile):
        return Damaged(reason=error.message)
    if isinstance(error, FileNotFoundError):
        return Missing(reason=str(error))
    if isinstance(error, OSError):
        return Unreadable(reason=str(error), errno=error.errno)
    log.error("a job of the reader broke", exc_info=error)
    return Unreadable(reason=repr(error))
