"""What preparing the next turn of a long chat costs when the last one was prepared before, against all of it anew.

Through the engine process, from the messages as JSON to the tokens in this process: pipe, rendering and tokenising
included. Run alone: `python -m benchmarks.prepare`; the last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from benchmarks.inprocess import say
from benchmarks.text import prose
from strata.engine.client import EngineClient
from strata.engine.protocol import EngineSettings, Prepared, unpack_tokens
from strata.serve.wiring import find_model
from strata.store.arena import Arena
from strata.types import MIB

CHAT_TOKENS = 100_000
MESSAGES = 200
SENTENCE_TOKENS = 15.4
"""Of benchmarks.text, in a long chat, with what the template adds."""
ROUNDS = 9


def chat(n_messages: int) -> list[dict[str, str]]:
    """The first messages of a chat of CHAT_TOKENS in MESSAGES messages."""
    sentences = round(CHAT_TOKENS / MESSAGES / SENTENCE_TOKENS)
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": prose(sentences, seed=i)} for i in range(n_messages)]


async def timed(prepare: Callable[[], Awaitable[Prepared]]) -> tuple[float, Prepared]:
    began = time.perf_counter()
    prepared = await prepare()
    return time.perf_counter() - began, prepared


async def measure() -> dict[str, float]:
    """`prepare_ratio`: median time of the whole prompt / of the same prompt as the next turn of a known one."""
    settings = EngineSettings(model_path=str(find_model("demo")), slots=1, context=1024, flash_attention="on")
    engine = EngineClient(settings, Arena(MIB, pretouch=False))
    await engine.start()
    known = msgspec.json.encode(chat(MESSAGES - 1))  # ends with a question; then come a reply and the next question
    following = msgspec.json.encode(chat(MESSAGES + 1))
    whole_s, next_s = [], []
    try:
        for n in range(ROUNDS):
            owner = f"round {n}"
            await engine.prepare(messages_json=known, owner=owner)
            took_s, fresh = await timed(lambda: engine.prepare(messages_json=following))
            whole_s.append(took_s)
            took_s, grown = await timed(lambda owner=owner: engine.prepare(messages_json=following, owner=owner))
            next_s.append(took_s)
            tokens = unpack_tokens(fresh.tokens)
            if not np.array_equal(tokens, unpack_tokens(grown.tokens)):
                raise RuntimeError("the next turn's tokens are not those of the whole prompt")
    finally:
        await engine.close()
    whole_ms, next_ms = 1000 * statistics.median(whole_s), 1000 * statistics.median(next_s)
    say(
        f"{len(tokens)} tokens in {MESSAGES + 1} messages: whole {whole_ms:.1f} ms, as the next turn {next_ms:.1f} ms "
        f"(rendering {1000 * grown.render_s:.1f}, tokenising {1000 * grown.tokenize_s:.1f}; "
        f"{len(tokens) - grown.reused} tokens from the last cut on)"
    )
    return {"prepare_ratio": whole_ms / next_ms}


def prepare_ratio() -> dict[str, float]:
    return asyncio.run(measure())


if __name__ == "__main__":
    print(json.dumps({name: round(value, 4) for name, value in prepare_ratio().items()}))
