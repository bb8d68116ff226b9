"""Fixtures: a scripted server behind the real application on a real port, with the official client in front."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from tests.web.scripted import WAIT_S, Running, ScriptedServer, Step

from strata.serve.request import TurnEvent, TurnRequest
from strata.web.answers import Limits
from strata.web.app import create_app


class _Switch:
    """Stands behind one application for many tests, each with a scripted server of its own."""

    def __init__(self) -> None:
        self.server = ScriptedServer()

    @property
    def model_name(self) -> str:
        return self.server.model_name

    def turn(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        return self.server.turn(request)

    def status(self) -> dict[str, Any]:
        return self.server.status()

    def facts(self) -> dict[str, Any]:
        return self.server.facts()

    def slots(self, namespace: str) -> list[dict[str, Any]]:
        return self.server.slots(namespace)

    def sessions(self) -> Any:
        return self.server.sessions()

    def health(self) -> tuple[bool, str]:
        return self.server.health()


Serve = Callable[..., Running]


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """`serve(server, keys=..., limits=...)` puts a scripted server on a port (the last one, for the same options)."""
    running: dict[Any, tuple[_Switch, Running]] = {}

    def start(server: ScriptedServer, keys: Sequence[str] = (), limits: Limits | None = None) -> Running:
        options = (tuple(keys), limits)
        if options not in running:
            switch = _Switch()
            running[options] = (switch, Running(create_app(switch, keys, limits=limits)))
        running[options][0].server = server
        return running[options][1]

    yield start
    for _, one in running.values():
        one.stop()


class Client:
    """Both ways to talk to one server: `openai`, the official client, and `http`, plain requests."""

    def __init__(self, server: ScriptedServer, running: Running) -> None:
        self.server = server
        self.port = running.port
        self.openai = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        self.http = httpx.Client(base_url=running.url, timeout=WAIT_S)

    def close(self) -> None:
        self.openai.close()
        self.http.close()


@pytest.fixture
def client(serve: Serve) -> Iterator[Callable[..., Client]]:
    """`client(script)`: a client of a server that plays `script` (an ordinary answer without one)."""
    clients: list[Client] = []

    def connect(script: Sequence[Step] = (), limits: Limits | None = None) -> Client:
        server = ScriptedServer(script)
        clients.append(Client(server, serve(server, limits=limits)))
        return clients[-1]

    yield connect
    for one in clients:
        one.close()
