"""The front's side of the engine: starts its process, watches it, starts it again, and keeps the books of one engine.

`EngineClient` implements interface.Engine for asyncio. It owns the policy of restarts (back-off, and a stop after
repeated failures); what happens on one process's pipe is `process.py`. It does not know what slots are used for: when a
new process is up, `on_restart` tells the layers above that every slot is empty.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from strata.engine.process import Chunk, EngineProcess, RunHandle
from strata.engine.protocol import (
    Apply,
    ApplyCheckpoint,
    Capture,
    CaptureCheckpoint,
    Compact,
    Detokenize,
    Detokenized,
    Done,
    EngineInfo,
    EngineSettings,
    Fork,
    Hold,
    Loading,
    Prepare,
    Prepared,
    ReleaseCheckpoint,
    Remembered,
    Run,
    Steps,
    Trim,
    pack_tokens,
)
from strata.errors import EngineGone, ModelError, StrataError
from strata.types import Span, StageShape, Tokens

if TYPE_CHECKING:
    from strata.store.arena import Arena

_FIRST_BACKOFF_S = 0.5
_MOST_BACKOFF_S = 30.0
_FAILURES = 5
_FAILURE_WINDOW_S = 60.0
_CLOSE_LIMIT_S = 5.0

State = str
"""'loading' | 'ready' | 'restarting' | 'failed' | 'closed'."""


class EngineClient:
    """One engine over all its processes. `start` once, `close` at the end; belongs to one event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        arena: Arena | None,
        *,
        on_loading: Callable[[Loading], None] | None = None,
        on_restart: Callable[[EngineInfo], None] | None = None,
        remembered: Remembered | None = None,
        silent_limit_s: float = 0,
    ) -> None:
        """`silent_limit_s`: after how long without an answer a process is replaced; 0 = never."""
        self.state: State = "loading"
        self._settings = settings
        self._arena = arena
        self._on_loading = on_loading
        self._on_restart = on_restart
        self._remembered = remembered or Remembered()
        self._silent_limit_s = silent_limit_s
        self._process: EngineProcess | None = None
        self._info: EngineInfo | None = None
        self._generation = 0
        self._failures: deque[float] = deque(maxlen=_FAILURES)
        self._why_gone = "the engine has not been started"
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers = 0
        self._chunks: list[Chunk] = []
        self._changed = asyncio.Event()  # set, and replaced, when `state` changes

    def __repr__(self) -> str:
        return f"EngineClient({self.state}, generation {self._generation}, pid {self.pid})"

    # -------------------------------------------------------------------------------------------------------- lifecycle

    async def start(self) -> EngineInfo:
        """Load the model. Raises ModelError or ConfigError when it cannot be served."""
        if self._arena is not None:
            self._arena.on_chunk(self._take_chunk)
        process = await self._spawn()
        self._process = process
        self._supervisor = asyncio.create_task(self._supervise(process), name="engine-supervisor")
        return self.info

    async def close(self, limit_s: float = _CLOSE_LIMIT_S) -> None:
        """End the process: after its current step, or by force after `limit_s` seconds."""
        self._why_gone = "the server is shutting down"
        self._become("closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._process is not None:
            await self._process.close(limit_s, self._why_gone)
            self._process = None

    async def wait_ready(self) -> EngineInfo:
        """Wait while a process is being started. Raises EngineGone when there will be none."""
        while self.state in ("loading", "restarting"):
            await self._changed.wait()
        if self.state != "ready":
            raise EngineGone(self._why_gone)
        return self.info

    def _become(self, state: State) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineGone(self._why_gone)
        return self._info

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def is_serving(self) -> bool:
        return self._process is not None and self._process.is_serving

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def steps(self) -> Steps:
        """What the steps of the process that runs have cost so far; all zero while there is none."""
        return self._process.steps if self._process is not None else Steps()

    @property
    def silent_s(self) -> float:
        """How long the process has not answered, although something waits for it."""
        return self._process.watch.silent_s if self._process is not None else 0.0

    def _take_chunk(self, index: int, size: int, fd: int | None, name: str | None) -> None:
        chunk = Chunk(index, size, fd, name)
        self._chunks.append(chunk)
        if self._process is not None:
            self._process.attach(chunk)

    async def _spawn(self) -> EngineProcess:
        """One process, loaded and with every arena chunk attached."""
        attached = len(self._chunks)
        process = await EngineProcess.spawn(self._chunks[:attached], self._silent_limit_s)
        try:
            info = await process.load(self._settings, self._remembered, self._on_loading)
            if self._info is not None and info.fingerprint != self._info.fingerprint:
                raise ModelError(f"the model file {info.model_path} has changed; restart the server to use it")
        except BaseException:
            await process.close(0, "the engine did not start")
            raise
        for chunk in self._chunks[attached:]:  # made while the model was loading
            process.attach(chunk)
        self._info = info
        self._remembered = Remembered(flash_attention=info.flash_attention, split_pool=info.pool == "split")
        self._generation += 1
        self._become("ready")
        return process

    async def _supervise(self, first: EngineProcess) -> None:
        """Wait for the process to end, and start a new one; until there were too many failures."""
        process: EngineProcess | None = first
        while process is not None:
            how = await process.ended()
            self._why_gone = f"the engine process ended ({how}); a new one is starting, send the request again"
            self._become("restarting")
            self._process = None
            await process.close(0, self._why_gone)
            self._process = process = await self._restart(how)

    async def _restart(self, how: str) -> EngineProcess | None:
        """A new process that is ready, or None after too many failures in a short time."""
        backoff_s = 0.0
        while True:
            now = time.monotonic()
            self._failures.append(now)
            if len(self._failures) == _FAILURES and now - self._failures[0] < _FAILURE_WINDOW_S:
                self._give_up(how)
                return None
            await asyncio.sleep(backoff_s)
            backoff_s = min(max(2 * backoff_s, _FIRST_BACKOFF_S), _MOST_BACKOFF_S)
            try:
                process = await self._spawn()
            except (StrataError, OSError) as error:
                how = str(error)
                continue
            self._tell_restarted()
            return process

    def _tell_restarted(self) -> None:
        """Before any call can reach the new process. A callback that fails must not end the supervision."""
        if self._on_restart is None:
            return
        try:
            self._on_restart(self.info)
        except Exception as error:
            context = {"message": "on_restart failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _give_up(self, how: str) -> None:
        self._why_gone = (
            f"the engine failed {_FAILURES} times within {_FAILURE_WINDOW_S:.0f} s and is not started again "
            f"(last: {how}); see the log, then restart the server"
        )
        self._become("failed")

    # ------------------------------------------------------------------------------------------------------------ calls

    def _live(self) -> EngineProcess:
        if self.state != "ready" or self._process is None:
            raise EngineGone(self._why_gone, retry_after_s=1 if self.state == "restarting" else None)
        return self._process

    def _next(self) -> int:
        """A number for a job or a request, never used twice."""
        self._numbers += 1
        return self._numbers

    async def prepare(
        self, *, messages_json: bytes | None = None, text: str | None = None, owner: str | None = None
    ) -> Prepared:
        job = Prepare(job=self._next(), messages_json=messages_json, text=text, owner=owner)
        return await self._live().call(job, job.job, Prepared)

    async def detokenize(self, tokens: Tokens) -> str:
        job = Detokenize(job=self._next(), tokens=pack_tokens(tokens))
        return (await self._live().call(job, job.job, Detokenized)).text

    def run(self, command: Run) -> RunHandle:
        return self._live().run(msgspec.structs.replace(command, request=self._next()))

    async def fork(self, source: int, target: int, n: int, checkpoint: int | None = None) -> Done:
        job = Fork(job=self._next(), source=source, target=target, n=n, checkpoint=checkpoint)
        return await self._live().call(job, job.job, Done)

    async def trim(self, slot: int, n: int) -> Done:
        job = Trim(job=self._next(), slot=slot, n=n)
        return await self._live().call(job, job.job, Done)

    async def capture(self, slot: int, start: int, end: int, spans: tuple[Span, ...]) -> Done:
        process = self._live()
        await process.has_chunks(spans)
        job = Capture(job=self._next(), slot=slot, start=start, end=end, spans=spans)
        return await process.call(job, job.job, Done, to_the_end=True)

    async def apply(
        self,
        slot: int,
        *,
        start: int,
        end: int,
        from_: int,
        upto: int,
        spans: tuple[Span, ...],
        tokens: Tokens,
        stages: tuple[StageShape, ...] = (),
    ) -> Done:
        process = self._live()
        await process.has_chunks(spans)
        job = Apply(
            job=self._next(),
            slot=slot,
            start=start,
            end=end,
            from_=from_,
            upto=upto,
            spans=spans,
            tokens=pack_tokens(tokens),
            stages=stages,
        )
        return await process.call(job, job.job, Done, to_the_end=True)

    async def compact(self, slot: int, start: int, end: int) -> Done:
        job = Compact(job=self._next(), slot=slot, start=start, end=end)
        return await self._live().call(job, job.job, Done)

    async def hold(self, slot: int) -> Done:
        job = Hold(job=self._next(), slot=slot)
        return await self._live().call(job, job.job, Done)

    async def capture_checkpoint(self, checkpoint: int, offset: int, span: Span) -> Done:
        process = self._live()
        await process.has_chunks([span])
        job = CaptureCheckpoint(job=self._next(), checkpoint=checkpoint, offset=offset, span=span)
        return await process.call(job, job.job, Done, to_the_end=True)

    async def release_checkpoint(self, checkpoint: int) -> Done:
        job = ReleaseCheckpoint(job=self._next(), checkpoint=checkpoint)
        return await self._live().call(job, job.job, Done)

    async def apply_checkpoint(self, slot: int, *, position: int, offset: int, total: int, span: Span) -> Done:
        process = self._live()
        await process.has_chunks([span])
        job = ApplyCheckpoint(job=self._next(), slot=slot, position=position, offset=offset, total=total, span=span)
        return await process.call(job, job.job, Done, to_the_end=True)
