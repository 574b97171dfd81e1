"""POST /v1/completions in OpenAI's shape."""

import pytest

from etserve.outputs import SequenceOutput
from etserve.sampling_params import EntropicParams, SamplingParams
from etserve.server.replies import ReplyFacts, Usage
from tests.fakes import FakeEngine, fake_model_info
from tests.server.helpers import TOKENIZER, call, complete, events


def test_a_reply_has_openais_fields() -> None:
    reply = complete().json()
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["model"] == "unit"
    assert isinstance(reply["created"], int)
    choice = reply["choices"][0]
    assert choice["index"] == 0
    assert len(choice["text"]) == 4
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_max_tokens_is_16_by_default() -> None:
    engine = FakeEngine()
    call("POST", "/v1/completions", engine=engine, json={"prompt": "a"})
    assert engine.seen[0].params.max_tokens == 16
    assert engine.seen[0].params.temperature == 1.0
    assert engine.seen[0].params.top_p == 1.0


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_a_prompt_is_text_texts_ids_or_lists_of_ids(prompt: object, ids: list[list[int]]) -> None:
    engine = FakeEngine()
    reply = complete(engine, prompt=prompt)
    assert reply.status_code == 200
    assert [request.prompt_token_ids for request in engine.seen] == ids
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(len(ids)))


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    reply = complete(prompt=["a", "b"], n=2, echo=True).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][0] for choice in reply["choices"]] == ["a", "a", "b", "b"]
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["a", 1], [1, "a"], [[1], "a"], [True], [1.5], [-1], [320], [2**31], 5, None, {}, [None]],
)
def test_a_prompt_of_another_kind_is_refused(prompt: object) -> None:
    reply = complete(prompt=prompt)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"


def test_at_most_64_prompts_fit_into_a_request() -> None:
    assert complete(prompt=["a"] * 64).status_code == 200
    assert complete(prompt=["a"] * 65).status_code == 400
    assert complete(prompt=["a"] * 64, n=3).json()["error"]["param"] == "n"


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    for prompt in ("a" * 3000, [97] * 3000):
        error = complete(prompt=prompt).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert "2048" in error["message"]
        assert "300" in error["message"]


def test_logprobs_are_aligned_with_the_text() -> None:
    logprobs = complete(prompt="hé", logprobs=2, echo=True).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-0.5] * 6
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])


def test_echo_with_no_tokens_scores_the_prompt() -> None:
    engine = FakeEngine()
    reply = complete(engine, prompt="ab", max_tokens=0, echo=True, logprobs=1)
    assert engine.seen[0].params.max_tokens == 0
    assert engine.seen[0].params.prompt_logprobs == 1
    choice = reply.json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert complete(max_tokens=0).json()["error"]["param"] == "max_tokens"


def test_an_offset_is_where_a_tokens_own_text_begins_also_after_half_a_code_point() -> None:
    reply = complete(prompt=[0xF0, 0x9F, 0xE2, 65], echo=True, logprobs=0, max_tokens=0)
    choice = reply.json()["choices"][0]
    assert choice["text"] == "\ufffd\ufffdA"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_every_choice_brings_the_prompts_logprobs_though_they_are_measured_once() -> None:
    for choice in complete(prompt=["ab", "c"], n=3, echo=True, logprobs=0, max_tokens=2).json()["choices"]:
        prompt = "ab" if choice["index"] < 3 else "c"
        assert choice["logprobs"]["tokens"][: len(prompt)] == list(prompt)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 2


def test_a_reply_that_would_hold_too_many_logprobs_is_refused() -> None:
    body = {"prompt": [[1] * 1000] * 8, "n": 16, "echo": True, "max_tokens": 1}
    assert complete(**body, logprobs=20).json()["error"]["param"] == "logprobs"
    assert complete(**{**body, "n": 1}, logprobs=1).status_code == 200


def test_streamed_text_and_logprobs_equal_the_whole_reply() -> None:
    body = {"prompt": ["one", "two"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 6}
    whole = complete(**body).json()
    stream = events(complete(**body, stream=True).text)
    assert stream[-1] == "[DONE]"
    for choice in whole["choices"]:
        parts = [c for e in stream[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [x for p in parts if p["logprobs"] for x in p["logprobs"][name]] == choice["logprobs"][name]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


def test_a_usage_chunk_comes_only_on_request_and_without_choices() -> None:
    plain = events(complete(stream=True).text)
    assert all(event["choices"] for event in plain[:-1])
    asked = events(complete(stream=True, stream_options={"include_usage": True}).text)
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == 4
    assert [event for event in asked[:-2] if event.get("usage")] == []


def test_the_entropic_record_comes_only_on_request() -> None:
    assert "entropic" not in complete().text
    summary = complete(n=2, entropic={"trace": "summary"}).json()
    assert summary["choices"][0]["entropic"]["tau_nats"] == 0.5
    assert "tokens" not in summary["choices"][0]["entropic"]
    assert summary["usage"]["entropic"]["tau_nats"] == 1.0
    sums = {"tau_nats", "tau_up_nats", "tau_deadband_nats", "tau_ratchet_nats", "nats_resolved", "surprisal_nats"}
    assert set(summary["usage"]["entropic"]) == sums | {"blocks_evicted", "entropy_estimator"}
    assert summary["usage"]["entropic"]["entropy_estimator"] == "exact"
    assert sums <= set(summary["choices"][0]["entropic"])
    traced = complete(entropic={"trace": "tokens"}).json()["choices"][0]["entropic"]
    assert len(traced["tokens"]) == 4
    assert set(traced["tokens"][0]) == {"entropy_nats", "varentropy", "temperature", "kept_fraction", "tau_nats"}


def test_in_a_stream_each_tokens_record_rides_with_the_token_and_the_summary_last() -> None:
    stream = events(complete(stream=True, entropic={"trace": "tokens"}).text)[:-1]
    records = [event["choices"][0].get("entropic", {}) for event in stream]
    assert [len(record.get("tokens", [])) for record in records] == [1, 1, 1, 1, 0]
    assert records[-1]["tau_nats"] == 0.5


def test_parameters_reach_the_engine_as_asked() -> None:
    engine = FakeEngine()
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "n": 2, "min_tokens": 1, "stop": "x", "seed": 3,
        "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"7": 2.5}, "priority": -3,
    }  # fmt: skip
    assert complete(engine, **asked).status_code == 200
    request = engine.seen[0]
    params = request.params
    for name in set(asked) - {"stop", "stop_token_ids", "logit_bias", "priority"}:
        assert getattr(params, name) == asked[name], name
    assert params.stop == ("x",)
    assert params.stop_token_ids == (5,)
    assert params.logit_bias == {7: 2.5}
    assert request.priority == -3


def test_a_negative_seed_is_taken_and_always_the_same() -> None:
    engine = FakeEngine()
    complete(engine, seed=-1)
    complete(engine, seed=-1)
    assert engine.seen[0].params.seed == engine.seen[1].params.seed
    assert engine.seen[0].params.seed >= 0


@pytest.mark.parametrize(
    "name", ["best_of", "suffix", "tools", "prompt_embeds", "typical_p", "chat_template", "messages"]
)
def test_an_option_that_is_not_offered_is_refused_by_name(name: str) -> None:
    error = complete(**{name: 1}).json()["error"]
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", "on"),
        ("nonsense", 1),
        ("temperature_mode", "fixed"),
        ("target_entropy_nats", -0.1),
        ("target_entropy_nats", 20.5),
        ("pruning", True),
        ("speculation", "ngram"),
        ("epsilon", 0.6),
        ("epsilon", -0.1),
        ("kv_protect", 1),
        ("kv_protect", True),  # a prompt has no roles
    ],
)
def test_an_entropic_option_that_is_not_offered_or_out_of_bounds_is_refused_by_name(name: str, value: object) -> None:
    reply = complete(entropic={name: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"entropic.{name}"


def test_entropic_options_reach_the_engine() -> None:
    engine = FakeEngine()
    wanted = {
        "temperature_mode": "cool",
        "target_entropy_nats": 1.5,
        "pruning": "on",
        "epsilon": 0.2,
        "speculation": "off",
    }
    assert complete(engine, entropic={**wanted, "kv_protect": False}).status_code == 200
    assert engine.seen[0].params.entropic == EntropicParams(**wanted, kv_protect=False)  # type: ignore[arg-type]
    complete(engine)
    assert engine.seen[1].params.entropic == EntropicParams()


def test_fields_that_cannot_change_the_result_are_taken() -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "best_of": None, "suffix": None,
        "safety_identifier": "s", "prompt_cache_key": "k", "logit_bias": None, "stop": None, "seed": None,
    }  # fmt: skip
    assert complete(**harmless).status_code == 200
    assert complete(store=True).json()["error"]["param"] == "store"


def test_token_ids_outside_the_vocabulary_are_refused_wherever_they_stand() -> None:
    for field in ({"stop_token_ids": [320]}, {"logit_bias": {"320": 1}}, {"prompt": [320]}, {"prompt": [[1], [320]]}):
        reply = complete(**field)
        assert reply.status_code == 400
        assert "319" in reply.json()["error"]["message"]
    assert complete(stop_token_ids=[319], logit_bias={"319": 1}, prompt=[319]).status_code == 200


def test_an_error_of_the_engine_ends_a_whole_reply_with_its_status() -> None:
    numerics = complete(FakeEngine(fail_after=2))
    assert numerics.status_code == 500
    assert numerics.json()["error"]["code"] == "model_numerics"
    grammar = complete(FakeEngine(fail_after=2, fail_code="grammar"))
    assert (grammar.status_code, grammar.json()["error"]["code"]) == (400, "grammar")
    restarted = complete(FakeEngine(fail_after=2, fail_code="engine_restarted"))
    assert restarted.status_code == 503
    assert restarted.headers["retry-after"] == "1"


def test_an_unexpected_error_tells_the_client_nothing() -> None:
    for stream in (False, True):
        reply = complete(FakeEngine(raise_after=2), stream=stream)
        assert "secret" not in reply.text
        assert "0x" not in reply.text
        assert "ValueError" not in reply.text
        assert "server had an error" in reply.text


def test_an_error_in_a_stream_is_an_event_and_no_done_follows() -> None:
    stream = events(complete(FakeEngine(fail_after=2), stream=True).text)
    assert stream[-1]["error"]["code"] == "model_numerics"
    assert "[DONE]" not in stream


def test_overload_is_429_and_a_dead_engine_503_with_a_time_to_come_back() -> None:
    overloaded = complete(FakeEngine(overloaded=True))
    assert overloaded.status_code == 429
    assert overloaded.headers["retry-after"] == "3"
    for stream in (False, True):
        dead = complete(FakeEngine(state="failed"), stream=stream)
        assert dead.status_code == 503
        assert dead.headers["retry-after"] == "1"


def test_when_one_prompt_of_several_is_not_admitted_none_stays_behind() -> None:
    engine = FakeEngine(info=fake_model_info(max_model_len=8))
    assert complete(engine, prompt=["ab", "abcdefg"], max_tokens=4).status_code == 400
    assert engine.running == {}


def test_the_whole_reply_leaves_nothing_running() -> None:
    engine = FakeEngine()
    complete(engine, prompt=["a", "b"], n=2)
    assert engine.running == {}
    assert TOKENIZER.decode(engine.seen[0].prompt_token_ids) == "a"


def test_another_model_is_not_found() -> None:
    reply = complete(model="gpt-4")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert complete(model="unit").status_code == 200


def test_guessed_tokens_are_told_in_the_usage_as_openai_names_them() -> None:
    usage = Usage(ReplyFacts("cmpl-1", "unit", TOKENIZER, [[1, 2]], SamplingParams(), "none"))
    output = SequenceOutput(request_id="a", num_output_tokens=9, num_drafted_tokens=8, num_accepted_tokens=5)
    usage.add(0, output)
    usage.add(0, SequenceOutput(request_id="a", choice=1, num_output_tokens=4))
    told = usage.shape()
    assert told["completion_tokens_details"] == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 3}
    assert told["completion_tokens"] == 13
