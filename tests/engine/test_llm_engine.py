"""The engine keeps its books: whatever happens to a request, it ends once, frees everything, and hurts no neighbour."""

import random
from typing import Any

import pytest
import torch

from etserve.attention.batch import StepBatch
from etserve.engine.rendering import ChoiceRenderer
from etserve.errors import ConfigError, PromptTooLongError, RequestError
from etserve.models.loader import LoadedModel
from etserve.models.types import Decoder, KVCache
from etserve.outputs import SequenceOutput
from etserve.sampling_params import Grammar
from tests.engine.helpers import (
    PROMPTS,
    check_idle,
    load_unit,
    make_engine,
    request,
    run,
    run_one,
    run_steps,
    unit_config,
)


class PoisonedDecoder:
    """The unit decoder, whose logits are NaN for every sequence that contains a given token in this step."""

    def __init__(self, inner: Decoder, token_id: int) -> None:
        self.inner = inner
        self.token_id = token_id
        self.spec, self.backend, self.weight_bytes = inner.spec, inner.backend, inner.weight_bytes
        self._bad_rows: list[int] = []

    def kv_bytes_per_block(self) -> int:
        return self.inner.kv_bytes_per_block()

    def allocate_cache(self, num_blocks: int) -> KVCache:
        return self.inner.allocate_cache(num_blocks)

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        hidden = self.inner.forward(batch, cache).clone()
        for index, row in enumerate(batch.logit_rows.tolist()):
            sequence = int((batch.query_start[1:] > row).argmax())
            tokens = batch.token_ids[batch.query_start[sequence] : batch.query_start[sequence + 1]]
            if self.token_id in tokens:
                hidden[index] = float("nan")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)


def poisoned(token_id: int) -> LoadedModel:
    import dataclasses

    loaded = load_unit("torch")
    return dataclasses.replace(loaded, decoder=PoisonedDecoder(loaded.decoder, token_id))


def test_a_row_that_is_not_finite_fails_its_request_alone() -> None:
    neighbour = run_one(make_engine(load_unit("torch")), request("good", PROMPTS[0]))
    engine = make_engine(poisoned(0xFF))
    bad = request("bad", [65, 0xFF, 66])
    outputs, stats = run_steps(engine, [request("good", PROMPTS[0]), bad, request("scored", [1, 0xFF], max_tokens=0)])
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert (ends["bad"].finish_reason, ends["bad"].error_code) == ("error", "model_numerics")
    assert sum(step.num_nonfinite_rows for step in stats) == 1
    assert [t for output in outputs if output.request_id == "good" for t in output.token_ids] == neighbour.token_ids


def test_prompt_logprobs_that_are_not_finite_fail_the_request() -> None:
    output = run_one(make_engine(poisoned(0xFF)), request("bad", [65, 0xFF, 66], prompt_logprobs=1))
    assert output.error_code == "model_numerics"


def test_what_a_poisoned_request_computed_is_no_prefix_for_others() -> None:
    engine = make_engine(poisoned(0xFF))
    prompt = [65] * 40 + [0xFF]
    run_one(engine, request("bad", prompt))
    assert run_one(engine, request("again", prompt + [66] * 8)).num_cached_tokens == 0


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 9])
def test_abort_at_any_time_frees_everything_and_hurts_no_neighbour(step: int) -> None:
    alone = run_one(make_engine(), request("other", PROMPTS[1])).token_ids
    engine = make_engine(max_step_tokens=32, max_num_seqs=3)
    engine.add_request(request("other", PROMPTS[1]))
    engine.add_request(request("victim", PROMPTS[3], n=3, temperature=1.0))
    outputs: list[SequenceOutput] = []
    for _ in range(step):
        outputs += engine.step()[0]
    engine.abort("victim")
    engine.abort("victim")
    engine.abort("unknown")
    while engine.has_work:
        outputs += engine.step()[0]
    check_idle(engine)
    ends = [output for output in outputs if output.request_id == "victim" and output.finish_reason]
    assert sorted((output.choice, output.finish_reason) for output in ends) == [(c, "abort") for c in range(3)]
    assert [t for output in outputs if output.request_id == "other" for t in output.token_ids] == alone


def test_a_bug_in_rendering_fails_one_request_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run_one(make_engine(), request("good", PROMPTS[0])).token_ids
    original = ChoiceRenderer.render

    def render(self: ChoiceRenderer, sampled: Any) -> SequenceOutput:
        if self.seq.request_id == "bad" and self.seq.num_output_tokens == 3:
            raise LookupError("bug")
        return original(self, sampled)

    monkeypatch.setattr(ChoiceRenderer, "render", render)
    outputs = run(make_engine(), [request("bad", PROMPTS[1]), request("good", PROMPTS[0])])
    assert outputs["bad", 0].finish_reason == "error"
    assert outputs["bad", 0].error_code == "internal"
    assert outputs["good", 0].token_ids == alone


def test_a_request_that_cannot_be_taken_changes_nothing() -> None:
    engine = make_engine(max_model_len=64)
    with pytest.raises(PromptTooLongError):
        engine.add_request(request("long", [65] * 60, max_tokens=8))
    with pytest.raises(RequestError):
        engine.add_request(request("bad schema", "a", n=2, grammar=Grammar(kind="json_schema", schema="{")))
    with pytest.raises(RequestError):
        engine.add_request(request("empty", []))
    assert not engine.has_work
    check_idle(engine)


def test_a_refused_request_is_answered_once_per_choice() -> None:
    engine = make_engine()
    engine.refuse(request("r", "a", n=2), "why")
    outputs, _ = run_steps(engine, [])
    assert [(o.choice, o.finish_reason, o.error_code) for o in outputs] == [(0, "error", "why"), (1, "error", "why")]


def test_three_hundred_requests_of_any_size_each_end_once() -> None:
    generator = random.Random(7)
    engine = make_engine(num_kv_blocks=18, max_model_len=256, max_step_tokens=96, max_num_seqs=16)
    ends: dict[tuple[str, int], list[str]] = {}
    num_preempted = 0
    waiting = [
        request(
            str(i),
            generator.choices(range(32, 127), k=generator.choice([1, 5, 16, 40, 150])),
            n=generator.choice([1, 1, 1, 2]),
            max_tokens=generator.choice([0, 1, 3, 12, 80]),
            temperature=generator.choice([0.0, 1.0]),
            seed=i,
        )
        for i in range(300)
    ]
    cancelled = {item.request_id for item in waiting if int(item.request_id) % 3 == 0}
    expected = {(item.request_id, choice) for item in waiting for choice in range(item.params.n)}
    live: list[str] = []
    while waiting or engine.has_work:
        for _ in range(generator.randrange(6)):
            if waiting:
                item = waiting.pop()
                engine.add_request(item)
                live.append(item.request_id)
        for request_id in generator.sample(live, min(2, len(live))):
            if request_id in cancelled and generator.random() < 0.3:
                engine.abort(request_id)
        outputs, stats = engine.step()
        num_preempted += stats.num_preempted
        for output in outputs:
            if output.finish_reason:
                ends.setdefault((output.request_id, output.choice), []).append(output.finish_reason)
    check_idle(engine)
    assert set(ends) == expected
    assert all(len(reasons) == 1 for reasons in ends.values())
    found = {reason for reasons in ends.values() for reason in reasons}
    assert num_preempted > 0
    assert {"length", "abort"} <= found <= {"length", "abort", "stop"}


def test_statistics_add_up() -> None:
    engine = make_engine(max_step_tokens=32)
    wanted = [request("a", PROMPTS[0], trace="tokens", temperature=1.0, seed=1), request("b", PROMPTS[1])]
    outputs, stats = run_steps(engine, wanted)
    assert sum(step.num_prompt_tokens for step in stats) == sum(len(item.prompt_token_ids) for item in wanted)
    num_output = sum(len(output.token_ids) for output in outputs)
    assert sum(len(step.entropies) for step in stats) == num_output
    computed = sum(step.num_prefill_tokens + step.num_decode_tokens for step in stats)
    assert computed == sum(len(item.prompt_token_ids) for item in wanted) + num_output - 2  # the last is never computed
    assert all(step.num_prefill_tokens + step.num_decode_tokens <= 32 for step in stats)
    summaries = [output.entropy_summary for output in outputs if output.entropy_summary]
    assert len(summaries) == 1
    assert sum(step.tau_nats for step in stats) >= summaries[0].tau_nats
    assert sum(step.nats_resolved for step in stats) > summaries[0].nats_resolved
    last = stats[-1]
    assert (last.num_running, last.num_waiting, last.num_waiting_tokens, last.kv_blocks_active) == (0, 0, 0, 0)
    assert last.kv_blocks_cached + last.kv_blocks_free == engine.info.num_kv_blocks
    assert all(step.flops > 0 and step.bytes_read >= engine.info.weight_bytes for step in stats)


def test_a_pool_that_cannot_hold_the_context_shortens_it_or_says_so() -> None:
    import dataclasses

    from etserve.engine.building import assemble
    from etserve.engine.llm_engine import LLMEngine
    from tests.engine.helpers import unit_tokenizer

    loaded = load_unit()
    shortened = LLMEngine(assemble(unit_config(num_kv_blocks=4), loaded, unit_tokenizer(), "unit", {}))
    assert shortened.info.max_model_len == 64
    output = run_one(shortened, request("r", [65] * 10, max_tokens=None, ignore_eos=True))
    assert output.num_output_tokens == 54
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        assemble(
            unit_config(num_kv_blocks=4, max_model_len=65),
            dataclasses.replace(loaded, max_model_len=65),
            unit_tokenizer(),
            "unit",
            {},
        )
    with pytest.raises(ConfigError, match="no room"):
        assemble(unit_config(num_kv_blocks=None, kv_memory_bytes=100), loaded, unit_tokenizer(), "unit", {})


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 1.5},
        {"logprobs": 65},
        {"prompt_logprobs": -1},
        {"n": 0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {320: 1.0}},
        {"stop_token_ids": (-1,)},
        {"stop": ("",)},
        {"max_tokens": -1},
    ],
    ids=str,
)
def test_values_that_could_hurt_the_engine_are_refused_by_it_too(params: dict[str, Any]) -> None:
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.add_request(request("r", "abc", **params))
    check_idle(engine)


def test_extreme_values_within_bounds_still_give_tokens() -> None:
    wanted = [
        request("cold", "abc", temperature=1e-45, seed=1, max_tokens=4),
        request("hot", "abc", temperature=100.0, seed=1, max_tokens=4, ignore_eos=True),
        request("narrow", "abc", temperature=1.0, top_p=0.0, min_p=1.0, top_k=2**31 - 1, seed=1, max_tokens=4),
        request("punished", "abc", repetition_penalty=1e3, presence_penalty=100.0, logit_bias={5: 1e4}, max_tokens=4),
    ]
    outputs = run(make_engine(), wanted)
    assert all(len(output.token_ids) == 4 for output in outputs.values())
    assert outputs["cold", 0].token_ids == run_one(make_engine(), request("r", "abc", max_tokens=4)).token_ids
