"""The web application: routes, keys and error shapes put together; and the doorway that answers while a model loads."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.types import Message, Receive, Scope, Send

import strata
from strata.errors import ServerLoading
from strata.web.admin import admin_routes
from strata.web.answers import Limits
from strata.web.auth import KeyGate
from strata.web.bodies import ChatBody, TextBody
from strata.web.errors import install_error_handlers, strata_error_response
from strata.web.exchange import Exchanges, ServerSeam, server_stops
from strata.web.gate import Gate
from strata.web.openai import openai_routes
from strata.web.pages import docs_routes
from strata.web.slots import SlotBody, slot_routes


def create_app(
    server: ServerSeam, keys: Sequence[str] = (), *, limits: Limits | None = None, names: Collection[str] = ()
) -> FastAPI:
    """The application around a started server. With `keys`, every route but /health needs one of them.

    `names`: what clients may call this server, beside addresses and localhost; with keys, anything.
    """
    app = FastAPI(title="Strata", version=strata.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.exchanges = Exchanges(server)
    app.include_router(openai_routes(server, app.state.exchanges, limits or Limits()))
    app.include_router(slot_routes(server))
    app.include_router(admin_routes(server))
    app.include_router(docs_routes(app))
    install_error_handlers(app)
    if keys:
        app.add_middleware(KeyGate, keys=keys)
    app.add_middleware(Gate, names=None if keys else names)
    _describe_bodies(app)
    return app


def _describe_bodies(app: FastAPI) -> None:
    """Adds the request bodies, which are validated outside FastAPI, to the OpenAPI page."""
    bodies = [(ChatBody, "validation"), (TextBody, "validation"), (SlotBody, "validation")]
    _, schema = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    original = app.openapi

    def openapi() -> dict[str, Any]:
        page = original()
        page.setdefault("components", {}).setdefault("schemas", {}).update(schema["$defs"])
        return page

    app.openapi = openapi  # type: ignore[method-assign]


class Doorway:
    """The ASGI application from the first moment on: 503 with what is being done, until `open()` has the real one."""

    def __init__(self) -> None:
        self.doing = "starting"
        self._app: FastAPI | None = None

    def open(self, app: FastAPI) -> None:
        self._app = app

    def cut_off_answers(self) -> None:
        """Ends every answer in progress with an error that says the server stops."""
        if self._app is not None:
            self._app.state.exchanges.cut_off()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._answer(self._app, scope, receive, send)
        elif scope["type"] == "http":
            error = ServerLoading(f"the server is not ready yet: {self.doing}", retry_after_s=2)
            await strata_error_response(error)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})

    @staticmethod
    async def _answer(app: FastAPI, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers; also a request that the HTTP server gives up, because it stops and has waited long enough."""
        has_begun = False

        async def note_and_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not has_begun:
                await strata_error_response(server_stops())(scope, receive, send)
