"""Figures of one round: of its steady window, in which nearly all sequences decode, and of the whole round."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from etserve.bench.ablate.records import PromptRun, RequestRun, RoundRun

STEADY_SHARE = 0.75  # of the most sequences that decode at once


class Figure(msgspec.Struct, frozen=True):
    """A column of the table."""

    name: str
    heading: str
    scale: float
    decimals: int
    is_better_high: bool | None  # None: neither is better


STEADY_FIGURES = (
    Figure("steady_tokens_per_second", "tokens/s", 1.0, 1, True),
    Figure("steady_tpot_seconds", "TPOT, ms", 1e3, 1, False),
    Figure("steady_tau_per_second", "τ/s", 1.0, 2, True),
    Figure("steady_tau_per_gb", "τ/GB", 1.0, 3, True),
    Figure("steady_tau_per_gflop", "τ/GFLOP", 1.0, 4, True),
    Figure("steady_nats_per_second", "nats/s", 1.0, 1, True),
    Figure("steady_share", "window, % of tokens", 100.0, 0, None),
    Figure("kept_share", "blocks read where it skips, %", 100.0, 1, None),
    Figure("skipping_share", "tokens that skip, %", 100.0, 0, None),
    Figure("kv_share", "f_kv, %", 100.0, 1, None),
)
WHOLE_FIGURES = (
    Figure("tokens_per_second", "tokens/s", 1.0, 1, True),
    Figure("e2e_mean_seconds", "mean e2e, s", 1.0, 2, False),
    Figure("e2e_p99_seconds", "p99 e2e, s", 1.0, 2, False),
    Figure("goodput", "good requests/s", 1.0, 3, True),
    Figure("tau_per_second", "τ/s", 1.0, 2, True),
    Figure("tau_per_gb", "τ/GB", 1.0, 3, True),
    Figure("tau_per_gflop", "τ/GFLOP", 1.0, 4, True),
    Figure("entropy_sd", "sd of H, nats", 1.0, 3, None),
    Figure("mean_temperature", "mean T", 1.0, 3, None),
    Figure("blocks_skipped", "10⁶ block reads skipped", 1e-6, 2, None),
    Figure("num_preempted", "preemptions", 1.0, 0, None),
    Figure("blocks_evicted", "blocks evicted", 1.0, 0, None),
    Figure("tokens_per_step", "tokens per sequence and step", 1.0, 2, None),
    Figure("num_failed", "failed", 1.0, 0, None),
    Figure("cpu_foreign", "foreign CPU, %", 100.0, 0, None),
)
FIGURE = {figure.name: figure for figure in (*STEADY_FIGURES, *WHOLE_FIGURES)}
_NO_PROMPTS = PromptRun(seconds=0.0, flops=0.0, bytes_read=0.0)


class Window(NamedTuple):
    """A stretch of a round in seconds, (begin, end]."""

    begin: float
    end: float

    def holds(self, at: float) -> bool:
        return self.begin < at <= self.end


class Costs(NamedTuple):
    """What was spent, in units of the figures' denominators."""

    second: float
    gb: float
    gflop: float


def round_figures(run: RoundRun, deadline_seconds: float | None = None) -> dict[str, float]:
    """Everything by name. A figure that the round does not have is missing. τ and nats are those of the replay.

    Whole-round figures count the prompts, also where they were read once for all arms: their time is added to the
    round's and to each request's, as if every arm had read them first.
    """
    complete = [request for request in run.requests if request.error is None]
    found = {
        "num_failed": float(len(run.requests) - len(complete)),
        "blocks_skipped": float(sum(run.steps.num_blocks_skipped)),
        "num_preempted": float(sum(run.steps.num_preempted)),
        "blocks_evicted": float(sum(run.steps.num_blocks_evicted)),
    }
    if run.cpu_foreign is not None:
        found["cpu_foreign"] = run.cpu_foreign
    return found | _whole(run, complete, deadline_seconds) | _per_token(complete) | steady_figures(run)


def _whole(run: RoundRun, complete: Sequence[RequestRun], deadline_seconds: float | None) -> dict[str, float]:
    prompts = run.prompts or _NO_PROMPTS
    begin = min((request.due_seconds for request in run.requests), default=0.0)
    duration = prompts.seconds + max((request.end_seconds for request in run.requests), default=0.0) - begin
    if duration <= 0.0:
        return {}
    found = {"tokens_per_second": sum(len(request.token_ids) for request in complete) / duration}
    ends = [request.end_to_end + prompts.seconds for request in complete]
    if ends:
        found |= {"e2e_mean_seconds": float(np.mean(ends)), "e2e_p99_seconds": float(np.percentile(ends, 99))}
    if deadline_seconds is not None:
        found["goodput"] = sum(end <= deadline_seconds for end in ends) / duration
    replays = [request.replay for request in complete if request.replay is not None]
    spent = Costs(
        duration,
        (sum(run.steps.bytes_read) + prompts.bytes_read) * 1e-9,
        (sum(run.steps.flops) + prompts.flops) * 1e-9,
    )
    return found | _per_cost("tau", sum(replay.tau_nats for replay in replays) if replays else None, spent)


def _per_token(complete: Sequence[RequestRun]) -> dict[str, float]:
    entropies = [value for request in complete for value in request.entropies]
    if not entropies:
        return {}
    shares = [value for request in complete for value in request.kept_fractions]
    return {
        "entropy_sd": float(np.std(entropies)),
        "mean_temperature": float(np.mean([value for request in complete for value in request.temperatures])),
        "kept_share": kept_share(shares),
        "skipping_share": float(np.mean([share < 1.0 for share in shares])),
        "tokens_per_step": float(
            np.mean([len(r.token_ids) / len(set(r.token_seconds)) for r in complete if r.token_ids])
        ),
    }


def kept_share(kept_fractions: Sequence[float]) -> float:
    """Mean share of the blocks that steps read which skipped any; 1 where none did."""
    skipping = [value for value in kept_fractions if value < 1.0]
    return float(np.mean(skipping)) if skipping else 1.0


def steady_window(requests: Sequence[RequestRun]) -> Window | None:
    """Between the first and the last moment at which nearly as many sequences decode as at any.

    A sequence decodes from its first token to its last, and what happens meanwhile counts: others' prompts and
    recomputation too. None where no sequence has two tokens.
    """
    spans = [(r.token_seconds[0], r.token_seconds[-1]) for r in requests if len(r.token_seconds) > 1]
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    counts = np.cumsum([change for _, change in changes])
    if not len(counts):
        return None
    full = np.flatnonzero(counts >= max(1.0, STEADY_SHARE * float(counts.max())))
    window = Window(changes[full[0]][0], changes[full[-1] + 1][0])
    return window if window.end > window.begin else None


def steady_figures(run: RoundRun) -> dict[str, float]:
    """Rates, latency and entropic time per cost within the steady window."""
    complete = [request for request in run.requests if request.error is None]
    window = steady_window(complete)
    if window is None:
        return {}
    times = [[at for at in request.token_seconds if window.holds(at)] for request in complete]
    count, seconds = sum(map(len, times)), window.end - window.begin
    found = {
        "steady_tokens_per_second": count / seconds,
        "steady_share": count / max(1, sum(len(request.token_ids) for request in complete)),
    }
    gaps = [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1]
    if gaps:
        found["steady_tpot_seconds"] = float(np.mean(gaps))
    inside = [index for index, at in enumerate(run.steps.end_seconds) if window.holds(at)]
    num_bytes, flops = (sum(column[i] for i in inside) for column in (run.steps.bytes_read, run.steps.flops))
    spent = Costs(seconds, num_bytes * 1e-9, flops * 1e-9)
    tau, nats = _entropic_time(complete, window)
    return found | _per_cost("steady_tau", tau, spent) | _per_cost("steady_nats", nats, spent) | _kv_share(run, inside)


def _entropic_time(complete: Sequence[RequestRun], window: Window) -> tuple[float | None, float | None]:
    """τ and nats resolved within the window, of the replayed texts; None where nothing was replayed."""
    replayed = [(r.replay.entropies, r.token_seconds) for r in complete if r.replay is not None and r.replay.entropies]
    if not replayed:
        return None, None
    tau = nats = 0.0
    for entropies, seconds in replayed:
        drops = np.maximum(0.0, -np.diff(entropies, prepend=entropies[0]))
        inside = np.array([window.holds(at) for at in seconds])
        tau += float(drops[inside].sum())
        nats += float(np.array(entropies)[inside].sum())
    return tau, nats


def _per_cost(name: str, amount: float | None, spent: Costs) -> dict[str, float]:
    if amount is None:
        return {}
    return {f"{name}_per_{unit}": amount / cost for unit, cost in spent._asdict().items() if cost > 0.0}


def _kv_share(run: RoundRun, inside: Sequence[int]) -> dict[str, float]:
    """The cache's part of what pure decode steps read."""
    decodes = [run.steps.bytes_read[i] for i in inside if run.steps.num_prefill_tokens[i] == 0]
    shares = [max(0.0, 1.0 - run.weight_bytes / num_bytes) for num_bytes in decodes if num_bytes > 0.0]
    return {"kv_share": float(np.mean(shares))} if shares else {}


def deadline(baseline: Sequence[RoundRun]) -> float | None:
    """Median end-to-end seconds of the baseline's requests, prompts included: what makes a request good."""
    ends = [
        request.end_to_end + (run.prompts or _NO_PROMPTS).seconds
        for run in baseline
        for request in run.requests
        if request.error is None
    ]
    return float(np.median(ends)) if ends else None
