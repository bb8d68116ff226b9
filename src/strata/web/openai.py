"""The OpenAI routes: /v1/chat/completions, /v1/completions and /v1/models; /v1/embeddings is refused."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from strata.engine.protocol import Timing
from strata.errors import NotFound, NotSupported
from strata.serve.request import Completed
from strata.web.answers import Dialect, Limits, StreamedAnswer, WholeAnswer, sse_data
from strata.web.auth import namespace_of
from strata.web.bodies import ChatBody, TextBody, body_schema, read_body
from strata.web.errors import json_response
from strata.web.exchange import Exchanges, ServerSeam

_DONE = b"data: [DONE]\n\n"


def usage_of(completed: Completed) -> dict[str, Any]:
    return {
        "prompt_tokens": completed.prompt_tokens,
        "completion_tokens": completed.completion_tokens,
        "total_tokens": completed.prompt_tokens + completed.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completed.cached_tokens},
    }


def timings_of(timing: Timing, cached_tokens: int) -> dict[str, Any]:
    """llama-server's `timings`; a rate nobody could measure is null."""

    def rate(tokens: int, seconds: float) -> float | None:
        return tokens / seconds if tokens and seconds > 0 else None

    return {
        "cache_n": cached_tokens,
        "prompt_n": timing.read_tokens,
        "prompt_ms": timing.read_s * 1000,
        "prompt_per_second": rate(timing.read_tokens, timing.read_s),
        "predicted_n": timing.write_tokens,
        "predicted_ms": timing.write_s * 1000,
        "predicted_per_second": rate(timing.write_tokens, timing.write_s),
    }


class _OpenAIDialect:
    """What the chat and the text answers share; a subclass says what stands in `choices`."""

    id_prefix: str
    object_whole: str
    object_chunk: str

    def __init__(self, *, model: str, include_usage: bool) -> None:
        self._head = {"id": self.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def _choice_whole(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _choice_piece(self, text: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse_data({**self._head, "object": self.object_chunk, "choices": choices, **more})

    def _piece(self, choice: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        return self._chunk([{"index": 0, **choice, "logprobs": None, "finish_reason": reason}], **more)

    def whole(self, text: str, completed: Completed) -> dict[str, Any]:
        choice = {"index": 0, **self._choice_whole(text), "logprobs": None, "finish_reason": completed.reason}
        return {
            **self._head,
            "object": self.object_whole,
            "choices": [choice],
            "usage": usage_of(completed),
            "timings": timings_of(completed.timing, completed.cached_tokens),
        }

    def opening(self) -> bytes:
        return b""

    def piece(self, text: str) -> bytes:
        return self._piece(self._choice_piece(text))

    def closing(self, completed: Completed) -> bytes:
        timings = timings_of(completed.timing, completed.cached_tokens)
        last = self._piece(self._choice_piece(None), completed.reason, timings=timings)
        usage = self._chunk([], usage=usage_of(completed)) if self._include_usage else b""
        return last + usage + _DONE


class _ChatDialect(_OpenAIDialect):
    id_prefix, object_whole, object_chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _choice_whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _choice_piece(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def opening(self) -> bytes:
        return self._piece({"delta": {"role": "assistant", "content": ""}})


class _TextDialect(_OpenAIDialect):
    id_prefix, object_whole, object_chunk = "cmpl-", "text_completion", "text_completion"

    def _choice_whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _choice_piece(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}


def openai_routes(server: ServerSeam, exchanges: Exchanges, limits: Limits) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    started = int(time.time())

    async def answer(request: Request, body: ChatBody | TextBody, dialect: type[_OpenAIDialect]) -> Response:
        turn = body.turn(namespace_of(request.scope))
        spelling: Dialect = dialect(model=body.model or server.model_name, include_usage=body.include_usage)
        if body.stream:
            return StreamedAnswer(exchanges, turn, spelling, limits)
        return WholeAnswer(exchanges, turn, spelling)

    @router.post("/chat/completions", openapi_extra=dict(body_schema(ChatBody)))
    async def chat_completions(request: Request) -> Response:
        return await answer(request, await read_body(request, ChatBody, limits.body_bytes), _ChatDialect)

    @router.post("/completions", openapi_extra=dict(body_schema(TextBody)))
    async def completions(request: Request) -> Response:
        return await answer(request, await read_body(request, TextBody, limits.body_bytes), _TextDialect)

    @router.post("/embeddings")
    async def embeddings() -> Response:
        raise NotSupported("embeddings: no model of this version of Strata gives any")

    def card() -> dict[str, Any]:
        return {"id": server.model_name, "object": "model", "created": started, "owned_by": "strata"}

    @router.get("/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        if name != server.model_name:
            raise NotFound(f"there is no model {name!r} here, only {server.model_name!r}", field="model")
        return json_response(card())

    return router
