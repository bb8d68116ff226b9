"""Chat templates, and the turn openers found from them."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine.template import ChatTemplate, TemplateRefused, find_openers
from strata.types import Tokens

USER = [{"role": "user", "content": "hi"}]
CHAT = [*USER, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>")


def test_a_model_without_a_template_gets_chatml() -> None:
    chatml = template(None)
    assert not chatml.is_from_model and template("x").is_from_model
    assert chatml.render(CHAT) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chatml.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_what_templates_of_hugging_face_use() -> None:
    source = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- generation %}[{{ m.role }}] {{ m.content | trim }}{% endgeneration %}
{%- endfor %}
{%- if tools %}no{% endif %}{{ {'a': '<ü>'} | tojson }}{{ strftime_now('%Y') | length }}{{ eos_token }}"""
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": " hi "}]
    assert template(source).render(messages) == '<s>[user] hi{"a": "<ü>"}4</s>'
    assert template("{{ messages | tojson(indent=2) }}").render([]) == "[]"


def test_blocks_leave_no_lines_behind() -> None:
    assert template("  {% if true %}\n  a\n  {% endif %}\n").render(USER) == "  a\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].role }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for m in messages %}", "cannot be parsed"),
        ("{{ nothing_here() }}", "undefined"),
        ("{% for i in range(999999999) %}x{% endfor %}", "too big|range"),
    ],
)
def test_a_template_that_refuses_says_why(source: str, words: str) -> None:
    with pytest.raises(TemplateRefused, match=words):
        template(source).render(USER)


# --------------------------------------------------------------------------------------------------------- turn openers

IDS = {"<s>": 1, "<|im_start|>": 2, "<|im_end|>": 3, "[INST]": 4, "[/INST]": 5, "<|user|>": 6, "<|assistant|>": 7}
ENDS = {3}


def words_of(text: str) -> Tokens:
    """A tokenizer that knows the markers above; every other character is token 100."""
    tokens, at = [], 0
    while at < len(text):
        marker = next((marker for marker in IDS if text.startswith(marker, at)), None)
        tokens.append(IDS[marker] if marker else 100)
        at += len(marker) if marker else 1
    return np.array(tokens, np.int32)


def openers(source: str | None) -> set[int]:
    chat = template(source)
    return set(
        find_openers(
            lambda messages, prompt: chat.render(messages, add_generation_prompt=prompt),
            words_of,
            lambda token: token < 100 and token not in ENDS,
            "<s>",
        )
    )


TURNS = "{% for m in messages %}%s{% endfor %}"


def test_openers_of_common_shapes() -> None:
    assert openers(None) == {IDS["<|im_start|>"]}
    by_role = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert openers(by_role + prompt) == {6, 7}
    inst = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('no system') }}{% endif %}"
        "{% endfor %}"
    )
    assert openers(inst) == {IDS["[INST]"]}


def test_openers_of_templates_that_rewrite_earlier_turns() -> None:
    """The last answer is shown with its thoughts, an earlier one without: the renderings are not prefixes."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}(thinking){% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert openers(source) == {IDS["<|im_start|>"]}


def test_content_that_must_be_a_list_of_parts() -> None:
    source = "{% for m in messages %}<|user|>{{ m.content[0].text }}{% endfor %}"
    assert openers(source) == {IDS["<|user|>"]}


def test_plain_text_roles_and_broken_templates_have_no_openers() -> None:
    assert openers("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}") == set()
    assert openers("{{ raise_exception('never') }}") == set()
    assert openers("{% for %}") == set()
    assert openers("always the same") == set()
