"""Who may send a browser here: the Host and Origin checks, in front of everything else.

DNS rebinding: a foreign page can make its own name point to this machine, and then counts as this server's page. Its
name stands in Host. So without API keys, Host must be a loopback name, an address, or a name that the server was told
is its own. With keys such a page gets nowhere, because it has none: every name is allowed (a server in a LAN is called
all kinds of names).

Cross-site requests: browsers send POSTs of foreign pages, but name the page in Origin. What may change something is
refused unless Origin is this server as Host names it. Programs send no Origin. Reading needs no check: the browser does
not show the answer to the foreign page, since no CORS header allows it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from strata.errors import Forbidden
from strata.web.errors import strata_error_response

_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_PORTS = {"http": 80, "https": 443}


class Gate:
    """ASGI middleware. `names`: what this server is called, beside loopback names and addresses; None allows all."""

    def __init__(self, app: ASGIApp, names: Collection[str] | None) -> None:
        self._app = app
        self._names = None if names is None else {_plain(name) for name in names} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await strata_error_response(problem)(scope, receive, send)

    def _problem(self, scope: Scope) -> Forbidden | None:
        hosts = _values(scope, b"host")
        if len(hosts) > 1:
            return Forbidden("more than one Host header", field="Host")
        host = hosts[0] if hosts else None  # only HTTP/1.0 may leave it out, and no browser does
        if host is not None and not self._is_ours(host):
            return Forbidden(
                f"this server is not called {host[:100]!r}: use its address or localhost (with --api-key, any name)",
                field="Host",
            )
        if scope["type"] == "http" and scope["method"] in _HARMLESS:
            return None
        for origin in _values(scope, b"origin"):
            if not _is_same(origin, host):
                return Forbidden(f"a page of another site ({origin[:100]}) may not do this", field="Origin")
        return None

    def _is_ours(self, host: str) -> bool:
        found = _split(host, 80)
        if found is None:
            return False
        return self._names is None or found[0] in self._names or _is_address(found[0])


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _plain(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def _split(host: str, default_port: int) -> tuple[str, int] | None:
    """Name (or address without brackets) and port of a Host header; None for what is none."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.netloc != host or "@" in host:
        return None
    return _plain(parts.hostname), default_port if port is None else port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_same(origin: str, host: str | None) -> bool:
    scheme, _, rest = origin.partition("://")
    default_port = _PORTS.get(scheme.lower())
    if default_port is None or host is None:
        return False  # "null" (a sandboxed page) or no web page at all
    found = _split(rest, default_port)
    return found is not None and found == _split(host, default_port)
