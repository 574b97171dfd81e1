"""The report's pictures. Drawing is matplotlib's."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from etserve.bench.ablate.arms import BASELINE
from etserve.bench.ablate.figures import kept_share
from etserve.bench.ablate.records import QualityRun, RoundRun
from etserve.bench.ablate.statistics import compare, loss
from etserve.bench.ablate.verdicts import Figures
from etserve.bench.errors import BenchError

matplotlib.use("Agg")
_MAX_BINS = 12
_MARKERS = "osD^v"  # arms often lie on top of each other


def draw_clock(rounds: dict[str, list[RoundRun]], path: Path) -> None:
    """Entropy and entropic time over the first request of the first round, one line an arm."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    entropy, clock = figure.subplots(1, 2)
    for name, runs in rounds.items():
        request = runs[0].requests[0] if runs and runs[0].requests else None
        if request is not None:
            entropy.plot(_smoothed(request.entropies), label=name, linewidth=1)
            clock.plot(request.tau_nats, label=name, linewidth=1)
    _dress(entropy, "Entropy, mean of 8 tokens", "output token", "H, nats")
    _dress(clock, "Entropic time", "output token", "τ, nats")
    clock.legend(fontsize="small")
    _save(figure, path)


def draw_ratios(figures: Figures, path: Path) -> None:
    """Steady window and whole run of each arm by the baseline's, with intervals where there are rounds enough."""
    names = [name for name in figures if name != BASELINE]
    figure = Figure(figsize=(13, 0.45 * len(names) + 1.8), layout="constrained")
    shown = (
        ("steady_tokens_per_second", "Steady: tokens/s (more is better)"),
        ("steady_tpot_seconds", "Steady: time per token (less)"),
        ("steady_tau_per_second", "Steady: τ/s (more)"),
        ("e2e_mean_seconds", "Whole run: latency (less)"),
    )
    for axes, (key, title) in zip(figure.subplots(1, 4, sharey=True), shown, strict=True):
        for row, name in enumerate(names):
            found = compare(figures[name], figures[BASELINE], key)
            if found is None:
                continue
            if found.low is not None and found.high is not None:
                axes.plot([found.low, found.high], [row, row], color="C0", linewidth=3, alpha=0.4)
            axes.plot(found.value, row, "o", color="C0")
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_xlabel("by the baseline's")
        axes.grid(alpha=0.3, axis="x")
    figure.axes[0].invert_yaxis()
    _save(figure, path)


def draw_kept(quality: dict[str, QualityRun], path: Path) -> None:
    """Share of blocks read over the step's own entropy, and what each arm but the baseline loses over what it reads."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    kept, lost = figure.subplots(1, 2)
    for index, (name, run) in enumerate((n, q) for n, q in quality.items() if n != BASELINE):
        entropies = [value for each in run.entropies for value in each]
        shares = [value for each in run.kept_fractions for value in each]
        kept.plot(
            *binned(entropies, shares),
            label=name,
            color=f"C{index}",
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            linewidth=1,
        )
        found = loss(run, quality[BASELINE])
        if found is not None:
            errors = None
            if found.low is not None and found.high is not None:
                errors = [[max(0.0, found.value - found.low) * 100], [max(0.0, found.high - found.value) * 100]]
            lost.errorbar(
                kept_share(shares) * 100,
                found.value * 100,
                errors,
                fmt=_MARKERS[index % len(_MARKERS)],
                color=f"C{index}",
                label=name,
                fillstyle="none",
            )
    lost.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    _dress(kept, "Blocks read, by entropy", "H of the step, nats", "share")
    _dress(lost, "Quality, by what steps that skip read", "blocks read, %", "ΔNLL, % (dashed: the limit)")
    lost.set_ylim(auto=True)
    lost.margins(0.15)
    if len(quality) > 1:
        lost.legend(fontsize="small")
    _save(figure, path)


def binned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means of x and y in bins of equally many points, at most 12 and at least 8 points each."""
    if not x:
        return [], []
    order = np.argsort(x, kind="stable")
    parts = np.array_split(order, max(1, min(_MAX_BINS, len(order) // 8)))
    return [float(np.mean(np.array(x)[p])) for p in parts], [float(np.mean(np.array(y)[p])) for p in parts]


def _smoothed(values: Sequence[float], width: int = 8) -> list[float]:
    width = min(width, max(1, len(values)))
    return [float(v) for v in np.convolve(values, np.ones(width) / width, mode="valid")] if values else []


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
