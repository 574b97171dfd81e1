"""One picture per comparison: how latencies are distributed and what happened over time. Drawing is matplotlib's."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from etserve.bench.errors import BenchError
from etserve.bench.records import BenchResult, RequestRecord, RoundResult

matplotlib.use("Agg")
MAX_BINS = 60
MIN_BIN_SECONDS = 0.25  # below it a bin holds one step or none


def draw(results: Sequence[BenchResult], path: Path) -> None:
    """Write a PNG: CDFs of time to first token and token gaps over all rounds, timelines of the first round.

    Raises BenchError when the file cannot be written.
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    first, gaps, running, tokens = (figure.add_subplot(2, 2, place) for place in (1, 2, 3, 4))
    for index, found in enumerate(results):
        complete = [r for each in found.rounds for r in each.records if r.error is None]
        colour = f"C{index}"
        _cdf(first, [r.time_to_first_token * 1e3 for r in complete], found.name, colour)
        _cdf(gaps, [g * 1e3 for r in complete for g in r.inter_token_latencies()], found.name, colour)
        if found.rounds:
            _timelines(running, tokens, found.rounds[0], found.name, colour)
    _dress(first, "Time to first token", "ms", "share of requests")
    _dress(gaps, "Inter-token latency", "ms (logarithmic)", "share of tokens")
    gaps.set_xscale("log")
    if first.get_legend_handles_labels()[1]:
        first.legend(fontsize="small")
    _dress(running, "Requests in flight, first round", "seconds", "requests")
    _dress(tokens, "Output rate, first round", "seconds", "tokens/s")
    workloads = dict.fromkeys(str(found.workload.get("name")) for found in results)
    figure.suptitle(", ".join(workloads) + " · " + ", ".join(dict.fromkeys(short(found.model) for found in results)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None


def short(model: str) -> str:
    """A model's name without the folders that some servers put before it."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def in_flight(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """Times at which the number of open requests changes, and the number from then on."""
    events = sorted([(r.sent_seconds, 1) for r in records] + [(r.end_seconds, -1) for r in records])
    times = [at for at, _ in events]
    return times, [int(n) for n in np.cumsum([change for _, change in events])]


def token_rate(records: Sequence[RequestRecord], num_bins: int | None = None) -> tuple[list[float], list[float]]:
    """Left edges of equal bins over the round, and output tokens per second in each."""
    at = [second for r in records for second in r.chunk_seconds]
    weights = [count for r in records for count in r.chunk_tokens]
    end = max((r.end_seconds for r in records), default=0.0)
    if not at or end <= 0.0:
        return [], []
    num_bins = num_bins or max(1, min(MAX_BINS, int(end / MIN_BIN_SECONDS)))
    counts, edges = np.histogram(at, bins=num_bins, range=(0.0, end), weights=weights)
    return [float(edge) for edge in edges[:-1]], [float(n) for n in counts / (edges[1] - edges[0])]


def _cdf(axes: Axes, sample: list[float], label: str, colour: str) -> None:
    if sample:
        axes.ecdf(sample, label=label, color=colour)


def _timelines(running: Axes, tokens: Axes, found: RoundResult, label: str, colour: str) -> None:
    times, counts = in_flight(found.records)
    running.step(times, counts, where="post", label=label, color=colour)
    edges, rates = token_rate(found.records)
    tokens.step(edges, rates, where="post", label=label, color=colour)


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=0.0)
