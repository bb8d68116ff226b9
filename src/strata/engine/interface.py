"""The engine as the front sees it: what `client.py` does through the pipe, and `fake.py` in tests.

Covers the calls alone; the messages that they become are in `protocol.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from strata.engine.protocol import Delta, Done, EngineInfo, Finished, Held, Paused, Prepared, Progress, Run
from strata.types import Span, StageShape, Tokens


class Generation(Protocol):
    """One running request: iterate it for Progress, Delta, Held (only if asked for), Paused and at last Finished.

    Raises RunError (an engine error; carries `held`) or EngineGone from the iteration. `cancel()` may be called at any
    time, also after the iteration was abandoned: it ends the request, drains its events and returns Finished.
    `checkpoints`: every Held so far, also those that were drained: whoever ran it releases them.
    `resume`: after a Paused, once its slot holds exactly [0, keep) of prompt and reply.
    """

    @property
    def checkpoints(self) -> list[Held]: ...

    def __aiter__(self) -> AsyncIterator[Progress | Delta | Held | Paused | Finished]: ...

    def resume(self, keep: int) -> None: ...

    async def cancel(self) -> Finished: ...


@runtime_checkable
class Engine(Protocol):
    """The engine as the layers above use it: `engine.client.EngineClient`, or `engine.fake.FakeEngine` in tests.

    Methods raise EngineGone (no process, or it dies); on JobFailed EngineRefused, or BadRequest (client_fault).
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def generation(self) -> int:
        """Counts engine processes: 1 for the first. What a slot held in an older generation is gone."""

    @property
    def is_serving(self) -> bool:
        """Whether requests run: what else takes the machine's cores then slows them down."""

    async def prepare(
        self, *, messages_json: bytes | None = None, text: str | None = None, owner: str | None = None
    ) -> Prepared: ...

    async def detokenize(self, tokens: Tokens) -> str: ...

    def run(self, command: Run) -> Generation:
        """Send `command` (its `request` number is assigned here) and return the handle of its events."""
        ...

    async def fork(self, source: int, target: int, n: int, checkpoint: int | None = None) -> Done: ...

    async def trim(self, slot: int, n: int) -> Done: ...

    async def capture(self, slot: int, start: int, end: int, spans: tuple[Span, ...]) -> Done: ...

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
    ) -> Done: ...

    async def compact(self, slot: int, start: int, end: int) -> Done: ...

    async def hold(self, slot: int) -> Done: ...

    async def capture_checkpoint(self, checkpoint: int, offset: int, span: Span) -> Done: ...

    async def release_checkpoint(self, checkpoint: int) -> Done: ...

    async def apply_checkpoint(self, slot: int, *, position: int, offset: int, total: int, span: Span) -> Done: ...
