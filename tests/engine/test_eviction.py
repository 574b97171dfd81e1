"""Eviction in the engine: memory comes back, guards hold, and a sequence that was evicted from feeds nobody."""

import dataclasses
from typing import Any

import msgspec
import pytest
import torch

from etserve.config import ControlConfig
from etserve.engine.llm_engine import LLMEngine
from etserve.errors import ConfigError, RequestError
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from etserve.sampling_params import EntropicParams
from tests.engine.helpers import (
    PROMPTS,
    encode,
    load_unit,
    make_engine,
    reference_model,
    request,
    run,
    run_one,
    run_steps,
)
from tests.kernels.decoders import make_batch

TEXT = " ".join(PROMPTS[:4]) + " "
LONG = (TEXT * 4)[:900]  # bytes, and so tokens: 57 blocks


def engine_of(
    backend: str = "auto", num_kv_blocks: int = 512, sketch_bits: int = 0, prefix_caching: bool = True, **control: Any
) -> LLMEngine:
    return make_engine(
        load_unit(backend, "float32", sketch_bits),
        backend=backend,
        control=ControlConfig(**control),
        num_kv_blocks=num_kv_blocks,
        prefix_caching=prefix_caching,
        pruning_sketch_bits=sketch_bits,
        max_model_len=1600,
    )


def long_request(request_id: str = "a", prompt: str = LONG, **params: Any) -> GenerateRequest:
    wanted: dict[str, Any] = {"temperature": 0.7, "seed": 3, "max_tokens": 60, "trace": "tokens", "ignore_eos": True}
    return request(request_id, prompt, **{**wanted, **params})


def crowd(num: int = 3, **params: Any) -> list[GenerateRequest]:
    return [long_request(f"r{i}", LONG[i + 1 :], seed=i, **params) for i in range(num)]


def evicted(output: SequenceOutput) -> int:
    assert output.entropy_summary is not None
    return output.entropy_summary.blocks_evicted


def total(stats: list[StepStats], name: str) -> int:
    return sum(getattr(one, name) for one in stats)


BUDGET = EntropicParams(eviction="budget", block_budget=40)


def test_a_sequence_keeps_to_its_budget_and_says_what_it_lost() -> None:
    engine = engine_of()
    engine.add_request(long_request(entropic=BUDGET))
    most, outputs, stats = 0, [], []
    while engine.has_work:
        told, one = engine.step()
        outputs += told
        stats.append(one)
        if one.num_prefill_tokens == 0 and engine.has_work:
            most = max(most, one.kv_blocks_active)
    assert most == 40
    lost = evicted(outputs[-1])
    assert lost == total(stats, "num_blocks_evicted") == -(-(len(LONG) + 59) // 16) - 40
    assert total(stats, "num_sequences_evicted") == 1


def test_half_of_the_sequence_stays_whatever_the_budget() -> None:
    output = run_one(
        engine_of(), long_request(prompt=LONG + LONG[:500], entropic=EntropicParams(eviction="budget", block_budget=32))
    )
    held = -(-(1400 + 59) // 16)
    assert evicted(output) <= held // 2
    assert evicted(output) >= held // 2 - 2


def test_off_is_the_plain_engine_bit_for_bit_and_so_is_an_unused_lever() -> None:
    plain = run(make_engine(load_unit(), max_model_len=1600), crowd())
    off = run(engine_of(eviction="budget", block_budget=40), crowd(entropic=EntropicParams(eviction="off")))
    roomy = run(engine_of(eviction="pressure"), crowd())
    for found in (off, roomy):
        for key, output in plain.items():
            assert found[key].token_ids == output.token_ids
            assert [e.entropy_nats for e in found[key].entropies] == [e.entropy_nats for e in output.entropies]
            assert evicted(found[key]) == 0


def test_pressure_evicts_before_it_preempts() -> None:
    needs = 3 * 60
    plain = engine_of(num_kv_blocks=needs - 3)
    _, before = run_steps(plain, crowd())
    _, after = run_steps(engine_of(num_kv_blocks=needs - 3, eviction="pressure"), crowd())
    assert total(before, "num_preempted") > 0 == total(before, "num_blocks_evicted")
    assert total(after, "num_preempted") == 0 < total(after, "num_blocks_evicted")


def test_when_every_guard_holds_a_sequence_is_preempted_after_all_and_restored_whole() -> None:
    """Without a single block to give, the tokens are those of the plain engine."""
    short = [
        long_request(f"r{i}", LONG[i : i + 400], seed=i, entropic=EntropicParams(eviction="pressure")) for i in range(8)
    ]
    outputs, stats = run_steps(engine_of(num_kv_blocks=107), short)
    assert total(stats, "num_preempted") > 0 == total(stats, "num_blocks_evicted")
    plain = run(make_engine(load_unit(), max_model_len=1600), short)
    found: dict[str, list[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.token_ids)
    assert found == {key[0]: output.token_ids for key, output in plain.items()}


def test_what_follows_an_eviction_is_never_shared() -> None:
    engine = engine_of()
    first = run_one(engine, long_request(entropic=BUDGET))
    assert evicted(first) > 0
    again = run_one(engine, long_request())
    assert again.num_cached_tokens == 0
    assert again.token_ids == run_one(engine_of(), long_request()).token_ids


def test_an_evicting_sequence_that_stays_whole_is_shared_when_it_ends() -> None:
    engine = engine_of(eviction="pressure")
    run_one(engine, long_request())
    again = run_one(engine, long_request())
    assert again.num_cached_tokens == len(LONG) // 16 * 16
    assert again.token_ids == run_one(engine_of(), long_request()).token_ids


def test_after_a_restart_replayed_output_may_be_evicted_as_it_was_before() -> None:
    plain = run_one(engine_of(), long_request(prompt=LONG[:100], max_tokens=690))
    wanted = long_request(prompt=LONG[:100], max_tokens=700, entropic=BUDGET)
    engine = engine_of()
    engine.add_request(msgspec.structs.replace(wanted, forced_output=[plain.token_ids]))
    (seq,) = engine._requests["a"]
    while seq.num_output_tokens == 690:
        engine.step()
    known = engine._scheduler._evictor._scores[seq.seq_id].surprisals[100:790]
    assert plain.entropy_summary is not None
    assert known.sum() == pytest.approx(plain.entropy_summary.surprisal_nats, rel=1e-3)
    rest, _ = run_steps(engine, [])
    assert evicted(rest[-1]) == 50 - 40  # the prompt has seven blocks


def test_protected_and_cached_blocks_stay() -> None:
    spans = ((0, 800),)
    output = run_one(
        engine_of(),
        long_request(
            entropic=EntropicParams(eviction="budget", block_budget=32, kv_protect=True, protected_spans=spans)
        ),
    )
    assert 0 < evicted(output) <= 7  # 60 blocks less 50 protected and the last 4, at its longest
    engine = engine_of()
    run_one(engine, long_request())
    cached = run_one(engine, long_request(seed=8, entropic=BUDGET))
    assert cached.num_cached_tokens > 800
    assert evicted(cached) == 0


@pytest.mark.parametrize("pruning", ["off", "on"])
def test_native_and_torch_evict_the_same_blocks_and_draw_alike(pruning: str) -> None:
    found = []
    for backend in ("native", "torch"):
        control: dict[str, Any] = {"pruning": pruning, "epsilon": 0.05}
        engine = engine_of(backend, sketch_bits=2, **control)
        found.append(run_one(engine, long_request(entropic=BUDGET)))
    assert evicted(found[0]) == evicted(found[1]) > 0
    assert found[0].token_ids == found[1].token_ids
    entropies = [torch.tensor([entry.entropy_nats for entry in output.entropies]) for output in found]
    torch.testing.assert_close(entropies[0], entropies[1], atol=5e-3, rtol=0)


def test_company_changes_no_token_of_a_sequence_with_a_budget() -> None:
    alone = run_one(engine_of(), long_request(entropic=BUDGET))
    together = run(engine_of(), [*crowd(), long_request(entropic=BUDGET)])["a", 0]
    assert together.token_ids == alone.token_ids
    assert together.entropies == alone.entropies
    assert evicted(together) == evicted(alone) > 0


def test_the_placebo_evicts_as_many_and_other_blocks() -> None:
    law, placebo = (
        run_one(engine_of(evict_selector=selector), long_request(entropic=BUDGET, max_tokens=120))
        for selector in ("score", "random")
    )
    assert evicted(law) == evicted(placebo) > 0
    assert law.entropies != placebo.entropies


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (EntropicParams(eviction="budget"), "entropic.block_budget"),
        (EntropicParams(block_budget=64), "entropic.block_budget"),
        (EntropicParams(eviction="pressure", block_budget=64), "entropic.block_budget"),
        (EntropicParams(eviction="budget", block_budget=31), "entropic.block_budget"),
    ],
)
def test_wishes_that_mean_nothing_are_refused(wanted: EntropicParams, param: str) -> None:
    engine = engine_of()
    with pytest.raises(RequestError) as caught:
        engine.add_request(long_request(entropic=wanted))
    assert caught.value.param == param


def test_a_model_with_a_sliding_window_evicts_nothing() -> None:
    loaded = load_unit()
    spec = dataclasses.replace(loaded.spec, sliding_window=64)
    windowed = dataclasses.replace(loaded, spec=spec)
    with pytest.raises(ConfigError, match="sliding window"):
        make_engine(windowed, control=ControlConfig(eviction="pressure"))
    with pytest.raises(RequestError, match="sliding window"):
        make_engine(windowed).add_request(request("r", "x", entropic=EntropicParams(eviction="pressure")))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_what_is_evicted_is_as_if_masked_from_then_on(backend: str) -> None:
    """Against transformers with a mask that hides positions 16 .. 47 from the rows behind position 61."""
    tokens, first = encode(LONG)[:90], 61
    hidden = torch.ones(90, 90, dtype=torch.bool).triu(1)
    hidden[first:, 16:48] = True
    mask = torch.zeros(1, 1, 90, 90).masked_fill(hidden, float("-inf"))
    with torch.inference_mode():
        expected = reference_model()(torch.tensor([tokens]), attention_mask=mask).logits[0, first:]
    decoder = load_unit(backend).decoder
    cache = decoder.allocate_cache(12)
    decoder.forward(make_batch([(tokens[:first], 0, [7, 3, 9, 2])]), cache)
    rest = make_batch([(tokens[first:], first - 32, [7, 2, 5, 1])])
    found = decoder.logits(decoder.forward(dataclasses.replace(rest, positions=rest.positions + 32), cache))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_blocks_of_each_sequence_are_told_only_while_somebody_watches() -> None:
    engine = engine_of(sketch_bits=2, pruning="on", epsilon=0.3)
    engine.add_request(long_request(entropic=BUDGET))
    engine.add_request(long_request("short", PROMPTS[0]))
    maps = []
    for step in range(40):
        engine.is_watched = step >= 20
        maps.append(engine.step()[1].kv_map)
    engine.abort("a")
    engine.abort("short")
    assert all(not told for told in maps[:20])
    told = {blocks.request_id: blocks for blocks in maps[-1]}
    assert told["a"].num_blocks - told["a"].num_evicted == 40
    assert told["a"].kept_fraction < 1.0 == told["short"].kept_fraction
    assert told["short"].num_evicted == 0 < told["short"].num_blocks


def test_the_engine_says_what_a_request_gets_that_says_nothing() -> None:
    def told(**control: Any) -> tuple[str, str, bool]:
        info = engine_of(sketch_bits=2, **control).info
        return info.pruning, info.eviction, info.kv_protect

    assert told() == ("off", "off", False)
    assert told(pruning="on", kv_protect=True) == ("on", "off", True)
    assert told(eviction="pressure") == ("off", "pressure", False)
