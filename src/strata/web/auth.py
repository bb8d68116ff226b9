"""API keys: who may send a request, and which namespace its conversations live in.

A namespace is derived from the key itself, so the order of keys does not matter and no key is ever stored. Does not
limit rates and knows no users.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence

from blake3 import blake3
from starlette.types import ASGIApp, Receive, Scope, Send

from strata.errors import Unauthorized
from strata.web.errors import strata_error_response

PUBLIC_PATHS = frozenset({"/health"})
_NAMESPACE_CONTEXT = "strata 2026-11 api key namespace"


def namespace_of_key(key: str) -> str:
    """The namespace of an API key: 32 hex digits that do not reveal it."""
    return blake3(key.encode(), derive_key_context=_NAMESPACE_CONTEXT).hexdigest(length=16)


def namespace_of(scope: Scope) -> str:
    """The namespace `KeyGate` found for a request; "" when the server has no keys."""
    found = scope.get("state", {}).get("namespace", "")
    assert isinstance(found, str)
    return found


class KeyGate:
    """ASGI middleware that lets a request pass only with a known key (Bearer or X-Api-Key)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [(key.encode(), namespace_of_key(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in PUBLIC_PATHS):
            await self._app(scope, receive, send)
            return
        presented = list(_credentials(scope))
        namespace = next((found for key in presented if (found := self._namespace(key)) is not None), None)
        if namespace is not None:
            scope.setdefault("state", {})["namespace"] = namespace
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            problem = "the API key is not valid" if presented else "an API key is needed"
            error = Unauthorized(f"{problem}: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'")
            await strata_error_response(error)(scope, receive, send)

    def _namespace(self, presented: bytes) -> str | None:
        # Every key is compared, always: the time taken tells nothing about which one was close.
        matches = [namespace for key, namespace in self._keys if hmac.compare_digest(presented, key)]
        return matches[0] if matches else None


def _credentials(scope: Scope) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
        elif name == b"x-api-key":
            yield value.strip()
