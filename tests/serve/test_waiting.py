"""A real server with one slot and several clients: what those that wait are told, and when they are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.serve.running import ANSWER_S, RunningServer, wait_for

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 1800,
    "ignore_eos": True,
    "stream": True,
}
SHORT: list[Any] = [{"role": "user", "content": "Say hello."}]
PROSE = "The fox reads a book in the evening and tells the owl about it. " * 90


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("waiting") / "log"
    with RunningServer(log, "--parallel=1", "--max-queued-requests=2") as running:
        yield running


def queue(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.status()["queue"]
    return found


def slot_state(server: RunningServer) -> str:
    return str(server.status()["slots"][0]["state"])


@contextmanager
def occupied(server: RunningServer) -> Iterator[None]:
    """The slot writes a long answer until the block ends: then its client leaves."""
    with server.http.stream("POST", "/v1/chat/completions", json=LONG) as response:
        assert response.status_code == 200
        wait_for(lambda: slot_state(server) == "active", "an answer being written")
        yield
    wait_for(lambda: not queue(server)["waiting"] and server.idle(), "an idle server", ANSWER_S)


def test_comments_tell_place_and_progress_and_disturb_no_client(server: RunningServer) -> None:
    comments: list[str] = []
    texts: list[str] = []

    def listen() -> None:
        body = {"messages": [{"role": "user", "content": PROSE}], "max_tokens": 4, "stream": True}
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=ANSWER_S) as response:
            for line in response.iter_lines():
                if line.startswith(":"):
                    comments.append(line)
                elif line.startswith("data: {"):
                    texts.extend(c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"])

    def ask() -> None:
        chunks = server.client.chat.completions.create(model="m", messages=SHORT, max_tokens=4, stream=True)
        answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

    answers: list[str] = []
    listener, asker = threading.Thread(target=listen), threading.Thread(target=ask)
    with occupied(server):
        listener.start()
        wait_for(lambda: queue(server)["waiting"] == 1, "the first waits")
        asker.start()
        wait_for(lambda: queue(server)["waiting"] == 2, "both wait")
        assert [slot["n_waiting"] for slot in server.http.get("/slots").json()] == [2]
        assert queue(server)["longest_wait_s"] > 0
        wait_for(lambda: ": wait_slot 1/2" in comments, "a comment about the queue")
    listener.join(ANSWER_S)
    asker.join(ANSWER_S)
    assert any(comment.startswith(": reading ") and comment.endswith("/1381") for comment in comments), comments
    assert "".join(texts) and answers[0]


def test_who_leaves_while_waiting_is_gone_at_once(server: RunningServer) -> None:
    left = queue(server)["left"]
    with occupied(server):
        for stream in (True, False):
            body = {"messages": SHORT, "max_tokens": 4, "stream": stream}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + "/v1/chat/completions", json=body, timeout=0.5)
        wait_for(lambda: queue(server)["waiting"] == 0, "nobody waits")
        assert queue(server)["left"] == left + 2
        assert slot_state(server) == "active"


def test_what_was_read_of_a_prompt_stays_when_its_client_leaves(server: RunningServer) -> None:
    """Who asks again, because his patience ended or his client tries again by itself, goes on where it was."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Again. " + PROSE}], "max_tokens": 4}
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        wait_for(lambda: int(server.http.get("/slots").json()[0]["n_past"]) >= 200, "a part of the prompt", ANSWER_S)
        assert slot_state(server) == "reading" and response.status_code == 200
    wait_for(server.idle, "an idle slot")
    held = int(server.http.get("/slots").json()[0]["n_past"])
    assert 200 <= held < 1300
    answer = server.http.post("/v1/chat/completions", json=body, timeout=ANSWER_S)
    assert answer.headers["x-strata-cache"].startswith(f"source=live; reused={held}/"), answer.headers


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_answers_429(server: RunningServer, stream: bool) -> None:
    with occupied(server):
        waiting = [
            threading.Thread(
                target=server.client.chat.completions.create,
                kwargs={"model": "m", "messages": SHORT, "max_tokens": 4},
            )
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        wait_for(lambda: queue(server)["waiting"] == 2, "a full queue")
        with pytest.raises(openai.RateLimitError) as caught:
            server.client.chat.completions.create(model="m", messages=SHORT, stream=stream)
        assert caught.value.code == "busy" and int(caught.value.response.headers["retry-after"]) > 0
        assert queue(server)["waiting"] == 2
    for thread in waiting:
        thread.join(ANSWER_S)


def test_who_waits_too_long_gets_503(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "log", "--parallel=1", "--queue-timeout-s=1") as server, occupied(server):
        for stream in (True, False):
            with pytest.raises(openai.InternalServerError) as caught:
                server.client.chat.completions.create(model="m", messages=SHORT, stream=stream)
            assert caught.value.status_code == 503 and caught.value.code == "queue_timeout"
            assert int(caught.value.response.headers["retry-after"]) > 0
        assert queue(server)["timed_out"] == 2
        assert slot_state(server) == "active", "the one that was served is not disturbed"
