"""The slots API over HTTP: llama-server's field names, and every malformed request refused before anything is done."""

from __future__ import annotations

from typing import Any

import pytest
from tests.web.scripted import ScriptedServer
from tests.web.test_answers import Connect
from tests.web.test_refusals import error_of

from strata.errors import Busy, DiskRefused, EngineGone, Forbidden, NoMemory, NotFound, SessionRefused, StrataError
from strata.serve.sessions import Moved

SAVE, RESTORE, ERASE = (f"/slots/1?action={action}" for action in ("save", "restore", "erase"))
NAME = {"filename": "talk.bin"}


class Actions:
    """What the web asked for, and the answers: always the same, or an error."""

    def __init__(self, error: StrataError | None = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._error = error

    def _ask(self, *what: Any) -> None:
        self.asked.append(what)
        if self._error is not None:
            raise self._error

    async def save(self, index: int, name: str, namespace: str) -> Moved:
        self._ask("save", index, name, namespace)
        return Moved(n_tokens=84, n_bytes=14309796, seconds=0.049865)

    async def restore(self, index: int, name: str, namespace: str) -> Moved:
        self._ask("restore", index, name, namespace)
        return Moved(n_tokens=84, n_bytes=14309796, seconds=0.042937)

    async def erase(self, index: int, namespace: str) -> int:
        self._ask("erase", index, namespace)
        return 84


def connect(client: Connect, error: StrataError | None = None) -> tuple[Any, Actions]:
    connected = client()
    server: ScriptedServer = connected.server
    server.slot_actions = Actions(error)
    return connected.http, server.slot_actions


def test_the_answers_have_llama_servers_fields(client: Connect) -> None:
    http, actions = connect(client)
    moved = {"id_slot": 1, "filename": "talk.bin"}
    assert http.post(SAVE, json=NAME).json() == {
        **moved,
        "n_saved": 84,
        "n_written": 14309796,
        "timings": {"save_ms": 49.865},
    }
    assert http.post(RESTORE, json=NAME).json() == {
        **moved,
        "n_restored": 84,
        "n_read": 14309796,
        "timings": {"restore_ms": 42.937},
    }
    assert http.post(ERASE).json() == {"id_slot": 1, "n_erased": 84}
    assert http.post(ERASE, json={}).json() == {"id_slot": 1, "n_erased": 84}
    assert actions.asked[:2] == [("save", 1, "talk.bin", ""), ("restore", 1, "talk.bin", "")]


def test_the_list_and_whether_a_slot_is_free(client: Connect) -> None:
    http, _ = connect(client)
    connected = client()
    assert [slot["id"] for slot in connected.http.get("/slots").json()] == [0]
    assert connected.http.get("/slots?fail_on_no_slot=1").status_code == 200
    connected.server.busy = True
    assert connected.http.get("/slots").status_code == 200
    assert connected.http.get("/slots?fail_on_no_slot=0").status_code == 200
    error_of(connected.http.get("/slots?fail_on_no_slot=1"), 503)
    assert error_of(http.delete("/slots/0"), 405)


def test_without_a_path_it_is_off(client: Connect) -> None:
    http = client().http
    for url in (SAVE, RESTORE, ERASE):
        error = error_of(http.post(url, json=NAME), 501)
        assert "--slot-save-path" in error["message"]
        assert error["code"] == "not_supported"


@pytest.mark.parametrize(
    ("slot", "status"),
    [("abc", 400), ("1e3", 400), ("0x1", 400), ("1.0", 400), ("%31", 200), ("+1", 400), ("-1", 404), ("9" * 30, 404)],
)
def test_slot_numbers(client: Connect, slot: str, status: int) -> None:
    http, actions = connect(client)
    response = http.post(f"/slots/{slot}?action=erase")
    assert response.status_code == status
    assert bool(actions.asked) == (status == 200)
    if status != 200:
        assert error_of(response, status)["param"] == "id_slot"


@pytest.mark.parametrize("query", ["", "?action=", "?action=SAVE", "?action=load", "?action=save%20", "?verb=save"])
def test_unknown_actions(client: Connect, query: str) -> None:
    http, actions = connect(client)
    assert error_of(http.post(f"/slots/1{query}", json=NAME), 400)["param"] == "action"
    assert actions.asked == []


@pytest.mark.parametrize("url", [SAVE, RESTORE])
def test_bodies(client: Connect, url: str) -> None:
    http, actions = connect(client)
    headers = {"content-type": "application/json"}
    for body in (b"", b"{", b"null", b"[]", b'"x"', b"5", b"\xff"):
        error_of(http.post(url, content=body, headers=headers), 400)
    for fields in ({}, {"filename": None}, {"filename": 5}, {"filename": ["x"]}, {"file": "x"}):
        assert error_of(http.post(url, json=fields), 400)["param"] == "filename"
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        error_of(http.post(url, content=b'{"filename": "x"}', headers={"content-type": content_type}), 415)
    error_of(http.post(url, content=b'{"filename": "x"}'), 415)
    error_of(http.post(url, json={"filename": "x" * 100_000}), 413)
    assert actions.asked == []
    assert http.post(url, json={**NAME, "unknown": 1}).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SessionRefused("session 'x' is refused: digest", field="digest"), 400),
        (Forbidden("slot 1 holds a conversation of another API key", field="id_slot"), 403),
        (NotFound("there is no session 'x'", field="filename"), 404),
        (Busy("256 requests wait", retry_after_s=5), 429),
        (NoMemory("physical memory does not admit 34 MiB now", retry_after_s=5), 503),
        (EngineGone("the engine is restarting", retry_after_s=1), 503),
        (DiskRefused("the disk is full: free some space"), 507),
    ],
)
def test_every_refusal_has_its_status(client: Connect, error: StrataError, status: int) -> None:
    http, _ = connect(client, error)
    for url in (SAVE, RESTORE, ERASE):
        response = http.post(url, json=NAME)
        shown = error_of(response, status)
        assert (shown["param"], shown["code"]) == (error.param, error.code)
        assert not isinstance(error, SessionRefused) or shown["param"] == "filename"
        assert ("retry-after" in response.headers) == (error.retry_after_s is not None)
