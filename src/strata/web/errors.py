"""Every error that leaves over HTTP, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Covers errors before the answer's headers (handlers on the app) and the payload of an error inside a stream.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from strata.errors import BadRequest, MethodNotAllowed, NotFound, StrataError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FROM_THE_ROUTER: dict[int, type[StrataError]] = {404: NotFound, 405: MethodNotAllowed}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`content` as JSON; not-a-number becomes null, so every client can parse it."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_content(status: int, message: str, *, code: str, field: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, BadRequest.code if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def strata_error_content(error: StrataError) -> dict[str, Any]:
    return error_content(error.status, error.message, code=error.code, field=error.param)


def strata_error_response(error: StrataError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(strata_error_content(error), error.status, headers)


async def _on_strata_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, StrataError)
    return strata_error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"  # its own words do not say what was asked for
    kind = _FROM_THE_ROUTER.get(error.status_code, BadRequest)
    content = error_content(error.status_code, message, code=kind.code)
    return json_response(content, error.status_code, dict(error.headers or {}))


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(_: Request, __: Exception) -> Response:
    # The framework logs the traceback; the client learns only that it was not its fault.
    return json_response(error_content(500, "internal error; see the server's log", code=StrataError.code), 500)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(StrataError, _on_strata_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
