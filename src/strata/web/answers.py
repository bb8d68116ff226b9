"""Sends a turn to its client: as one JSON body, or as server-sent events while it is being written.

Until the turn is admitted nothing is sent, so whatever is wrong with a request is a proper 4xx or 5xx. What one API's
chunks look like is that API's module's business (`Dialect`).
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strata.errors import EngineGone, StrataError
from strata.serve.request import Completed, Parked, Reading, Started, Text, TurnEvent, TurnRequest, Waiting
from strata.web.errors import json_response, strata_error_content
from strata.web.exchange import ClientGone, Exchange, Exchanges

CACHE_HEADER = "x-strata-cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one request. `started_wait_s`: how long a stream's headers wait for the cache report."""

    body_bytes: int = 64 << 20
    keep_alive_s: float = 10.0
    started_wait_s: float = 5.0
    progress_s: float = 1.0  # least time between two comments about waiting or reading


class Dialect(Protocol):
    """How one API spells an answer; the streamed parts are complete server-sent events."""

    def whole(self, text: str, completed: Completed) -> dict[str, Any]: ...

    def opening(self) -> bytes: ...

    def piece(self, text: str) -> bytes: ...

    def closing(self, completed: Completed) -> bytes: ...


def sse_data(content: Any) -> bytes:
    """One server-sent event carrying JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class WholeAnswer(Response):
    """The answer as one JSON body, sent when the turn is complete."""

    def __init__(self, exchanges: Exchanges, request: TurnRequest, dialect: Dialect) -> None:
        super().__init__()
        self._exchanges, self._request, self._dialect = exchanges, request, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[str] = []
        async with self._exchanges.begin(self._request, receive) as exchange:
            try:
                while not isinstance(event := await exchange.event(), Completed):
                    if isinstance(event, Text):
                        pieces.append(event.text)
            except ClientGone:
                return
        completed = _finished(event)
        content = self._dialect.whole("".join(pieces), completed)
        await json_response(content, headers={CACHE_HEADER: completed.cache.header()})(scope, receive, send)


class StreamedAnswer(Response):
    """The answer as server-sent events; comments keep the connection alive and tell how far reading is."""

    def __init__(self, exchanges: Exchanges, request: TurnRequest, dialect: Dialect, limits: Limits) -> None:
        super().__init__()
        self._exchanges, self._request, self._dialect, self._limits = exchanges, request, dialect, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchanges.begin(self._request, receive) as exchange:
            try:
                await exchange.event()  # Admitted, or the error that keeps the request from being admitted
                first = await self._first(exchange)
                await send(_stream_start(first))
                await self._stream(exchange, first, send)
            except ClientGone:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _first(self, exchange: Exchange) -> TurnEvent | None:
        """What the headers wait for: the cache report. When it takes too long, what it waits for, or None."""
        now = asyncio.get_running_loop().time
        deadline, place = now() + self._limits.started_wait_s, None
        while (left_s := deadline - now()) > 0:
            event = await exchange.event(within_s=left_s)
            if not isinstance(event, Waiting | Parked):
                return event or place
            place = event
        return place

    async def _stream(self, exchange: Exchange, event: TurnEvent | None, send: Send) -> None:
        now = asyncio.get_running_loop().time
        comment = b": waiting\n\n"
        out, sent_at, told_at = self._dialect.opening(), now(), -math.inf
        try:
            while True:
                match event:
                    case Text(text=text) if text:
                        out += self._dialect.piece(text)
                        comment = b": active\n\n"
                    case Started():
                        comment = b": reading\n\n"
                    case Parked():
                        comment = b": parked, waits for room\n\n"
                        out += comment
                    case Waiting() | Reading():
                        comment = _progress(event)
                        if now() - told_at >= self._limits.progress_s:
                            out, told_at = out + comment, now()
                    case Completed():
                        await _send_part(send, out + self._dialect.closing(_finished(event)))
                        return
                idle_s = now() - sent_at
                if not out and idle_s >= self._limits.keep_alive_s:
                    out = comment
                if out:
                    await _send_part(send, out)
                    out, sent_at = b"", now()
                    idle_s = 0.0
                event = await exchange.event(within_s=self._limits.keep_alive_s - idle_s)
        except StrataError as error:
            # The headers are gone: the error is the last event, and no [DONE] follows that would look like an end.
            await _send_part(send, sse_data(strata_error_content(error)))


def _progress(event: Waiting | Reading) -> bytes:
    """How far a request is, as a comment: its place in the queue, tokens read, or that its first token is due."""
    if isinstance(event, Waiting):
        return f": wait_slot {event.position}/{event.total}\n\n".encode()
    state = "reading" if event.held < event.total else "ready"
    return f": {state} {event.held}/{event.total}\n\n".encode()


def _stream_start(event: TurnEvent | None) -> dict[str, Any]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    if isinstance(event, Started):
        headers[CACHE_HEADER] = event.cache.header()
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _finished(completed: Completed) -> Completed:
    """`completed`, unless the server ended the turn itself: that is no answer."""
    if completed.reason == "cancelled":
        raise EngineGone("the server ended this request before it was complete; send it again", retry_after_s=5)
    return completed
