"""Figures of a round and what they say of an arm. Bootstrap is scipy's; figures are paired by round or by document."""

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import stats

from etserve.bench.ablate.records import QualityRun, RequestRun, RoundRun
from etserve.bench.summary import Ratio, ratio

STEADY_SHARE = 0.75  # of the most sequences that decode at once


class Figure(msgspec.Struct, frozen=True):
    """A column of the table."""

    name: str
    heading: str
    scale: float
    decimals: int
    is_better_high: bool | None  # None: neither is better


FIGURES = (
    Figure("tpot_seconds", "TPOT, ms", 1e3, 1, False),
    Figure("e2e_mean_seconds", "mean e2e, s", 1.0, 2, False),
    Figure("e2e_p99_seconds", "p99 e2e, s", 1.0, 2, False),
    Figure("steady_tokens_per_second", "steady tokens/s", 1.0, 1, True),
    Figure("tokens_per_second", "tokens/s", 1.0, 1, True),
    Figure("goodput", "good requests/s", 1.0, 3, True),
    Figure("tau_per_gflop", "τ/GFLOP", 1.0, 4, True),
    Figure("tau_per_gb", "τ/GB", 1.0, 4, True),
    Figure("tau_per_second", "τ/s", 1.0, 2, True),
    Figure("nats_per_gflop", "nats/GFLOP", 1.0, 4, True),
    Figure("nats_per_gb", "nats/GB", 1.0, 4, True),
    Figure("nats_per_second", "nats/s", 1.0, 2, True),
    Figure("entropy_sd", "sd of H, nats", 1.0, 3, None),
    Figure("mean_temperature", "mean T", 1.0, 3, None),
    Figure("kept_share", "blocks read, %", 100.0, 1, None),
    Figure("blocks_skipped", "block reads skipped", 1.0, 0, None),
    Figure("num_preempted", "preemptions", 1.0, 0, None),
    Figure("kv_share", "f_kv, %", 100.0, 1, None),
    Figure("num_failed", "failed", 1.0, 0, None),
    Figure("cpu_foreign", "foreign CPU, %", 100.0, 0, None),
)
FIGURE = {figure.name: figure for figure in FIGURES}


def round_figures(run: RoundRun, deadline_seconds: float | None = None) -> dict[str, float]:
    """Everything by name. A figure that the round does not have is missing. τ and nats are those of the replay."""
    complete = [request for request in run.requests if request.error is None]
    begin = min((request.due_seconds for request in run.requests), default=0.0)
    duration = max((request.end_seconds for request in run.requests), default=0.0) - begin
    num_tokens = sum(len(request.token_ids) for request in complete)
    found = {
        "num_failed": float(len(run.requests) - len(complete)),
        "blocks_skipped": float(sum(run.steps.num_blocks_skipped)),
        "num_preempted": float(sum(run.steps.num_preempted)),
    }
    if run.cpu_foreign is not None:
        found["cpu_foreign"] = run.cpu_foreign
    if duration > 0.0:
        found["tokens_per_second"] = num_tokens / duration
        if deadline_seconds is not None:
            found["goodput"] = sum(r.end_to_end <= deadline_seconds for r in complete) / duration
    if steady := steady_rate(run):
        found["steady_tokens_per_second"] = steady
    return found | _latencies(complete) | _per_token(complete) | _per_cost(run, complete, duration)


def _latencies(complete: Sequence[RequestRun]) -> dict[str, float]:
    if not complete:
        return {}
    ends = [request.end_to_end for request in complete]
    tpots = [value for request in complete if (value := request.time_per_output_token) is not None]
    found = {"e2e_mean_seconds": float(np.mean(ends)), "e2e_p99_seconds": float(np.percentile(ends, 99))}
    return found | ({"tpot_seconds": float(np.mean(tpots))} if tpots else {})


def _per_token(complete: Sequence[RequestRun]) -> dict[str, float]:
    entropies = [value for request in complete for value in request.entropies]
    if not entropies:
        return {}
    return {
        "entropy_sd": float(np.std(entropies)),
        "mean_temperature": float(np.mean([value for request in complete for value in request.temperatures])),
        "kept_share": kept_share([value for request in complete for value in request.kept_fractions]),
    }


def kept_share(kept_fractions: Sequence[float]) -> float:
    """Mean share of the blocks that steps read which skipped any; 1 where none did."""
    skipping = [value for value in kept_fractions if value < 1.0]
    return float(np.mean(skipping)) if skipping else 1.0


def _per_cost(run: RoundRun, complete: Sequence[RequestRun], duration: float) -> dict[str, float]:
    replays = [request.replay for request in complete if request.replay is not None]
    costs = {"gflop": sum(run.steps.flops) * 1e-9, "gb": sum(run.steps.bytes_read) * 1e-9, "second": duration}
    found: dict[str, float] = {}
    for name, cost in costs.items():
        if replays and cost > 0.0:
            found[f"tau_per_{name}"] = sum(replay.tau_nats for replay in replays) / cost
            found[f"nats_per_{name}"] = sum(replay.nats_resolved for replay in replays) / cost
    decodes = [b for b, n in zip(run.steps.bytes_read, run.steps.num_prefill_tokens, strict=True) if n == 0 and b > 0]
    if decodes:
        found["kv_share"] = float(np.mean([max(0.0, 1.0 - run.weight_bytes / num_bytes) for num_bytes in decodes]))
    return found


def steady_rate(run: RoundRun) -> float | None:
    """Output tokens per second between the first and the last step that serve nearly as many as any step does.

    What happens between them counts, prompts and recomputation too. None for fewer than two such steps.
    """
    steps = run.steps
    most = max(steps.num_decode_tokens, default=0)
    full = [i for i, count in enumerate(steps.num_decode_tokens) if count >= max(1.0, STEADY_SHARE * most)]
    if len(full) < 2:
        return None
    begin, end = steps.end_seconds[full[0]], steps.end_seconds[full[-1]]
    count = sum(begin < at <= end for request in run.requests for at in request.token_seconds)
    return count / (end - begin) if end > begin else None


def deadline(baseline: Sequence[RoundRun]) -> float | None:
    """Median end-to-end seconds of the baseline's requests: what makes a request good."""
    ends = [request.end_to_end for run in baseline for request in run.requests if request.error is None]
    return float(np.median(ends)) if ends else None


def compare(of: Sequence[dict[str, float]], by: Sequence[dict[str, float]], name: str) -> Ratio | None:
    """Median ratio of a figure over paired rounds, with its interval; None where it is missing or 0."""
    pairs = [(a[name], b[name]) for a, b in zip(of, by, strict=False) if name in a and b.get(name, 0.0) > 0.0]
    return ratio([a for a, _ in pairs], [b for _, b in pairs])


def is_improvement(found: Ratio | None, figure: Figure) -> bool:
    """Whether the whole interval lies on the good side of 1.00; never without an interval."""
    if found is None or found.low is None or found.high is None or figure.is_better_high is None:
        return False
    return found.low > 1.0 if figure.is_better_high else found.high < 1.0


class Loss(msgspec.Struct, frozen=True):
    """Relative rise of the mean negative log-likelihood per token, with a 95 % interval over documents."""

    value: float
    low: float | None  # None with fewer than 3 documents
    high: float | None


def loss(of: QualityRun, by: QualityRun, seed: int = 0) -> Loss | None:
    """Compare two arms document by document; None without documents."""
    mine = np.array([float(np.mean(values)) for values in of.nll_nats])
    theirs = np.array([float(np.mean(values)) for values in by.nll_nats])
    if not len(mine) or len(mine) != len(theirs):
        return None

    def relative(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        risen: np.ndarray = a.mean(axis=axis) / b.mean(axis=axis) - 1.0
        return risen

    value = float(relative(mine, theirs))
    if len(mine) < 3 or np.array_equal(mine, theirs):
        return Loss(value, None, None) if len(mine) < 3 else Loss(value, value, value)
    found = stats.bootstrap(
        (mine, theirs), relative, paired=True, vectorized=True, method="percentile", n_resamples=4999,
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return Loss(value, float(found.confidence_interval.low), float(found.confidence_interval.high))
