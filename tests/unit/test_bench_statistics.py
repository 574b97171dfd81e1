"""Figures agree with what can be counted by hand, and failures never make a server look fast."""

import numpy as np
import pytest

from etserve.bench import plots, report
from etserve.bench.client import share_tokens
from etserve.bench.records import BenchResult, CpuShares, RequestRecord, RoundResult
from etserve.bench.summary import Slo, Summary, is_good, median_of, metric, ratio, spread, summarise
from tests.unit.bench_helpers import record


def round_of(*records: RequestRecord, foreign: float = 0.0) -> RoundResult:
    cpu = CpuShares(server=0.5, client=0.1, foreign=foreign, steal=0.0, cores=2)
    return RoundResult(seed=0, started_at="", records=list(records), cpu=cpu, server_peak_bytes=2_000_000)


def result_of(name: str, *rounds: RoundResult) -> BenchResult:
    return BenchResult(
        name=name,
        url="",
        model="m",
        workload={"name": "W1"},
        api="completions",
        seed=0,
        machine={},
        rounds=list(rounds),
    )


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = record(scheduled=0.5, chunks=(2.0, 2.5, 3.5), tokens=(1, 1, 1), end=3.75)
    assert late.time_to_first_token == 1.5
    assert late.end_to_end == 3.25
    assert late.time_per_output_token == 0.75
    assert late.inter_token_latencies() == [0.5, 1.0]


def test_a_chunk_of_several_tokens_counts_as_that_many() -> None:
    packed = record(chunks=(1.0, 2.0, 5.0), tokens=(2, 1, 3))
    assert packed.inter_token_latencies() == [1.0, 1.0, 1.0, 1.0]
    assert packed.time_per_output_token == 1.0


def test_a_reply_in_one_piece_has_no_token_gaps() -> None:
    single = record(chunks=(1.0,), tokens=(7,))
    assert single.inter_token_latencies() == []
    assert single.time_per_output_token is None


@pytest.mark.parametrize(
    ("lengths", "total", "expected"),
    [
        ([3, 9, 1], 3, [1, 1, 1]),
        ([4, 4], 4, [2, 2]),
        ([30, 10], 6, [4, 2]),
        ([1], 9, [9]),
        ([5, 5, 5], 2, [1, 1, 0]),
        ([], 5, []),
        ([2, 2], 0, [0, 0]),
    ],
)
def test_tokens_are_shared_out_over_chunks_without_loss(lengths: list[int], total: int, expected: list[int]) -> None:
    assert share_tokens(lengths, total) == expected


def test_sharing_out_conserves_tokens_on_random_chunks() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        lengths = [int(n) for n in generator.integers(1, 50, generator.integers(1, 30))]
        total = int(generator.integers(1, 100))
        counts = share_tokens(lengths, total)
        assert sum(counts) == total
        assert min(counts) >= (1 if total >= len(lengths) else 0)


def test_a_round_is_reduced_to_its_rates_and_spreads() -> None:
    records = [record(i, chunks=(1.0 + i, 2.0 + i), end=2.0 + i) for i in range(4)]
    summary = summarise(round_of(*records))
    assert (summary.num_requests, summary.num_complete, summary.errors) == (4, 4, {})
    assert summary.duration_seconds == 5.0
    assert summary.output_tokens_per_second == 8 / 5
    assert summary.total_tokens_per_second == 48 / 5
    assert summary.requests_per_second == 4 / 5
    assert summary.ttft_seconds is not None
    assert (summary.ttft_seconds.mean, summary.ttft_seconds.p50, summary.ttft_seconds.max) == (2.5, 2.5, 4.0)
    assert summary.ttft_seconds.p95 == pytest.approx(3.85)
    assert (summary.cpu_server, summary.server_peak_bytes) == (0.5, 2_000_000)
    assert summary.good_requests_per_second is None


def test_failed_requests_are_counted_and_give_no_tokens_and_no_latency() -> None:
    failed = [
        record(1, chunks=(), tokens=(), end=0.1, error="refused"),
        record(2, chunks=(0.1,), tokens=(50,), error="disconnect"),
    ]
    summary = summarise(round_of(record(0), *failed))
    assert summary.errors == {"refused": 1, "disconnect": 1}
    assert summary.num_complete == 1
    assert summary.num_output_tokens == 2
    assert summary.ttft_seconds == spread([1.0])


def test_a_round_in_which_everything_failed_has_rates_of_zero_and_no_spread() -> None:
    summary = summarise(round_of(record(error="connect", chunks=(), tokens=(), end=0.0)))
    assert summary.output_tokens_per_second == 0.0
    assert summary.ttft_seconds is summary.itl_seconds is summary.e2e_seconds is None
    assert report.latency_table([summary]).row_count == 4


def test_goodput_counts_what_met_every_deadline() -> None:
    fast = record(0, chunks=(0.1, 0.2, 0.3), tokens=(1, 1, 1), end=0.3)
    slow_start = record(1, chunks=(0.9, 1.0), end=1.0)
    stalled = record(2, chunks=(0.1, 2.0), end=2.0)
    failed = record(3, chunks=(0.1, 0.2), end=0.2, error="stream")
    slo = Slo(ttft_seconds=0.5, itl_seconds=0.5)
    assert [is_good(each, slo) for each in (fast, slow_start, stalled, failed)] == [True, False, False, False]
    assert summarise(round_of(fast, slow_start, stalled, failed), slo).good_requests_per_second == 0.5


def test_miscounted_prompts_are_noticed() -> None:
    summary = summarise(round_of(record(0), record(1, prompt_tokens=11)))
    assert summary.prompt_count_mismatches == 1
    assert any("counted otherwise" in line for line in report.remarks([summary]))


def test_remarks_tell_of_failures_and_of_other_processes() -> None:
    noisy = summarise(round_of(record(0), record(1, error="timeout", chunks=(), tokens=()), foreign=0.3))
    lines = report.remarks([noisy])
    assert any("1 of 2 failed: 1 timeout" in line for line in lines)
    assert any("30% of the CPU" in line for line in lines)
    assert report.remarks([summarise(round_of(record(0)))]) == []


def test_metrics_are_found_by_name_and_absent_ones_are_none() -> None:
    summary = summarise(round_of(record(0)))
    assert metric(summary, "ttft_seconds.p50") == 1.0
    assert metric(summary, "good_requests_per_second") is None
    assert metric(summarise(round_of()), "ttft_seconds.p50") is None
    assert median_of([summary, summary], "ttft_seconds.p50") == 1.0
    assert median_of([], "ttft_seconds.p50") is None


def test_a_ratio_is_paired_by_round_and_its_interval_holds_the_truth() -> None:
    generator = np.random.default_rng(1)
    mood = generator.uniform(50.0, 200.0, 12)  # the machine's, common to both servers
    slow = list(mood)
    fast = list(mood * 1.5 * generator.normal(1.0, 0.02, 12))
    found = ratio(fast, slow)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 1.5 <= found.high
    assert found.high - found.low < 0.1
    assert found.num_rounds == 12


def test_too_few_rounds_give_a_ratio_without_an_interval() -> None:
    found = ratio([3.0, 3.0], [2.0, 1.0])
    assert found is not None
    assert (found.value, found.low, found.num_rounds) == (2.25, None, 2)
    assert ratio([], []) is None
    assert ratio([1.0], [0.0]) is None
    constant = ratio([2.0] * 4, [1.0] * 4)
    assert constant is not None
    assert (constant.low, constant.high) == (2.0, 2.0)


def test_the_comparison_is_a_markdown_table_against_the_first_server() -> None:
    slow = result_of("slow", *[round_of(record(0, end=4.0))] * 3)
    fast = result_of("fast", *[round_of(record(0, end=2.0))] * 3)
    header, rows = report.comparison_rows([slow, fast])
    assert [row[:2] for row in rows] == [["W1", "slow"], ["W1", "fast"]]
    assert rows[0][-1] == "1 (base)"
    assert rows[1][-1] == "2.00 [2.00, 2.00]"
    text = report.markdown(header, rows)
    assert text.splitlines()[0].count("|") == text.splitlines()[1].count("|") == len(header) + 1
    assert report.comparison_table(header, rows).row_count == 2


def test_requests_in_flight_and_token_rate_conserve_what_was_sent() -> None:
    records = [
        record(0, chunks=(0.5, 1.0), end=1.0),
        record(1, scheduled=0.5, chunks=(1.0, 2.0), tokens=(2, 3), end=2.0),
    ]
    times, counts = plots.in_flight(records)
    assert (times, counts) == ([0.0, 0.5, 1.0, 2.0], [1, 2, 1, 0])
    edges, rates = plots.token_rate(records, num_bins=4)
    assert edges == [0.0, 0.5, 1.0, 1.5]
    assert sum(rates) * 0.5 == 7.0
    assert plots.token_rate([]) == ([], [])


def test_summaries_name_every_figure_that_tables_show() -> None:
    names = set(Summary.__struct_fields__)
    assert {path.split(".")[0] for path, *_ in report.COMPARED} <= names
