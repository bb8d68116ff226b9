"""One turn while its client is connected: its events with time limits, and its end when the client leaves.

The turn runs in a task of its own and never waits for a slow reader. Knows nothing of formats; answers.py writes those.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.types import Receive

from strata.errors import ServerStopping, StrataError
from strata.serve.request import Completed, TurnEvent, TurnRequest
from strata.serve.sessions import Sessions

_log = logging.getLogger(__name__)


class ServerSeam(Protocol):
    """What the web needs of the server; `serve.wiring.Server` is the real one."""

    @property
    def model_name(self) -> str: ...

    def turn(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """The events of one request. A StrataError before the first one (Admitted) means nothing was done."""
        ...

    def status(self) -> dict[str, Any]: ...

    def facts(self) -> dict[str, Any]:
        """What was resolved at the start; see `serve.status.engine_facts`."""
        ...

    def slots(self, namespace: str) -> list[dict[str, Any]]:
        """What GET /slots answers to this namespace."""
        ...

    def sessions(self) -> Sessions:
        """Raises NotSupported when slots cannot be saved, ServerLoading or ServerStopping at start and end."""
        ...

    def health(self) -> tuple[bool, str]: ...


def server_stops() -> ServerStopping:
    return ServerStopping("the server is stopping; send the request again later", retry_after_s=10)


class ClientGone(Exception):
    """The client closed its connection; the turn has been cancelled."""


class Exchange:
    """Async context manager around one turn: `event()` gives what happens; leaving it early cancels the turn."""

    def __init__(self, events: AsyncGenerator[TurnEvent, None], receive: Receive, exchanges: Exchanges) -> None:
        self._events = events
        self._receive = receive
        self._exchanges = exchanges
        self._inbox: asyncio.Queue[TurnEvent | None] = asyncio.Queue()
        self._answered = False
        self._cancelled = False
        self._cut_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Exchange:
        self._pump = asyncio.create_task(self._run())
        self._pump.add_done_callback(lambda _: self._inbox.put_nowait(None))
        self._watch = asyncio.create_task(self._watch_client())
        self._exchanges.open.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        if not self._answered:
            self._cancel()
            await asyncio.wait({self._pump, self._cut_off}, return_when=asyncio.FIRST_COMPLETED)
        self._exchanges.open.discard(self)
        if self._answered or not self._pump.done():
            self._exchanges.let_finish(self._pump)

    async def event(self, within_s: float | None = None) -> TurnEvent | None:
        """The next event, or None when there is none within the limit.

        Raises the StrataError the turn raises, ClientGone, and StrataError for a turn that ends in any other way.
        """
        try:
            async with asyncio.timeout(within_s):
                event = await self._inbox.get()
        except TimeoutError:
            return None
        if event is not None:
            return event
        if self._cut_off.done():
            raise server_stops()
        if self._pump.cancelled():
            raise ClientGone
        problem = self._pump.exception()
        if isinstance(problem, StrataError):
            raise problem
        _log.error("a request ended without a result", exc_info=problem)
        raise StrataError("internal error; the server's log has more")

    def cut_off(self) -> None:
        """Ends the turn with an error for its client, who does not wait until the turn is in order."""
        if not self._answered and not self._cut_off.done():
            self._cut_off.set_result(None)
            self._cancel()
            self._inbox.put_nowait(None)

    def _cancel(self) -> None:
        # Once only: a second cancellation would hit the turn while it puts its slot in order.
        if not self._cancelled:
            self._cancelled = True
            self._pump.cancel()

    async def _run(self) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                self._answered = isinstance(event, Completed)
                self._inbox.put_nowait(event)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered:
            self._cancel()


class Exchanges:
    """All exchanges of one application, so that a stopping server can end those that take too long."""

    def __init__(self, server: ServerSeam) -> None:
        self.open: set[Exchange] = set()
        self._server = server
        # Turns whose client has its answer, but which still put their slot in order; a task needs somebody to hold it.
        self._finishing: set[asyncio.Task[None]] = set()

    def begin(self, request: TurnRequest, receive: Receive) -> Exchange:
        return Exchange(self._server.turn(request), receive, self)

    def let_finish(self, turn: asyncio.Task[None]) -> None:
        self._finishing.add(turn)
        turn.add_done_callback(self._finished)

    def _finished(self, turn: asyncio.Task[None]) -> None:
        self._finishing.discard(turn)
        problem = None if turn.cancelled() else turn.exception()
        if problem is not None and not isinstance(problem, StrataError):
            _log.error("a request failed after its answer", exc_info=problem)

    def cut_off(self) -> None:
        for exchange in self.open:
            exchange.cut_off()
