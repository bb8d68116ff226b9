"""A light streaming client, the same for every server: when each piece of an answer arrived.

It parses as little as it can, because on a small machine the client takes the server's cores. It relies on servers that
put no line of an event into two HTTP chunks, as both that are measured do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

Messages = list[dict[str, str]]


@dataclass(slots=True, kw_only=True)
class Answer:
    """One streamed answer. Times are of time.perf_counter; `at`: of each piece of text."""

    sent_s: float
    at: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float:
        return self.at[0] - self.sent_s

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that were not reused."""
        return int(self.usage["prompt_tokens"]) - int(self.usage["prompt_tokens_details"]["cached_tokens"])


async def ask(
    url: str, messages: Messages, *, max_tokens: int, on_text: Callable[[Answer], None] | None = None
) -> Answer:
    """A greedy chat completion of exactly `max_tokens` tokens; cancelling it closes the connection."""
    where = urlsplit(url)
    assert where.hostname is not None
    body = msgspec.json.encode(
        {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        answer = Answer(sent_s=time.perf_counter())
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode(errors="replace"))
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                break
            _take(answer, msgspec.json.decode(line[6:]), now, on_text)
    finally:
        writer.close()
    if not answer.usage:
        raise RuntimeError(f"the answer ended early: {answer.text!r}")
    return answer


def _take(answer: Answer, chunk: dict[str, Any], now: float, on_text: Callable[[Answer], None] | None) -> None:
    if "error" in chunk:
        raise RuntimeError(chunk["error"])
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            answer.at.append(now)
            answer.pieces.append(text)
            if on_text is not None:
                on_text(answer)


def question(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def rate(answers: list[Answer]) -> float:
    """Tokens per second of all together while every one of them writes."""
    begin, end = max(answer.at[0] for answer in answers), min(answer.at[-1] for answer in answers)
    written = 0.0
    for answer in answers:
        inside = sum(begin < at <= end for at in answer.at)
        written += inside * answer.tokens / len(answer.at)  # a piece may be more than one token
    return written / (end - begin)
