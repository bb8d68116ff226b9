"""One thread that runs jobs in the order given, some of them overlapping.

Covers the queue, its end, and jobs in two parts: the first part starts something elsewhere and returns the second,
which waits for it. Up to `at_once` second parts are outstanding while the first parts of the next jobs run; a job in
one part runs when none is. Jobs must not raise; outcomes are the business of whoever gives them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]
Begin = Callable[[], Job]


class JobThread:
    """Starts at once; ends after `close` when everything given before is done, and `at_end` after that."""

    def __init__(self, name: str, *, at_once: int, at_end: Job) -> None:
        self._at_once = at_once
        self._at_end = at_end
        self._jobs: queue.SimpleQueue[tuple[Job | None, Begin | None]] = queue.SimpleQueue()
        self._begun: deque[Job] = deque()  # second parts, oldest first; touched by the thread alone
        self._lock = threading.Lock()  # guards the order of the queue's end
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"JobThread({self._thread.name!r}, {self._jobs.qsize()} waiting, closed={self._closed})"

    @property
    def is_alive(self) -> bool:
        """Whether jobs are still taken and carried out."""
        return self._thread.is_alive() and not self._closed

    def put(self, *, job: Job | None = None, begin: Begin | None = None) -> bool:
        """Queue a job in one part or in two; False when it comes too late."""
        with self._lock:
            if not self._closed:
                self._jobs.put((job, begin))
            return not self._closed

    def close(self, timeout: float | None) -> bool:
        """Take no more jobs, finish those that wait, end the thread; False if it still runs after `timeout` seconds."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put((None, None))
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            while self._begun and (self._jobs.empty() or len(self._begun) >= self._at_once):
                self._begun.popleft()()
            job, begin = self._jobs.get()
            if begin is not None:
                self._begun.append(begin())
            else:
                while self._begun:
                    self._begun.popleft()()
                if job is None:
                    break
                job()
            del job, begin  # or what they hold would stay in use until the next one comes
        self._at_end()
