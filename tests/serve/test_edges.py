"""Requests at the edges, on the real server: one token, the whole context, one too many, other keys, early leavers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest
from tests.serve.running import RunningServer, wait_for

CONTEXT = 512
LINE = "The word of the day is {}.\n"
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("edges")
    with RunningServer(folder / "log", f"--context={CONTEXT}", cold=folder / "cold", keys=KEYS) as server:
        yield server
        server.settled()
        server.stop()


def complete(server: RunningServer, prompt: str, max_tokens: int = 8, client: openai.OpenAI | None = None):
    """A greedy text completion."""
    answer = (client or server.client).completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer, answer.usage.prompt_tokens_details.cached_tokens


def prompt_of(server: RunningServer, n_tokens: int) -> str:
    """A prompt of exactly this many tokens."""
    text = " word" * n_tokens
    answer, _ = complete(server, " word" * 20, 0)
    return text[5 * (answer.usage.prompt_tokens - 20) :]


def test_a_prompt_of_one_token_and_again(server: RunningServer) -> None:
    for _ in range(2):
        answer, cached = complete(server, "Hello", 2)
        assert (answer.usage.prompt_tokens, cached) == (1, 0)


def test_the_same_prompt_twice_reads_one_token_again(server: RunningServer) -> None:
    prompt = LINE.format("lantern") * 12
    first, _ = complete(server, prompt)
    again, cached = complete(server, prompt)
    assert cached == again.usage.prompt_tokens - 1
    assert again.choices[0].text == first.choices[0].text
    assert "lantern" in first.choices[0].text


@pytest.mark.parametrize("n_tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 5000])
def test_the_end_of_the_context(server: RunningServer, n_tokens: int) -> None:
    kept = LINE.format("orchid") * 40
    complete(server, kept)
    server.settled()
    prompt = prompt_of(server, n_tokens)
    if n_tokens < CONTEXT:
        answer, _ = complete(server, prompt, 100)
        assert answer.usage.prompt_tokens == n_tokens
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == CONTEXT
    else:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                server.client.completions.create(model="demo", prompt=prompt, stream=stream)
            assert refused.value.code == "context_length_exceeded"
            assert str(n_tokens) in refused.value.message and str(CONTEXT) in refused.value.message
    answer, cached = complete(server, kept)
    assert cached > 0.9 * answer.usage.prompt_tokens, "what was parked before still hits"


def test_a_prompt_and_more_reply_than_fits(server: RunningServer) -> None:
    answer, _ = complete(server, prompt_of(server, CONTEXT - 12), 100)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == CONTEXT


def test_another_key_never_hits_and_never_hears(server: RunningServer) -> None:
    other = server.client_with(KEYS[1])
    secret = LINE.format("xylophone") * 40
    complete(server, secret)
    answer, cached = complete(server, LINE[:15], 24, other)
    assert cached == 0
    assert "xylophone" not in answer.choices[0].text
    answer, cached = complete(server, secret, 8, other)
    assert cached <= 5, "no more than its own first words"
    answer, cached = complete(server, secret)
    assert cached > 0.9 * answer.usage.prompt_tokens
    assert "xylophone" not in str(server.status())
    with pytest.raises(openai.AuthenticationError):
        complete(server, "Hello", 1, server.client_with("third-key"))
    assert server.http.get("/v1/models").status_code == 401


def test_who_leaves_while_writing_frees_the_slot_within_a_second(server: RunningServer) -> None:
    stream = server.client.completions.create(
        model="demo", prompt=LINE.format("saddle") * 5, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    left = time.monotonic()
    wait_for(server.idle, "the slot to be idle")
    assert time.monotonic() - left < 1
    answer, _ = complete(server, LINE.format("marble") * 5)
    assert "marble" in answer.choices[0].text
