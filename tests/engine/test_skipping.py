"""Skipped blocks in the engine: within epsilon, watched over, never shared, and off where a guard says so."""

import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etserve.config import ControlConfig, load_config
from etserve.control import pruning
from etserve.control.cost import step_flops, step_kv_bytes
from etserve.control.pruning import PruningState
from etserve.engine.llm_engine import LLMEngine
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from etserve.sampling_params import EntropicParams
from tests.engine.helpers import PROMPTS, load_unit, make_engine, request, run, run_one, run_steps

TEXT = " ".join(PROMPTS[:4]) + " "
LONG = (TEXT * 4)[:900]  # bytes, and so tokens: more than the 512 below which nothing is skipped


def engine_of(backend: str = "auto", num_kv_blocks: int = 512, **control: Any) -> LLMEngine:
    settings = ControlConfig(**{"pruning": "on", **control})
    loaded = load_unit(backend, "float32", 2)
    return make_engine(
        loaded,
        backend=backend,
        pruning_sketch_bits=2,
        control=settings,
        num_kv_blocks=num_kv_blocks,
        max_model_len=1600,
    )


def long_request(request_id: str = "a", prompt: str = LONG, **params: Any) -> GenerateRequest:
    wanted: dict[str, Any] = {"temperature": 0.7, "seed": 3, "max_tokens": 40, "trace": "tokens", "ignore_eos": True}
    return request(request_id, prompt, **{**wanted, **params})


def kept(output: SequenceOutput) -> list[float]:
    return [entry.kept_fraction for entry in output.entropies]


def fallbacks(stats: list[StepStats]) -> dict[str, int]:
    found: dict[str, int] = {}
    for reason, count in itertools.chain.from_iterable(one.prune_fallbacks.items() for one in stats):
        found[reason] = found.get(reason, 0) + count
    return found


def test_long_contexts_are_read_in_part_and_short_ones_whole() -> None:
    found = run(engine_of(), [long_request(), long_request("short", PROMPTS[0])])
    assert kept(found["a", 0])[0] == 1.0  # drawn by the prompt's own step, which is dense
    assert min(kept(found["a", 0])) < 0.9
    assert set(kept(found["short", 0])) == {1.0}
    summary = found["a", 0].entropy_summary
    assert summary is not None
    assert summary.kept_fraction_mean == pytest.approx(sum(kept(found["a", 0])) / 40)


def test_each_step_reads_densely_or_within_the_epsilon_that_entropy_gives_it() -> None:
    """The law is recomputed from the entropies that the reply told."""
    output = run_one(engine_of(epsilon=0.3, epsilon_swing=1.0), long_request(max_tokens=60))
    law = ControlConfig(epsilon=0.3, epsilon_swing=1.0).pruning_law()
    state = PruningState()
    for index, entry in enumerate(output.entropies):
        may_skip = index > 0 and pruning.epsilon(law, state, len(LONG) + index) > 0.0
        assert may_skip or entry.kept_fraction == 1.0
        state = pruning.observe(law, state, entry.entropy_nats)
    assert 0.0 < sum(value < 1.0 for value in kept(output)) < 60


def test_a_looser_epsilon_reads_less() -> None:
    shares = []
    for epsilon in (0.02, 0.1, 0.4):
        options = EntropicParams(epsilon=epsilon)
        output = run_one(engine_of(epsilon_swing=0.0), long_request(entropic=options))
        shares.append(sum(kept(output)) / 40)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]


def test_epsilon_zero_and_off_are_dense_bit_for_bit() -> None:
    plain = run_one(make_engine(max_model_len=1600), long_request())
    for options in (EntropicParams(epsilon=0.0), EntropicParams(pruning="off")):
        output = run_one(engine_of(), long_request(entropic=options))
        assert output.token_ids == plain.token_ids
        assert output.entropies == plain.entropies


def test_a_request_may_ask_for_skipping_where_the_server_has_it_off() -> None:
    output = run_one(engine_of(pruning="off"), long_request(entropic=EntropicParams(pruning="on", epsilon=0.3)))
    assert min(kept(output)) < 1.0
    assert set(kept(run_one(engine_of(pruning="off"), long_request()))) == {1.0}


def test_company_and_schedule_change_no_token_of_a_skipping_request() -> None:
    alone = run_one(engine_of(epsilon=0.3), long_request())
    others = [long_request(f"other-{i}", LONG[i:], seed=i) for i in range(1, 4)]
    found = run(engine_of(epsilon=0.3), [*others, long_request()])["a", 0]
    assert found.token_ids == alone.token_ids
    assert found.entropies == alone.entropies


def test_what_was_computed_with_blocks_skipped_is_never_shared() -> None:
    """A dense request that goes on where a skipping one stopped finds its prompt in the cache, and nothing else."""
    engine = engine_of(epsilon=0.4)
    first = run_one(engine, long_request(max_tokens=64))
    tokens = [*long_request().prompt_token_ids, *first.token_ids, 65, 66]
    off = EntropicParams(pruning="off")
    later = run_one(engine, request("b", tokens, trace="tokens", entropic=off))
    fresh = run_one(make_engine(max_model_len=1600), request("b", tokens, trace="tokens"))
    assert later.entropies == fresh.entropies
    assert later.token_ids == fresh.token_ids
    assert 0 < later.num_cached_tokens <= len(LONG) + 16  # up to the first token that was allowed to skip


def test_preemption_makes_a_skipping_sequence_dense_again_and_goes_on() -> None:
    engine = engine_of(epsilon=0.3, jump_nats=50.0, num_kv_blocks=124)
    wanted = [long_request(f"r{i}", LONG[i:], seed=i, max_tokens=120) for i in range(2)]
    outputs, stats = run_steps(engine, wanted)
    assert sum(one.num_preempted for one in stats) > 0
    assert sum(len(output.token_ids) for output in outputs) == 240
    assert any(one.kept_fractions for one in stats)


# --- guards


def protected_share(spans: tuple[tuple[int, int], ...], protect: bool) -> float:
    options = EntropicParams(epsilon=0.4, kv_protect=protect, protected_spans=spans)
    return sum(kept(run_one(engine_of(epsilon_swing=0.0), long_request(entropic=options))))


def test_protected_spans_are_read_when_asked_for() -> None:
    whole = ((0, len(LONG)),)
    assert protected_share(whole, protect=True) > protected_share(whole, protect=False)
    assert protected_share(whole, protect=False) == protected_share((), protect=True)


def test_the_watchdog_compares_the_same_step_and_leaves_dense_entries() -> None:
    """Epsilon so tight that nothing is skipped: the check must find no divergence, and change nothing."""
    plain = run_one(make_engine(max_model_len=1600), long_request())
    tight = {"epsilon": 1e-6, "epsilon_swing": 0.0, "watchdog_steps": 4, "watchdog_divergence_nats": 1e-6}
    engine = engine_of(**tight)
    outputs, stats = run_steps(engine, [long_request()])
    assert [t for output in outputs for t in output.token_ids] == plain.token_ids
    assert "watchdog" not in fallbacks(stats)


def test_a_watchdog_that_tolerates_nothing_turns_skipping_off_after_two_checks() -> None:
    often = {"epsilon": 0.4, "epsilon_swing": 0.0, "jump_nats": 50.0, "watchdog_steps": 4}
    for tolerated, is_off in ((0.0, True), (20.0, False)):
        outputs, stats = run_steps(engine_of(**often, watchdog_divergence_nats=tolerated), [long_request()])
        shares = [entry.kept_fraction for output in outputs for entry in output.entropies]
        last = max(index for index, value in enumerate(shares) if value < 1.0)
        assert fallbacks(stats).get("watchdog", 0) == is_off
        assert (last < 10) is is_off


def test_a_check_costs_what_a_second_pass_costs() -> None:
    checked = run_steps(engine_of(watchdog_steps=8), [long_request(entropic=EntropicParams(epsilon=1e-6))])[1]
    plain = run_steps(engine_of(watchdog_steps=1000), [long_request(entropic=EntropicParams(epsilon=1e-6))])[1]
    extra = [one.flops / other.flops for one, other in zip(checked, plain, strict=True)]
    assert any(value == pytest.approx(2.0, rel=1e-3) for value in extra)
    assert any(value == 1.0 for value in extra)


# --- what is told


def test_counters_traces_and_costs_agree() -> None:
    engine = engine_of(epsilon=0.3)
    outputs, stats = run_steps(engine, [long_request()])
    shares = [entry.kept_fraction for output in outputs for entry in output.entropies]
    told = [share for one in stats for share in one.kept_fractions]
    assert [share for share in told if share < 1.0] == [share for share in shares if share < 1.0]
    assert all(0.0 <= mass <= 0.4 + 1e-6 for one in stats for mass in one.skipped_masses)
    shape = engine._costs._shape
    blocks_of_step = shape.num_layers * shape.num_kv_heads
    for one in stats:
        if len(one.kept_fractions) == 1 and one.num_decode_tokens == 1:
            num_blocks = one.num_blocks_skipped / ((1.0 - one.kept_fractions[0]) or math.inf) / blocks_of_step
            assert one.num_blocks_skipped == 0 or num_blocks == pytest.approx(round(num_blocks), abs=1e-6)
    first = next(index for index, one in enumerate(stats) if one.kept_fractions and one.kept_fractions[0] < 1.0)
    drawn = sum(len(one.entropies) for one in stats[:first])
    end = len(LONG) + drawn
    share = stats[first].kept_fractions[0]
    flops = step_flops(shape, num_tokens=1, kept_tokens=shape.num_layers * end * share, num_logits=1)
    assert stats[first].flops == pytest.approx(flops)
    kv = step_kv_bytes(shape, num_tokens=1, kept_tokens=shape.num_layers * end * share)
    kv += shape.sketch_token_bytes * shape.num_layers * end
    assert stats[first].bytes_read == pytest.approx(engine.info.weight_bytes + kv)
    assert shape.sketch_token_bytes > 0


def test_placebos_read_their_share_whatever_the_query() -> None:
    for selector in ("random", "recency"):
        output = run_one(engine_of(prune_selector=selector, prune_share=0.5), long_request())
        some = [value for value in kept(output) if value < 1.0]
        assert some
        assert min(some) == pytest.approx(0.75, abs=0.05)  # two of four layers are dense


def test_the_torch_reference_skips_by_the_same_law() -> None:
    native = run_one(engine_of(epsilon=0.3), long_request(max_tokens=12))
    torch = run_one(engine_of("torch", epsilon=0.3), long_request(max_tokens=12))
    assert torch.token_ids == native.token_ids
    assert kept(torch) == pytest.approx(kept(native), abs=0.05)


@pytest.mark.parametrize("arm", ["entropic", "paper"])
def test_the_shipped_arms_run_with_all_scales_on(arm: str) -> None:
    shipped = load_config(Path(__file__).parents[2] / "configs" / f"{arm}.toml", environment={}).engine
    loaded = load_unit("auto", "float32", shipped.pruning_sketch_bits)
    control = msgspec.structs.replace(shipped.control, target_entropy_nats=1.0)  # bytes are surer than words
    engine = make_engine(
        loaded,
        pruning_sketch_bits=shipped.pruning_sketch_bits,
        control=control,
        max_model_len=1600,
        max_step_tokens=64,
    )
    wanted = [long_request(f"r{i}", LONG[i:], seed=i, max_tokens=60) for i in range(3)]
    found = run(engine, wanted)
    for output in found.values():
        assert len(output.token_ids) == 60
        assert min(kept(output)) < 1.0
        assert len({entry.temperature for entry in output.entropies}) > 1
