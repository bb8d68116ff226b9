"""A long conversation among the small requests of an agent, on two slots without a cache: it is never read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.text import prose
from tests.serve.running import RunningServer

HELPERS = 20


def helper(n: int, chat: list[Any]) -> list[Any]:
    """A title, a summary or a sub-agent's question, in turn; each with its own system prompt."""
    kinds = ("You write titles.", "You summarise what you are given.", f"You are sub-agent {n}. {prose(3, seed=n)}")
    asked = (chat[0]["content"][:120], prose(6, seed=100 + n), f"Look at file {n} and report.")
    return [
        {"role": "system", "content": kinds[n % 3]},
        {"role": "user", "content": asked[n % 3]},
    ]


@pytest.mark.parametrize("tokens", [1500, pytest.param(6000, marks=pytest.mark.slow)])
def test_helpers_between_its_turns_cost_the_main_conversation_nothing(tmp_path: Path, tokens: int) -> None:
    with RunningServer(tmp_path / "log", "--parallel=2", f"--context={tokens + 1000}") as server:

        def ask(messages: list[Any]) -> tuple[str, int, int]:
            """The answer, its prompt's tokens, and how many of these were not read again."""
            answer = server.client.chat.completions.create(model="m", messages=messages, max_tokens=4, temperature=0)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached is not None
            return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached

        chat: list[Any] = [{"role": "user", "content": prose(tokens // 16, seed=1)}]
        reply, before, _ = ask(chat)
        assert abs(before - tokens) < tokens / 10
        for turn in range(2):
            for n in range(HELPERS):
                ask(helper(n, chat))
            chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"And then, {turn}?"}]
            reply, now, cached = ask(chat)
            assert cached >= before, f"turn {turn}: {cached} of {before} tokens were kept"
            before = now
