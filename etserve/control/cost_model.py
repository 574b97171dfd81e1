"""What a step costs, learnt online: seconds ~ c0 + alpha * FLOPs + beta * bytes. Knows no model and no clock.

Section 3 of the entropic-control page. The recursion keeps exponentially weighted sums of products and solves the
3 x 3 problem exactly, so it equals weighted non-negative least squares over all steps seen and cannot wind up the way
a recursively inverted covariance does when the load stays the same for long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

StepKind = Literal["prefill", "decode"]
STEP_KINDS: tuple[StepKind, ...] = ("prefill", "decode")

FORGETTING = 0.99  # weight of a step, per later step: about the last hundred count
MIN_R_SQUARED = 0.5  # below, the fit explains too little to steer by
MIN_EFFECTIVE_STEPS = 16.0  # three coefficients fit a handful of steps perfectly and know nothing

_NUM_TERMS = 3
_SINGULAR_PIVOT = 1e-9  # of a matrix with unit diagonal: the two columns cannot be told apart
_CONSTANT_TIMES = 1e-12  # variance relative to the mean square below which step times do not vary
_BETTER = 1.0 - 1e-9  # a larger set of terms must lower the residual by more than rounding


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step does: `flops` = sum of F over its sequences, `bytes_read` = W + sum of B."""

    flops: float
    bytes_read: float

    @property
    def is_valid(self) -> bool:
        return all(math.isfinite(x) and x >= 0.0 for x in (self.flops, self.bytes_read))


@dataclass(frozen=True, slots=True)
class CostFit:
    """Solved coefficients, each >= 0, and how far to trust them."""

    fixed_seconds: float = 0.0  # c0
    seconds_per_flop: float = 0.0  # alpha
    seconds_per_byte: float = 0.0  # beta
    r_squared: float = 0.0  # 1 - RSS/TSS, weighted; 0 where step times do not vary; may be negative
    effective_steps: float = 0.0  # sum of weights, at most 1 / (1 - forgetting)

    @property
    def is_usable(self) -> bool:
        """Whether the fit may steer anything: R2 >= 0.5 over enough steps."""
        return self.r_squared >= MIN_R_SQUARED and self.effective_steps >= MIN_EFFECTIVE_STEPS

    def predict_seconds(self, work: StepWork) -> float:
        """Return c0 + alpha * flops + beta * bytes."""
        return self.fixed_seconds + self.marginal_seconds(work.flops, work.bytes_read)

    def marginal_seconds(self, flops: float, bytes_read: float) -> float:
        """Return C = alpha * F + beta * B of one sequence: weights and the fixed part are paid anyway."""
        return self.seconds_per_flop * flops + self.seconds_per_byte * bytes_read


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Weighted sums over the steps of one kind, x = (1, FLOPs, bytes): replaced at each step."""

    forgetting: float = FORGETTING
    xx: tuple[float, ...] = (0.0,) * 6  # upper triangle of sum w x x^T: 00 01 02 11 12 22
    xy: tuple[float, float, float] = (0.0, 0.0, 0.0)
    yy: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.forgetting <= 1.0:
            raise ValueError(f"forgetting must be in (0, 1], got {self.forgetting}")

    def observe(self, work: StepWork, seconds: float) -> "StepTimes":
        """Take one measured step in; an impossible measurement (non-finite, or time <= 0) changes nothing."""
        if not (work.is_valid and math.isfinite(seconds) and seconds > 0.0):
            return self
        x = (1.0, work.flops, work.bytes_read)
        products = (x[i] * x[j] for i in range(_NUM_TERMS) for j in range(i, _NUM_TERMS))
        keep = self.forgetting
        return replace(
            self,
            xx=tuple(keep * old + new for old, new in zip(self.xx, products, strict=True)),
            xy=(keep * self.xy[0] + seconds, keep * self.xy[1] + x[1] * seconds, keep * self.xy[2] + x[2] * seconds),
            yy=keep * self.yy + seconds * seconds,
        )

    def fit(self) -> CostFit:
        """Solve for the coefficients; costs tens of microseconds, so once per step is enough."""
        steps = self.xx[0]
        if steps == 0.0:
            return CostFit()
        coefficients, residual = _solve_nonnegative(_full_matrix(self.xx), self.xy, self.yy)
        total = self.yy - self.xy[0] * self.xy[0] / steps
        varies = total > _CONSTANT_TIMES * self.yy
        return CostFit(*coefficients, r_squared=1.0 - residual / total if varies else 0.0, effective_steps=steps)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Two regressions: a step with any prefill token is `prefill`, for matrix products then run at another speed."""

    prefill: StepTimes = field(default_factory=StepTimes)
    decode: StepTimes = field(default_factory=StepTimes)

    def observe(self, kind: StepKind, work: StepWork, seconds: float) -> "CostModel":
        """Take one measured step of `kind` in."""
        if kind == "prefill":
            return replace(self, prefill=self.prefill.observe(work, seconds))
        return replace(self, decode=self.decode.observe(work, seconds))

    def fit(self, kind: StepKind) -> CostFit:
        """Solve the regression of `kind`."""
        return self.prefill.fit() if kind == "prefill" else self.decode.fit()


def _full_matrix(upper: Sequence[float]) -> list[list[float]]:
    a, b, c, d, e, f = upper
    return [[a, b, c], [b, d, e], [c, e, f]]


def _solve_nonnegative(
    matrix: list[list[float]], vector: Sequence[float], square: float
) -> tuple[tuple[float, float, float], float]:
    """Minimise square - 2 c.vector + c.matrix.c over c >= 0; return c and the minimum.

    With three terms every active set can be tried: exact, where an iterative solver would have to converge.
    """
    scale = [math.sqrt(matrix[i][i]) for i in range(_NUM_TERMS)]  # FLOPs and bytes are 1e9 apart from the constant
    best, lowest = [0.0] * _NUM_TERMS, square
    for size in range(1, _NUM_TERMS + 1):
        for terms in combinations(range(_NUM_TERMS), size):
            solved = _solve_scaled(matrix, vector, scale, terms)
            if solved is None or min(solved) < 0.0:
                continue
            residual = square - sum(solved[k] * vector[i] / scale[i] for k, i in enumerate(terms))
            if residual < lowest * _BETTER:
                lowest = residual
                best = [0.0] * _NUM_TERMS
                for k, i in enumerate(terms):
                    best[i] = solved[k] / scale[i]
    return (best[0], best[1], best[2]), max(0.0, lowest)


def _solve_scaled(
    matrix: list[list[float]], vector: Sequence[float], scale: Sequence[float], terms: Sequence[int]
) -> list[float] | None:
    """Solve the normal equations restricted to `terms`, columns scaled to length 1; None where they are dependent."""
    if any(scale[i] == 0.0 for i in terms):
        return None
    rows = [[matrix[i][j] / (scale[i] * scale[j]) for j in terms] + [vector[i] / scale[i]] for i in terms]
    for k, pivot_row in enumerate(rows):  # positive semidefinite: elimination needs no pivoting
        if pivot_row[k] < _SINGULAR_PIVOT:
            return None
        for row in rows[k + 1 :]:
            factor = row[k] / pivot_row[k]
            for j in range(k, len(row)):
                row[j] -= factor * pivot_row[j]
    solution = [0.0] * len(rows)
    for k in range(len(rows) - 1, -1, -1):
        known = sum(rows[k][j] * solution[j] for j in range(k + 1, len(rows)))
        solution[k] = (rows[k][-1] - known) / rows[k][k]
    return solution
