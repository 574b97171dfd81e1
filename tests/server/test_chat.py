"""POST /v1/chat/completions in OpenAI's shape."""

import json
from typing import Any

import pytest

from tests.fakes import JSON_TEXT, FakeEngine, fake_model_info
from tests.server.helpers import TOKENIZER, call, chat, events

HELLO = [{"role": "user", "content": "hi"}]


def test_a_reply_has_openais_fields() -> None:
    reply = chat().json()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 4
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 4
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_the_prompt_is_the_models_own_template() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "d", "name": "Ann"},
    ]
    assert chat(engine, messages=messages).status_code == 200
    text = TOKENIZER.decode(engine.seen[0].prompt_token_ids)
    assert text == "system: be brief\nuser: a\nb\nassistant: c\nuser: d\nassistant: "


def test_generation_goes_to_the_end_of_the_context_by_default() -> None:
    engine = FakeEngine(text="short")
    call("POST", "/v1/chat/completions", engine=engine, json={"messages": [{"role": "user", "content": "hi"}]})
    assert engine.seen[0].params.max_tokens is None


def test_max_completion_tokens_is_max_tokens() -> None:
    engine = FakeEngine()
    chat(engine, max_tokens=None, max_completion_tokens=3)
    assert engine.seen[0].params.max_tokens == 3
    assert chat(max_tokens=2, max_completion_tokens=3).status_code == 400


def test_logprobs_carry_exact_bytes() -> None:
    choice = chat(FakeEngine(text="é"), logprobs=True, top_logprobs=2).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert chat().json()["choices"][0]["logprobs"] is None
    assert chat(top_logprobs=2).json()["error"]["param"] == "top_logprobs"


def test_a_stream_names_the_role_first_and_ends_with_done() -> None:
    stream = events(chat(stream=True, n=2).text)
    assert stream[-1] == "[DONE]"
    assert [event["object"] for event in stream[:-1]] == ["chat.completion.chunk"] * (len(stream) - 1)
    assert len({event["id"] for event in stream[:-1]}) == 1
    assert [event["choices"][0]["delta"] for event in stream[:2]] == [{"role": "assistant", "content": ""}] * 2
    whole = chat(n=2).json()
    for index in (0, 1):
        parts = [c for event in stream[:-1] for c in event["choices"] if c["index"] == index]
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == whole["choices"][index]["message"]["content"]
        assert parts[-1]["delta"] == {}
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


def test_a_part_that_is_known_and_not_offered_is_refused_by_its_kind() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    error = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]).json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == "messages[0].content[1].type"
    assert error["message"] == "`messages[0].content[1].type`: parts of type image_url are not offered, only text."


def test_a_refusal_speaks_of_the_form_that_was_sent() -> None:
    error = chat(stop=["a", ""]).json()["error"]
    assert error["param"] == "stop[1]"
    assert "at least 1 character" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}],
        [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
        [{"type": "file", "file": {"file_id": "x"}}],
        [],
        None,
        5,
        {"type": "text", "text": "a"},
    ],
)
def test_content_that_is_no_text_is_refused_by_its_place(content: object) -> None:
    reply = chat(messages=[{"role": "user", "content": content}])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("messages[0].content")


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}], [5]]
)
def test_messages_of_another_kind_are_refused(messages: object) -> None:
    reply = chat(messages=messages)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    "name",
    ["functions", "function_call", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options",
     "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "echo", "guided_json"],
)  # fmt: skip
def test_an_option_that_is_not_offered_is_refused_by_name(name: str) -> None:
    error = chat(**{name: {"a": 1}}).json()["error"]
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"


def test_tools_are_refused_and_what_says_nothing_without_them_is_taken() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool]).json()["error"]["param"].startswith("tools")
    assert chat(tool_choice="auto", tools=[tool]).status_code == 400
    assert chat(parallel_tool_calls=True, tool_choice="none", modalities=["text"], tools=None).status_code == 200


def test_a_response_format_becomes_a_grammar() -> None:
    engine = FakeEngine()
    assert chat(engine, response_format={"type": "text"}).status_code == 200
    assert chat(engine, response_format={"type": "json_object"}, max_tokens=99).status_code == 200
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    reply = chat(engine, response_format=wanted, max_tokens=99)
    assert reply.json()["choices"][0]["message"]["content"] == JSON_TEXT
    grammars = [request.params.grammar for request in engine.seen]
    assert grammars[0] is None
    assert grammars[1].kind == "json_object"
    assert json.loads(grammars[2].schema) == schema


def _nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": _nested(33)}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": "x" * 66_000}}},
        {"type": "xml"},
        {"type": "json_object", "schema": {}},
        "json_object",
    ],
)
def test_a_bad_response_format_is_refused_before_anything_is_queued(wanted: object) -> None:
    engine = FakeEngine()
    reply = chat(engine, response_format=wanted)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("response_format")
    assert engine.seen == []


def test_the_prompt_too_long_message_names_both_numbers() -> None:
    error = chat(messages=[{"role": "user", "content": "x" * 4000}]).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "2048" in error["message"]


def test_the_engine_learns_which_tokens_are_the_systems_where_they_are_to_be_kept() -> None:
    messages = [{"role": "system", "content": "Speak in riddles only."}, {"role": "user", "content": "hi"}]

    def spans(server: dict[str, object], **entropic: object) -> tuple[tuple[int, int], ...]:
        engine = FakeEngine(info=fake_model_info(pruning_sketch_bits=2, can_evict=True, **server))
        assert chat(engine, messages=messages, entropic=entropic).status_code == 200
        prompt, found = engine.seen[0].prompt_token_ids, engine.seen[0].params.entropic.protected_spans
        for start, end in found:
            assert "riddles" in TOKENIZER.decode(prompt[start:end], skip_special_tokens=False)
        return found

    protecting = {"kv_protect": True}
    assert len(spans({**protecting, "pruning": "on"})) == 1
    assert len(spans({**protecting, "eviction": "pressure"})) == 1
    assert len(spans({"pruning": "on"}, kv_protect=True)) == 1
    assert len(spans(protecting, eviction="pressure")) == 1
    assert len(spans({}, kv_protect=True, pruning="on")) == 1
    assert spans({"pruning": "on"}) == ()
    assert spans({**protecting, "pruning": "on"}, kv_protect=False) == ()
    assert spans({**protecting, "pruning": "on"}, pruning="off") == ()
    assert spans(protecting) == ()


def count_renders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Messages of each conversation that is rendered from now on."""
    rendered: list[int] = []
    real = TOKENIZER.apply_chat_template

    def watched(messages: Any, add_generation_prompt: bool = True) -> list[int]:
        rendered.append(len(messages))
        return real(messages, add_generation_prompt)

    monkeypatch.setattr(TOKENIZER, "apply_chat_template", watched)
    return rendered


def test_a_server_that_keeps_everything_renders_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = count_renders(monkeypatch)
    engine = FakeEngine(info=fake_model_info(pruning_sketch_bits=2, can_evict=True))
    assert chat(engine, messages=[{"role": "system", "content": "rules"}, *HELLO]).status_code == 200
    assert rendered == [2]


def test_a_prompt_that_does_not_fit_is_refused_before_its_system_messages_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendered = count_renders(monkeypatch)
    engine = FakeEngine(info=fake_model_info(can_evict=True, eviction="pressure", kv_protect=True))
    reply = chat(engine, messages=[{"role": "system", "content": "x" * 4000}, *HELLO])
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert rendered == [2]
