"""Workloads ask for what their names say, and equal seeds ask for the same."""

import numpy as np
import pytest

from etserve.bench import workloads
from etserve.bench.errors import BenchError
from etserve.bench.prompts import PromptMaker
from etserve.bench.traces import TraceEntry
from etserve.bench.workloads import Lengths, Workload
from tests.unit.bench_helpers import unit_tokenizer

MAKER = PromptMaker(unit_tokenizer())
IDS = PromptMaker(unit_tokenizer(), send_ids=True)  # cheaper where the text does not matter


@pytest.mark.parametrize(
    ("name", "requests", "concurrency", "tokens_in", "tokens_out"),
    [
        ("W1", 8, 1, 128, 128),
        ("W2", 16, 8, 128, 128),
        ("W3", 64, 32, 256, 128),
        ("W4", 8, 8, 1536, 256),
        ("W5", 32, 32, 1056, 64),
        ("W7", 8, 1, 384, 128),
    ],
)
def test_closed_loops_ask_for_their_fixed_lengths(
    name: str, requests: int, concurrency: int, tokens_in: int, tokens_out: int
) -> None:
    workload = workloads.standard(name)
    planned = workloads.plan(workload, IDS, seed=1)
    assert workload.concurrency == concurrency
    assert [(r.prompt.num_tokens, r.num_output_tokens, r.arrival_seconds) for r in planned] == [
        (tokens_in, tokens_out, None)
    ] * requests


def test_w5_shares_its_first_1024_tokens_and_nothing_more() -> None:
    planned = workloads.plan(workloads.standard("W5"), MAKER, seed=1)
    ids = [unit_tokenizer().encode(str(request.prompt.content)) for request in planned]
    assert all(len(each) == 1056 for each in ids)
    assert len({tuple(each[:1024]) for each in ids}) == 1
    assert len({tuple(each[1024:1040]) for each in ids}) == 32


def test_w7_says_its_passage_three_times_and_each_request_has_its_own() -> None:
    planned = workloads.plan(workloads.standard("W7"), MAKER, seed=1)
    prompts = [unit_tokenizer().encode(str(request.prompt.content)) for request in planned]
    size = (384 - 11) // 3
    passages = {tuple(ids[-size:]) for ids in prompts}
    assert all(ids[-size:] == ids[-2 * size : -size] == ids[-3 * size : -2 * size] for ids in prompts)
    assert len(passages) == len(prompts)


def test_w6_arrives_for_a_minute_at_its_rate_with_mixed_lengths() -> None:
    planned = workloads.plan(workloads.standard("W6", rate=5.0), IDS, seed=2)
    arrivals = [request.arrival_seconds or 0.0 for request in planned]
    assert len(planned) == 300
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert 45.0 < arrivals[-1] < 75.0
    assert {32 <= request.prompt.num_tokens <= 512 for request in planned} == {True}
    assert {16 <= request.num_output_tokens <= 160 for request in planned} == {True}
    assert len({request.prompt.num_tokens for request in planned}) > 50


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_sets_the_spread_of_the_gaps_but_not_the_rate(burstiness: float, variation: float) -> None:
    workload = Workload(
        name="custom",
        num_requests=4000,
        prompt_tokens=Lengths(1, 1),
        output_tokens=Lengths(1, 1),
        rate=10.0,
        burstiness=burstiness,
    )
    gaps = np.diff([at or 0.0 for at in workloads._arrivals(workload, np.random.default_rng(0))])
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(variation, rel=0.15)


def test_equal_seeds_plan_equal_rounds_and_others_share_no_prompt() -> None:
    workload = workloads.scaled(workloads.standard("W2"), 0.5)
    first, again, other = (workloads.plan(workload, MAKER, seed) for seed in (7, 7, 8))
    assert first == again
    assert not {str(r.prompt.content)[:40] for r in first} & {str(r.prompt.content)[:40] for r in other}


def test_warmup_has_the_shapes_but_not_the_prompts_of_the_round() -> None:
    planned = workloads.plan(workloads.standard("W2"), MAKER, seed=3)
    warm = workloads.warmup(planned, 2, MAKER, seed=3)
    assert [request.prompt.num_tokens for request in warm] == [128, 128]
    assert [request.num_output_tokens for request in warm] == [16, 16]
    assert not {request.prompt.content for request in warm} & {request.prompt.content for request in planned}


def test_scaling_shrinks_counts_and_lengths_but_nothing_to_zero() -> None:
    small = workloads.scaled(workloads.standard("W5"), 0.05)
    assert (small.num_requests, small.concurrency, small.shared_prefix_tokens) == (2, 2, 51)
    assert small.prompt_tokens == Lengths(53, 53)
    assert workloads.plan(small, MAKER, seed=1)[0].prompt.num_tokens == 53
    assert workloads.scaled(workloads.standard("W1"), 0.001).output_tokens == Lengths(4, 4)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5, float("nan")])
def test_a_scale_outside_its_range_is_refused(factor: float) -> None:
    with pytest.raises(BenchError, match="scale"):
        workloads.scaled(workloads.standard("W1"), factor)


def test_unknown_workloads_and_pointless_rates_are_refused() -> None:
    with pytest.raises(BenchError, match="W1, W2"):
        workloads.standard("W9")
    with pytest.raises(BenchError, match="takes no rate"):
        workloads.standard("W1", rate=2.0)


def test_trace_entries_with_equal_block_hashes_share_those_tokens() -> None:
    entries = [
        TraceEntry(0.0, 1300, 5, (0, 1, 2)),
        TraceEntry(1.5, 1400, 6, (0, 1, 3)),
        TraceEntry(2.0, 700, 7, (0, 4)),
        TraceEntry(3.0, 40, 8),
    ]
    planned = workloads.plan_trace(entries, MAKER, seed=1)
    ids = [unit_tokenizer().encode(str(request.prompt.content)) for request in planned]
    special = len(ids[0]) - len(unit_tokenizer().encode(str(planned[0].prompt.content), False))
    assert [len(each) for each in ids] == [1300, 1400, 700, 40]
    assert [request.arrival_seconds for request in planned] == [0.0, 1.5, 2.0, 3.0]
    assert ids[0][: special + 1024] == ids[1][: special + 1024]
    assert ids[0][special + 1024 :][:100] != ids[1][special + 1024 :][:100]
    assert ids[0][: special + 512] == ids[2][: special + 512]
    assert ids[0][special + 512 :][:100] != ids[2][special + 512 :][:100]
