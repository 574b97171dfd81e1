"""The control loop in the engine: each law steers what it should and nothing else, and off is the plain engine."""

import functools
import itertools
import math
from typing import Any

import msgspec
import pytest

from etserve.config import ControlConfig
from etserve.control import entropy, thermostat
from etserve.engine.llm_engine import LLMEngine
from etserve.errors import RequestError
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from etserve.sampling_params import EntropicParams
from tests.engine.helpers import PROMPTS, make_engine, reference_logits, request, run, run_one, run_steps

MEASURED_TIME = {"step_seconds", "schedule_seconds", "schedule_ages_seconds", "cost_r_squared"}
OFF = EntropicParams(temperature_mode="off", pruning="off")


def requests(**params: Any) -> list[GenerateRequest]:
    """Sampled and greedy, plain and with wishes."""
    return [
        request("plain", PROMPTS[0], temperature=0.9, seed=1, trace="tokens", **params),
        request("choices", PROMPTS[1], temperature=1.1, seed=2, n=2, top_k=40, trace="tokens", **params),
        request("greedy", PROMPTS[2], trace="tokens", logprobs=2, **params),
        request("wishes", PROMPTS[3], temperature=1.0, seed=3, frequency_penalty=0.5, trace="tokens", **params),
    ]


def sampled(request_id: str = "a", prompt: str = PROMPTS[0], max_tokens: int = 60, **params: Any) -> GenerateRequest:
    wanted: dict[str, Any] = {"temperature": 1.0, "seed": 7, "trace": "tokens", "ignore_eos": True, **params}
    return request(request_id, prompt, max_tokens=max_tokens, **wanted)


@functools.cache
def engine_of(**control: Any) -> LLMEngine:
    return make_engine(control=ControlConfig(**control))


def steered(mode: str, target: float | None = None, **params: Any) -> SequenceOutput:
    wanted = EntropicParams(temperature_mode=mode, target_entropy_nats=target)  # type: ignore[arg-type]
    return run_one(engine_of(), sampled(entropic=wanted, **params))


def temperatures(output: SequenceOutput) -> list[float]:
    return [entry.temperature for entry in output.entropies]


def comparable(stats: list[StepStats]) -> list[dict[str, Any]]:
    return [{k: v for k, v in msgspec.to_builtins(one).items() if k not in MEASURED_TIME} for one in stats]


def without_times(outputs: list[SequenceOutput]) -> list[dict[str, Any]]:
    found = []
    for output in outputs:
        shaped = msgspec.to_builtins(output)
        shaped.pop("timings", None)
        if shaped.get("entropy_summary"):
            shaped["entropy_summary"].pop("tau_per_second")
        found.append(shaped)
    return found


# --- off


def test_all_off_is_the_plain_engine_bit_for_bit() -> None:
    """Gains, targets and weights say nothing while no mode is on; nor does a request that says so itself."""
    plain = run_steps(make_engine(), requests())
    gains = ControlConfig(target_entropy_nats=1.0, thermostat_gain=5.0, epsilon=0.4, kv_protect=True, gain_weight=0.1)
    measured = ControlConfig(mean_entropy_nats=2.3, entropy_low_nats=2.4, entropy_high_nats=4.2, epsilon=0.2)
    for control, params in ((gains, {}), (measured, {}), (ControlConfig(), {"entropic": OFF})):
        outputs, stats = run_steps(make_engine(control=control), requests(**params))
        assert without_times(outputs) == without_times(plain[0])
        assert comparable(stats) == comparable(plain[1])
    assert all(not one.kept_fractions and not one.num_forced and not one.num_saturated_low for one in plain[1])


def test_a_request_can_turn_off_what_the_server_has_on() -> None:
    plain = run(make_engine(), requests())
    on = make_engine(control=ControlConfig(temperature_mode="cool", target_entropy_nats=0.1))
    assert {k: v.token_ids for k, v in run(on, requests(entropic=OFF)).items()} == {
        k: v.token_ids for k, v in plain.items()
    }


def test_a_steered_neighbour_changes_no_plain_request() -> None:
    plain = run(make_engine(), requests())
    hot = [sampled(f"hot-{i}", PROMPTS[i], entropic=EntropicParams(temperature_mode="edt")) for i in range(3)]
    found = run(make_engine(), [*hot, *requests()])
    for key, output in plain.items():
        assert found[key].token_ids == output.token_ids
        assert found[key].entropies == output.entropies


# --- micro


def replayed_temperatures(
    output: SequenceOutput, wanted: GenerateRequest, config: thermostat.ThermostatConfig
) -> list[float]:
    """Recompute the thermostat from transformers' logits of the produced text: the oracle."""
    prompt = wanted.prompt_token_ids
    logits = reference_logits([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
    state = thermostat.start(config, wanted.params.temperature)
    found = []
    for row, token_id in zip(logits.tolist(), output.token_ids, strict=True):
        scale = thermostat.temperature(config, state)
        found.append(scale)
        at = 1.0 if config.mode == "edt" else scale
        measured = entropy.measure([value / at for value in row])
        surprisal = measured.log_sum_exp - row[token_id] / at
        state = thermostat.observe(config, state, measured.entropy_nats, measured.varentropy, surprisal_nats=surprisal)
    return found


@pytest.mark.parametrize(
    ("mode", "target"), [("cool", 1.1), ("two_sided", 1.0), ("two_sided", 1.8), ("edt", None), ("mirostat", 1.5)]
)
def test_the_temperature_is_what_the_law_makes_of_the_models_own_logits(mode: str, target: float | None) -> None:
    options = EntropicParams(temperature_mode=mode, target_entropy_nats=target)  # type: ignore[arg-type]
    wanted = sampled(temperature=0.8, entropic=options)
    output = run_one(engine_of(), wanted)
    config = ControlConfig().thermostat_law(mode, target)  # type: ignore[arg-type]
    expected = replayed_temperatures(output, wanted, config)
    assert temperatures(output) == pytest.approx(expected, rel=2e-3)
    if mode != "mirostat":  # which limits surprise, and leaves the temperature alone
        assert len(set(temperatures(output))) > 5
    assert output.entropy_summary is not None
    assert output.entropy_summary.mean_temperature == pytest.approx(sum(expected) / len(expected), rel=2e-3)


def test_each_mode_keeps_within_its_bounds() -> None:
    assert max(temperatures(steered("cool", 0.0, temperature=0.8))) <= 0.8
    assert min(temperatures(steered("cool", 0.0, temperature=0.8, max_tokens=120))) == pytest.approx(0.4)
    warm = temperatures(steered("two_sided", 9.0, temperature=0.8, max_tokens=120))
    assert (min(warm), max(warm)) == (0.8, pytest.approx(1.2))


def test_fixed_is_one_temperature() -> None:
    output = run_one(engine_of(temperature_mode="fixed", fixed_temperature=0.6), sampled())
    assert set(temperatures(output)) == {0.6}
    assert output.token_ids == run_one(engine_of(), sampled(temperature=0.6)).token_ids


def test_mirostat_draws_nothing_that_surprises_it_more_than_its_limit() -> None:
    output = steered("mirostat", 1.0, logprobs=1)
    config = ControlConfig().thermostat_law("mirostat", 1.0)
    state = thermostat.start(config, 1.0)
    surprises = [-entry.logprob for entry in output.logprobs]
    for surprise, entry, token in zip(surprises, output.logprobs, output.entropies, strict=True):
        is_likeliest = entry.top_ids[0] == entry.token_id
        assert surprise <= state.max_surprisal_nats + 1e-4 or is_likeliest
        state = thermostat.observe(config, state, token.entropy_nats, token.varentropy, surprisal_nats=surprise)
    plain = run_one(engine_of(), sampled(logprobs=1))
    assert sum(surprises) < sum(-entry.logprob for entry in plain.logprobs)


@pytest.mark.parametrize("mode", ["two_sided", "mirostat"])
def test_log_probabilities_and_entropies_stay_those_of_the_raw_logits(mode: str) -> None:
    """Rows are scaled and cut in place for the draw; what is told of the model is what it said."""
    options = EntropicParams(temperature_mode=mode, target_entropy_nats=1.0)  # type: ignore[arg-type]
    wanted = sampled(temperature=0.7, logprobs=2, logit_bias={101: 1.5}, entropic=options, max_tokens=30)
    output = run(make_engine(), [sampled("other", PROMPTS[1], 30), wanted])["a", 0]
    prompt = wanted.prompt_token_ids
    rows = reference_logits([*prompt, *output.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
    for row, entry, token in zip(rows.tolist(), output.logprobs, output.entropies, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=2e-3)
        assert entry.top_logprobs == pytest.approx(sorted(row, reverse=True)[:2], abs=2e-3)
        assert token.entropy_nats == pytest.approx(entropy.measure(row).entropy_nats, abs=2e-3)


def test_greedy_bypasses_every_mode_and_is_measured() -> None:
    plain = run_one(engine_of(), request("a", PROMPTS[0], trace="tokens"))
    for mode in ("cool", "edt", "mirostat"):
        options = EntropicParams(temperature_mode=mode, target_entropy_nats=0.5)  # type: ignore[arg-type]
        output = run_one(engine_of(), request("a", PROMPTS[0], trace="tokens", entropic=options))
        assert output.token_ids == plain.token_ids
        assert output.entropies == plain.entropies
        assert set(temperatures(output)) == {0.0}


def test_the_thermostat_holds_the_mean_entropy_near_its_target() -> None:
    """Raw entropies told here are at temperature 1; the loop measures at the temperature in force."""
    free = [entry.entropy_nats for entry in run_one(engine_of(), sampled(max_tokens=300)).entropies]
    natural = sum(free) / len(free)
    for target in (0.75 * natural, 1.2 * natural):
        options = EntropicParams(temperature_mode="two_sided", target_entropy_nats=target)
        held: list[float] = []
        for seed in range(3):
            wanted = sampled(max_tokens=300, seed=seed, entropic=options)
            output = run_one(engine_of(), wanted)
            logits = reference_logits([*wanted.prompt_token_ids, *output.token_ids])
            rows = logits[len(wanted.prompt_token_ids) - 1 : -1].tolist()
            pairs = list(zip(rows, temperatures(output), strict=True))[100:]
            held += [entropy.measure([value / scale for value in row]).entropy_nats for row, scale in pairs]
        assert abs(sum(held) / len(held) - target) < 0.5 * abs(natural - target)


def test_preemption_and_recomputation_never_move_the_thermostat() -> None:
    options = EntropicParams(temperature_mode="two_sided", target_entropy_nats=1.0)
    wanted = [sampled(f"r{i}", PROMPTS[i], 60, seed=i, entropic=options) for i in range(4)]
    roomy = run(make_engine(), wanted)
    engine = make_engine(num_kv_blocks=21, prefix_caching=False)
    outputs, stats = run_steps(engine, wanted)
    assert sum(one.num_preempted for one in stats) > 0
    found: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(temperatures(output))
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert found == {key[0]: temperatures(output) for key, output in roomy.items()}
    assert tokens == {key[0]: output.token_ids for key, output in roomy.items()}


@pytest.mark.parametrize("mode", ["two_sided", "edt", "mirostat"])
def test_after_a_restart_the_temperatures_go_on_where_they_stood(mode: str) -> None:
    """Tokens already sent come back as a forced prefix, over chunks of prompt and with penalties on."""
    options = EntropicParams(temperature_mode=mode, target_entropy_nats=1.2)  # type: ignore[arg-type]
    wishes = {"frequency_penalty": 0.4, "logit_bias": {101: -2.0}, "min_tokens": 5}
    for params in ({}, wishes):
        wanted = sampled(entropic=options, **params)
        whole = run_one(make_engine(), wanted)
        resumed = msgspec.structs.replace(wanted, forced_output=[whole.token_ids[:37]])
        rest = run_one(make_engine(max_step_tokens=16), resumed)
        assert rest.token_ids == whole.token_ids[37:]
        assert temperatures(rest) == temperatures(whole)[37:]
        assert rest.entropy_summary is not None
        assert whole.entropy_summary is not None
        assert rest.entropy_summary.tau_nats == whole.entropy_summary.tau_nats
        assert rest.entropy_summary.mean_temperature == whole.entropy_summary.mean_temperature


def test_each_choice_has_a_thermostat_of_its_own() -> None:
    options = EntropicParams(temperature_mode="two_sided", target_entropy_nats=1.4)
    alone = run_one(make_engine(), sampled(entropic=options))
    both = run(make_engine(), [sampled(n=2, entropic=options)])
    assert both["a", 0].entropies == alone.entropies
    assert temperatures(both["a", 1]) != temperatures(alone)


def test_clamped_tokens_are_counted_by_side() -> None:
    for target, side in ((0.0, "num_saturated_low"), (9.0, "num_saturated_high")):
        options = EntropicParams(temperature_mode="two_sided", target_entropy_nats=target)
        stats = run_steps(make_engine(), [sampled(max_tokens=120, entropic=options)])[1]
        counts = {
            name: sum(getattr(one, name) for one in stats) for name in ("num_saturated_low", "num_saturated_high")
        }
        assert counts.pop(side) > 20
        assert set(counts.values()) == {0}


# --- macro


@pytest.mark.parametrize("mode", ["paper", "entropic", "entropic_inverse", "random"])
def test_the_order_of_service_changes_no_token(mode: str) -> None:
    plain = run(make_engine(), requests())
    control = ControlConfig(priority_mode=mode)  # type: ignore[arg-type]
    found = run(make_engine(control=control, num_kv_blocks=40, max_step_tokens=16, max_num_seqs=3), requests())
    assert {k: v.token_ids for k, v in found.items()} == {k: v.token_ids for k, v in plain.items()}


# --- the clock and the cost model


def test_traces_add_up_to_the_counters_exactly() -> None:
    engine = make_engine(num_kv_blocks=40, prefix_caching=False)
    outputs, stats = run_steps(engine, requests(max_tokens=40))
    traces: dict[tuple[str, int], list[Any]] = {}
    for output in outputs:
        traces.setdefault((output.request_id, output.choice), []).extend(output.entropies)
    summaries = {(o.request_id, o.choice): o.entropy_summary for o in outputs if o.entropy_summary is not None}
    for key, trace in traces.items():
        values = [entry.entropy_nats for entry in trace]
        tau = sum(max(0.0, before - after) for before, after in itertools.pairwise(values))
        summary = summaries[key]
        assert summary is not None
        assert summary.tau_nats == pytest.approx(tau, abs=1e-4)
        assert summary.tau_nats == trace[-1].tau_nats
    total = math.fsum(summary.tau_nats for summary in summaries.values() if summary)
    assert total == pytest.approx(math.fsum(one.tau_nats for one in stats), abs=1e-9)
    for name in ("tau_up_nats", "nats_resolved"):
        told = math.fsum(getattr(summary, name) for summary in summaries.values())
        assert told == pytest.approx(math.fsum(getattr(one, name) for one in stats), abs=1e-9)


def test_costs_of_the_choices_add_up_to_the_counters() -> None:
    engine = make_engine()
    outputs, stats = run_steps(engine, requests())
    summaries = [output.entropy_summary for output in outputs if output.entropy_summary is not None]
    gflop = math.fsum(s.tau_nats / s.tau_per_gflop for s in summaries)
    gigabytes = math.fsum(s.tau_nats / s.tau_per_gb for s in summaries)
    assert gflop == pytest.approx(math.fsum(one.flops for one in stats) * 1e-9, rel=1e-9)
    assert gigabytes == pytest.approx(math.fsum(one.bytes_read for one in stats) * 1e-9, rel=1e-9)
    assert all(s.tau_per_second > 0.0 for s in summaries)


def test_the_cost_model_learns_from_the_steps() -> None:
    engine = make_engine()
    stats = run_steps(engine, [sampled(f"r{i}", PROMPTS[i % 5], 40 + 20 * i, seed=i) for i in range(6)])[1]
    assert stats[0].cost_r_squared == {"prefill": 0.0, "decode": 0.0}
    fit = engine._costs.fit("decode")
    assert fit.effective_steps > 16
    assert stats[-1].cost_r_squared["decode"] == fit.r_squared
    assert fit.r_squared <= 1.0


# --- what is refused


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (EntropicParams(temperature_mode="cool"), "entropic.target_entropy_nats"),
        (EntropicParams(temperature_mode="mirostat"), "entropic.target_entropy_nats"),
        (EntropicParams(target_entropy_nats=math.nan), "entropic.target_entropy_nats"),
        (EntropicParams(epsilon=0.9), "entropic.epsilon"),
        (EntropicParams(pruning="on"), "entropic.pruning"),
        (EntropicParams(protected_spans=((5, 2),)), "entropic.protected_spans"),
    ],
)
def test_what_the_engine_cannot_steer_is_refused_by_name(options: EntropicParams, param: str) -> None:
    with pytest.raises(RequestError) as fault:
        engine_of().add_request(sampled(entropic=options))
    assert fault.value.param == param
