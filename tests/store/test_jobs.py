"""The job thread: order, how many second parts are outstanding, and its end."""

from __future__ import annotations

import queue
import threading

from strata.store.jobs import Job, JobThread

WAIT_S = 20.0


def test_jobs_in_one_part_wait_for_those_in_two_and_all_keep_their_order() -> None:
    done: list[str] = []
    outstanding: list[int] = []
    begun = 0

    def begin(name: str) -> Job:
        nonlocal begun
        begun += 1
        outstanding.append(begun)

        def finish() -> None:
            nonlocal begun
            begun -= 1
            done.append(name)

        return finish

    gate = threading.Event()
    thread = JobThread("jobs", at_once=2, at_end=lambda: done.append("end"))
    thread.put(job=lambda: done.append("open") if gate.wait(WAIT_S) else None)
    for name in "abcd":
        thread.put(begin=lambda name=name: begin(name))
    thread.put(job=lambda: done.append(f"alone, {begun} outstanding"))
    thread.put(begin=lambda: begin("e"))
    gate.set()
    assert thread.close(WAIT_S)
    assert done == ["open", "a", "b", "c", "d", "alone, 0 outstanding", "e", "end"]
    assert max(outstanding) == 2


def test_a_second_part_does_not_wait_for_a_job_that_may_never_come() -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    thread = JobThread("jobs", at_once=8, at_end=lambda: None)
    thread.put(begin=lambda: lambda: done.put("a"))
    assert done.get(timeout=WAIT_S) == "a"
    assert thread.close(WAIT_S)


def test_what_comes_after_the_end_is_refused() -> None:
    thread = JobThread("jobs", at_once=1, at_end=lambda: None)
    assert thread.close(WAIT_S)
    assert thread.close(WAIT_S)
    assert not thread.put(job=lambda: None)
