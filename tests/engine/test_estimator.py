"""What stands for a row's entropy: the exact one unless an estimate is chosen, which then steers and is told."""

import functools
import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from etserve.config import ControlConfig, load_config
from etserve.control import thermostat
from etserve.control.entropy import Estimator, estimate_entropy, measure
from etserve.errors import ConfigError, RequestError
from etserve.kernels import rows
from etserve.outputs import SequenceOutput
from etserve.runner.estimating import EXACT, EntropyReader
from etserve.sampling_params import EntropicParams
from tests.engine.helpers import PROMPTS, load_unit, make_engine, reference_logits, run_one, run_steps
from tests.engine.test_control_loop import comparable, requests, sampled, temperatures, without_times
from tests.engine.test_skipping import engine_of, kept, long_request

ESTIMATES: list[Estimator] = ["mid", "topk_renorm"]


def some_rows(vocab: int) -> torch.Tensor:
    """Plain, tied, masked, certain, shifted and flat rows, and three that are broken."""
    random = torch.Generator().manual_seed(vocab)
    z = torch.randn(9, vocab, generator=random) * 4
    z[1] = torch.randint(-3, 3, (vocab,), generator=random).float()
    z[2, 1::3] = -math.inf
    z[3] = -math.inf
    z[3, vocab // 2] = 1.5
    z[4] += 20
    z[5] = 0.25
    z[6, vocab // 3] = math.nan
    z[7, vocab // 2] = math.inf
    z[8] = -math.inf
    return z


def oracle(estimator: Estimator, k: int, row: list[float]) -> float:
    """By the law in plain Python."""
    top = sorted((z for z in row if math.isfinite(z)), reverse=True)[:k]
    padded = top + [-math.inf] * (k - len(top))
    return estimate_entropy(estimator, padded, measure(row).log_sum_exp, len(row))


# --- the fast way against the law


@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 111, 4097])
def test_rows_are_read_as_the_law_says(
    vocab: int, estimator: Estimator, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        monkeypatch.setattr(rows, "_is_native", lambda logits: False)
    logits = some_rows(vocab)
    plain = rows.row_pass(logits, 3)
    for k in (1, 7, 64):
        stats = EntropyReader(estimator, k).row_pass(logits, 3)
        expected = [oracle(estimator, k, row) for row in logits.tolist()]
        np.testing.assert_allclose(stats.entropy, expected, atol=3e-4)
        assert stats.entropy[3] == 0.0  # one token is left: certain, by any estimate
        assert np.array_equal(np.isnan(stats.entropy), np.isnan(plain.entropy))
        for name in ("log_sum_exp", "varentropy", "argmax", "nonfinite"):
            np.testing.assert_array_equal(getattr(stats, name), getattr(plain, name))
        np.testing.assert_array_equal(stats.top_ids[:, :3], plain.top_ids)


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_what_others_ask_for_changes_no_estimate(estimator: Estimator) -> None:
    logits, reader = some_rows(300), EntropyReader(estimator, 5)
    alone = reader.row_pass(logits).entropy
    np.testing.assert_array_equal(reader.row_pass(logits, 20).entropy, alone)
    parts = [reader.row_pass(logits[index : index + 1], 2).entropy for index in range(len(logits))]
    np.testing.assert_array_equal(np.concatenate(parts), alone)
    assert len(reader.row_pass(logits[:0]).entropy) == 0


def test_the_exact_reader_is_the_row_pass() -> None:
    logits = some_rows(300)
    for wanted in (0, 4):
        stats, plain = EXACT.row_pass(logits, wanted), rows.row_pass(logits, wanted)
        for name in rows.RowStats.__slots__:
            np.testing.assert_array_equal(getattr(stats, name), getattr(plain, name))


def test_every_k_that_the_settings_take_the_row_pass_returns() -> None:
    most = load_config(None, {"control": {"estimator_top_k": rows.MAX_TOP}}, {}).control
    assert most.estimator_top_k == EXACT.top_k
    with pytest.raises(ConfigError, match="estimator_top_k"):
        load_config(None, {"control": {"estimator_top_k": rows.MAX_TOP + 1}}, {})


# --- in the engine


def test_exact_is_the_plain_engine_bit_for_bit() -> None:
    plain = run_steps(make_engine(), requests())
    outputs, stats = run_steps(make_engine(control=ControlConfig(estimator_top_k=3)), requests())
    assert without_times(outputs) == without_times(plain[0])
    assert comparable(stats) == comparable(plain[1])


@functools.cache
def told(estimator: Estimator, top_k: int, backend: str) -> SequenceOutput:
    control = ControlConfig(entropy_estimator=estimator, estimator_top_k=top_k)
    return run_one(make_engine(load_unit(backend), backend=backend, control=control), sampled(logprobs=8))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("estimator", "top_k"), [("mid", 4), ("mid", 64), ("topk_renorm", 4)])
def test_what_is_told_is_the_estimate_of_the_models_own_logits(estimator: Estimator, top_k: int, backend: str) -> None:
    output, exact = told(estimator, top_k, backend), told("exact", 64, backend)
    ids = sampled().prompt_token_ids
    logits = reference_logits([*ids, *output.token_ids])[len(ids) - 1 : -1]
    expected = [oracle(estimator, top_k, row) for row in logits.tolist()]
    values = [entry.entropy_nats for entry in output.entropies]
    assert values == pytest.approx(expected, abs=5e-3)
    summary = output.entropy_summary
    assert summary is not None
    assert summary.entropy_estimator == estimator
    assert summary.nats_resolved == pytest.approx(sum(values), abs=1e-4)
    falls = [max(0.0, before - after) for before, after in itertools.pairwise(values)]
    assert summary.tau_nats == pytest.approx(sum(falls), abs=1e-4)
    assert output.token_ids == exact.token_ids  # nothing is steered
    assert output.logprobs == exact.logprobs
    assert [one.varentropy for one in output.entropies] == [one.varentropy for one in exact.entropies]
    if top_k == 4:
        apart = [mine - one.entropy_nats for mine, one in zip(values, exact.entropies, strict=True)]
        assert max(map(abs, apart)) > 0.05
        assert estimator == "mid" or max(apart) < 1e-3  # biased low, never high


def test_a_temperature_is_steered_by_the_estimate() -> None:
    options = EntropicParams(temperature_mode="two_sided", target_entropy_nats=1.0)
    wanted = sampled(temperature=0.8, entropic=options)
    reading = ControlConfig(entropy_estimator="mid", estimator_top_k=4)
    output = run_one(make_engine(control=reading), wanted)
    config = ControlConfig().thermostat_law("two_sided", 1.0)
    state, expected = thermostat.start(config, 0.8), []
    ids = wanted.prompt_token_ids
    for row in reference_logits([*ids, *output.token_ids])[len(ids) - 1 : -1].tolist():
        scale = thermostat.temperature(config, state)
        expected.append(scale)
        scaled = [value / scale for value in row]
        state = thermostat.observe(config, state, oracle("mid", 4, scaled), measure(scaled).varentropy)
    assert temperatures(output) == pytest.approx(expected, rel=5e-3)
    assert temperatures(output) != temperatures(run_one(make_engine(), wanted))


def test_skipping_follows_the_estimate() -> None:
    """The law that swings epsilon is told the estimates, so it reads more or less of the same context."""
    law: dict[str, Any] = {"epsilon": 0.25, "epsilon_swing": 1.0}
    wanted = long_request(max_tokens=60)
    exact = run_one(engine_of(**law), wanted)
    found = run_one(engine_of(entropy_estimator="mid", estimator_top_k=2, **law), wanted)
    assert min(kept(found)) < 1.0
    assert kept(found) != kept(exact)


def test_a_restarted_engine_reads_what_was_sent_by_the_same_estimate() -> None:
    control = ControlConfig(entropy_estimator="mid", estimator_top_k=4)
    options = EntropicParams(temperature_mode="two_sided", target_entropy_nats=1.0)
    wanted = sampled(temperature=0.8, entropic=options)
    whole = run_one(make_engine(control=control), wanted)
    resumed = msgspec.structs.replace(wanted, forced_output=[whole.token_ids[:37]])
    output = run_one(make_engine(control=control), resumed)
    assert output.token_ids == whole.token_ids[37:]
    assert temperatures(output) == pytest.approx(temperatures(whole)[37:], rel=1e-3)
    assert output.entropy_summary is not None
    assert whole.entropy_summary is not None
    assert output.entropy_summary.tau_nats == pytest.approx(whole.entropy_summary.tau_nats, abs=1e-3)


# --- what is refused


@pytest.mark.parametrize(
    "mode",
    [
        {"temperature_mode": "edt"},
        {"temperature_mode": "fixed"},
        {"priority_mode": "entropic"},
        {"pruning": "on", "prune_selector": "random"},
        {"eviction": "pressure"},
        {"speculation": "ngram"},
    ],
    ids=str,
)
def test_the_biased_estimate_steers_nothing(mode: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="topk_renorm"):
        load_config(None, {"control": {"entropy_estimator": "topk_renorm", **mode}}, {})
    assert load_config(None, {"control": {"entropy_estimator": "mid", **mode}}, {}).control.is_steering


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (EntropicParams(temperature_mode="cool"), "temperature_mode"),
        (EntropicParams(pruning="on"), "pruning"),
        (EntropicParams(eviction="pressure"), "eviction"),
    ],
)
def test_no_request_is_steered_by_it_either(options: EntropicParams, name: str) -> None:
    engine = make_engine(control=ControlConfig(entropy_estimator="topk_renorm"))
    with pytest.raises(RequestError) as fault:
        engine.add_request(sampled(entropic=options))
    assert fault.value.param == f"entropic.{name}"
    off = EntropicParams(temperature_mode="off", pruning="off", eviction="off")
    assert run_one(engine, sampled(prompt=PROMPTS[0], max_tokens=3, entropic=off)).finish_reason == "length"
