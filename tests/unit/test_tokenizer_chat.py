"""Chat templates: the model's own, in the sandbox, within bounds; a client only ever sees a one-line reason."""

import sys
import time
from typing import Any

import pytest

from etserve.errors import ModelError, RequestError
from etserve.tokenizer.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "folder/chat_template.jinja")


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: object) -> str:
    return template(source).render(MESSAGES if messages is None else messages, True, **options)


def test_a_template_sees_messages_special_tokens_and_options() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ level }}{{ messages[0] | tojson }}"
        "{% generation %}g{% endgeneration %}"
    )
    assert render(source, level=3) == '<s>user=hi</s>>3{"role": "user", "content": "hi"}g'


def test_blocks_are_trimmed_as_transformers_does() -> None:
    assert render("{% for m in messages %}\n    {{ m.content }}\n{% endfor %}\nend") == "    hi\nend"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "^Roles must alternate.$"),
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "division"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recurses too deeply"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ 'a' * 10**9 }}", "too large"),
        ("{{ 10 ** 10 ** 10 }}", "too large"),
        ("{{ '%999999999d' % 1 }}", "too large"),
        ("{% for i in range(9999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}", "output is too long"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}", "too long"),
        ("{{ lipsum.__globals__['os'].system('true') }}", "unsafe|undefined"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_a_fault_in_a_template_is_one_line_for_the_client_within_bounds(source: str, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match=reason) as caught:
        render(source)
    assert "\n" not in caught.value.message
    assert "0x" not in caught.value.message
    assert caught.value.param == "messages"
    assert time.monotonic() - start < 30  # it ends at all; the bound itself is a second
    assert sys.gettrace() is None


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ messages", "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}", "x" * (1 << 21), "{% foo %}"]
)
def test_a_template_that_does_not_compile_stops_the_start(source: str) -> None:
    with pytest.raises(ModelError, match=r"folder/chat_template\.jinja: the chat template") as caught:
        template(source).check()
    assert "\n" not in str(caught.value)


def test_long_messages_may_give_long_prompts() -> None:
    content = "a" * 300_000
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content
