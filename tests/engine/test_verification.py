"""What was drawn with blocks skipped is computed again densely: before it is told, or to renew its keys and values."""

from typing import Any

import pytest

from etserve.config import ControlConfig, EngineConfig
from etserve.control.draft import DraftRun
from etserve.engine.llm_engine import LLMEngine
from etserve.errors import RequestError
from etserve.outputs import GenerateRequest
from etserve.sampling_params import EntropicParams, Grammar
from tests.engine.helpers import PROMPTS, load_unit, make_engine, request, run, run_one, run_steps
from tests.engine.test_skipping import LONG, TEXT, engine_of, long_request
from tests.engine.test_speculation import Outputs, assert_same, run_counted

LOSSLESS: dict[str, Any] = {"verify": "lossless", "epsilon": 0.3, "verify_budget_nats": 0.05, "verify_max_tokens": 5}
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.1, "seed": 5, "top_k": 30, "logprobs": 2, "max_tokens": 61},
    {"seed": 6, "n": 2, "ignore_eos": False, "stop_token_ids": (101,), "min_tokens": 12},
    {"seed": 7, "stop": ("th", "er"), "min_tokens": 6},
    {"seed": 8, "repetition_penalty": 1.2},
    {"seed": 9, "grammar": Grammar(kind="json_object"), "max_tokens": 12, "ignore_eos": False},
    {"seed": 10, "logit_bias": {101: 1.0}, "max_tokens": 2},
    {"seed": 11, "max_tokens": 1},
    {"seed": 12, "entropic": EntropicParams(temperature_mode="cool", target_entropy_nats=1.0)},
]


def wanted_requests() -> list[GenerateRequest]:
    long = [long_request(f"{i}", LONG[i:], **wishes) for i, wishes in enumerate(WISHES)]
    return [*long, long_request("short", PROMPTS[0]), long_request("edge", LONG[:500], max_tokens=50)]


@pytest.fixture(scope="module")
def dense() -> Outputs:
    """The same requests where nothing is ever skipped."""
    return run(engine_of(pruning="off"), wanted_requests())


@pytest.mark.parametrize(
    ("pool", "changes"),
    [
        (700, {}),
        (700, {"verify_max_tokens": 1}),
        (700, {"verify_budget_nats": 0.0}),
        (700, {"verify_max_tokens": 16, "verify_budget_nats": 1.0, "epsilon": 0.45, "epsilon_swing": 0.0}),
        (700, {"speculation": "ngram", "draft_row_cost": 1e-6}),
        (117, {}),
    ],
    ids=str,
)
def test_losslessly_every_token_is_that_of_dense_attention(pool: int, changes: dict[str, Any], dense: Outputs) -> None:
    engine = engine_of(num_kv_blocks=pool, **{**LOSSLESS, **changes})
    found, stats = run_counted(engine, wanted_requests())
    assert_same(found, dense)
    assert sum(step.num_blocks_skipped for step in stats) > 0
    assert sum(step.num_verifications for step in stats) > 0
    assert sum(len(step.entropies) for step in stats) == sum(output.num_output_tokens for output in dense.values())
    assert engine._scheduler._ahead._copies == {}
    if pool == 117:
        assert sum(step.num_preempted for step in stats) > 0


@pytest.mark.parametrize("max_step_tokens", [16, 20])
def test_a_small_step_holds_whatever_is_verified_in_it(max_step_tokens: int, dense: Outputs) -> None:
    laws: dict[str, Any] = {"verify_max_tokens": 16, "verify_budget_nats": 20.0, "epsilon_swing": 0.0}
    control = ControlConfig(pruning="on", **{**LOSSLESS, **laws})
    engine = make_engine(
        load_unit("auto", "float32", 2),
        pruning_sketch_bits=2,
        control=control,
        num_kv_blocks=700,
        max_model_len=1600,
        max_step_tokens=max_step_tokens,
    )
    found, stats = run_counted(engine, wanted_requests()[:4])
    assert_same(found, {key: dense[key] for key in found})
    assert sum(step.num_accepted_tokens for step in stats) > 0


def test_tokens_are_held_back_until_they_are_verified() -> None:
    engine = engine_of(**LOSSLESS)
    engine.add_request(long_request(max_tokens=40))
    told, guessing = [], 0
    while engine.has_work:
        outputs, stats = engine.step()
        told += [len(output.token_ids) for output in outputs if output.token_ids]
        is_guess = not outputs and stats.num_prefill_tokens == 0
        guessing += is_guess
        assert not (is_guess and stats.schedule_ages_seconds)  # nobody is served by it
    assert guessing > 5
    assert max(told) > 1
    assert sum(told) == 40


def test_an_abort_while_guesses_are_out_leaves_nothing_behind() -> None:
    engine = engine_of(**LOSSLESS)
    engine.add_request(long_request(max_tokens=40))
    while not engine._scheduler._ahead._copies:
        engine.step()
    engine.abort("a")
    endings, _ = run_steps(engine, [])
    assert [output.finish_reason for output in endings] == ["abort"]
    assert engine._scheduler._ahead._copies == {}


def test_a_guess_that_fails_is_forgotten_and_the_sequence_goes_on(dense: Outputs) -> None:
    engine = engine_of(**LOSSLESS)
    draw = engine._sampler.draw
    broken: list[int] = []

    def draw_badly(seqs: Any, logits: Any) -> Any:
        for index, seq in enumerate(seqs):
            if engine._scheduler._ahead._copies.get(seq.seq_id) is seq and len(broken) < 3:
                logits[index] = float("nan")
                broken.append(seq.num_tokens)
        return draw(seqs, logits)

    engine._sampler.draw = draw_badly  # type: ignore[method-assign]
    found = run(engine, [long_request("0", LONG)])
    assert len(broken) == 3
    assert_same(found, {("0", 0): dense["0", 0]})


def scored_densely(prompt: str, tokens: list[int]) -> list[float]:
    """Log-probabilities of the tokens after the prompt, all read densely."""
    engine = engine_of(pruning="off")
    ids = long_request("score", prompt).prompt_token_ids + tokens
    output = run_one(engine, request("score", ids, max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    return [entry.logprob for entry in output.prompt_logprobs[-len(tokens) :] if entry is not None]


@pytest.mark.parametrize("longest", [1, 4])
def test_bounded_renews_what_was_computed_with_blocks_skipped(longest: int) -> None:
    """Each step that renews is dense over dense entries, so its token has the probability that dense scoring says."""
    settings = {"epsilon": 0.4, "epsilon_swing": 0.0, "watchdog_steps": 10_000, "jump_nats": 100.0}
    bounded = engine_of(verify="bounded", verify_max_tokens=longest, verify_budget_nats=20.0, **settings)
    output = run_one(bounded, long_request(logprobs=0, max_tokens=40))
    truth = scored_densely(LONG, output.token_ids)
    renewed = [i for i, entry in enumerate(output.entropies) if entry.kept_fraction == 1.0 and i > 0]
    assert renewed == list(range(1 + longest, 40, 1 + longest))
    for index in renewed:
        assert output.logprobs[index].logprob == pytest.approx(truth[index], abs=1e-5)
    never = run_one(engine_of(**settings), long_request(logprobs=0, max_tokens=40))
    told = [entry.logprob for entry in never.logprobs]
    assert max(abs(a - b) for a, b in zip(told, scored_densely(LONG, never.token_ids), strict=True)) > 1e-3


def test_what_was_renewed_is_shared_as_a_prefix_again() -> None:
    engine = engine_of(verify="bounded", verify_max_tokens=1, epsilon=0.4, epsilon_swing=0.0, jump_nats=100.0)
    first = run_one(engine, long_request(max_tokens=60))
    ids = long_request(prompt=LONG).prompt_token_ids + first.token_ids
    again = run_one(engine, request("again", ids, max_tokens=2))
    assert again.num_cached_tokens > len(LONG) + 16
    fresh = run_one(engine_of(pruning="off"), request("again", ids, max_tokens=2))
    assert again.token_ids == fresh.token_ids


BOUNDED: dict[str, Any] = {"verify": "bounded", "epsilon": 0.4, "epsilon_swing": 0.0, "jump_nats": 100.0}


def test_what_is_renewed_is_counted_as_no_prompt() -> None:
    wanted = long_request(max_tokens=40)
    _, stats = run_steps(engine_of(verify_max_tokens=4, **BOUNDED), [wanted])
    assert sum(step.num_verifications for step in stats) > 3
    assert sum(step.num_prefill_tokens for step in stats) == len(wanted.prompt_token_ids)
    assert sum(step.num_decode_tokens for step in stats) == 39  # the prompt's own step draws the first


def test_when_the_watchdog_ends_skipping_what_stands_is_renewed_at_once() -> None:
    watchful: dict[str, Any] = {"watchdog_steps": 5, "watchdog_divergence_nats": 0.0, "verify_budget_nats": 20.0}
    engine = engine_of(verify_max_tokens=32, **watchful, **BOUNDED)
    engine.add_request(long_request(max_tokens=40))
    (seq,) = engine._requests["a"]
    num_skipping = num_after = 0
    while engine.has_work:
        _, stats = engine.step()
        if seq.control.pruning.disabled_reason is None:
            num_skipping += seq.num_dense_tokens is not None
        else:
            assert seq.num_dense_tokens is None
            num_after += stats.num_verifications
    assert num_skipping > 5
    assert num_after == 1


def test_the_server_s_verification_refuses_nobody_who_is_not_pruned() -> None:
    engine = make_engine(
        load_unit("auto", "float32", 2), pruning_sketch_bits=2, control=ControlConfig(verify="bounded")
    )
    run_one(engine, request("a", TEXT, entropic=EntropicParams(eviction="pressure")))
    with pytest.raises(RequestError) as caught:
        engine.add_request(request("b", TEXT, entropic=EntropicParams(pruning="on", eviction="pressure")))
    assert caught.value.param == "entropic.verify"


def test_verification_takes_something_to_skip_by() -> None:
    with pytest.raises(ValueError, match="verify takes pruning_sketch_bits"):
        EngineConfig(control=ControlConfig(verify="lossless"))
    EngineConfig(control=ControlConfig(verify="lossless", prune_selector="recency"))


@pytest.mark.parametrize(
    ("entropic", "param"),
    [
        ({"verify": "lossless"}, "entropic.verify"),
        ({"verify": "bounded", "pruning": "off"}, "entropic.verify"),
        ({"verify": "bounded", "pruning": "on", "eviction": "pressure"}, "entropic.verify"),
    ],
)
def test_what_cannot_be_verified_is_refused(entropic: dict[str, Any], param: str) -> None:
    engine = make_engine(load_unit("auto", "float32", 2), pruning_sketch_bits=2)
    with pytest.raises(RequestError) as caught:
        engine.add_request(request("a", TEXT, entropic=EntropicParams(**entropic)))
    assert caught.value.param == param
    with pytest.raises(ValueError, match="eviction off"):
        ControlConfig(verify="lossless", eviction="pressure")


def test_a_request_chooses_its_own_verification() -> None:
    engine: LLMEngine = engine_of(epsilon=0.3)
    engine.add_request(long_request("a", entropic=EntropicParams(verify="lossless")))
    engine.add_request(long_request("b"))
    assert [engine._requests[name][0].control.is_lossless for name in "ab"] == [True, False]
    assert engine._requests["a"][0].run == DraftRun()
    for name in "ab":
        engine.abort(name)
    run_steps(engine, [])


def test_the_table_of_the_settings_says_how_soon_the_risk_is_spent() -> None:
    counts = []
    for risk in (0.0, 0.01, 20.0):  # of every entropy
        engine = engine_of(verify="bounded", verify_risks_nats=((20.0, risk),), verify_max_tokens=16)
        _, stats = run_steps(engine, [long_request(max_tokens=40)])
        counts.append(sum(step.num_verifications for step in stats))
    assert counts[0] < counts[1] < counts[2]
