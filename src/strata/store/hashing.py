"""Digests ahead of the writing thread: while it writes one segment, those that wait are hashed here.

Covers a small pool of threads (xxh3-128 leaves the GIL), started by its first job. It writes nothing, keeps nothing,
and bounds nothing: what waits lies in the arena, which is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from strata.store.format import digest

HASH_THREADS = 1  # a core hashes 10-25 GB/s, several times what a disk writes


class Hasher:
    """Any thread may give it jobs; they start in the order given."""

    def __init__(self, name: str, threads: int = HASH_THREADS) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(threads, f"hasher-{name}")

    def __repr__(self) -> str:
        return f"Hasher({self._name!r})"

    def digests(self, views: Sequence[memoryview]) -> Future[tuple[bytes, ...]]:
        """One xxh3-128 per view; the views are in use until it is done. RuntimeError in it once this is closed."""
        try:
            return self._pool.submit(_digests, views)
        except RuntimeError as error:
            closed: Future[tuple[bytes, ...]] = Future()
            closed.set_exception(error)
            return closed

    def shutdown(self) -> None:
        """Finish the jobs that wait and end the threads."""
        self._pool.shutdown()


def _digests(views: Sequence[memoryview]) -> tuple[bytes, ...]:
    return tuple(digest(view) for view in views)
