"""The engine thread: takes commands, moves blocks, runs one decode step after the other.

One turn of the loop: receive what has arrived (waiting only when there is nothing else to do), carry out queued slot
commands (any number of metadata operations; captures and applies until the stall budget is used), then one step, whose
rows the agenda plans (`turns.py`). A step that reads is stopped when a request is cancelled; one that finds no free
cells makes requests give way (`pausing.py`). The events of a step leave in one write. Commands of one slot keep their
order; those of others may pass. Prompts are prepared elsewhere (`worker.py`); what the commands do is `jobs.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from strata.engine.chunks import Chunks
from strata.engine.jobs import MOVES_BYTES, Jobs, touched
from strata.engine.llama import Sampler, last_errors
from strata.engine.pausing import Pauses
from strata.engine.pool_messages import POOL_IS_FULL, Resume
from strata.engine.protocol import (
    Cancel,
    Command,
    Delta,
    Event,
    Held,
    Progress,
    Run,
    RunFailed,
    Shutdown,
    SlotJob,
    unpack_tokens,
)
from strata.engine.request import Request
from strata.engine.selftest import is_cuttable
from strata.engine.startup import Served
from strata.engine.steps import StepClock
from strata.engine.turns import Part, Turns, knobs_of

SlotCommand = Run | Resume | SlotJob
Send = Callable[[Sequence[Event]], None]

# While a slot writes, a step moves one block, or several small ones: that alone takes about a millisecond, and what is
# done with it elsewhere (hashing, the disk) takes the same cores (DESIGN §5.8: 5 ms at most; see bench-park) ...
_STALL_WRITING_S = 0.0005
_STALL_READING_S = 0.25  # ... and for so long while others only read: their steps take seconds on a CPU
_NO_FREE_CELLS = 1  # llama_decode's codes; nothing was changed then ...
_STOPPED = 2  # ... and here what was computed last was taken back


class Loop:
    """Owns every call to the context of `served`. `run` returns after Shutdown."""

    def __init__(self, served: Served, chunks: Chunks, inbox: queue.SimpleQueue[Command], send: Send) -> None:
        self._context = served.context
        self._vocabulary = served.model.vocabulary
        self._slots = served.slots
        self._takes_checkpoints = served.checkpoints is not None
        self._can_stop = is_cuttable(served.model)
        self._stoppable: frozenset[int] = frozenset()  # requests that read in the running step, if it may be stopped
        self._was_stopped = False  # the last step that read was: the next one is not, for the sake of others
        self._cancels_told = self._cancels_taken = 0  # of how many `interrupt` told, and how many have arrived
        self._turns = Turns(
            knobs_of(served.settings),
            full=served.settings.read_chunk,
            rows=served.context.ubatch,
            token_s=served.token_s / 2,  # the first chunk may be too long, not too short: a short read is slow
            stoppable=self._can_stop,
        )
        self._jobs = Jobs(served.slots, served.checkpoints, chunks)
        self._clock = StepClock()
        self._inbox = inbox
        self._send = send
        self._events: list[Event] = []
        self._waiting: list[SlotCommand] = []
        self._active: list[Request] = []  # in order of arrival
        self._ended = False  # a request has, since events were sent
        self._pauses = Pauses(served.slots)
        self._closing = False

    def run(self) -> None:
        while not self._closing:
            self._receive()
            counts = not self._waiting
            self._work()
            self._flush()
            if self._active and not self._pauses.stalled:
                rows = self._step()
                if counts:
                    self._clock.end(rows)
                self._clock.begin()
                self._flush()

    def _flush(self) -> None:
        if self._ended:
            self._events.append(self._clock.counts())
            self._ended = False
        if self._events:
            self._send(self._events)
            self._events = []

    # --------------------------------------------------------------------------------------------------------- commands

    def _receive(self) -> None:
        wait = not self._waiting and (not self._active or self._pauses.stalled)
        while wait or not self._inbox.empty():
            command = self._inbox.get()
            wait = False
            if isinstance(command, Shutdown):
                self._closing = True
            elif isinstance(command, Cancel):
                self._cancel(command.request)
            elif isinstance(command, SlotCommand):
                self._waiting.append(command)

    def _cancel(self, number: int) -> None:
        self._cancels_taken += 1
        for request in [*self._active, *self._pauses.waiting]:
            if request.number == number:
                self._finish(request, "cancelled")
                return
        for command in self._waiting:
            if isinstance(command, Run) and command.request == number:
                self._waiting.remove(command)
                request = Request(command, self._slots.limit)
                self._events.append(request.finished("cancelled", self._jobs.held(command.slot)))
                return

    def _work(self) -> None:
        """Carry out what waits, in order per slot; blocks only until the stall budget is used (at least one)."""
        kept: list[SlotCommand] = []
        blocked: set[int] = set()
        writing = any(request.is_writing for request in self._active)
        ends = time.perf_counter() + (_STALL_WRITING_S if writing else _STALL_READING_S)
        moved = False
        for command in self._waiting:
            used = touched(command)
            is_block = isinstance(command, MOVES_BYTES)
            if used & blocked or (is_block and moved and time.perf_counter() > ends):
                kept.append(command)
                blocked |= used
                continue
            moved = moved or is_block
            self._pauses.stalled = False
            if isinstance(command, Run):
                self._start(command)
            elif isinstance(command, Resume):
                self._resume(command)
            else:
                self._events.append(self._jobs.carry_out(command, {request.slot for request in self._active}))
            if is_block:
                self._flush()  # whoever waits for it can go on, and send another, while the next one is moved
        self._waiting = kept

    # --------------------------------------------------------------------------------------------------------- requests

    def _start(self, command: Run) -> None:
        kind, problem = "internal", self._misuse(command)
        if problem is None:
            kind, problem = "state", self._unready(command)
        if problem is not None:
            held = self._jobs.held(command.slot)
            self._events.append(RunFailed(request=command.request, kind=kind, message=problem, held=held))
            return
        request = Request(command, self._slots.limit)
        if not self._takes_checkpoints:
            request.checkpoints = frozenset()  # they would only cut the chunks
        request.sampler = Sampler(self._vocabulary, command.sampling, request.tokens)
        self._active.append(request)
        self._hold_if_asked(request)

    def _resume(self, command: Resume) -> None:
        request = self._pauses.find(command.request)
        if request is None:  # cancelled meanwhile
            return
        problem = self._unready(command)
        if problem is None and not command.keep < len(request.tokens):
            problem = f"keep {command.keep} must be less than the {len(request.tokens)} tokens of the request"
        if problem is not None:
            self._fail(request, problem, kind="state")
            return
        self._pauses.waiting.remove(request)
        request.resume(command.keep)
        self._active.append(request)
        self._active.sort(key=lambda request: request.number)

    def _misuse(self, command: Run) -> str | None:
        """What no caller should send; None when it is fine."""
        tokens = unpack_tokens(command.tokens)
        if not 0 <= command.slot < len(self._slots.held):
            return f"slot {command.slot} does not exist"
        if not 0 <= command.keep < len(tokens):
            return f"keep {command.keep} must be less than the {len(tokens)} prompt tokens"
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary.n_tokens:
            return f"token ids must lie in [0, {self._vocabulary.n_tokens})"
        if any(not max(command.keep, 1) <= position <= len(tokens) for position in command.checkpoints):
            return f"checkpoints {command.checkpoints} must lie in [{max(command.keep, 1)}, {len(tokens)}]"
        if len(tokens) > min(command.limit, self._slots.limit):
            return f"{len(tokens)} prompt tokens exceed the limit of {min(command.limit, self._slots.limit)}"
        return None

    def _unready(self, command: Run | Resume) -> str | None:
        """Why the slot cannot take this request now; None when it holds exactly `keep` tokens."""
        if any(request.slot == command.slot for request in self._active):
            return f"slot {command.slot} has a running request"
        return self._slots.trim(command.slot, command.keep)

    def _hold_if_asked(self, request: Request) -> None:
        """At a position where a checkpoint was asked for: hold one."""
        if self._jobs.held(request.slot) in request.checkpoints:
            self._hold(request)

    def _hold(self, request: Request) -> None:
        if self._takes_checkpoints:
            checkpoint, size, reason = self._jobs.hold(request.slot)
            held = Held(
                request=request.number,
                position=self._jobs.held(request.slot),
                checkpoint=checkpoint,
                payload_bytes=size,
                reason=reason,
            )
            self._events.append(held)

    def _finish(self, request: Request, reason: str) -> None:
        self._drop(request)
        if request.hold_end:
            self._hold(request)
        self._events.append(request.finished(reason, self._jobs.held(request.slot)))

    def _fail(self, request: Request, message: str, *, kind: str = "decode") -> None:
        self._drop(request)
        held = self._jobs.held(request.slot)
        self._events.append(RunFailed(request=request.number, kind=kind, message=message, held=held))

    def _drop(self, request: Request) -> None:
        self._pauses.stalled = False  # its cells may be free soon, and nobody may be left to say so
        (self._pauses.waiting if request in self._pauses.waiting else self._active).remove(request)
        if request.sampler is not None:
            request.sampler.close()
        self._ended = True

    # ------------------------------------------------------------------------------------------------------------- step

    def _step(self) -> int:
        """One decode: what the agenda plans. Returns its rows."""
        plan = self._turns.plan(self._active, self._jobs.held)
        for request, _ in plan.parts:
            request.begin_reading()
        writing = sum(request.is_writing for request in self._active)
        began = time.perf_counter()
        done = self._decode(plan.parts)
        (self._turns.done if done else self._turns.spent)(plan, time.perf_counter() - began, writing)
        return sum(n for _, n in plan.parts)

    def interrupt(self, number: int) -> None:
        """A request is cancelled: stop a step that reads. From one other thread, before it sends the Cancel.

        Others who read in it lose what it has done so far, but never twice in a row.
        """
        self._cancels_told += 1
        if number in self._stoppable or (self._stoppable and not self._was_stopped):
            self._context.stop[0] = 1

    def _decode(self, parts: Sequence[Part]) -> bool:
        """Decode `parts`; False when nothing was done. When it failed: without the youngest (pool full), or singly."""
        rows = self._fill(parts)
        self._context.stop[0] = 0  # before anybody may set it for this step
        if self._can_stop and not parts[-1][0].is_writing:  # those who read come last
            self._stoppable = frozenset(request.number for request, _ in parts if not request.is_writing)
        if self._cancels_told > self._cancels_taken:  # too early for `interrupt`, too late for `_receive`
            self._stoppable = frozenset()
            return False
        code = self._clock.inside(partial(self._context.decode, rows))
        self._stoppable = frozenset()
        if code in (0, _STOPPED) and not parts[-1][0].is_writing:
            self._was_stopped = code == _STOPPED
        if code == 0:
            self._advance(parts)
            return True
        message = last_errors()
        for request, _ in parts:
            self._slots.repair(request.slot)
        if code == _STOPPED:  # the next step does again what the others lost
            return False
        if code == _NO_FREE_CELLS:
            return self._give_way(parts)
        if len(parts) == 1:
            self._fail(parts[0][0], f"llama.cpp could not decode (code {code}) {message}".rstrip())
            return True
        for part in parts:
            if part[0] in self._active:  # it may have given way to one before it
                self._decode([part])
        return True

    def _give_way(self, parts: Sequence[Part]) -> bool:
        """The pool is full: the youngest pauses, and the others are decoded if there is room then."""
        youngest = self._pauses.gives_way(self._active)
        if youngest is None:
            return False
        if self._pauses.is_hopeless(youngest):
            self._fail(youngest, POOL_IS_FULL)
            return False
        self._active.remove(youngest)
        self._events.append(self._pauses.pause(youngest))
        rest = [part for part in parts if part[0] is not youngest]
        return bool(rest) and self._decode(rest)

    def _fill(self, parts: Sequence[Part]) -> int:
        """Write the batch; returns its rows."""
        batch, row = self._context, 0
        for request, n in parts:
            held = self._jobs.held(request.slot)
            end = row + n
            if request.is_writing:
                batch.token[row], batch.position[row] = request.last, held
                batch.sequence[row], batch.want[row] = request.slot, 1
            else:
                batch.token[row:end] = request.tokens[held : held + n]
                batch.position[row:end] = np.arange(held, held + n)
                batch.sequence[row:end] = request.slot
                batch.want[row:end] = 0
                batch.want[end - 1] = held + n == len(request.tokens)
            row = end
        return row

    def _advance(self, parts: Sequence[Part]) -> None:
        """After a successful decode: count what is held now, sample where a row ended a prompt or wrote."""
        row = 0
        for request, n in parts:
            row += n
            self._slots.held[request.slot] += n
            if not request.is_writing:
                held, total = self._jobs.held(request.slot), len(request.tokens)
                self._events.append(Progress(request=request.number, held=held, total=total))
                self._hold_if_asked(request)
                if held < total:
                    continue
                request.begin_writing()
                if not request.left:
                    self._finish(request, "length")
                    continue
            sampler = request.sampler
            assert sampler is not None, "set when the request started"
            self._take(request, self._clock.inside(partial(self._context.sample, sampler, row - 1)))

    def _take(self, request: Request, token: int) -> None:
        """One sampled token: an event, and perhaps the end."""
        if token in self._vocabulary.end_of_generation and not request.ignores_end:
            self._finish(request, "stop")
            return
        text = request.take(token, self._vocabulary.piece(token))
        self._events.append(Delta(request=request.number, tokens=token.to_bytes(4, "little"), text=text))
        if request.text.stop_string is not None:
            self._finish(request, "stop")
        elif not request.left:
            self._finish(request, "length")
