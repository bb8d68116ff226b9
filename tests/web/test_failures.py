"""What a client gets when the server fails: a status while that is possible, else one error event and the end."""

from __future__ import annotations

import json

import openai
import pytest
from tests.web.scripted import REPORT, Step, answer, completed
from tests.web.test_answers import MESSAGES, Connect, events
from tests.web.test_refusals import CHAT, error_of

from strata.errors import Busy, ContextOverflow, EngineGone, RunError, StrataError
from strata.serve.request import Admitted, Started, Text

ADMITTED, STARTED = Admitted(prompt_tokens=100), Started(slot=0, cache=REPORT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (
            ContextOverflow("the prompt has 5000 tokens, the context 512", field="messages"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (Busy("64 requests wait already", retry_after_s=7), 429, "rate_limit_error", "busy"),
        (EngineGone("the engine is restarting", retry_after_s=3), 503, "server_error", "engine_restarting"),
        (StrataError("broken"), 500, "server_error", "internal_error"),
    ],
)
def test_an_error_before_the_answer_is_a_status(
    client: Connect, stream: bool, error: StrataError, status: int, kind: str, code: str
) -> None:
    for script in ([error], [ADMITTED, error]):
        response = client(script).http.post(CHAT, json={"messages": MESSAGES, "stream": stream})
        got = error_of(response, status)
        assert (got["message"], got["type"], got["code"], got["param"]) == (error.message, kind, code, error.field)
        wanted = None if error.retry_after_s is None else str(error.retry_after_s)
        assert response.headers.get("retry-after") == wanted


def test_the_official_client_sees_the_overflow_of_a_stream_as_a_bad_request(client: Connect) -> None:
    connected = client([ContextOverflow("the prompt has 5000 tokens, the context 512", field="messages")])
    with pytest.raises(openai.BadRequestError, match=r"5000.*512") as caught:
        connected.openai.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_an_error_inside_a_stream_is_its_one_last_event(client: Connect) -> None:
    script: list[Step] = [ADMITTED, STARTED, Text(text="Hel", n_tokens=1), RunError("decode failed", held=101)]
    connected = client(script)
    body = connected.http.post(CHAT, json={"messages": MESSAGES, "stream": True}).text
    payloads = events(body)
    assert [payload for payload in payloads if "error" in payload] == payloads[-1:]
    assert payloads[-1]["error"]["message"] == "decode failed"
    assert "[DONE]" not in body
    assert connected.server.ended.acquire(timeout=1)

    stream = connected.openai.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="decode failed"):
        list(stream)


def test_an_error_inside_a_whole_answer_is_a_status(client: Connect) -> None:
    connected = client([ADMITTED, STARTED, Text(text="Hel", n_tokens=1), RunError("decode failed", held=101)])
    error = error_of(connected.http.post(CHAT, json={"messages": MESSAGES}), 500)
    assert error["message"] == "decode failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_the_server_cut_off_is_no_answer(client: Connect, stream: bool) -> None:
    connected = client(answer("Hel", reason="cancelled"))
    response = connected.http.post(CHAT, json={"messages": MESSAGES, "stream": stream})
    error = events(response.text)[-1]["error"] if stream else error_of(response, 503)
    assert "before it was complete" in error["message"]
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_ends_without_a_result_is_an_error(client: Connect, stream: bool) -> None:
    connected = client([ADMITTED, STARTED, Text(text="Hel", n_tokens=1)])
    response = connected.http.post(CHAT, json={"messages": MESSAGES, "stream": stream})
    error = events(response.text)[-1]["error"] if stream else error_of(response, 500)
    assert error["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_tells_the_client_nothing_of_its_insides(client: Connect, stream: bool) -> None:
    connected = client([ValueError("secret prompt text")])
    response = connected.http.post(CHAT, json={"messages": MESSAGES, "stream": stream})
    error_of(response, 500)
    assert "secret" not in response.text


def test_a_bug_inside_a_stream_is_its_one_last_event(client: Connect) -> None:
    connected = client([ADMITTED, STARTED, Text(text="Hel", n_tokens=1), ValueError("secret prompt text")])
    body = connected.http.post(CHAT, json={"messages": MESSAGES, "stream": True}).text
    assert events(body)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in body
    assert connected.server.ended.acquire(timeout=1)


def test_the_server_lives_on_after_every_failure(client: Connect) -> None:
    connected = client()
    for script in ([ValueError("x")], [ADMITTED, EngineGone("gone")], [ADMITTED, STARTED, ValueError("x")]):
        connected.server.script = script
        connected.http.post(CHAT, json={"messages": MESSAGES})
    connected.server.script = [ADMITTED, STARTED, Text(text="ok", n_tokens=1), completed()]
    body = json.loads(connected.http.post(CHAT, json={"messages": MESSAGES}).text)
    assert body["choices"][0]["message"]["content"] == "ok"
