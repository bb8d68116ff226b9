"""What a client may send to the OpenAI routes, and its translation into a TurnRequest.

A field that cannot be honoured is refused by name, never dropped; fields nobody knows are ignored, as the originals do.
Whether token ids exist and whether the prompt fits is for the server to say: only it knows the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import Request

from strata.engine.protocol import Sampling
from strata.errors import BadRequest, BodyTooLarge, NotJson
from strata.serve.request import TurnRequest

MAX_STOPS = 16
MAX_BIASES = 1 << 16
_LARGE_BODY_BYTES = 1 << 20
_INT32 = 2**31 - 1
_Item = TypeVar("_Item")
_Body = TypeVar("_Body", bound=BaseModel)


def _refuse_unless(*harmless: Any) -> AfterValidator:
    """Refuses every value but null and these: the feature is not in this version, and must not be dropped silently."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(known) and value == known for known in harmless):
            raise PydanticCustomError("unsupported", "this is not supported yet, in this version of Strata")
        return value

    return AfterValidator(check)


def _as_list(value: Any) -> Any:
    if value == "":  # said here, where the place of the error is still the client's own
        raise PydanticCustomError("empty", "this must not be empty")
    return [value] if isinstance(value, str) else value


def _not_too_many(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:  # before its million keys are looked at
        raise PydanticCustomError("too_many", "at most {most} tokens can have a bias", {"most": MAX_BIASES})
    return biases


# A million bad items would make a million errors, of which the client is told one.
AtOnce = Annotated[list[_Item], Field(fail_fast=True)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Count = Annotated[int, Field(ge=-1, le=_INT32)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Nothing = Annotated[Any, _refuse_unless()]
NoList = Annotated[Any, _refuse_unless([])]
NoSwitch = Annotated[Any, _refuse_unless(False)]


class _Fields(BaseModel):
    # Strict: "5" is no number and 1 is no boolean, as in the originals. NaN and infinity are refused.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class Part(_Fields):
    type: str
    text: str | None = Field(default=None, validate_default=True)

    @field_validator("type")
    @classmethod
    def _only_text(cls, kind: str) -> str:
        if kind != "text":
            raise PydanticCustomError("part", "{kind} parts are not supported yet, only text", {"kind": kind})
        return kind

    @field_validator("text")
    @classmethod
    def _has_text(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None and info.data.get("type") == "text":
            raise PydanticCustomError("part", "a text part needs its text")
        return text


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[AtOnce[Part] | None, BeforeValidator(_as_parts)] = Field(default=None, validate_default=True)
    tool_calls: NoList = None
    function_call: Nothing = None

    @field_validator("content")
    @classmethod
    def _only_assistants_may_be_silent(cls, content: list[Part] | None, info: ValidationInfo) -> list[Part] | None:
        role = info.data.get("role")
        if content is None and role not in ("assistant", None):
            raise PydanticCustomError("content", "a message of the {role} needs content", {"role": role})
        return content

    def plain(self) -> dict[str, Any]:
        """The message as the engine's chat template takes it."""
        text = "\n".join(part.text or "" for part in self.content or ())
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Fields):
    include_usage: bool | None = None


class _CompletionFields(_Fields):
    """What chat and text completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[NonEmpty] | None, Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, BeforeValidator(_not_too_many)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    n: Annotated[int | None, _refuse_unless(1)] = None
    grammar: Nothing = None
    json_schema: Nothing = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(self) -> Sampling:
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1 is what others call "off"
            "min_p": self.min_p,
            # llama.cpp takes 32 bits, of which the highest value means "random"; a negative seed asks for just that.
            "seed": None if self.seed is None or self.seed < 0 else self.seed % 0xFFFFFFFF,
            "repeat_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias and {int(token): bias for token, bias in self.logit_bias.items()},
        }
        return Sampling(**{name: value for name, value in given.items() if value is not None})

    def _turn(self, namespace: str, max_tokens: int | None, **prompt: Any) -> TurnRequest:
        return TurnRequest(
            namespace=namespace,
            sampling=self._sampling(),
            max_tokens=None if max_tokens == -1 else max_tokens,  # -1: until the context ends, as in llama-server
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            cache_prompt=self.cache_prompt is not False,
            **prompt,
        )


class ChatBody(_CompletionFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[AtOnce[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: NoSwitch = None
    top_logprobs: Annotated[Any, _refuse_unless(0)] = None
    tools: NoList = None
    functions: NoList = None
    response_format: Annotated[Any, _refuse_unless({"type": "text"})] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees_with_its_old_name(cls, value: int | None, info: ValidationInfo) -> int | None:
        old = info.data.get("max_tokens")
        if value is not None and old is not None and value != old:
            raise PydanticCustomError("max_tokens", "this contradicts max_tokens, the old name of the same field")
        return value

    def turn(self, namespace: str) -> TurnRequest:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._turn(namespace, limit, messages=tuple(message.plain() for message in self.messages))


class TextBody(_CompletionFields):
    """The body of /v1/completions."""

    prompt: Annotated[list[NonEmpty], Field(min_length=1, max_length=1), BeforeValidator(_as_list)]
    logprobs: NoSwitch = None
    best_of: Annotated[Any, _refuse_unless(1)] = None
    echo: NoSwitch = None
    suffix: Annotated[Any, _refuse_unless("")] = None

    def turn(self, namespace: str) -> TurnRequest:
        return self._turn(namespace, self.max_tokens, text=self.prompt[0])


async def read_body(request: Request, kind: type[_Body], limit_bytes: int) -> _Body:
    """The body of a request as `kind`. Raises NotJson, BodyTooLarge, and BadRequest naming the first bad field."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise NotJson(f"Content-Type must be application/json, not {content_type or 'absent'}", field="Content-Type")
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > limit_bytes:
            raise BodyTooLarge(f"the body is larger than {limit_bytes} bytes")
    try:
        if len(raw) <= _LARGE_BODY_BYTES:
            return kind.model_validate_json(bytes(raw))
        return await asyncio.to_thread(kind.model_validate_json, bytes(raw))  # other streams go on meanwhile
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _bad_request(first) from None


def _bad_request(error: ErrorDetails) -> BadRequest:
    field = ""
    for step in error["loc"]:
        if isinstance(step, int):
            field += f"[{step}]"
        elif step != "[key]":  # a bad key of a mapping; the key itself stands before it
            field += f".{step}" if field else step
    message: str = error["msg"]
    return BadRequest(f"{field}: {message}" if field else message, field=field or None)


def body_schema(kind: type[BaseModel]) -> Mapping[str, Any]:
    """The request body of a route for the OpenAPI page, which FastAPI cannot see behind `read_body`."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
