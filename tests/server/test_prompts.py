"""Encoding of prompts: off the event loop, bounded, and with the template's own words for what it refuses."""

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from etserve.errors import OverloadedError, RequestError
from etserve.server.prompts import INLINE_CHARACTERS, MAX_PENDING, MAX_SYSTEM_SPANS, PromptEncoder
from etserve.server.schemas import MAX_MESSAGES, Message
from etserve.tokenizer.chat import ChatTemplate
from etserve.tokenizer.tokenizer import Tokenizer
from tests.server.helpers import TOKENIZER

HELLO = [Message(role="user", content="hi")]


class WatchedTokenizer:
    """Records the thread of each call, and waits for `gate` where there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.threads: list[threading.Thread] = []
        self._gate = gate

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        if self._gate is not None:
            self._gate.wait(10)
        return TOKENIZER.encode(text, add_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        self.threads.append(threading.current_thread())
        return TOKENIZER.apply_chat_template(messages, add_generation_prompt)


def encoder_of(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, 320, 2048)


def test_templates_and_long_texts_leave_the_event_loop_and_short_texts_do_not() -> None:
    watched = WatchedTokenizer()
    encoder = encoder_of(watched)

    async def go() -> None:
        await encoder.text("short")
        await encoder.text("x" * (INLINE_CHARACTERS + 1))
        await encoder.chat(HELLO)

    asyncio.run(go())
    main = threading.main_thread()
    assert [thread is main for thread in watched.threads] == [True, False, False]


def test_more_jobs_than_the_bound_are_shed() -> None:
    gate = threading.Event()
    encoder = encoder_of(WatchedTokenizer(gate))

    async def go() -> list[object]:
        jobs = [asyncio.create_task(encoder.text("x" * 3000)) for _ in range(MAX_PENDING + 5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.set()
        return list(await asyncio.gather(*jobs, return_exceptions=True))

    results = asyncio.run(go())
    assert sum(isinstance(result, OverloadedError) for result in results) == 5
    assert sum(isinstance(result, list) for result in results) == MAX_PENDING


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate."),
        ("{{ messages[7].content }}", None),
        ("{{ messages + 5 }}", None),
    ],
)
def test_what_a_template_refuses_is_the_clients_fault_in_the_templates_words(source: str, said: str | None) -> None:
    backend = TOKENIZER._backend
    spelled = Tokenizer(backend, TOKENIZER._spelling, chat_template=ChatTemplate(source, {}, "a template"))
    with pytest.raises(RequestError) as caught:
        asyncio.run(encoder_of(spelled).chat(HELLO))
    assert caught.value.param == "messages"
    assert said is None or caught.value.message == said
    assert "Traceback" not in caught.value.message
    assert "0x" not in caught.value.message


def test_a_template_that_makes_nothing_is_refused() -> None:
    empty = Tokenizer(TOKENIZER._backend, TOKENIZER._spelling, chat_template=ChatTemplate("", {}, "a template"))
    with pytest.raises(RequestError, match="empty prompt"):
        asyncio.run(encoder_of(empty).chat(HELLO))
    none = Tokenizer(TOKENIZER._backend, TOKENIZER._spelling)
    with pytest.raises(RequestError, match="no chat template"):
        asyncio.run(encoder_of(none).chat(HELLO))


def spans_of(messages: list[Message]) -> tuple[list[tuple[int, int]], list[int]]:
    encoder = encoder_of(TOKENIZER)

    async def go() -> tuple[list[tuple[int, int]], list[int]]:
        ids = await encoder.chat(messages)
        return await encoder.system_spans(messages, ids), ids

    try:
        return asyncio.run(go())
    finally:
        encoder.close()


def test_the_tokens_of_system_messages_are_found_wherever_they_stand() -> None:
    rules, late = "Speak in riddles only.", "Now be brief."
    spans, ids = spans_of(
        [
            Message(role="system", content=rules),
            Message(role="user", content="What runs and never walks?"),
            Message(role="developer", content=late),
            Message(role="user", content="Well?"),
        ]
    )
    texts = [TOKENIZER.decode(ids[start:end], skip_special_tokens=False) for start, end in spans]
    assert len(texts) == 2
    assert rules in texts[0]
    assert late in texts[1]
    assert not any("never walks" in text or "Well?" in text for text in texts)


def test_a_chat_without_system_messages_protects_nothing() -> None:
    assert spans_of(HELLO)[0] == []


def test_a_template_that_takes_no_beginnings_protects_the_whole_prompt() -> None:
    class Picky(WatchedTokenizer):
        def apply_chat_template(
            self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
        ) -> list[int]:
            if not add_generation_prompt:
                raise RequestError("conversations end with the user", param="messages")
            return super().apply_chat_template(messages, add_generation_prompt)

    encoder = encoder_of(Picky())
    messages = [Message(role="system", content="rules"), *HELLO]

    async def go() -> None:
        ids = await encoder.chat(messages)
        assert await encoder.system_spans(messages, ids) == [(0, len(ids))]

    asyncio.run(go())
    encoder.close()


def alternating(num_turns: int) -> list[Message]:
    """A system message before every user's."""
    return [
        message
        for i in range(num_turns)
        for message in (Message(role="system", content=f"Rule {i};"), Message(role="user", content="go"))
    ]


@pytest.mark.parametrize("num_turns", [MAX_SYSTEM_SPANS - 1, MAX_SYSTEM_SPANS, MAX_SYSTEM_SPANS + 1, 40])
def test_every_system_message_is_protected_however_many_there_are(num_turns: int) -> None:
    spans, ids = spans_of(alternating(num_turns))
    assert len(spans) == min(num_turns, MAX_SYSTEM_SPANS)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    texts = [TOKENIZER.decode(ids[start:end], skip_special_tokens=False) for start, end in spans]
    for i in range(num_turns):
        assert f"Rule {i};" in texts[min(i, MAX_SYSTEM_SPANS - 1)]
    assert ["go" in text for text in texts[:-1]] == [False] * (len(texts) - 1)


def test_no_conversation_is_rendered_more_often_than_the_bound() -> None:
    watched = WatchedTokenizer()
    encoder = encoder_of(watched)
    messages = alternating(MAX_MESSAGES // 2)

    async def go() -> list[tuple[int, int]]:
        return await encoder.system_spans(messages, list(range(10)))

    assert len(asyncio.run(go())) == MAX_SYSTEM_SPANS
    encoder.close()
    assert len(watched.threads) <= 2 * MAX_SYSTEM_SPANS
