"""The report: Markdown tables, pictures, and in words what is a gain, what is not, and what was not reproduced."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etserve.bench.ablate import plots
from etserve.bench.ablate.arms import ARMS, BASELINE
from etserve.bench.ablate.figures import deadline, round_figures
from etserve.bench.ablate.goals import attempts, goals_section, missed_section, ratio_text, shares_section
from etserve.bench.ablate.records import RoundRun
from etserve.bench.ablate.run import Results
from etserve.bench.ablate.sections import loss_text, quality_section, short_heading, workload_section
from etserve.bench.ablate.statistics import loss
from etserve.bench.ablate.verdicts import JUDGED, Figures, Verdict, judge
from etserve.bench.errors import BenchError
from etserve.bench.report import markdown

REPORT = "report.md"
_ABOUT = (
    "The same requests, arrivals and seeds were put through the plain engine and through arms that switch parts of "
    "the control loop on: **micro** steers the temperature, **macro** decides who is served, **meso** skips blocks of "
    "the KV cache, **full** does all three, **paper** does so in the paper's words. Placebos do as much blindly."
)
# arXiv 2603.03310, relative to its baseline; model, hardware and data are not named there.
_CLAIMS = (
    ("micro", "0.98", "1.02", "1.08", "1.00"),
    ("macro", "0.88", "1.15", "1.12", "1.00"),
    ("meso", "0.85", "1.20", "1.25", "0.98"),
    ("full", "0.70", "1.40", "1.55", "1.00"),
)


def write_report(found: Results, facts: Mapping[str, Any], folder: Path) -> Path:
    """Write report.md and its pictures into `folder`. `facts`: model, machine, commit, command, settings."""
    figures = {workload: figures_of(rounds) for workload, rounds in found.rounds.items()}
    verdicts = [v for workload, each in figures.items() for v in judge(workload, each, found.quality)]
    tried = [a for workload, each in figures.items() for a in attempts(workload, each, found.quality)]
    parts = [
        "# Ablation of the control loop",
        _ABOUT,
        goals_section(tried, verdicts),
        missed_section(tried, figures),
        *(shares_section(w, rounds) for w, rounds in found.rounds.items() if _has_read_prompts(rounds)),
        verdict_section(verdicts, found),
        _facts(facts),
        _claims(),
    ]
    for workload, rounds in found.rounds.items():
        plots.draw_ratios(figures[workload], folder / f"{workload}-ratios.png")
        plots.draw_clock(rounds, folder / f"{workload}-clock.png")
        parts.append(workload_section(workload, rounds, figures[workload]))
    if found.quality:
        plots.draw_kept(found.quality, folder / "quality.png")
        parts.append(quality_section(found.quality))
    path = folder / REPORT
    try:
        text = re.sub("\n{3,}", "\n\n", "\n\n".join(filter(None, parts)))
        path.write_text(text.rstrip() + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    return path


def figures_of(rounds: Mapping[str, Sequence[RoundRun]]) -> Figures:
    """Figures of each round of each arm; goodput by the baseline's median latency."""
    limit = deadline(rounds[BASELINE])
    return {name: [round_figures(run, limit) for run in runs] for name, runs in rounds.items()}


def _has_read_prompts(rounds: Mapping[str, Sequence[RoundRun]]) -> bool:
    """Only there are steps alike: they decode, and little else."""
    return any(run.prompts is not None for runs in rounds.values() for run in runs)


def verdict_section(verdicts: Sequence[Verdict], found: Results) -> str:
    """Every law on every workload; bold is a gain, and the last column says why the others are none."""
    rows = []
    for workload, arm in dict.fromkeys((v.workload, v.arm) for v in verdicts):
        mine = {v.figure: v for v in verdicts if (v.workload, v.arm) == (workload, arm)}
        cells = [_cell(mine.get(name)) for name in JUDGED]
        rows.append([workload, arm, *cells, _quality(arm, found), _reasons(list(mine.values()))])
    header = ["workload", "arm", *map(short_heading, JUDGED), "ΔNLL", "why the rest is no gain"]
    return "\n\n".join(
        [
            "## Verdicts",
            "Ratio to the baseline [95 % interval]; *s*: steady window, *w*: whole run. **Bold: a gain**: clear of "
            "1.00, ΔNLL at most 1 %, and better than its placebo. Everything else is not reproduced.",
            markdown(header, rows),
        ]
    )


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "–"
    text = ratio_text(verdict.ratio)
    return f"**{text}**" if verdict.is_gain else text


def _quality(arm: str, found: Results) -> str:
    if not ARMS[arm].is_lossy:
        return "0"
    if arm not in found.quality or BASELINE not in found.quality:
        return "–"
    return loss_text(loss(found.quality[arm], found.quality[BASELINE]))


def _reasons(verdicts: Sequence[Verdict]) -> str:
    """Each reason once, with the figures that it stops."""
    by_reason: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.is_gain:
            by_reason.setdefault(verdict.reason, []).append(short_heading(verdict.figure))
    if len(by_reason) == 1 and len(verdicts) == len(next(iter(by_reason.values()))):
        return next(iter(by_reason))
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def _facts(facts: Mapping[str, Any]) -> str:
    return "## How it was measured\n\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _claims() -> str:
    header = ["arm", "latency", "throughput", "dτ/dC", "quality"]
    table = markdown(header, [list(row) for row in _CLAIMS])
    return f"## What the paper claims\n\nRelative to its baseline; hypotheses, not facts.\n\n{table}"
