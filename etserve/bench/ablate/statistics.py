"""What figures say of an arm. Bootstrap is scipy's; figures are paired by round or by document."""

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import stats

from etserve.bench.ablate.figures import Figure
from etserve.bench.ablate.records import QualityRun
from etserve.bench.summary import Ratio, ratio


def compare(of: Sequence[dict[str, float]], by: Sequence[dict[str, float]], name: str) -> Ratio | None:
    """Median ratio of a figure over paired rounds, with its interval; None where it is missing or 0."""
    pairs = [(a[name], b[name]) for a, b in zip(of, by, strict=False) if name in a and b.get(name, 0.0) > 0.0]
    return ratio([a for a, _ in pairs], [b for _, b in pairs])


def is_improvement(found: Ratio | None, figure: Figure) -> bool:
    """Whether the whole interval lies on the good side of 1.00; never without an interval."""
    if found is None or found.low is None or found.high is None or figure.is_better_high is None:
        return False
    return found.low > 1.0 if figure.is_better_high else found.high < 1.0


def is_worse(found: Ratio, figure: Figure) -> bool:
    """Whether the whole interval lies on the bad side of 1.00."""
    if found.low is None or found.high is None:
        return False
    return found.high < 1.0 if figure.is_better_high else found.low > 1.0


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
