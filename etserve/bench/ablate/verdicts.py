"""What may be called a gain: clear of 1.00, at a quality that is kept, and better than doing as much blindly."""

from collections.abc import Sequence
from dataclasses import dataclass

from etserve.bench.ablate.arms import ARMS, BASELINE, Arm, placebos_of
from etserve.bench.ablate.figures import FIGURE
from etserve.bench.ablate.records import QualityRun
from etserve.bench.ablate.statistics import Loss, compare, is_improvement, is_worse, loss
from etserve.bench.summary import Ratio

MAX_LOSS = 0.01
JUDGED = (
    "steady_tokens_per_second",
    "steady_tpot_seconds",
    "steady_tau_per_second",
    "steady_tau_per_gb",
    "tokens_per_second",
    "e2e_mean_seconds",
)
_EXACT = ("ngram", "lossless")  # every token is the plain engine's own: there is nothing to do blindly
_OF_MESO = ("loose", "verified")
_WHOLE_LOOPS = ("full", "paper")
Figures = dict[str, list[dict[str, float]]]  # rounds of each arm


@dataclass(frozen=True, slots=True)
class Verdict:
    """One arm's figure on one workload, beside the baseline's."""

    workload: str
    arm: str
    figure: str
    ratio: Ratio
    is_gain: bool
    reason: str  # why not, in words; empty for a gain


def judge(workload: str, figures: Figures, quality: dict[str, QualityRun]) -> list[Verdict]:
    """Every judged figure of every law. Placebos are judged only as their law's opponents."""
    found = []
    for arm in (ARMS[name] for name in figures if name != BASELINE and ARMS[name].placebo_of is None):
        for name in JUDGED:
            measured = compare(figures[arm.name], figures[BASELINE], name)
            if measured is not None:
                reason = _objection(arm, name, measured, figures, quality)
                found.append(Verdict(workload, arm.name, name, measured, not reason, reason))
    return found


def _objection(arm: Arm, name: str, measured: Ratio, figures: Figures, quality: dict[str, QualityRun]) -> str:
    if measured.low is None:
        return "too few rounds for an interval"
    if not is_improvement(measured, FIGURE[name]):
        return "worse than the baseline" if is_worse(measured, FIGURE[name]) else "the interval holds 1.00"
    if problem := _quality_problem(arm, quality):
        return problem
    opponents = [placebo for placebo in _opponents(arm) if _is_measured(placebo, figures, quality)]
    if not opponents and arm.name in _EXACT:
        return ""
    if not opponents:
        return "no placebo ran beside it"
    beaten = [_beats(arm, placebo, name, figures, quality) for placebo in opponents]
    return "" if all(beaten) else "not better than " + ", ".join(
        placebo.name for placebo, is_beaten in zip(opponents, beaten, strict=True) if not is_beaten
    )  # fmt: skip


def _quality_problem(arm: Arm, quality: dict[str, QualityRun]) -> str:
    if not arm.is_lossy:
        return ""
    if arm.name not in quality or BASELINE not in quality:
        return "its quality was not measured"
    lost = loss(quality[arm.name], quality[BASELINE])
    return "" if lost is not None and lost.value <= MAX_LOSS else f"ΔNLL is {_shown(lost)}, above {MAX_LOSS:.0%}"


def _shown(lost: Loss | None) -> str:
    return "unknown" if lost is None else f"{lost.value:+.2%}"


def _opponents(arm: Arm) -> Sequence[Arm]:
    """Steering by entropy is a claim of its own: see `steering`. A whole loop meets its parts' placebos.

    Variants of `meso` meet its placebos.
    """
    names = ("micro", "macro", "meso") if arm.name in _WHOLE_LOOPS else ("meso" if arm.name in _OF_MESO else arm.name,)
    return [placebo for name in names for placebo in placebos_of(name) if placebo.name != "constant-epsilon"]


def _is_measured(placebo: Arm, figures: Figures, quality: dict[str, QualityRun]) -> bool:
    """Where a placebo is beaten by what it loses, no workload has to have run it."""
    return placebo.name in (quality if placebo.matches == "kept_share" else figures)


def _beats(arm: Arm, placebo: Arm, name: str, figures: Figures, quality: dict[str, QualityRun]) -> bool:
    """A placebo that reads as many blocks is as fast: it is beaten by losing more. Others are beaten at the figure."""
    if placebo.matches == "kept_share":
        found = steering(quality, arm.name, placebo.name)
        return found is not None and found.high is not None and found.high < 0.0
    return is_improvement(compare(figures[arm.name], figures[placebo.name], name), FIGURE[name])


def steering(quality: dict[str, QualityRun], law: str = "meso", placebo: str = "constant-epsilon") -> Loss | None:
    """NLL of a law relative to another arm's; below 0: the law loses less. None where one was not scored."""
    if law not in quality or placebo not in quality:
        return None
    return loss(quality[law], quality[placebo])
