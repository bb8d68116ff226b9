"""What a good request gets (text, usage, timings, headers), alike streamed or not; and what the server is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import NotFoundError
from tests.web.conftest import Client
from tests.web.scripted import REPORT, answer

from strata.engine.protocol import Sampling, Timing
from strata.serve.request import TurnRequest

MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]
TEXT = "Hello wörld 🦉"
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "total_tokens": 103,
    "prompt_tokens_details": {"cached_tokens": 90},
}
Connect = Callable[..., Client]


def events(body: str) -> list[Any]:
    """The payloads of a stream of server-sent events; the last one is the string [DONE]."""
    payloads = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def test_a_chat_answer_carries_text_usage_and_the_cache_header(client: Connect) -> None:
    response = client().openai.chat.completions.with_raw_response.create(model="gpt-x", messages=MESSAGES)
    parsed = response.parse()
    assert parsed.choices[0].message.content == TEXT
    assert parsed.choices[0].message.role == "assistant"
    assert (parsed.choices[0].finish_reason, parsed.model, parsed.object) == ("stop", "gpt-x", "chat.completion")
    assert parsed.usage is not None
    assert parsed.usage.to_dict() == USAGE
    assert response.headers["x-strata-cache"] == REPORT.header()


def test_a_streamed_chat_answer_equals_the_whole_one(client: Connect) -> None:
    connected = client()
    whole = connected.openai.chat.completions.create(model="m", messages=MESSAGES)
    with connected.openai.chat.completions.with_streaming_response.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as response:
        assert response.headers["x-strata-cache"] == REPORT.header()
        chunks = list(response.parse())
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * 4 + ["stop"]
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1


def test_a_streamed_text_answer_equals_the_whole_one(client: Connect) -> None:
    connected = client(answer("one", " two", reason="length"))
    whole = connected.openai.completions.create(model="m", prompt="count")
    chunks = list(
        connected.openai.completions.create(
            model="m", prompt="count", stream=True, stream_options={"include_usage": True}
        )
    )
    assert whole.choices[0].text == "one two" == "".join(c.choices[0].text for c in chunks if c.choices)
    assert whole.choices[0].finish_reason == "length" == chunks[-2].choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert whole.object == "text_completion"
    assert connected.server.requests == [TurnRequest(text="count")] * 2


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_without_include_usage_no_chunk_has_usage(client: Connect, options: Any) -> None:
    body = {"messages": MESSAGES, "stream": True, "stream_options": options}
    payloads = events(client().http.post("/v1/chat/completions", json=body).text)
    assert payloads[-1] == "[DONE]"
    assert all("usage" not in payload and len(payload["choices"]) == 1 for payload in payloads[:-1])


def test_with_include_usage_there_is_exactly_one_usage_object_and_it_is_last(client: Connect) -> None:
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    payloads = events(client().http.post("/v1/chat/completions", json=body).text)
    assert [payload.get("usage") for payload in payloads[:-1] if "usage" in payload] == [USAGE]
    assert payloads[-2]["usage"] == USAGE
    assert payloads[-2]["choices"] == []


def test_timings_are_the_same_streamed_and_whole(client: Connect) -> None:
    connected = client()
    expected = {
        "cache_n": 90,
        "prompt_n": 10,
        "prompt_ms": 500.0,
        "prompt_per_second": 20.0,
        "predicted_n": 3,
        "predicted_ms": 250.0,
        "predicted_per_second": 12.0,
    }
    body = {"messages": MESSAGES}
    assert connected.http.post("/v1/chat/completions", json=body).json()["timings"] == expected
    streamed = connected.http.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert events(streamed)[-2]["timings"] == expected


@pytest.mark.parametrize(
    "timing",
    [
        Timing(read_s=0.0, read_tokens=5, write_s=0.0, write_tokens=0),
        Timing(read_s=float("nan"), read_tokens=5, write_s=1.0, write_tokens=0),
    ],
)
def test_a_rate_nobody_measured_is_null(client: Connect, timing: Timing) -> None:
    body = client(answer("x", timing=timing)).http.post("/v1/chat/completions", json={"messages": MESSAGES}).text
    timings = json.loads(body, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["timings"]
    assert timings["prompt_per_second"] is None
    assert timings["predicted_per_second"] is None


def test_every_sampling_field_reaches_the_server(client: Connect) -> None:
    connected = client()
    body = {
        "messages": MESSAGES,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 1 << 40,
        "repeat_penalty": 1.5,
        "frequency_penalty": -1,
        "presence_penalty": 2.0,
        "logit_bias": {"15": -100, "7": 0.5},
        "max_tokens": 9,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "cache_prompt": False,
    }
    assert connected.http.post("/v1/chat/completions", json=body).status_code == 200
    assert connected.server.requests == [
        TurnRequest(
            messages=({"role": "user", "content": "Say hello."},),
            sampling=Sampling(
                temperature=0.0,
                top_p=0.5,
                top_k=7,
                min_p=0.25,
                seed=(1 << 40) % 0xFFFFFFFF,
                repeat_penalty=1.5,
                frequency_penalty=-1.0,
                presence_penalty=2.0,
                logit_bias={15: -100.0, 7: 0.5},
            ),
            max_tokens=9,
            stop=("a", "b"),
            ignore_eos=True,
            cache_prompt=False,
        )
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, TurnRequest(messages=({"role": "user", "content": "Say hello."},))),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"max_tokens": 0}, {"max_tokens": 0}),
        ({"seed": -1}, {"sampling": Sampling(seed=None)}),
        ({"seed": 0xFFFFFFFF}, {"sampling": Sampling(seed=0)}),
        ({"top_k": -1}, {"sampling": Sampling(top_k=0)}),
        ({"stop": "end"}, {"stop": ("end",)}),
        ({"stop": None, "temperature": None, "max_tokens": None, "logit_bias": None, "stream": None}, {}),
        ({"n": 1, "tools": [], "functions": None, "logprobs": False, "response_format": {"type": "text"}}, {}),
        ({"user": "me", "store": True, "metadata": {"a": [1]}, "something_new": {"deep": [None]}}, {}),
    ],
)
def test_what_is_asked_reaches_the_server(client: Connect, fields: dict[str, Any], expected: Any) -> None:
    connected = client()
    response = connected.http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    plain = ({"role": "user", "content": "Say hello."},)
    wanted = expected if isinstance(expected, TurnRequest) else TurnRequest(messages=plain, **expected)
    assert connected.server.requests == [wanted]


def test_messages_are_made_plain(client: Connect) -> None:
    connected = client()
    messages = [
        {"role": "developer", "content": "be brief", "name": "dev"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "user", "content": ""},
    ]
    response = connected.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert connected.server.requests[0].messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": ""},
    )


def test_a_list_with_one_prompt_is_a_prompt(client: Connect) -> None:
    connected = client()
    assert connected.http.post("/v1/completions", json={"prompt": ["one"]}).status_code == 200
    assert connected.server.requests == [TurnRequest(text="one")]


def test_the_model_is_listed_and_echoed(client: Connect) -> None:
    connected = client()
    assert [model.id for model in connected.openai.models.list()] == ["scripted-model"]
    assert connected.openai.models.retrieve("scripted-model").owned_by == "strata"
    with pytest.raises(NotFoundError, match="scripted-model"):
        connected.openai.models.retrieve("other/model")
    body = connected.http.post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    assert body["model"] == "scripted-model"


def test_health_and_status(client: Connect) -> None:
    connected = client()
    assert connected.http.get("/health").json() == {"status": "ok"}
    assert connected.http.head("/health").status_code == 200
    assert connected.http.get("/v1/status").json() == {"model": "scripted-model", "never_measured": None}
    connected.server.ready = (False, "the engine is restarting")
    response = connected.http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the engine is restarting"


def test_the_api_page_describes_the_bodies(client: Connect) -> None:
    page = client().http.get("/openapi.json").json()
    schemas = page["components"]["schemas"]
    assert "messages" in schemas["ChatBody"]["properties"]
    assert "prompt" in schemas["TextBody"]["properties"]
    refs = {part.partition('"')[0] for part in json.dumps(page).split('"#/components/schemas/')[1:]}
    assert refs <= schemas.keys()
