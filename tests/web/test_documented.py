"""docs/http.md and docs/errors.md are complete: every route, every word of the cache header, every code."""

from __future__ import annotations

import re

import pytest
from tests.laws.test_sizes import ROOT
from tests.web.scripted import ScriptedServer
from tests.web.test_answers import MESSAGES, Connect
from tests.web.test_refusals import CHAT, error_of

from strata.cache.system_prompts import LEVEL_NAME
from strata.web.app import create_app

HTTP = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def test_every_route_is_documented_and_no_other() -> None:
    app = create_app(ScriptedServer())
    served = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    documented = set(re.findall(r"`((?:GET|POST) /[^`]*)`", HTTP))
    assert documented == served | {"GET /docs", "GET /openapi.json"}


@pytest.mark.parametrize("word", ["none", "live", "session", "fork", "ram", "warm", "cold", LEVEL_NAME])
def test_every_word_of_the_cache_header_is_documented(word: str) -> None:
    assert re.search(rf"^\|.*`{word}`.*\|$", HTTP, re.MULTILINE)


@pytest.mark.parametrize(
    ("method", "path", "content_type", "status"),
    [
        ("GET", CHAT, "application/json", 405),
        ("POST", CHAT, "text/plain", 415),
        ("POST", "/v1/messages", "application/json", 404),
        ("POST", "/v1/embeddings", "application/json", 501),
    ],
)
def test_codes_of_the_router_are_documented(
    client: Connect, method: str, path: str, content_type: str, status: int
) -> None:
    response = client().http.request(method, path, content=b"{}", headers={"content-type": content_type})
    code = error_of(response, status)["code"]
    assert f"| {status} | `{code}` |" in ERRORS


def test_health_and_full_slots_have_a_documented_code(client: Connect) -> None:
    connected = client()
    connected.server.ready, connected.server.busy = (False, "the engine is restarting"), True
    for path in ("/health", "/slots?fail_on_no_slot=1"):
        code = error_of(connected.http.get(path), 503)["code"]
        assert f"| 503 | `{code}` |" in ERRORS


def test_props_are_as_llama_servers(client: Connect) -> None:
    props = client().http.get("/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (2, 100)
    assert props["model_alias"] == "scripted-model"


def test_unknown_fields_are_ignored(client: Connect) -> None:
    connected = client()
    assert connected.http.post(CHAT, json={"messages": MESSAGES, "nobody_knows": {"x": 1}}).status_code == 200
