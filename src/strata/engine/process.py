"""One engine process as the front sees it: its pipe, its pending calls and runs, and the arena chunks it was given.

Everything here ends with the process: `ended` tells how, and every pending call gets an EngineGone. Starting another
one is the concern of `client.py`. Belongs to one event loop; only the sending of descriptors runs on another thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from subprocess import PIPE
from typing import Any, TypeVar, cast

import msgspec

from strata.engine.environment import environment
from strata.engine.liveness import Watch
from strata.engine.protocol import (
    AttachChunk,
    Cancel,
    Command,
    Delta,
    Detokenize,
    Detokenized,
    Done,
    EngineInfo,
    EngineSettings,
    Event,
    Finished,
    Held,
    JobFailed,
    Load,
    LoadFailed,
    Loading,
    Paused,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Progress,
    Ready,
    Remembered,
    Resume,
    Run,
    RunFailed,
    Shutdown,
    Steps,
)
from strata.engine.wire import FrameCutter, decode_event, encode_frame
from strata.errors import BadRequest, ConfigError, EngineGone, EngineRefused, ModelError, RunError, StrataError
from strata.types import Span

_MODEL_FLAG = "--model"

Answer = Prepared | Detokenized | Done
RunEvent = Progress | Delta | Held | Paused | Finished
_A = TypeVar("_A", Prepared, Detokenized, Done)


class Chunk(msgspec.Struct, frozen=True):
    """An arena chunk to attach: found by `fd` on Linux, by `name` elsewhere."""

    index: int
    size: int
    fd: int | None
    name: str | None


class EngineProcess(asyncio.SubprocessProtocol):
    """A running engine process. Made by `spawn`. `silent_limit_s`: see `liveness.Watch`."""

    def __init__(self, descriptors: socket.socket | None, silent_limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._descriptors = descriptors
        self._gone: str | None = None  # why, once it is
        self._killed_because: str | None = None
        self.signs = self.reports = 0  # see liveness.Watched
        self.steps = Steps()
        self._cutter = FrameCutter()
        self._jobs: dict[int, asyncio.Future[Answer | JobFailed]] = {}
        self._text_jobs: set[int] = set()  # those of them that the engine thread never sees
        self._runs: dict[int, RunHandle] = {}
        self._loaded: asyncio.Future[Ready | LoadFailed] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()
        self._on_loading: Callable[[Loading], None] | None = None
        self._to_attach: asyncio.Queue[Chunk] = asyncio.Queue()
        self._attached: dict[int, asyncio.Event] = {}
        self.watch = Watch(self, silent_limit_s)
        self._tasks = [asyncio.create_task(self._attach(), name="engine-attacher")]

    @property
    def pid(self) -> int:
        return int(self._transport.get_pid())

    @property
    def is_serving(self) -> bool:
        """Whether requests run."""
        return bool(self._runs)

    def __repr__(self) -> str:
        return f"EngineProcess(pid {self.pid}, {len(self._jobs)} jobs, {len(self._runs)} runs, gone: {self._gone})"

    @classmethod
    async def spawn(cls, chunks: Sequence[Chunk], silent_limit_s: float = 0) -> EngineProcess:
        """Start a process that has not loaded anything yet. Raises OSError."""
        arguments = [sys.executable, "-P", "-m", "strata.engine.worker"]
        ours = theirs = None
        if hasattr(socket, "send_fds"):
            ours, theirs = socket.socketpair()
            arguments += ["--chunk-socket", str(theirs.fileno())]
        try:
            _, engine = await asyncio.get_running_loop().subprocess_exec(
                lambda: cls(ours, silent_limit_s),
                *arguments,
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                pass_fds=(theirs.fileno(),) if theirs is not None else (),
                env=environment(os.environ),
            )
        finally:
            if theirs is not None:
                theirs.close()
        for chunk in chunks:
            engine.attach(chunk)
        return engine

    async def load(
        self,
        settings: EngineSettings,
        remembered: Remembered,
        on_loading: Callable[[Loading], None] | None,
    ) -> EngineInfo:
        """Load the model. Raises ModelError or ConfigError when it cannot be served, EngineGone when it was killed."""
        self._on_loading = on_loading
        self._send(Load(settings=settings, remembered=remembered))
        waited: list[asyncio.Future[Any]] = [self._loaded, self._ended]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not self._loaded.done():
            how = await self.ended()
            if self._killed_because is not None:
                raise EngineGone(
                    f"the engine process was ended before it had loaded {settings.model_path}: {how}. Look for what "
                    "slows this machine or its disk down, or allow more time with --engine-timeout-s."
                )
            raise ModelError(
                f"the engine process ended ({how}) while it loaded {settings.model_path}: the file is damaged, "
                "of an unknown kind, or too large for this machine's memory.",
                field=_MODEL_FLAG,
            )
        event = self._loaded.result()
        if isinstance(event, Ready):
            return event.info
        kind = ModelError if event.field == _MODEL_FLAG else ConfigError
        raise kind(event.message, field=event.field)

    async def ended(self) -> str:
        """Wait until the process has ended and its last event was taken; "signal 9", "exit code 1"."""
        return await asyncio.shield(self._ended)

    async def close(self, limit_s: float, why: str) -> None:
        """Ask the process to end, kill it after `limit_s`, and fail whatever still waits."""
        self._send(Shutdown())
        await asyncio.wait([self._ended], timeout=limit_s)
        if not self._ended.done():
            self._transport.kill()
        await self.ended()
        self._fail_pending(why)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fail_pending(self, why: str) -> None:
        """From now on every call fails; those that wait do so now."""
        self._gone = why
        for future in self._jobs.values():
            if not future.done():
                future.set_exception(self._engine_gone())
        self._jobs.clear()
        self._text_jobs.clear()
        for run in self._runs.values():
            run.put(self._engine_gone())
        self._runs.clear()
        for attached in self._attached.values():
            attached.set()

    def _engine_gone(self) -> EngineGone:
        return EngineGone(self._gone or "", retry_after_s=1)

    # ----------------------------------------------------------------------------------------------------------- chunks

    def attach(self, chunk: Chunk) -> None:
        """Give the process an arena chunk; in order, as soon as possible."""
        self._attached[chunk.index] = asyncio.Event()
        self._to_attach.put_nowait(chunk)

    async def _attach(self) -> None:
        while True:
            chunk = await self._to_attach.get()
            if chunk.fd is not None and self._descriptors is not None:
                # the socket holds a few hundred descriptors, then sending waits until the engine has mapped some
                await asyncio.to_thread(socket.send_fds, self._descriptors, [b"\0"], [chunk.fd])
            self._send(AttachChunk(chunk=chunk.index, size=chunk.size, name=chunk.name))
            self._attached[chunk.index].set()

    async def has_chunks(self, spans: Sequence[Span]) -> None:
        """Wait until the chunks of `spans` were given to the process."""
        for span in spans:
            if span.chunk not in self._attached:
                raise EngineRefused(f"chunk {span.chunk} is not one of the arena's")
            await self._attached[span.chunk].wait()

    # ------------------------------------------------------------------------------------------------------------ calls

    async def call(self, job: Command, number: int, answer: type[_A], *, to_the_end: bool = False) -> _A:
        """Send a job and wait for its answer.

        `to_the_end`: even when the waiting task is cancelled, wait until the engine is done with the job, because it
        reads or writes memory of the caller. Raises BadRequest or EngineRefused on JobFailed, EngineGone.
        """
        if self._gone is not None:
            raise self._engine_gone()
        future: asyncio.Future[Answer | JobFailed] = asyncio.get_running_loop().create_future()
        self._jobs[number] = future
        if isinstance(job, Prepare | Detokenize):
            self._text_jobs.add(number)
        self._send(job)
        event = await (_to_the_end(future) if to_the_end else future)
        if isinstance(event, JobFailed):
            raise BadRequest(event.message, field="messages") if event.client_fault else EngineRefused(event.message)
        if not isinstance(event, answer):
            raise EngineRefused(f"the engine answered {type(event).__name__} where {answer.__name__} was expected")
        return event

    def run(self, command: Run) -> RunHandle:
        if self._gone is not None:
            raise self._engine_gone()
        handle = RunHandle(command.request, command.slot, self._send)
        self._runs[command.request] = handle
        self._send(command)
        return handle

    def _send(self, command: Command) -> None:
        if self._gone is None and not self._stdin.is_closing():
            self._stdin.write(encode_frame(command))

    # --------------------------------------------------------------------------------------------------------- liveness

    @property
    def is_waited_for(self) -> bool:
        return not self._loaded.done() or bool(self._jobs or self._runs)

    @property
    def is_to_step(self) -> bool:
        """Not while a request is paused: the others may wait for the cells that the front is about to free."""
        paused = any(run.is_paused for run in self._runs.values())
        return self._jobs.keys() > self._text_jobs or (bool(self._runs) and not paused)

    def ping(self) -> None:
        self._send(Ping())

    def kill(self, why: str) -> None:
        """End it at once; `ended` says why."""
        self._killed_because = why
        self._transport.kill()

    # ----------------------------------------------------------------------------------------------------------- events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # casts: the transports of uvloop are not subclasses of asyncio's
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        self._tasks.append(asyncio.create_task(self.watch.run(), name="engine-watch"))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Bytes from the process. One whose events make no sense is killed."""
        try:
            for body in self._cutter.feed(data):
                self._take(decode_event(body))
        except (ValueError, msgspec.MsgspecError):
            self._transport.kill()
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended and its pipes are closed."""
        code = self._transport.get_returncode() or 0
        if self._descriptors is not None:
            self._descriptors.close()
        self._ended.set_result(self._killed_because or (f"signal {-code}" if code < 0 else f"exit code {code}"))

    def _take(self, event: Event) -> None:
        self.signs += 1
        self.reports += not isinstance(event, Pong | Prepared | Detokenized)
        if isinstance(event, Delta | Progress | Held | Paused | Finished | RunFailed):
            run = self._runs.get(event.request)
            if isinstance(event, Finished | RunFailed):
                self._runs.pop(event.request, None)
            if run is not None:
                run.put(event)
        elif isinstance(event, Steps):
            self.steps = event
        elif isinstance(event, Loading):
            if self._on_loading is not None:
                self._on_loading(event)
        elif isinstance(event, Ready | LoadFailed):
            self._loaded.set_result(event)
        elif not isinstance(event, Pong):
            self._text_jobs.discard(event.job)
            future = self._jobs.pop(event.job, None)
            if future is not None and not future.done():
                future.set_result(event)


async def _to_the_end(future: asyncio.Future[Answer | JobFailed]) -> Answer | JobFailed:
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return future.result()


class RunHandle:
    """The events of one request; implements interface.Generation."""

    def __init__(self, number: int, slot: int, send: Callable[[Command], None]) -> None:
        self.number = number
        self._slot = slot
        self._send = send
        self._events: asyncio.Queue[RunEvent | RunFailed | StrataError] = asyncio.Queue()
        self._outcome: Finished | StrataError | None = None
        self.checkpoints: list[Held] = []
        self.is_paused = False

    def put(self, event: RunEvent | RunFailed | StrataError) -> None:
        self.is_paused = isinstance(event, Paused)
        if isinstance(event, Held) and event.checkpoint:
            self.checkpoints.append(event)
        self._events.put_nowait(event)

    def __aiter__(self) -> RunHandle:
        return self

    async def __anext__(self) -> RunEvent:
        if self._outcome is not None:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, RunFailed):
            event = RunError(event.message, held=event.held)
        if isinstance(event, StrataError):
            self._outcome = event
            raise event
        if isinstance(event, Finished):
            self._outcome = event
        return event

    def resume(self, keep: int) -> None:
        """Go on after a Paused; the slot holds exactly [0, keep)."""
        self.is_paused = False
        self._send(Resume(request=self.number, slot=self._slot, keep=keep))

    async def cancel(self) -> Finished:
        """End the request and drain its events. Raises RunError or EngineGone when that is how it ended."""
        if self._outcome is None:
            self.is_paused = False
            self._send(Cancel(request=self.number))
        while self._outcome is None:
            await anext(self)
        if isinstance(self._outcome, StrataError):
            raise self._outcome
        return self._outcome
