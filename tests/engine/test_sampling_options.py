"""Each sampling option does what its name says, against a slow reference where there is arithmetic."""

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from etserve.errors import RequestError
from etserve.runner.grammar import validate_grammar
from etserve.runner.penalties import TokenCounts
from etserve.sampling_params import EntropicParams, Grammar, SamplingParams
from etserve.sequence import Sequence
from tests.engine.helpers import PROMPTS, encode, make_engine, reference_logits, request, run, run_one

EOS = 257


def slow_penalties(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    changed = list(logits)
    for token_id in set(prompt) | set(output):
        value = changed[token_id]
        changed[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id in set(output):
        changed[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
    return changed


def sequence(prompt: list[int], output: list[int], params: SamplingParams) -> Sequence:
    return Sequence(
        seq_id=0,
        request_id="r",
        choice=0,
        params=params,
        seed=0,
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        max_output_tokens=99,
        arrival_seconds=0.0,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5, "frequency_penalty": -0.7},
        {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_penalties_equal_the_slow_reference_as_the_output_grows(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    generator = np.random.default_rng(0)
    vocab, counts = 211, TokenCounts()
    prompt = generator.integers(0, vocab, 150).tolist()
    seq = sequence(prompt, [], params)
    for _ in range(5):
        seq.token_ids += generator.integers(0, vocab, 17).tolist()
        logits = generator.normal(size=vocab).astype(np.float32)
        expected = slow_penalties(logits.tolist(), prompt, seq.output_token_ids, params)
        counts.update(seq)
        counts.apply(logits, params)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_greedy_with_penalties_follows_the_penalised_reference() -> None:
    params: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5}
    output = run_one(make_engine(), request("r", PROMPTS[0], **params))
    prompt, wanted = encode(PROMPTS[0]), SamplingParams(**params)
    known: list[int] = []
    for token_id in output.token_ids:
        row = reference_logits(prompt + known)[-1].tolist()
        assert token_id == int(np.argmax(slow_penalties(row, prompt, known, wanted)))
        known.append(token_id)


def test_logit_bias_forbids_and_forces_tokens() -> None:
    forced = run_one(make_engine(), request("r", PROMPTS[0], logit_bias={65: 100.0}, max_tokens=5))
    assert forced.token_ids == [65] * 5
    free = run_one(make_engine(), request("r", PROMPTS[0]))
    banned = run_one(make_engine(), request("r", PROMPTS[0], logit_bias={free.token_ids[0]: -100.0}))
    assert free.token_ids[0] not in banned.token_ids


def test_eos_ends_the_output_and_is_no_text() -> None:
    output = run_one(make_engine(), request("r", PROMPTS[0], logit_bias={EOS: 100.0}))
    assert (output.token_ids, output.text, output.finish_reason) == ([EOS], "", "stop")
    assert output.num_output_tokens == 1


def test_ignore_eos_goes_on() -> None:
    output = run_one(make_engine(), request("r", PROMPTS[0], logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=4))
    assert output.token_ids == [EOS] * 4
    assert output.finish_reason == "length"


def test_min_tokens_come_before_any_end() -> None:
    output = run_one(make_engine(), request("r", PROMPTS[0], logit_bias={EOS: 100.0}, min_tokens=6))
    assert len(output.token_ids) == 7
    assert EOS not in output.token_ids[:6]
    assert output.token_ids[6] == EOS


def test_min_tokens_hold_for_stop_token_ids_too() -> None:
    free = run_one(make_engine(), request("r", PROMPTS[0]))
    stop = free.token_ids[2]
    output = run_one(make_engine(), request("r", PROMPTS[0], stop_token_ids=(stop,), min_tokens=4))
    assert stop not in output.token_ids[:4]


def test_a_stop_token_ends_the_output_and_is_named() -> None:
    free = run_one(make_engine(), request("r", PROMPTS[0]))
    stop = free.token_ids[5]
    output = run_one(make_engine(), request("r", PROMPTS[0], stop_token_ids=(stop,)))
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == free.text[: len(output.token_ids) - 1]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_match_across_token_borders(include: bool) -> None:
    free = run_one(make_engine(), request("r", PROMPTS[0], max_tokens=40))
    stop = free.text[7:12]  # five tokens of this byte-level model
    output = run_one(
        make_engine(),
        request("r", PROMPTS[0], max_tokens=40, stop=("zzz", stop), include_stop_str_in_output=include),
    )
    end = free.text.index(stop)
    assert output.text == free.text[: end + len(stop) if include else end]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) == end + len(stop)


def test_text_is_held_back_only_as_far_as_a_stop_string_is_possible() -> None:
    engine = make_engine()
    free = run_one(engine, request("free", PROMPTS[0], max_tokens=40))
    almost = free.text[10:14] + "\0"
    engine.add_request(request("r", PROMPTS[0], max_tokens=40, stop=(almost,)))
    said = ""
    num_tokens = 0
    while engine.has_work:
        for output in engine.step()[0]:
            said += output.text
            num_tokens += len(output.token_ids)
            assert len(said) >= num_tokens - len(almost)
    assert said == free.text


def test_a_stop_string_completed_by_the_last_token_wins_over_length() -> None:
    free = run_one(make_engine(), request("r", PROMPTS[0]))
    output = run_one(make_engine(), request("r", PROMPTS[0], max_tokens=8, stop=(free.text[4:8],)))
    assert output.finish_reason == "stop"


def test_logprobs_are_log_softmax_of_the_raw_logits() -> None:
    wanted = request("r", PROMPTS[1], temperature=0.7, seed=2, logprobs=5, repetition_penalty=1.5, logit_bias={70: 3.0})
    output = run_one(make_engine(), wanted)
    tokens = wanted.prompt_token_ids + output.token_ids
    expected = reference_logits(tokens).log_softmax(-1)[len(wanted.prompt_token_ids) - 1 :]
    assert len(output.logprobs) == len(output.token_ids)
    for position, entry in enumerate(output.logprobs):
        assert entry.token_id == output.token_ids[position]
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-3)
        top = expected[position].topk(5)
        torch.testing.assert_close(torch.tensor(entry.top_logprobs), top.values, atol=1e-3, rtol=0)
        assert entry.top_ids == top.indices.tolist()


@pytest.mark.parametrize("changes", [{}, {"max_step_tokens": 16}, {"prefix_caching": False}], ids=str)
def test_prompt_logprobs_equal_transformers(changes: dict[str, Any]) -> None:
    engine = make_engine(**changes)
    run_one(engine, request("warm the prefix cache", PROMPTS[3]))
    wanted = request("r", PROMPTS[3], prompt_logprobs=2, max_tokens=3, n=2)
    output = run(engine, [wanted])["r", 0]
    prompt = wanted.prompt_token_ids
    expected = reference_logits(prompt).log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
        assert len(entry.top_ids) == 2


def test_zero_tokens_score_the_prompt() -> None:
    output = run_one(make_engine(), request("r", PROMPTS[3], prompt_logprobs=0, max_tokens=0))
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(encode(PROMPTS[3]))


def test_the_entropy_trace_is_measured_on_raw_logits_and_tau_follows_from_it() -> None:
    wanted = request("r", PROMPTS[0], temperature=0.6, seed=9, trace="tokens", logit_bias={32: 5.0})
    output = run_one(make_engine(), wanted)
    tokens = wanted.prompt_token_ids + output.token_ids
    expected = torch.distributions.Categorical(logits=reference_logits(tokens)).entropy()
    expected = expected[len(wanted.prompt_token_ids) - 1 : -1]
    entropies = [entry.entropy_nats for entry in output.entropies]
    torch.testing.assert_close(torch.tensor(entropies), expected, atol=2e-3, rtol=0)
    tau = tau_up = 0.0
    for before, after, entry in zip(entropies, entropies[1:], output.entropies[1:], strict=False):
        tau += max(0.0, before - after)
        tau_up += max(0.0, after - before)
        assert entry.tau_nats == pytest.approx(tau)
    summary = output.entropy_summary
    assert summary is not None
    assert summary.tau_nats == pytest.approx(tau)
    assert summary.tau_up_nats == pytest.approx(tau_up)
    assert summary.nats_resolved == pytest.approx(sum(entropies))
    assert summary.mean_entropy_nats == pytest.approx(sum(entropies) / len(entropies))
    assert summary.final_entropy_nats == entropies[-1]
    assert summary.tau_per_gflop > 0
    assert {entry.temperature for entry in output.entropies} == {0.6}


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"logit_bias": {32: 5.0}, "presence_penalty": 0.5},
        {"entropic": EntropicParams(temperature_mode="two_sided", target_entropy_nats=2.0)},
        {"entropic": EntropicParams(temperature_mode="mirostat", target_entropy_nats=2.0), "logprobs": 2},
    ],
)
@pytest.mark.parametrize("num_resumed", [0, 9])
def test_surprisal_is_of_the_raw_logits_whatever_bends_the_draw(wishes: dict[str, Any], num_resumed: int) -> None:
    wanted = request("r", PROMPTS[0], temperature=0.6, seed=9, trace="summary", **wishes)
    output = run_one(make_engine(), wanted)
    if num_resumed:  # after an engine restart the clock is moved over the tokens that were sent before it
        forced = msgspec.structs.replace(wanted, forced_output=[output.token_ids[:num_resumed]])
        resumed = run_one(make_engine(), forced)
        assert resumed.token_ids == output.token_ids[num_resumed:]
        output = msgspec.structs.replace(output, entropy_summary=resumed.entropy_summary)
    rows = torch.log_softmax(reference_logits(wanted.prompt_token_ids + output.token_ids), -1)
    drawn = rows[len(wanted.prompt_token_ids) - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None])
    assert output.entropy_summary is not None
    assert output.entropy_summary.surprisal_nats == pytest.approx(-float(drawn.sum()), abs=0.02)


def test_the_record_is_as_long_as_asked_for() -> None:
    silent = run_one(make_engine(), request("r", PROMPTS[0]))
    assert (silent.entropy_summary, silent.entropies) == (None, [])
    summary = run_one(make_engine(), request("r", PROMPTS[0], trace="summary"))
    assert summary.entropy_summary is not None
    assert summary.entropies == []


@pytest.mark.parametrize("seed", range(4))
def test_output_satisfies_its_schema(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["cat", "dog"]},
        },
        "required": ["age", "name", "kind"],
        "additionalProperties": False,
    }
    grammar = Grammar(kind="json_schema", schema=json.dumps(schema))
    wanted = request("r", PROMPTS[2], temperature=1.0, seed=seed, grammar=grammar, max_tokens=200, min_tokens=3)
    output = run_one(make_engine(), wanted)
    assert output.finish_reason == "stop"
    value = json.loads(output.text)
    assert set(value) == {"age", "name", "kind"}
    assert isinstance(value["age"], int)
    assert value["kind"] in ("cat", "dog")


def test_grammar_state_survives_preemption_and_replay() -> None:
    import msgspec

    grammar = Grammar(kind="json_schema", schema='{"type": "array", "items": {"type": "integer"}, "maxItems": 30}')
    wanted = [request(str(i), PROMPTS[3], temperature=1.0, seed=i, grammar=grammar, max_tokens=60) for i in range(4)]
    free = {item.request_id: run_one(make_engine(), item).token_ids for item in wanted}
    tight = run(make_engine(num_kv_blocks=24, max_model_len=320), wanted)
    assert {item.request_id: tight[item.request_id, 0].token_ids for item in wanted} == free
    forced = msgspec.structs.replace(wanted[1], forced_output=[free["1"][:5]])
    assert run_one(make_engine(), forced).token_ids == free["1"][5:]


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[]",
        '{"type": "nonsense"}',
        '{"items":' * 40 + "{}" + "}" * 40,
        '{"description": "' + "x" * 70_000 + '"}',
        "[" * 100_000,
        '{"type": "string", "pattern": "(?<=a)b"}',
    ],
    ids=["truncated", "array", "unknown type", "deep", "long", "very deep", "look-behind"],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_grammar(Grammar(kind="json_schema", schema=schema))
    assert caught.value.param == "response_format"


def test_a_schema_that_nothing_can_satisfy_fails_its_own_request_only() -> None:
    grammar = Grammar(kind="json_schema", schema='{"$ref": "#"}')
    outputs = run(make_engine(), [request("endless", PROMPTS[0], grammar=grammar), request("other", PROMPTS[0])])
    assert (outputs["endless", 0].finish_reason, outputs["endless", 0].error_code) == ("error", "grammar")
    assert outputs["other", 0].token_ids == run_one(make_engine(), request("other", PROMPTS[0])).token_ids


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps({"type": "object", "description": "[" * 100 + '\\"' + "{" * 100})
    validate_grammar(Grammar(kind="json_schema", schema=text))


def test_greedy_ignores_the_seed_and_top_k_one_is_greedy() -> None:
    greedy = run_one(make_engine(), request("r", PROMPTS[0]))
    seeded = run_one(make_engine(), request("r", PROMPTS[0], temperature=1.3, top_k=1, seed=77))
    assert seeded.token_ids == greedy.token_ids
    assert not math.isnan(sum(greedy.token_ids))


def test_without_the_extra_structured_output_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="structured"):
        validate_grammar(Grammar(kind="json_schema", schema='{"type": "object", "title": "asked only here"}'))


def test_any_object_is_one_that_parses() -> None:
    wanted = request("r", PROMPTS[0], temperature=0.7, seed=3, grammar=Grammar(kind="json_object"), max_tokens=400)
    output = run_one(make_engine(), wanted)
    if output.finish_reason == "stop":
        assert isinstance(json.loads(output.text), dict)
    else:
        assert output.text.startswith("{")
