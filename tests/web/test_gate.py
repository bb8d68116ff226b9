"""Host and Origin: no foreign page gets in through a browser, and no honest client is kept out."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from tests.web.conftest import Serve
from tests.web.scripted import WAIT_S, Running, ScriptedServer, raw_request, read_until
from tests.web.test_answers import MESSAGES, Connect
from tests.web.test_refusals import CHAT, error_of

from strata.cli.serve import _names
from strata.web.app import create_app

KEY = {"x-api-key": "first-key"}


@pytest.fixture(scope="module")
def named() -> Iterator[httpx.Client]:
    """A server without keys that was told its name."""
    running = Running(create_app(ScriptedServer(), names={"Box.lan"}))
    with httpx.Client(base_url=running.url, timeout=WAIT_S) as http:
        yield http
    running.stop()


OURS = ["localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:8080", "127.0.0.2", "[::1]:8080", "192.168.1.7:8080"]
OURS += ["[fe80::1]", "box.lan", "BOX.lan:99", "box.lan."]
FOREIGN = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost"]
FOREIGN += ["", ":8080", "localhost:x", "localhost:99999", "a@localhost", "localhost/x", "[::1", "box.lan,localhost"]


FOREIGN_PAGES = ["http://evil.example", "https://localhost:9", "http://localhost:3000", "null", "", "file://"]
FOREIGN_PAGES += ["http://localhost:8080.evil.example", "http://localhost:8080@evil.example", "chrome-extension://abc"]
FOREIGN_PAGES += ["localhost:8080"]


@pytest.mark.parametrize("host", OURS)
def test_our_names(named: httpx.Client, host: str) -> None:
    assert named.get("/v1/models", headers={"host": host}).status_code == 200
    assert named.post(CHAT, json={"messages": MESSAGES}, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names(named: httpx.Client, host: str) -> None:
    for path in ("/v1/models", "/health", "/slots", "/docs", "/nothing"):
        assert error_of(named.get(path, headers={"host": host}), 403)["code"] == "forbidden"


def test_two_hosts_are_none(client: Connect) -> None:
    connection = raw_request(client().port, b"{}", headers="Host: localhost\r\n")
    assert read_until(connection, b"\r\n").split()[1] in {b"400", b"403"}


def test_with_a_key_any_name_will_do(serve: Serve) -> None:
    url = serve(ScriptedServer(), ("first-key",)).url
    assert httpx.get(url + "/v1/models", headers={"host": "strata.example", **KEY}).status_code == 200
    assert httpx.get(url + "/v1/models", headers={"host": "strata.example"}).status_code == 401
    body = {"messages": MESSAGES}
    headers = {"host": "strata.example", "origin": "https://strata.example", **KEY}
    assert httpx.post(url + CHAT, json=body, headers=headers).status_code == 200
    headers["origin"] = "https://evil.example"
    error_of(httpx.post(url + CHAT, json=body, headers=headers), 403)


@pytest.mark.parametrize(
    "origin",
    FOREIGN_PAGES,
)
@pytest.mark.parametrize("path", [CHAT, "/slots/0?action=erase", "/nothing"])
def test_a_foreign_page_may_change_nothing(client: Connect, origin: str, path: str) -> None:
    connected = client()
    headers = {"host": "localhost:8080", "origin": origin}
    assert error_of(connected.http.post(path, json={"messages": MESSAGES}, headers=headers), 403)["param"] == "Origin"
    assert connected.http.delete("/v1/models", headers=headers).status_code == 403
    assert connected.server.requests == []


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8080", "http://localhost:8080"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("127.0.0.1", "https://127.0.0.1:443"),
        ("[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_our_own_page_may(client: Connect, host: str, origin: str) -> None:
    headers = {"host": host, "origin": origin}
    assert client().http.post(CHAT, json={"messages": MESSAGES}, headers=headers).status_code == 200


def test_a_foreign_page_may_ask_what_it_cannot_read(client: Connect) -> None:
    response = client().http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control-")]


def test_a_server_for_others_goes_by_this_machines_name() -> None:
    assert _names("127.0.0.1") == {"127.0.0.1"}
    assert _names("localhost") == {"localhost"}
    for host in ("0.0.0.0", "::", "192.168.1.7", "box.lan"):
        assert {host, socket.gethostname()} < _names(host)


def test_the_docs_need_no_other_server_and_no_script(client: Connect, serve: Serve) -> None:
    page = client().http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text and "http://" not in page.text and "https://" not in page.text
    for route in ("/v1/chat/completions", "/slots/{id_slot}", "/v1/models"):
        assert f" {route}<" in page.text
    assert "max_completion_tokens" in page.text and "filename" in page.text
    url = serve(ScriptedServer(), ("first-key",)).url
    assert httpx.get(url + "/docs").status_code == 401
    assert httpx.get(url + "/openapi.json").status_code == 401
    assert httpx.get(url + "/docs", headers=KEY).text == page.text
