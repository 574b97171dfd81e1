"""The engine on the CUDA decoder, emulated: the CPU engine's tokens in any company, and what it measures."""

from typing import Any

import pytest
import torch

from etserve.config import ControlConfig, EngineConfig
from etserve.errors import ConfigError
from etserve.kernels.cuda import CudaKernels
from etserve.models.files import resolve_model
from etserve.models.loader import load_model
from etserve.sampling_params import EntropicParams
from tests.cuda.emulated import emulated_engine
from tests.engine.helpers import PROMPTS, UNIT_MODEL, make_engine, request, run, run_one, run_steps
from tests.engine.test_eviction import evicted, long_request

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.2, "seed": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "seed": 13, "repetition_penalty": 1.3, "presence_penalty": 0.4, "prompt_logprobs": 1},
]


def mixed_requests(max_tokens: int = 10) -> list[Any]:
    return [
        request(f"{i}", prompt, **{**SAMPLING[i % len(SAMPLING)], "max_tokens": max_tokens, "trace": "tokens"})
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize(
    "changes", [{}, {"max_step_tokens": 37}, {"max_num_seqs": 2, "num_kv_blocks": 22, "max_model_len": 320}], ids=str
)
def test_the_tokens_and_measurements_are_those_of_the_cpu_engine(
    emulator: CudaKernels, changes: dict[str, Any]
) -> None:
    expected = run(make_engine(), mixed_requests())
    found = run(emulated_engine(emulator, **changes), mixed_requests())
    for key, output in found.items():
        assert output.token_ids == expected[key].token_ids
        for got, wanted in zip(output.entropies, expected[key].entropies, strict=True):
            assert got.entropy_nats == pytest.approx(wanted.entropy_nats, abs=1e-3)
            assert got.tau_nats == pytest.approx(wanted.tau_nats, abs=1e-2)
        for mine, theirs in zip(output.logprobs or (), expected[key].logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert mine.top_ids == theirs.top_ids


def test_in_bfloat16_greedy_tokens_agree_as_far_as_the_choice_is_clear(emulator: CudaKernels) -> None:
    wanted = [request(f"{i}", prompt, logprobs=2, max_tokens=8) for i, prompt in enumerate(PROMPTS)]
    expected = run(make_engine(), wanted)
    found = run(emulated_engine(emulator, "bfloat16"), wanted)
    num_compared = 0
    for key, output in expected.items():
        pairs = zip(output.token_ids, found[key].token_ids, output.logprobs or (), strict=False)
        for token, mine, logprobs in pairs:
            if logprobs.top_logprobs[0] - logprobs.top_logprobs[1] < 0.1:  # bfloat16 may decide otherwise
                break
            assert mine == token
            num_compared += 1
    assert num_compared >= 10


def test_a_pool_too_small_preempts_and_changes_nothing(emulator: CudaKernels) -> None:
    wanted = [request(f"{i}", f"{i} was ", max_tokens=40, temperature=0.5 * (i % 2), seed=i) for i in range(4)]
    expected = run(make_engine(), wanted)
    outputs, stats = run_steps(emulated_engine(emulator, num_kv_blocks=8, max_model_len=80), wanted)
    assert sum(step.num_preempted for step in stats) > 0
    for item in wanted:
        tokens = [t for output in outputs if output.request_id == item.request_id for t in output.token_ids]
        assert tokens == expected[item.request_id, 0].token_ids


def test_a_prefix_found_in_the_cache_changes_nothing(emulator: CudaKernels) -> None:
    engine = emulated_engine(emulator)
    first = run_one(engine, request("first", PROMPTS[3], temperature=0.9, seed=3, max_tokens=6))
    second = run_one(engine, request("second", PROMPTS[3], temperature=0.9, seed=3, max_tokens=6))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 16
    assert second.token_ids == first.token_ids


def test_a_steered_temperature_measures_what_it_measures_on_the_cpu(emulator: CudaKernels) -> None:
    control = ControlConfig(temperature_mode="two_sided", target_entropy_nats=1.0, priority_mode="entropic")
    wanted = [request("a", PROMPTS[0], temperature=0.9, seed=4, max_tokens=12, trace="tokens")]
    expected = run(make_engine(control=control), wanted)["a", 0]
    found = run(emulated_engine(emulator, control=control), wanted)["a", 0]
    assert found.token_ids == expected.token_ids
    for got, known in zip(found.entropies, expected.entropies, strict=True):
        assert got.temperature == pytest.approx(known.temperature, abs=1e-3)


def test_a_row_that_is_not_finite_fails_alone(emulator: CudaKernels) -> None:
    engine = emulated_engine(emulator)
    decoder = engine._runner._decoder
    plain = decoder.logits
    decoder.logits = lambda hidden: plain(hidden).index_fill_(0, torch.tensor([1]), float("nan"))
    try:
        found = run(engine, [request(f"{i}", "The man", max_tokens=1) for i in range(3)])
    finally:
        decoder.logits = plain
    reasons = [output.finish_reason for output in found.values()]
    assert reasons.count("error") == 1
    assert reasons.count("length") == 2


def test_without_a_device_the_start_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    for backend in ("auto", "torch"):
        config = EngineConfig(model=UNIT_MODEL, device="cuda", backend=backend)
        with pytest.raises(ConfigError, match="device cuda: "):
            load_model(config, resolve_model(UNIT_MODEL))


@pytest.mark.parametrize("change", [{"quantize": "q8_0"}, {"quantize": "q4_1"}])
def test_what_the_device_cannot_do_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="device cuda"):
        EngineConfig(device="cuda", **change)


def test_guessed_tokens_are_verified_as_on_the_cpu(emulator: CudaKernels) -> None:
    control = ControlConfig(speculation="ngram")
    wanted = [request("a", "the sea the sea the sea ", max_tokens=16), request("b", PROMPTS[0], max_tokens=8)]
    expected = run(make_engine(control=control), wanted)
    outputs, stats = run_steps(emulated_engine(emulator, control=control), wanted)
    for item in wanted:
        tokens = [t for output in outputs if output.request_id == item.request_id for t in output.token_ids]
        assert tokens == expected[item.request_id, 0].token_ids
    assert len(stats) < 17  # some were accepted


def test_blocks_are_evicted_as_on_the_cpu(emulator: CudaKernels) -> None:
    budget = EntropicParams(eviction="budget", block_budget=34)
    wanted = long_request(max_tokens=40, entropic=budget)
    expected = run_one(make_engine(max_model_len=1600), wanted)
    found = run_one(emulated_engine(emulator, max_model_len=1600), wanted)
    assert evicted(found) == evicted(expected) > 0
    assert found.token_ids == expected.token_ids


def test_entropies_are_estimated_as_on_the_cpu(emulator: CudaKernels) -> None:
    """Plain rows, whose logits stay on the device, and one with wishes, whose logits come to the host."""
    control = ControlConfig(entropy_estimator="mid", estimator_top_k=5)
    expected = run(make_engine(control=control), mixed_requests())
    found = run(emulated_engine(emulator, control=control), mixed_requests())
    exact = run(make_engine(), mixed_requests())
    for key, output in found.items():
        mine, theirs, plain = ([one.entropy_nats for one in o[key].entropies] for o in (found, expected, exact))
        assert output.token_ids == expected[key].token_ids
        assert mine == pytest.approx(theirs, abs=2e-3)
        assert mine != pytest.approx(plain, abs=2e-3)
