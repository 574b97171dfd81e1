"""What the project wants of the control loop, how far it got, and where a step's time goes where it fell short."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from etserve.bench.ablate.arms import ARMS, BASELINE
from etserve.bench.ablate.figures import FIGURE
from etserve.bench.ablate.records import QualityRun, RoundRun
from etserve.bench.ablate.statistics import compare, loss
from etserve.bench.ablate.verdicts import MAX_LOSS, Figures, Verdict
from etserve.bench.report import markdown, shown
from etserve.bench.summary import Ratio


class Goal(NamedTuple):
    """A ratio to the baseline's, in the steady window."""

    figure: str
    words: str
    bound: float

    @property
    def is_at_least(self) -> bool:
        return FIGURE[self.figure].is_better_high is True

    def is_reached(self, found: Ratio) -> bool:
        return found.value >= self.bound if self.is_at_least else found.value <= self.bound


GOALS: dict[str, tuple[Goal, ...]] = {
    name: (
        Goal("steady_tokens_per_second", "throughput", 1.7),
        Goal("steady_tpot_seconds", "mean latency (time per token)", 0.6),
        Goal("steady_tau_per_second", "entropic time per second", 1.7),
        Goal("steady_tau_per_gb", "entropic time per GB read", 1.7),
    )
    for name in ("long-context", "memory-bound")
}
GOALS["short-chat"] = (Goal("steady_tokens_per_second", "throughput, nothing to gain", 0.98),)
_PHASES = ("attention", "matrices", "head", "kv_write", "elementwise", "setup")
_PHASE_HEADINGS = ("attention", "matrices", "head", "rotary and KV write", "norms", "checks")


class Attempt(NamedTuple):
    """The law that came closest to a goal among those that keep the quality."""

    workload: str
    goal: Goal
    arm: str
    ratio: Ratio

    @property
    def is_reached(self) -> bool:
        return self.goal.is_reached(self.ratio)


def attempts(workload: str, figures: Figures, quality: Mapping[str, QualityRun]) -> list[Attempt]:
    """One for each goal of the workload that something was measured for. On short chat the worst law counts."""
    laws = [name for name in figures if name != BASELINE and ARMS[name].placebo_of is None]
    found = []
    for goal in GOALS.get(workload, ()):
        measured = [(n, r) for n in laws if (r := compare(figures[n], figures[BASELINE], goal.figure)) is not None]
        measured = [(name, ratio) for name, ratio in measured if keeps_quality(name, quality)]
        if measured:
            is_highest = goal.is_at_least and goal.bound > 1.0
            arm, ratio = (max if is_highest else min)(measured, key=lambda each: each[1].value)
            found.append(Attempt(workload, goal, arm, ratio))
    return found


def keeps_quality(arm: str, quality: Mapping[str, QualityRun]) -> bool:
    """Whether the arm reads and keeps everything, or loses at most MAX_LOSS on held-out text."""
    if not ARMS[arm].is_lossy:
        return True
    if arm not in quality or BASELINE not in quality:
        return False
    lost = loss(quality[arm], quality[BASELINE])
    return lost is not None and lost.value <= MAX_LOSS


def goals_section(found: Sequence[Attempt], verdicts: Sequence[Verdict]) -> str:
    """The first table of the report."""
    gains = {(v.workload, v.arm, v.figure) for v in verdicts if v.is_gain}
    rows = []
    for attempt in found:
        goal = attempt.goal
        sign = "at least" if goal.is_at_least else "at most"
        is_gain = (attempt.workload, attempt.arm, goal.figure) in gains
        rows.append(
            [
                f"{attempt.workload}: {goal.words}",
                f"{sign} {goal.bound:g}",
                attempt.arm,
                ratio_text(attempt.ratio),
                _reached(attempt, is_gain),
            ]
        )
    if not rows:
        return ""
    header = ["goal", "wanted", "closest law", "measured", "reached"]
    return "\n\n".join(
        [
            "## Goals",
            "Ratios to the plain engine in the steady window (at least three quarters of the sequences decode), "
            f"with 95 % intervals; laws that lose more than {MAX_LOSS:.0%} of NLL do not count. On short chat the "
            "slowest law is shown.",
            markdown(header, rows),
        ]
    )


def _reached(attempt: Attempt, is_gain: bool) -> str:
    """A goal above 1.00 is reached by a gain alone: an interval, and a placebo that is beaten."""
    if not attempt.is_reached:
        return "**no**"
    is_about_no_loss = attempt.goal.is_at_least and attempt.goal.bound < 1.0
    return "yes" if is_gain or is_about_no_loss else "the value, but no gain by the rules"


def shares_section(workload: str, rounds: Mapping[str, Sequence[RoundRun]]) -> str:
    """Milliseconds of a step by phase, and what skipping can gain at most; empty where no arm was timed so."""
    rows, attention = [], None
    for name, runs in rounds.items():
        timed = [run for run in runs if run.phases]
        if not timed:
            continue
        steps = sum(len(run.steps.step_seconds) for run in timed)
        total = sum(sum(run.steps.step_seconds) for run in timed)
        seconds = {phase: sum(run.phases.get(phase, 0.0) for run in timed) for phase in _PHASES}
        cells = [shown(seconds[phase] / steps, 1e3, 2) for phase in _PHASES]
        rest = shown((total - sum(seconds.values())) / steps, 1e3, 2)
        share = seconds["attention"] / total
        rows.append([name, shown(total / steps, 1e3, 2), *cells, rest, f"{share:.0%}"])
        attention = share if name == BASELINE else attention
    if not rows:
        return ""
    header = ["arm", "step, ms", *_PHASE_HEADINGS, "Python, sampling, scheduling", "attention's share"]
    lines = [f"### Where a step's time goes: {workload}", markdown(header, rows)]
    if attention is not None and attention < 1.0:
        lines.append(
            f"Attention is {attention:.0%} of the plain engine's step, measured: if it cost nothing at all, a step "
            f"would take {1.0 - attention:.2f} of its time, and throughput be {1.0 / (1.0 - attention):.2f} times as "
            "high. That is the most that skipping can gain here."
        )
    return "\n\n".join(lines)


def missed_section(found: Sequence[Attempt], figures: Mapping[str, Figures]) -> str:
    """In words, for each workload with a goal that was missed."""
    lines = []
    for workload in dict.fromkeys(a.workload for a in found if not a.is_reached):
        missed = [a for a in found if a.workload == workload and not a.is_reached]
        named = ", ".join(f"{a.goal.words} {a.ratio.value:.2f} of {a.goal.bound:g} ({a.arm})" for a in missed)
        arm = missed[0].arm
        facts = [_median(figures[workload][arm], name) for name in ("kept_share", "skipping_share", "kv_share")]
        lines.append(f"- **{workload}**: {named}.{_facts(arm, *facts)}")
    return "### What was missed\n\n" + "\n".join(lines) if lines else ""


def _facts(arm: str, kept: float | None, skipping: float | None, kv_share: float | None) -> str:
    parts = []
    if skipping is not None and kept is not None:
        parts.append(f"{skipping:.0%} of its tokens skip, and those read {kept:.0%} of the blocks")
    if kv_share is not None:
        parts.append(f"keys and values are {kv_share:.0%} of the bytes that its decode steps read")
    return f" With {arm}, {'; '.join(parts)}." if parts else ""


def _median(rounds: Sequence[dict[str, float]], name: str) -> float | None:
    values = [each[name] for each in rounds if name in each]
    return float(np.median(values)) if values else None


def ratio_text(found: Ratio | None) -> str:
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}{interval}"
