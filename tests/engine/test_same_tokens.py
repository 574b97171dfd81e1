"""What is generated depends on the request alone: not on company, schedule, chunks, caches or preemption."""

from typing import Any

import pytest

from etserve.kernels import native
from tests.engine.helpers import PROMPTS, load_unit, make_engine, reference_greedy, request, run, run_one, run_steps

VARIANTS: list[dict[str, Any]] = [
    {"max_step_tokens": 16},
    {"max_step_tokens": 37},
    {"max_step_tokens": 512},
    {"prefix_caching": False},
    {"max_num_seqs": 2},
    {"num_kv_blocks": 20, "max_model_len": 320},  # room for one long prompt: the others are preempted
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 1.2, "seed": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "seed": 13, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_greedy_output_is_that_of_transformers(backend: str) -> None:
    engine = make_engine(load_unit(backend))
    outputs = run(engine, [request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)])
    for index, prompt in enumerate(PROMPTS):
        assert outputs[f"r{index}", 0].token_ids == reference_greedy(prompt, 24)


def _mixed_requests() -> list[Any]:
    return [
        request(f"{i}/{j}", prompt, **sampling, max_tokens=20)
        for i, prompt in enumerate(PROMPTS)
        for j, sampling in enumerate(SAMPLING)
    ]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], list[int]]:
    """Each request by itself in a fresh engine."""
    tokens = {}
    for wanted in _mixed_requests():
        tokens[wanted.request_id, 0] = run_one(make_engine(), wanted).token_ids
    return tokens


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_company_and_schedule_change_no_token(changes: dict[str, Any], alone: dict[tuple[str, int], list[int]]) -> None:
    outputs = run(make_engine(**changes), _mixed_requests())
    assert {key: output.token_ids for key, output in outputs.items()} == alone


def test_a_pool_far_too_small_preempts_and_changes_nothing() -> None:
    wanted = [
        request(f"{i}", f"{i} was ", max_tokens=70, temperature=0.5 * (i % 2), seed=i, trace="tokens") for i in range(5)
    ]
    roomy = run(make_engine(), wanted)
    engine = make_engine(num_kv_blocks=9, max_model_len=96)
    outputs, stats = run_steps(engine, wanted)
    assert sum(step.num_preempted for step in stats) > 0
    for item in wanted:
        parts = [output for output in outputs if output.request_id == item.request_id]
        whole = roomy[item.request_id, 0]
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert "".join(part.text for part in parts) == whole.text
        assert parts[-1].entropy_summary is not None
        assert whole.entropy_summary is not None
        assert parts[-1].entropy_summary.tau_nats == pytest.approx(whole.entropy_summary.tau_nats, abs=1e-3)


def test_a_prefix_found_in_the_cache_changes_nothing() -> None:
    engine = make_engine()
    wanted = request("first", PROMPTS[3], temperature=0.9, seed=3, logprobs=2)
    first = run_one(engine, wanted)
    second = run_one(engine, request("second", PROMPTS[3], temperature=0.9, seed=3, logprobs=2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 16
    assert second.token_ids == first.token_ids
    for before, after in zip(first.logprobs, second.logprobs, strict=True):
        assert after.logprob == pytest.approx(before.logprob, abs=1e-4)


def test_choices_of_one_request_differ_and_the_same_seed_repeats_them() -> None:
    wanted = request("a", PROMPTS[0], temperature=1.0, seed=5, n=4)
    first = run(make_engine(), [wanted])
    second = run(make_engine(), [wanted, request("b", PROMPTS[0], temperature=1.0, seed=6, n=2)])
    texts = [first["a", choice].token_ids for choice in range(4)]
    assert len({tuple(tokens) for tokens in texts}) == 4
    assert [second["a", choice].token_ids for choice in range(4)] == texts
    assert second["b", 0].token_ids != texts[0]


def test_without_a_seed_two_runs_differ() -> None:
    engine = make_engine()
    outputs = run(engine, [request(str(i), PROMPTS[0], temperature=1.0) for i in range(2)])
    assert outputs["0", 0].token_ids != outputs["1", 0].token_ids


def test_forced_output_continues_the_stream_exactly() -> None:
    import msgspec

    wanted = request("a", PROMPTS[1], temperature=0.9, seed=4, n=2, trace="tokens")
    whole = run(make_engine(), [wanted])
    forced = [whole["a", 0].token_ids[:9], whole["a", 1].token_ids[:2]]
    resumed = run(make_engine(max_step_tokens=16), [msgspec.structs.replace(wanted, forced_output=forced)])
    for choice, known in enumerate(forced):
        before, after = whole["a", choice], resumed["a", choice]
        assert known + after.token_ids == before.token_ids
        assert before.text.endswith(after.text)
        assert after.num_output_tokens == before.num_output_tokens
        assert before.entropy_summary is not None
        assert after.entropy_summary is not None
        assert after.entropy_summary.tau_nats == pytest.approx(before.entropy_summary.tau_nats, abs=1e-3)
        assert after.entropies[-1].tau_nats == pytest.approx(before.entropies[-1].tau_nats, abs=1e-3)


def test_choices_that_had_ended_are_not_run_again() -> None:
    import msgspec

    wanted = request("a", PROMPTS[1], n=3, temperature=1.0, seed=1)
    outputs = run(make_engine(), [msgspec.structs.replace(wanted, finished_choices=[0, 2])])
    assert set(outputs) == {("a", 1)}


@pytest.mark.skipif(not native.is_available(), reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_natively_every_measured_bit_is_the_same_in_any_company(dtype: str) -> None:
    loaded = load_unit("native", dtype)
    wanted = [
        request(str(i), prompt, temperature=0.7, seed=i, logprobs=3, trace="tokens", prompt_logprobs=1)
        for i, prompt in enumerate(PROMPTS)
    ]
    alone = {(item.request_id, 0): run_one(make_engine(loaded), item) for item in wanted}
    for changes in ({}, {"max_step_tokens": 16}, {"num_kv_blocks": 22, "max_model_len": 320}):
        together = run(make_engine(loaded, **changes), wanted)
        for key, output in together.items():
            assert output.token_ids == alone[key].token_ids
            assert output.logprobs == alone[key].logprobs
            assert output.entropies == alone[key].entropies
            assert output.prompt_logprobs == alone[key].prompt_logprobs
