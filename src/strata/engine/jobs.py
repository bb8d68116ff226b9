"""Carries out the commands about slots that are answered with Done: rows, checkpoints, forks, trims.

One call is one command, done at once on the engine thread. In which order and when is `loop.py`'s concern; what the
operations mean is in `slots.py` (rows, metadata) and `checkpoints.py`.
"""

from __future__ import annotations

import time

from strata.engine.checkpoints import Checkpoints
from strata.engine.chunks import Chunks
from strata.engine.pool_messages import Compact, Resume
from strata.engine.protocol import (
    Apply,
    ApplyCheckpoint,
    Capture,
    CaptureCheckpoint,
    Done,
    Event,
    Fork,
    Hold,
    JobFailed,
    ReleaseCheckpoint,
    Run,
    SlotJob,
    Trim,
    unpack_tokens,
)
from strata.engine.slots import Refusal, Slots

MOVES_BYTES = Capture | Apply | Compact | CaptureCheckpoint | ApplyCheckpoint
"""Jobs that cost more than metadata."""
_LEAVES_SLOT = Capture | Hold
_NO_CHECKPOINTS = "this model's memory needs no checkpoints, or none can be taken of it"


class Jobs:
    """`carry_out` any slot job; `hold` is also used at the positions that a running request asked for."""

    def __init__(self, slots: Slots, checkpoints: Checkpoints | None, chunks: Chunks) -> None:
        self._slots = slots
        self._checkpoints = checkpoints
        self._chunks = chunks

    def carry_out(self, job: SlotJob, running: set[int]) -> Event:
        """The outcome of `job`; `running`: the slots of running requests, which only the loop may change."""
        began = time.perf_counter()
        changed = changed_slot(job)
        try:
            if changed in running:
                refusal: Refusal = f"slot {changed} has a running request"
            elif isinstance(job, Hold):
                return self._hold(job, began)
            else:
                held = self._position(job)
                refusal = self._do(job)
        except ValueError as error:
            return JobFailed(job=job.job, message=str(error))
        if not isinstance(job, CaptureCheckpoint | ReleaseCheckpoint):
            held = self.held(job.target if isinstance(job, Fork) else job.slot)
        seconds = time.perf_counter() - began
        return Done(job=job.job, ok=refusal is None, held=held, seconds=seconds, reason=refusal or "")

    def held(self, slot: int) -> int:
        return self._slots.held[slot] if 0 <= slot < len(self._slots.held) else 0

    def _do(self, job: SlotJob) -> Refusal:
        slots = self._slots
        if self._checkpoints is not None and isinstance(job, Fork | Trim):
            self._checkpoints.forget(changed_slot(job) or 0)
        if isinstance(job, Fork) and job.checkpoint is None:
            return slots.fork(job.source, job.target, job.n)
        if isinstance(job, Trim):
            return slots.trim(job.slot, job.n)
        if isinstance(job, Compact):
            return slots.compact(job.slot, job.start, job.end)
        if isinstance(job, Capture | Apply):
            spans = [self._chunks.view(span) for span in job.spans]
            if isinstance(job, Capture):
                return slots.capture(job.slot, job.start, job.end, spans)
            tokens = unpack_tokens(job.tokens)
            return slots.apply(job.slot, job.start, job.end, job.from_, job.upto, spans, tokens, job.stages)
        return self._do_checkpoint(job)

    def _do_checkpoint(self, job: SlotJob) -> Refusal:
        checkpoints = self._checkpoints
        if checkpoints is None:
            return _NO_CHECKPOINTS
        if isinstance(job, Fork):
            if self._position(job) != job.n:
                return f"checkpoint {job.checkpoint} is not held at {job.n}"
            return checkpoints.fork(job.checkpoint or 0, job.source, job.target)
        if isinstance(job, CaptureCheckpoint):
            return checkpoints.capture(job.checkpoint, job.offset, self._chunks.view(job.span))
        if isinstance(job, ApplyCheckpoint):
            span = self._chunks.view(job.span)
            return checkpoints.apply(job.slot, job.position, job.offset, job.total, span)
        assert isinstance(job, ReleaseCheckpoint), "the other jobs were handled above"
        return checkpoints.release(job.checkpoint)

    def _position(self, job: SlotJob) -> int:
        """The position of the checkpoint that a job names; 0 when it names none that is held."""
        named = job.checkpoint if isinstance(job, CaptureCheckpoint | ReleaseCheckpoint | Fork) else None
        found = self._checkpoints.pending.get(named or 0) if self._checkpoints is not None else None
        return found.position if found is not None else 0

    def _hold(self, job: Hold, began: float) -> Done:
        checkpoint, size, reason = self.hold(job.slot)
        return Done(
            job=job.job,
            ok=checkpoint > 0,
            held=self.held(job.slot),
            seconds=time.perf_counter() - began,
            reason=reason,
            checkpoint=checkpoint,
            payload_bytes=size,
        )

    def hold(self, slot: int) -> tuple[int, int, str]:
        """Checkpoint id (0 when there is none), payload bytes, and why there is none."""
        if self._checkpoints is None:
            return 0, 0, _NO_CHECKPOINTS
        held = self._checkpoints.hold(slot)
        if isinstance(held, str):
            return 0, 0, held
        return held, self._checkpoints.pending[held].payload_bytes, ""


def changed_slot(job: SlotJob) -> int | None:
    """The slot whose contents a job changes; None for one that only reads."""
    if isinstance(job, Fork):
        return job.target
    return job.slot if isinstance(job, Trim | Apply | ApplyCheckpoint) else None


def touched(command: SlotJob | Run | Resume) -> set[int]:
    """What a command uses, for keeping order: slots, and checkpoints as negative numbers."""
    if isinstance(command, CaptureCheckpoint | ReleaseCheckpoint):
        return {-command.checkpoint}
    if isinstance(command, Fork):
        used = {command.source, command.target}
        return used | {-command.checkpoint} if command.checkpoint else used
    return {command.slot}
