"""Figures of a round. Statistics are numpy's and scipy's; failed requests count as failed, never as fast."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
from scipy import stats

from etserve.bench.records import RequestRecord, RoundResult


class Spread(msgspec.Struct, frozen=True):
    """Location of a sample, in its own unit. Percentiles interpolate linearly."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines that make a request count as good: its first token, and the 95th percentile of its token gaps."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One round. Rates are over the span from the first request due to the last one ended."""

    num_requests: int
    num_complete: int
    errors: dict[str, int]
    duration_seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    good_requests_per_second: float | None  # None: no deadline given
    ttft_seconds: Spread | None
    tpot_seconds: Spread | None
    itl_seconds: Spread | None
    e2e_seconds: Spread | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    prompt_count_mismatches: int  # complete requests whose prompt the server counted otherwise than asked
    output_count_mismatches: int
    cpu_foreign: float | None
    cpu_server: float | None
    cpu_client: float | None
    server_peak_bytes: int | None


def spread(sample: list[float]) -> Spread | None:
    """None for an empty sample."""
    if not sample:
        return None
    p50, p95, p99 = np.percentile(sample, [50, 95, 99])
    return Spread(float(np.mean(sample)), float(p50), float(p95), float(p99), float(np.max(sample)))


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Complete and within every deadline that is set."""
    if record.error is not None:
        return False
    if slo.ttft_seconds is not None and record.time_to_first_token > slo.ttft_seconds:
        return False
    gaps = record.inter_token_latencies()
    return slo.itl_seconds is None or not gaps or float(np.percentile(gaps, 95)) <= slo.itl_seconds


def summarise(result: RoundResult, slo: Slo | None = None) -> Summary:
    """Reduce a round's records. Rates are 0 when nothing completed."""
    records = result.records
    complete = [record for record in records if record.error is None]
    begin = min((record.scheduled_seconds for record in records), default=0.0)
    duration = max((record.end_seconds for record in records), default=0.0) - begin
    num_out = sum(record.output_tokens for record in complete)
    num_in = sum(record.prompt_tokens for record in complete)

    def rate(count: float) -> float:
        return count / duration if duration > 0.0 else 0.0

    return Summary(
        num_requests=len(records),
        num_complete=len(complete),
        errors=dict(Counter(record.error for record in records if record.error)),
        duration_seconds=duration,
        output_tokens_per_second=rate(num_out),
        total_tokens_per_second=rate(num_in + num_out),
        requests_per_second=rate(len(complete)),
        good_requests_per_second=rate(sum(is_good(r, slo) for r in records)) if slo and slo != Slo() else None,
        ttft_seconds=spread([r.time_to_first_token for r in complete]),
        tpot_seconds=spread([t for r in complete if (t := r.time_per_output_token) is not None]),
        itl_seconds=spread([gap for r in complete for gap in r.inter_token_latencies()]),
        e2e_seconds=spread([r.end_to_end for r in complete]),
        num_prompt_tokens=num_in,
        num_output_tokens=num_out,
        num_cached_tokens=sum(r.cached_tokens for r in complete),
        prompt_count_mismatches=sum(r.prompt_tokens != r.prompt_tokens_asked for r in complete),
        output_count_mismatches=sum(r.output_tokens != r.output_tokens_asked for r in complete),
        cpu_foreign=result.cpu.foreign if result.cpu else None,
        cpu_server=result.cpu.server if result.cpu else None,
        cpu_client=result.cpu.client if result.cpu else None,
        server_peak_bytes=result.server_peak_bytes,
    )


def metric(summary: Summary, path: str) -> float | None:
    """A figure by name, `output_tokens_per_second` or `ttft_seconds.p50`; None where the round has none."""
    value: Any = summary
    for part in path.split("."):
        value = getattr(value, part, None)
    return None if value is None else float(value)


def median_of(summaries: list[Summary], path: str) -> float | None:
    """Median over rounds; None when no round has the figure."""
    values = [value for summary in summaries if (value := metric(summary, path)) is not None]
    return float(np.median(values)) if values else None


class Ratio(msgspec.Struct, frozen=True):
    """Median over paired rounds of one server's figure by another's, with a 95 % bootstrap interval."""

    value: float
    low: float | None  # None with fewer than 3 rounds: no interval can be had
    high: float | None
    num_rounds: int


def ratio(of: list[float], by: list[float], seed: int = 0) -> Ratio | None:
    """Compare round by round (rounds of one interleaved run share the machine's mood). None without rounds."""
    pairs = [(a, b) for a, b in zip(of, by, strict=False) if b > 0.0]
    if not pairs:
        return None
    quotients = np.array([a / b for a, b in pairs])
    middle = float(np.median(quotients))
    if len(pairs) < 3:
        return Ratio(middle, None, None, len(pairs))
    if np.ptp(quotients) == 0.0:
        return Ratio(middle, middle, middle, len(pairs))
    found = stats.bootstrap(
        (quotients,), np.median, method="percentile", n_resamples=4999, rng=np.random.default_rng(seed)
    )
    interval = found.confidence_interval
    return Ratio(middle, float(interval.low), float(interval.high), len(pairs))
