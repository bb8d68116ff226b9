"""API keys: every route but /health needs one, each key is its own namespace, and no key shows anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from tests.web.conftest import Serve
from tests.web.scripted import WAIT_S, ScriptedServer, raw_request, read_until
from tests.web.test_answers import MESSAGES
from tests.web.test_refusals import CHAT, error_of

from strata.web.app import create_app

KEYS = ("first-key", "second-key")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")


def all_paths() -> list[str]:
    """Every path of the application, and the spellings that might slip past a check of names."""
    paths: list[str] = []
    todo: list[Any] = list(create_app(ScriptedServer(), KEYS).routes)
    while todo:
        route = todo.pop()
        todo += getattr(getattr(route, "original_router", route), "routes", [])
        if isinstance(route, Route):
            paths.append(route.path.replace("{name:path}", "scripted-model"))
    assert {"/health", "/docs", "/openapi.json", "/v1/status", "/v1/models", CHAT} <= set(paths)
    extra = ["/v1/models/", "//v1/models", "/health/", "/health/../v1/models", "//health", "/%2e/v1/status", "/nothing"]
    return sorted({path for path in paths if path != "/health"}) + extra


@pytest.fixture
def http(serve: Serve) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve(ScriptedServer(), KEYS).url, timeout=WAIT_S) as http:
        yield http


def test_no_route_answers_without_a_key(serve: Serve) -> None:
    server = ScriptedServer()
    with httpx.Client(base_url=serve(server, KEYS).url, timeout=WAIT_S) as http:
        for path, method in itertools.product(all_paths(), METHODS):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "Bearer"},
                {"authorization": "Basic first-key"},
                {"authorization": "first-key"},
                {"x-api-key": "first-ke"},
                {"x-api-key": ""},
                {"api-key": "first-key"},
            ):
                response = http.request(method, path, headers=headers, json={"messages": MESSAGES})
                assert response.status_code == 401, (path, method, headers)
                assert "first-key" not in response.text
                assert response.headers["www-authenticate"] == "Bearer"
            allowed = http.request(method, path, headers={"x-api-key": "second-key"}, json={"messages": MESSAGES})
            assert allowed.status_code != 401, (path, method)
    assert all(request.namespace for request in server.requests)


def test_a_refusal_has_openai_s_shape(http: httpx.Client) -> None:
    missing = error_of(http.get("/v1/models"), 401)
    wrong = error_of(http.get("/v1/models", headers={"authorization": "Bearer nope"}), 401)
    assert missing["code"] == wrong["code"] == "invalid_api_key"
    assert missing["message"] != wrong["message"]


def test_health_is_open(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}


def test_a_websocket_is_refused(serve: Serve) -> None:
    upgrade = (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGVzdA==\r\n"
    )
    connection = raw_request(serve(ScriptedServer(), KEYS).port, b"", path="/health", headers=upgrade)
    assert read_until(connection, b"\r\n").split()[1] in {b"403", b"400", b"401", b"404", b"405"}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer  first-key"},
        {"x-api-key": "first-key"},
        {"authorization": "Bearer other", "x-api-key": "first-key"},
    ],
)
def test_a_key_is_taken_from_either_header(http: httpx.Client, headers: dict[str, str]) -> None:
    assert http.get("/v1/models", headers=headers).status_code == 200


def test_each_key_is_a_namespace_that_does_not_show_it(serve: Serve) -> None:
    seen: list[str] = []
    for keys in (KEYS, KEYS[::-1]):
        server = ScriptedServer()
        url = serve(server, keys).url
        for key in KEYS:
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(url + CHAT, json={"messages": MESSAGES}, headers=headers).status_code == 200
        seen += [request.namespace for request in server.requests]
    assert seen[:2] == seen[2:]  # the order of keys does not matter
    assert seen[0] != seen[1]
    assert all(namespace and key not in namespace for namespace, key in zip(seen, KEYS * 2, strict=True))


def test_without_keys_everybody_shares_the_empty_namespace(serve: Serve) -> None:
    server = ScriptedServer()
    headers = {"authorization": "Bearer anything"}
    assert httpx.post(serve(server).url + CHAT, json={"messages": MESSAGES}, headers=headers).status_code == 200
    assert server.requests[0].namespace == ""
