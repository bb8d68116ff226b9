"""The model's chat template, rendered in a sandbox, and the turn openers found from it.

Covers Jinja templates as GGUF files carry them (written for Hugging Face's renderer). A model without one gets ChatML,
as in llama.cpp. Tools, images and reasoning fields are passed on as the messages carry them; nothing here knows them.
`find_openers` is pure: it takes the renderer and the vocabulary as functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strata.types import Tokens

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Messages = Sequence[dict[str, Any]]


class TemplateRefused(ValueError):
    """The template does not accept these messages; the text is what it says, for the client to read."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks a model's words, for training; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Hugging Face's filter: plain JSON, without jinja2's escaping of < and >."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """A model's template; ChatML when `source` is None. One that cannot be parsed refuses every rendering."""

    def __init__(self, source: str | None, *, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.is_from_model = source is not None
        self._special = {"bos_token": bos, "eos_token": eos}
        self._broken = ""
        try:
            self._template = environment.from_string(CHATML if source is None else source)
        except jinja2.TemplateError as error:
            self._broken = f"the model's chat template cannot be parsed: {error}"

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises TemplateRefused with the template's own words when it rejects the messages."""
        if self._broken:
            raise TemplateRefused(self._broken)
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateRefused(f"the model's chat template rejects these messages: {error}") from error


# --------------------------------------------------------------------------------------------------------- turn openers

_USER, _REPLY, _NEXT, _SYSTEM = "Zqv first question", "Zqv one answer", "Zqv second question", "Zqv the rules"

Render = Callable[[Messages, bool], str]
"""(messages, add_generation_prompt) -> text; raises TemplateRefused."""


def find_openers(
    render: Render, tokenize: Callable[[str], Tokens], is_opener: Callable[[int], bool], bos: str
) -> frozenset[int]:
    """Token ids that open a turn: of each role's added text, the first token that is a marker and does not end a turn.

    `is_opener(token)`: a control or user-defined token that is not an end of generation. Method and pitfalls: ENGINE.md
    §11. Empty when the template writes roles in plain text, or renders none of the probes.
    """
    for as_parts in (False, True):
        added = _added_texts(render, bos, as_parts=as_parts)
        first = (_first_marker(tokenize(text), is_opener) for text in added)
        if found := frozenset(token for token in first if token is not None):
            return found
    return frozenset()


def _first_marker(tokens: Tokens, is_opener: Callable[[int], bool]) -> int | None:
    return next((int(token) for token in tokens if is_opener(int(token))), None)


def _added_texts(render: Render, bos: str, *, as_parts: bool) -> list[str]:
    """What the template writes in front of a new user, assistant and system message, as far as it can be told."""

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}

    def attempt(messages: Messages, *, generation: bool = False) -> str | None:
        try:
            return render(messages, generation)
        except TemplateRefused:
            return None

    user, reply, following = message("user", _USER), message("assistant", _REPLY), message("user", _NEXT)
    one, two = attempt([user]), attempt([user, reply])
    three = attempt([user, reply, following])
    prompt = attempt([user], generation=True)
    system = attempt([message("system", _SYSTEM), user])
    added = []
    if two is not None and three is not None and _NEXT in three:
        added.append(_between_turns(two, three))
    if one is not None and prompt is not None and prompt.startswith(one):
        added.append(prompt[len(one) :])
    if system is not None and _SYSTEM in system:
        added.append(system[: system.index(_SYSTEM)].removeprefix(bos))
    return added


def _between_turns(two: str, three: str) -> str:
    """The text between the answer and the next question. Templates that rewrite earlier turns need the second form."""
    end = three.index(_NEXT)
    if three.startswith(two):
        return three[len(two) : end]
    differs = next((i for i, (a, b) in enumerate(zip(two, three, strict=False)) if a != b), min(len(two), len(three)))
    behind_reply = three.find(_REPLY) + len(_REPLY) if _REPLY in three else 0
    return three[max(differs, behind_reply) : end]
