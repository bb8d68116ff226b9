"""What a bad request gets: a 4xx in OpenAI's shape that names the field, before the server does anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.web.scripted import raw_request, read_until
from tests.web.test_answers import MESSAGES, Connect

from strata.web.answers import Limits

HUGE = 10**400
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error object of a response, after checking that the whole response has the one shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


BAD_FIELDS: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hello"),
    ("messages", {"role": "user"}),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "warm"),
    ("temperature", True),
    ("temperature", HUGE),
    ("top_p", 1.5),
    ("top_p", -1),
    ("top_k", 2.5),
    ("top_k", -2),
    ("top_k", HUGE),
    ("min_p", 2),
    ("seed", 2**63),
    ("seed", "7"),
    ("max_tokens", -2),
    ("max_tokens", 2**31),
    ("max_tokens", HUGE),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("max_completion_tokens", []),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repeat_penalty", 0),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("logit_bias", [[1, 2]]),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", True),
    ("ignore_eos", 1),
    ("cache_prompt", "no"),
    ("model", 5),
    ("n", 0),
    ("n", 2),
    ("n", True),
    ("logprobs", True),
    ("top_logprobs", 3),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tools", {}),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("grammar", 'root ::= "a"'),
    ("json_schema", {}),
]


@pytest.mark.parametrize("stream", [False, True])
def test_every_bad_field_is_refused_by_name(client: Connect, stream: bool) -> None:
    connected = client()
    for field, value in BAD_FIELDS:
        body = json.dumps({"messages": MESSAGES, "stream": stream, field: value})
        response = connected.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        error = error_of(response, 400)
        assert error["param"] == field, (field, value, error)
        assert error["message"].startswith(field), error
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request_error")
    assert connected.server.requests == []


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]},
            "messages[1].content[1].type",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
        ("hello", "messages[1]"),
    ],
)
def test_a_bad_message_is_refused_by_its_place(client: Connect, message: Any, field: str) -> None:
    error = error_of(client().http.post(CHAT, json={"messages": [USER, message]}), 400)
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_an_image_is_named(client: Connect) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = error_of(client().http.post(CHAT, json={"messages": [{"role": "user", "content": [image]}]}), 400)
    assert "image_url parts are not supported" in error["message"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"prompt": [[1]]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "end"}, "suffix"),
        ({"prompt": "x", "logprobs": 0}, "logprobs"),
        ({"prompt": "x", "n": 3}, "n"),
    ],
)
def test_a_bad_text_completion_is_refused_by_name(client: Connect, fields: dict[str, Any], field: str) -> None:
    connected = client()
    assert error_of(connected.http.post(TEXT, json=fields), 400)["param"].startswith(field)
    assert connected.server.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_the_place_inside_a_field_is_named(client: Connect, fields: dict[str, Any], param: str) -> None:
    assert error_of(client().http.post(CHAT, json={"messages": MESSAGES, **fields}), 400)["param"] == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "max_tokens", "seed"])
def test_what_is_no_number_is_refused(client: Connect, number: str, field: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{field}": {number}}}'
    response = client().http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [}',
        b"hello",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": "\xff\xfe"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"messages": ' + b'{"a": ' * 50_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json_object_is_refused(client: Connect, body: bytes) -> None:
    connected = client()
    response = connected.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    error_of(response, 400)
    assert connected.server.requests == []


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_another_content_type_is_refused(client: Connect, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps({"messages": MESSAGES}).encode()
    error = error_of(client().http.post(CHAT, content=body, headers=headers), 415)
    assert "application/json" in error["message"]


def test_a_content_type_with_a_charset_is_json(client: Connect) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps({"messages": MESSAGES}).encode()
    assert client().http.post(CHAT, content=body, headers=headers).status_code == 200


def test_a_body_over_the_limit_is_refused(client: Connect) -> None:
    connected = client(limits=Limits(body_bytes=1000))
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    error = error_of(connected.http.post(CHAT, json=body), 413)
    assert "1000 bytes" in error["message"]
    assert connected.http.post(CHAT, json={"messages": MESSAGES}).status_code == 200


def test_a_client_that_leaves_while_sending_its_body_does_no_harm(client: Connect) -> None:
    connected = client()
    connection = raw_request(connected.port, b"", headers="Expect: nothing\r\n")
    connection.close()
    half = raw_request(connected.port, b'{"messages": ', path=CHAT, headers="X-Half: 1\r\n")
    half.close()
    assert connected.http.post(CHAT, json={"messages": MESSAGES}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [1] * 1_000_000}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [1] * 1_000_000}]}, "messages[0].content[0]"),
        ({"messages": MESSAGES, "stop": [1] * 1_000_000}, "stop"),
        ({"messages": MESSAGES, "logit_bias": {f"x{n}": 1 for n in range(300_000)}}, "logit_bias"),
    ],
)
def test_a_flood_of_mistakes_is_refused_at_the_first(client: Connect, fields: dict[str, Any], param: str) -> None:
    connected = client()
    response = connected.http.post(CHAT, json=fields, timeout=3)  # all million of them took 10 s
    assert error_of(response, 400)["param"].startswith(param)


def test_unknown_routes_and_methods_have_the_same_shape(client: Connect) -> None:
    connected = client()
    for path in ("/", "/v1/nothing", "/v1/models/", "//v1/models", "/v1/chat/completions/"):
        assert error_of(connected.http.get(path), 404)["code"] == "not_found"
    response = connected.http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(connected.http.delete("/v1/models"), 405)["code"] == "method_not_allowed"


def test_a_request_that_is_no_http_is_refused(client: Connect) -> None:
    connected = client()
    connection = raw_request(connected.port, b"{}", headers="Bad Header Line\r\n")
    assert read_until(connection, b"\r\n").startswith(b"HTTP/1.1 400")
