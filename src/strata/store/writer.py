"""The thread that writes to one level.

Covers the order of jobs, the files that belong to one ticket (one park, or one entry taken from another level), and
outcomes: every job answers with a value, never with an exception. A failure (a full disk, an I/O error) is counted and
shown in `state`; the next job tries again. Hashing ahead, filling the device and waiting for it happen on small pools
beside the thread.

It does not bound how much waits (the payloads lie in the arena, which is bounded), and decides nothing: what to write
and what to drop is the caller's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from strata.errors import DamagedFile, StrataError
from strata.store.account import Vanished
from strata.store.content import PendingFile
from strata.store.format import CheckpointHeader, FileHeader, Manifest, SegmentHeader
from strata.store.hashing import Hasher
from strata.store.jobs import Begin, Job, JobThread
from strata.store.level import Level
from strata.store.names import checkpoint_path, segment_path
from strata.store.outcomes import (
    Abandoned,
    Adopted,
    Committed,
    Dropped,
    Failed,
    Quarantined,
    WriterStatistics,
    Written,
)
from strata.store.reader import not_read
from strata.store.tickets import Ticket
from strata.types import Key

__all__ = [
    "OK",
    "Abandoned",
    "Adopted",
    "Committed",
    "Dropped",
    "Failed",
    "Quarantined",
    "Writer",
    "WriterStatistics",
    "Written",
]

log = logging.getLogger(__name__)

OK = "ok"
WRITES_AT_ONCE = 3  # while one is set up or torn down, the device has others
SYNC_THREADS = 8  # they only wait for the device, which joins what waits at the same time


T = TypeVar("T")


class Writer:
    """Jobs run in the order they were given. Every method but `flush` and `close` returns at once.

    A ticket is any number that the caller does not use for another park; it ends with `commit` or `abandon`.
    """

    def __init__(self, level: Level) -> None:
        self._level = level
        self._hasher = Hasher(level.name)
        self._syncers = ThreadPoolExecutor(SYNC_THREADS, f"syncer-{level.name}")
        self._fillers = ThreadPoolExecutor(WRITES_AT_ONCE, f"filler-{level.name}")
        self._tickets: dict[int, Ticket] = {}  # changed by the thread alone, like the next five
        self._state = OK
        self.free_bytes = level.volume.free_bytes()
        """What the volume had left for this user when the last job ended."""
        self._failures = 0
        self._seconds = 0.0
        self._hash_wait_s = 0.0
        self._lock = threading.Lock()  # guards the next two
        self._waiting_jobs = 0
        self._waiting_bytes = 0
        self._thread = JobThread(f"writer-{level.name}", at_once=2 * WRITES_AT_ONCE, at_end=self._end)

    def __repr__(self) -> str:
        return f"Writer({self._level.name!r}, {self._state!r}, {self.statistics()})"

    @property
    def state(self) -> str:
        """`OK`, or "failing: <reason>" from a failed write until the next one that succeeds."""
        return self._state

    @property
    def is_alive(self) -> bool:
        """Whether jobs are still carried out."""
        return self._thread.is_alive

    def statistics(self) -> WriterStatistics:
        counts = self._level.counts
        with self._lock:
            return WriterStatistics(
                bytes_written=counts.bytes_written,
                files_written=counts.files_written,
                fsyncs=counts.fsyncs,
                failures=self._failures,
                seconds=self._seconds,
                hash_wait_s=self._hash_wait_s,
                waiting_jobs=self._waiting_jobs,
                waiting_bytes=self._waiting_bytes,
            )

    def write_segment(
        self, ticket: int, header: SegmentHeader, payloads: tuple[memoryview, ...]
    ) -> Future[Written | Failed]:
        """Write one stage of a segment for `ticket` (see `Level.write_segment`). The payloads are in use until done.

        A header without digests gets them from the hasher, which begins at once.
        """
        return self._write(ticket, header, payloads)

    def write_checkpoint(
        self, ticket: int, header: CheckpointHeader, payloads: tuple[memoryview, ...]
    ) -> Future[Written | Failed]:
        """Write a checkpoint for `ticket`; all of its blocks lie in memory until it is done (see `write_segment`)."""
        return self._write(ticket, header, payloads)

    def write_block(
        self, ticket: int, header: CheckpointHeader, index: int, payload: memoryview
    ) -> Future[Written | Failed]:
        """Write one block of a checkpoint, the next one in order; with the last one it is written.

        The payload is in use until done. A ticket of which one is not whole cannot be committed.
        """
        digests = self._hasher.digests([payload[: header.blocks[index].length]])

        def work() -> Written | Failed:
            entry = self._tickets.setdefault(ticket, Ticket())
            return entry.grow(self._level, header, index, payload, *self._await(digests))

        return self._submit(work, partial(self._fail, ticket), proves_disk=True)

    def join(self, ticket: int, other: int) -> Future[Written | Failed]:
        """Let `ticket` have the files of `other`, which ends. One that failed costs its own files alone."""

        def work() -> Written | Failed:
            joined = self._tickets.pop(other, Ticket())
            return self._tickets.setdefault(ticket, Ticket()).join(self._level, joined)

        return self._submit(work)

    def _write(self, ticket: int, header: FileHeader, payloads: tuple[memoryview, ...]) -> Future[Written | Failed]:
        blocks = zip(header.blocks, payloads, strict=False)  # the level refuses what does not match
        views = [payload[: block.length] for block, payload in blocks]
        digests = None if header.has_digests else self._hasher.digests(views)

        def begin() -> Callable[[], Written | Failed]:
            entry = self._tickets.setdefault(ticket, Ticket())
            ready = header if digests is None else header.with_digests(self._await(digests))
            if entry.failed is not None:
                return partial(self._fail, ticket, entry.failed)
            entry.keys.append(header.key)
            written = self._level.begin_segment(ready, payloads, self._fillers)

            def finish() -> Written | Failed:
                try:
                    entry.files.append(written())
                except OSError:
                    if entry.failed is None:
                        raise
                if entry.failed is not None:  # by one before this one, while this one was on its way
                    return self._fail(ticket, entry.failed)
                return Written(bytes=entry.files[-1].size)

            return finish

        n_bytes = sum(block.length for block in header.blocks)
        return self._submit_write(begin, partial(self._fail, ticket), n_bytes)

    def adopt_segment(
        self, ticket: int, giver: Level, key: Key, stage: int, *, may_link: bool
    ) -> Future[Adopted | Failed]:
        """Take one stage of a segment from another level for `ticket` (see `Level.adopt_segment`).

        When the giver's file is at fault, the ticket fails with `giver` saying how, and the state of this level stays.
        """
        take = partial(self._level.adopt_segment, giver, key, stage, may_link=may_link)
        return self._adopt(ticket, key, giver.root / segment_path(key, stage), take, is_needed=True)

    def adopt_checkpoint(self, ticket: int, giver: Level, key: Key, *, may_link: bool) -> Future[Adopted | Failed]:
        """`adopt_segment` for a checkpoint; but what the giver cannot give does not fail the ticket."""
        take = partial(self._level.adopt_checkpoint, giver, key, may_link=may_link)
        return self._adopt(ticket, key, giver.root / checkpoint_path(key), take, is_needed=False)

    def _adopt(
        self, ticket: int, key: Key, source: Path, take: Callable[[], PendingFile], *, is_needed: bool
    ) -> Future[Adopted | Failed]:
        def work() -> Adopted | Failed:
            entry = self._tickets.setdefault(ticket, Ticket())
            if entry.failed is not None:
                return entry.failed
            entry.keys.append(key)
            try:
                file = take()
            except (DamagedFile, OSError) as error:
                if isinstance(error, OSError) and str(error.filename) != str(source):
                    raise  # it is this level that failed
                failed = replace(_failed(error), giver=not_read(error))
                return self._fail(ticket, failed) if is_needed else failed
            entry.files.append(file)
            return Adopted(bytes=file.size, linked=file.linked)

        return self._submit(work, partial(self._fail, ticket))

    def commit(self, ticket: int, manifest: Manifest, *, ids_only: bool = False) -> Future[Committed | Failed]:
        """Make the ticket's files durable, then the manifest. Fails if one of them failed. Ends the ticket.

        Fails too when a file that was there before is not any more, unless `ids_only`.
        """
        entry = Ticket()

        def work() -> Committed | Failed:
            nonlocal entry
            started = time.monotonic()
            entry = self._tickets.pop(ticket, entry)
            if entry.failed is not None:
                return entry.failed
            if entry.growing:
                raise ValueError("a file of it is not whole")
            self._level.publish(entry.files, self._syncers)
            if not ids_only:
                self._level.require(manifest)
            size = self._level.put_manifest(manifest)
            return Committed(manifest_bytes=size, seconds=time.monotonic() - started)

        def undo(failed: Failed) -> Failed:
            self._level.discard(entry.files)
            return replace(failed, left=tuple(dict.fromkeys(entry.keys)))

        return self._submit(work, undo, proves_disk=True)

    def abandon(self, ticket: int) -> Future[Abandoned | Failed]:
        """Remove the ticket's temporary files. Ends the ticket."""

        def work() -> Abandoned:
            self._level.discard(self._tickets.pop(ticket, Ticket()).files)
            return Abandoned()

        return self._submit(work)

    def drop(self, serials: Sequence[int], keys: Sequence[Key]) -> Future[Dropped | Failed]:
        """Remove manifests, then segments and checkpoints, durably (see `Level.drop`)."""
        return self._submit(lambda: Dropped(bytes=self._level.drop(serials, keys, self._syncers)))

    def remove_files(self, paths: Sequence[str]) -> Future[Dropped | Failed]:
        """Remove files that no manifest names (see `Level.remove_files`)."""
        return self._submit(lambda: Dropped(bytes=self._level.remove_files(paths)))

    def quarantine(self, key: Key, stage: int) -> Future[Quarantined | Failed]:
        """Set a damaged segment file aside."""
        return self._submit(lambda: Quarantined(found=self._level.quarantine_segment(key, stage)))

    def quarantine_checkpoint(self, key: Key) -> Future[Quarantined | Failed]:
        """Set a damaged checkpoint file aside."""
        return self._submit(lambda: Quarantined(found=self._level.quarantine_checkpoint(key)))

    def quarantine_manifest(self, serial: int) -> Future[Quarantined | Failed]:
        """Set a damaged manifest aside."""
        return self._submit(lambda: Quarantined(found=self._level.quarantine_manifest(serial)))

    def probe(self) -> Future[Failed | None]:
        """Behind the jobs that wait: see how much the volume has left and, after a failure, whether it takes a file."""
        return self._submit(lambda: None if self._state == OK else self._level.volume.probe(), proves_disk=True)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every job given so far is done; False when that took longer than `timeout` seconds."""
        try:
            self._submit(lambda: None).result(timeout)
        except TimeoutError:
            return False
        return True

    def close(self, timeout: float | None = None) -> bool:
        """Take no more jobs, finish those that wait, end the thread; False if it still runs after `timeout` seconds."""
        return self._thread.close(timeout)

    def _fail(self, ticket: int, failed: Failed) -> Failed:
        """Nothing of this ticket can be committed any more."""
        entry = self._tickets[ticket]
        self._level.discard(entry.files)
        entry.files.clear()
        entry.failed = failed
        return failed

    def _await(self, digests: Future[tuple[bytes, ...]]) -> tuple[bytes, ...]:
        started = time.monotonic()
        try:
            return digests.result()
        finally:
            self._hash_wait_s += time.monotonic() - started

    def _submit(
        self,
        work: Callable[[], T | Failed],
        undo: Callable[[Failed], Failed] | None = None,
        *,
        proves_disk: bool = False,
    ) -> Future[T | Failed]:
        """Queue `work`. When it raises, `undo` cleans up and completes the outcome."""
        future: Future[T | Failed] = Future()
        return self._queue(future, 0, job=partial(self._conclude, future, 0, work, undo, proves_disk=proves_disk))

    def _submit_write(
        self, begin: Callable[[], Callable[[], T | Failed]], undo: Callable[[Failed], Failed], n_bytes: int
    ) -> Future[T | Failed]:
        """Queue a job in two parts (see `JobThread`): what `begin` returns gives the outcome."""
        future: Future[T | Failed] = Future()

        def first() -> Job:
            started = time.monotonic()
            work: Callable[[], T | Failed]
            try:
                work = begin()
            except Exception as error:  # told in `_conclude`, when the writes before this one are done
                work = partial(_raise, error)
            self._seconds += time.monotonic() - started
            return partial(self._conclude, future, n_bytes, work, undo, proves_disk=True)

        return self._queue(future, n_bytes, begin=first)

    def _queue(
        self, future: Future[T | Failed], n_bytes: int, *, job: Job | None = None, begin: Begin | None = None
    ) -> Future[T | Failed]:
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it: files are at stake
        self._wait_more(1, n_bytes)
        if not self._thread.put(job=job, begin=begin):
            self._wait_more(-1, -n_bytes)
            future.set_result(Failed(reason="the writer is closed"))
        return future

    def _wait_more(self, jobs: int, n_bytes: int) -> None:
        with self._lock:
            self._waiting_jobs += jobs
            self._waiting_bytes += n_bytes

    def _conclude(
        self,
        future: Future[T | Failed],
        n_bytes: int,
        work: Callable[[], T | Failed],
        undo: Callable[[Failed], Failed] | None,
        *,
        proves_disk: bool,
    ) -> None:
        started, before, failed = time.monotonic(), self._state, None
        outcome: T | Failed
        try:
            outcome = work()
        except Exception as error:  # the seam of this thread: whatever happens is an outcome
            failed = _failed(error)
            outcome = undo(failed) if undo else failed
        if failed is not None:
            self._failures += 1
            self._state = f"failing: {failed.reason}"
        elif proves_disk and not isinstance(outcome, Failed):
            self._state = OK
        self._seconds += time.monotonic() - started
        with suppress(OSError):
            self.free_bytes = self._level.volume.free_bytes()
        self._wait_more(-1, -n_bytes)
        if self._state != before:
            log.warning("writer of the %s level: %s", self._level.name, self._state)
        future.set_result(outcome)

    def _end(self) -> None:
        for ticket in self._tickets.values():
            self._level.discard(ticket.files)
        for pool in (self._hasher, self._fillers, self._syncers):
            pool.shutdown()


def _raise(error: Exception) -> NoReturn:
    raise error


def _failed(error: Exception) -> Failed:
    if isinstance(error, OSError):
        return Failed(reason=str(error), errno=error.errno, vanished=isinstance(error, Vanished))
    if isinstance(error, StrataError):
        cause = error.__cause__
        return Failed(reason=error.message, errno=cause.errno if isinstance(cause, OSError) else None)
    log.error("a job of the writer broke", exc_info=error)
    return Failed(reason=repr(error))
