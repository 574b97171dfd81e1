"""The report: Markdown tables, pictures, and in words what is a gain, what is not, and what was not reproduced."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etserve.bench.ablate import plots, similarity
from etserve.bench.ablate.arms import ARMS, BASELINE
from etserve.bench.ablate.records import QualityRun, RoundRun
from etserve.bench.ablate.run import Results
from etserve.bench.ablate.statistics import FIGURES, Loss, compare, deadline, kept_share, loss, round_figures
from etserve.bench.ablate.verdicts import JUDGED, Figures, Verdict, judge, steering
from etserve.bench.errors import BenchError
from etserve.bench.report import FOREIGN_LIMIT, markdown, shown
from etserve.bench.summary import Ratio

REPORT = "report.md"
# arXiv 2603.03310, relative to its baseline; model, hardware and data are not named there.
_CLAIMS = (
    ("micro", "0.98", "1.02", "1.08", "1.00"),
    ("macro", "0.88", "1.15", "1.12", "1.00"),
    ("meso", "0.85", "1.20", "1.25", "0.98"),
    ("full", "0.70", "1.40", "1.55", "1.00"),
)


def write_report(found: Results, facts: Mapping[str, Any], folder: Path) -> Path:
    """Write report.md and its pictures into `folder`. `facts`: model, machine, commit, command, settings."""
    parts = ["# Ablation of the control loop", _facts(facts), _claims()]
    verdicts: list[Verdict] = []
    for workload, rounds in found.rounds.items():
        figures = figures_of(rounds)
        judged = judge(workload, figures, found.quality)
        verdicts += judged
        plots.draw_ratios(figures, folder / f"{workload}-ratios.png")
        plots.draw_clock(rounds, folder / f"{workload}-clock.png")
        parts.append(_workload(workload, rounds, figures))
    if found.quality:
        plots.draw_kept(found.quality, folder / "quality.png")
        parts.append(_quality(found.quality))
    parts.insert(3, summary(verdicts))
    path = folder / REPORT
    try:
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    return path


def figures_of(rounds: Mapping[str, Sequence[RoundRun]]) -> Figures:
    """Figures of each round of each arm; goodput by the baseline's median latency."""
    limit = deadline(rounds[BASELINE])
    return {name: [round_figures(run, limit) for run in runs] for name, runs in rounds.items()}


def summary(verdicts: Sequence[Verdict]) -> str:
    """The gains, then everything that is none, with the reason."""
    gains = [f"- {_named(verdict)}" for verdict in verdicts if verdict.is_gain]
    others = [f"- {_named(verdict)}: {verdict.reason}" for verdict in verdicts if not verdict.is_gain]
    lines = ["## What is a gain", "", "Clear of 1.00, ΔNLL at most 1 %, and better than its placebo:", ""]
    lines += gains or ["- nothing"]
    lines += ["", "## What is not reproduced", ""]
    lines += others or ["- nothing was missed"]
    return "\n".join(lines)


def _named(verdict: Verdict) -> str:
    return f"{verdict.workload}, {verdict.arm}, {verdict.figure}: {ratio_text(verdict.ratio)}"


def ratio_text(found: Ratio | None) -> str:
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}{interval}"


def _facts(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _claims() -> str:
    header = ["arm", "latency", "throughput", "dτ/dC", "quality"]
    table = markdown(header, [list(row) for row in _CLAIMS])
    return f"## What the paper claims\n\nRelative to its baseline; hypotheses, not facts.\n\n{table}"


def _workload(workload: str, rounds: Mapping[str, Sequence[RoundRun]], figures: Figures) -> str:
    return "\n\n".join(
        [
            f"## {workload}",
            "Medians over rounds. τ and nats are those of a dense replay of the produced text at temperature 1.",
            _absolute(figures),
            *_warnings(figures),
            "By the baseline's, paired by round, with a 95 % bootstrap interval:",
            _relative(figures),
            _texts(rounds),
            _kv_share(figures),
            f"![Latency and throughput]({workload}-ratios.png)",
            f"![Entropy and entropic time]({workload}-clock.png)",
        ]
    )


def _absolute(figures: Figures) -> str:
    shown_figures = [f for f in FIGURES if any(f.name in each for rounds in figures.values() for each in rounds)]
    header = ["arm", "rounds", *(figure.heading for figure in shown_figures)]
    rows = []
    for name, rounds in figures.items():
        cells = []
        for figure in shown_figures:
            values = [each[figure.name] for each in rounds if figure.name in each]
            cells.append(shown(float(np.median(values)) if values else None, figure.scale, figure.decimals))
        rows.append([name, str(len(rounds)), *cells])
    return markdown(header, rows)


def _warnings(figures: Figures) -> list[str]:
    busy = [each["cpu_foreign"] for rounds in figures.values() for each in rounds if "cpu_foreign" in each]
    if busy and max(busy) > FOREIGN_LIMIT:
        return [f"**Up to {max(busy):.0%} of the CPU went to other processes: repeat on a quiet machine.**"]
    return []


def _relative(figures: Figures) -> str:
    names = (*JUDGED, "e2e_p99_seconds", "goodput", "nats_per_gflop", "tau_per_gb", "tau_per_second")
    headings = {figure.name: figure.heading for figure in FIGURES}
    rows = []
    for arm in (name for name in figures if name != BASELINE):
        cells = [ratio_text(compare(figures[arm], figures[BASELINE], name)) for name in names]
        rows.append([arm, ARMS[arm].description, *cells])
    return markdown(["arm", "what it is", *(headings[name] for name in names)], rows)


def _texts(rounds: Mapping[str, Sequence[RoundRun]]) -> str:
    """Sampled texts part at their first different token: equal seeds keep them together as long as they can be."""
    base = {(run.round, request.index): request.text for run in rounds[BASELINE] for request in run.requests}
    rows = []
    for name, runs in rounds.items():
        requests = [(base.get((run.round, r.index)), r) for run in runs for r in run.requests]
        pairs = [(r.text, reference) for reference, r in requests if reference is not None]
        texts, references = [text for text, _ in pairs], [reference for _, reference in pairs]
        rows.append(
            [
                name,
                f"{similarity.rouge_l(texts, references):.3f}",
                f"{similarity.bleu(texts, references):.1f}",
                f"{similarity.repetition([r.token_ids for _, r in requests]):.2%}",
            ]
        )
    return markdown(["arm", "ROUGE-L to baseline", "BLEU to baseline", "repeated 4-grams"], rows)


def _kv_share(figures: Figures) -> str:
    shares = [each["kv_share"] for each in figures[BASELINE] if "kv_share" in each]
    if not shares:
        return "No step was pure decoding: f_kv is unknown."
    share = float(np.median(shares))
    return (
        f"f_kv, the cache's part of what a decode step reads, is {share:.0%} in the baseline: were it read for "
        f"nothing, a step bound by memory would take {1.0 - share:.0%} of its time. Skipping cannot gain more."
    )


def _quality(quality: Mapping[str, QualityRun]) -> str:
    rows = [_quality_row(name, run, quality.get(BASELINE)) for name, run in quality.items()]
    header = [
        "arm",
        "NLL, nats",
        "ΔNLL",
        "blocks read where it skips, %",
        "steps that skip, %",
        "cloze",
        "its NLL",
        "needles",
        "their NLL",
    ]
    steered = steering(dict(quality))
    lines = [
        "## Quality",
        "Held-out text, one decode step a token, each arm's law in force. Arms that are missing here skip nothing: the "
        "same text gives them the baseline's distributions, bit for bit.",
        markdown(header, rows),
    ]
    if steered is not None:
        lines.append(f"NLL with epsilon steered by entropy, against a constant epsilon: {loss_text(steered)}.")
    return "\n\n".join([*lines, "![Quality](quality.png)"])


def loss_text(found: Loss | None) -> str:
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{found.low:+.2%}, {found.high:+.2%}]"
    return f"{found.value:+.2%}{interval}"


def _quality_row(name: str, run: QualityRun, baseline: QualityRun | None) -> list[str]:
    nll = [value for each in run.nll_nats for value in each]
    shares = [value for each in run.kept_fractions for value in each]
    return [
        name,
        shown(float(np.mean(nll)) if nll else None, 1.0, 4),
        loss_text(None if baseline is None else loss(run, baseline)),
        shown(kept_share(shares), 100.0, 1),
        shown(float(np.mean([share < 1.0 for share in shares])) if shares else None, 100.0, 0),
        _accuracy(run.cloze_hits),
        _mean(run.cloze_nll),
        _accuracy(run.needle_hits),
        _mean(run.needle_nll),
    ]


def _mean(values: Sequence[float]) -> str:
    return shown(float(np.mean(values)) if values else None, 1.0, 3)


def _accuracy(hits: Sequence[bool]) -> str:
    return f"{sum(hits)}/{len(hits)}" if hits else "–"
