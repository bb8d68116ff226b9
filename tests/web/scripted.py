"""The server seam with a script behind it, on a real port: what the web sends is what a client would get.

A script is a list of turn events, of errors to raise, and of `Hold`s at which the turn waits for the test.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from strata.engine.protocol import Timing
from strata.errors import NotSupported
from strata.serve.request import Admitted, CacheReport, Completed, Reading, Started, Text, TurnEvent, TurnRequest

WAIT_S = 10.0
"""Longest a test waits for something that should happen at once."""

REPORT = CacheReport(source="cold", reused=90, total=100, restore_s=0.0123)


class Hold:
    """A place in a script where the turn waits; `reached` tells the test that it is there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached.set()
        await self._go.wait()

    def call(self, function: Callable[[], object]) -> None:
        """Calls `function` in the server's thread, once the turn waits here."""
        assert self.reached.wait(WAIT_S)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    def release(self) -> None:
        self.call(self._go.set)


Step = TurnEvent | Exception | Hold


def completed(**changes: Any) -> Completed:
    values: dict[str, Any] = {
        "reason": "stop",
        "prompt_tokens": 100,
        "cached_tokens": 90,
        "completion_tokens": 3,
        "cache": REPORT,
        "timing": Timing(read_s=0.5, read_tokens=10, write_s=0.25, write_tokens=3),
    }
    return Completed(**(values | changes))


def answer(*texts: str, **changes: Any) -> list[Step]:
    """The whole script of an ordinary turn that writes `texts`."""
    return [
        Admitted(prompt_tokens=100),
        Started(slot=0, cache=REPORT),
        Reading(held=100, total=100),
        *(Text(text=text, n_tokens=1) for text in texts),
        completed(**changes),
    ]


class ScriptedServer:
    """Plays `script` for every turn; keeps what was asked, and counts the turns that have ended."""

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.model_name = "scripted-model"
        self.script = list(script) or answer("Hel", "lo ", "wörld 🦉")
        self.requests: list[TurnRequest] = []
        self.ready = (True, "")
        self.ended = threading.Semaphore(0)
        self.at_the_end: Hold | None = None
        self.tidy = False
        self.busy = False
        self.slot_actions: Any = None

    async def turn(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, Hold):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            try:
                if self.at_the_end is not None:
                    await self.at_the_end.wait()
                self.tidy = True
            finally:
                self.ended.release()

    def status(self) -> dict[str, Any]:
        return {"model": self.model_name, "never_measured": None}

    def facts(self) -> dict[str, Any]:
        return {"slots": 2, "context_tokens": 100}

    def slots(self, namespace: str) -> list[dict[str, Any]]:
        return [{"id": 0, "n_ctx": 100, "is_processing": self.busy, "namespace": namespace}]

    def sessions(self) -> Any:
        if self.slot_actions is None:
            raise NotSupported("saving and restoring slots is off: start the server with --slot-save-path DIR")
        return self.slot_actions

    def health(self) -> tuple[bool, str]:
        return self.ready


class Running:
    """An ASGI application on a free port of this machine, in a thread."""

    def __init__(self, app: ASGIApp) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        self._thread = threading.Thread(target=self._uvicorn.run, args=([self._listener],), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def raw_request(port: int, body: bytes, path: str = "/v1/chat/completions", headers: str = "") -> socket.socket:
    """A connection on which a POST has been sent, for tests that read or drop it byte by byte."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n{headers}"
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    connection.sendall(head.encode() + b"\r\n" + body)
    return connection


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    """Everything received up to and with `wanted`; fails when the connection ends or stalls before."""
    received = b""
    while wanted not in received:
        piece = connection.recv(65536)
        assert piece, f"the connection ended after {received!r}"
        received += piece
    return received
