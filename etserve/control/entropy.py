"""Entropy and varentropy of softmax(logits) in one pass, and bounds on the entropy from the likeliest tokens alone.

Nats throughout. With a shift m, x = z - m, Z = sum e^x, S1 = sum x e^x, S2 = sum x^2 e^x:
H = ln Z - S1 / Z, V = S2 / Z - (S1 / Z)^2. The oracle of the native row pass.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

# What stands for the entropy of a row: exact, of all of it; mid, the middle of the bounds from its likeliest tokens;
# topk_renorm, the entropy of these alone.
Estimator = Literal["exact", "mid", "topk_renorm"]


@dataclass(frozen=True, slots=True)
class Partial:
    """Sums over a part of a row. Parts merge in any grouping; NaN and +inf entries are only counted."""

    shift: float = -math.inf  # m, the part's maximum
    z: float = 0.0
    s1: float = 0.0
    s2: float = 0.0
    num_nonfinite: int = 0  # NaN and +inf

    @property
    def log_sum_exp(self) -> float:
        """-inf without a finite entry, NaN if some entry was NaN or +inf."""
        if self.num_nonfinite:
            return math.nan
        return self.shift + math.log(self.z) if self.z > 0.0 else -math.inf

    @property
    def entropy_nats(self) -> float:
        """H. One finite entry gives 0, none NaN; NaN if some entry was NaN or +inf: unknown is not certain."""
        return max(0.0, math.log(self.z) - self.s1 / self.z) if self._is_known else math.nan

    @property
    def varentropy(self) -> float:
        """V = Var[ln p], in nats squared; NaN where the entropy is."""
        return max(0.0, self.s2 / self.z - (self.s1 / self.z) ** 2) if self._is_known else math.nan

    @property
    def _is_known(self) -> bool:
        return not self.num_nonfinite and self.z > 0.0


def measure(logits: Iterable[float]) -> Partial:
    """Add up a part of a row; -inf entries count for nothing."""
    entries = list(logits)
    finite = [z for z in entries if math.isfinite(z)]
    num_nonfinite = sum(1 for z in entries if math.isnan(z) or z == math.inf)
    if not finite:
        return Partial(num_nonfinite=num_nonfinite)
    shift = max(finite)
    weighted = [(z - shift, math.exp(z - shift)) for z in finite]
    return Partial(
        shift=shift,
        z=math.fsum(e for _, e in weighted),
        s1=math.fsum(x * e for x, e in weighted),
        s2=math.fsum(x * x * e for x, e in weighted),
        num_nonfinite=num_nonfinite,
    )


def merge(a: Partial, b: Partial) -> Partial:
    """Sums over the union, relative to the larger of the two shifts."""
    shift = max(a.shift, b.shift)
    parts = [_shifted(part, shift) for part in (a, b) if part.z > 0.0]
    z, s1, s2 = (math.fsum(part[i] for part in parts) for i in range(3))
    return Partial(shift, z, s1, s2, a.num_nonfinite + b.num_nonfinite)


def _shifted(part: Partial, shift: float) -> tuple[float, float, float]:
    d = part.shift - shift
    e = math.exp(d)
    return e * part.z, e * (part.s1 + d * part.z), e * (part.s2 + 2.0 * d * part.s1 + d * d * part.z)


def merge_all(parts: Iterable[Partial]) -> Partial:
    """In order; the empty row for no parts."""
    return reduce(merge, parts, Partial())


@dataclass(frozen=True, slots=True)
class EntropyBounds:
    """lower <= H <= upper from the k likeliest tokens and the exact log-sum-exp; |mid - H| <= (upper - lower) / 2."""

    lower: float
    upper: float

    @property
    def mid(self) -> float:
        return 0.5 * (self.lower + self.upper)


def entropy_bounds(top_logits: list[float], log_sum_exp: float, vocab_size: int) -> EntropyBounds:
    """Bound H by the `top_logits` (finite, any order), the row's exact log-sum-exp, and how many tokens there are.

    With r the mass of the other tokens and Hh = -sum p ln p over the top: the tail is flattest when spread evenly,
    U = Hh + r ln((V - k) / r), and steepest in tokens as likely as the least of the top: L = Hh - r ln min(p_k, r).
    Raises ValueError without top logits, or with more than the vocabulary holds.
    """
    if not 0 < len(top_logits) <= vocab_size:
        raise ValueError(f"got {len(top_logits)} top logits of a vocabulary of {vocab_size}")
    surprisals = [max(0.0, log_sum_exp - z) for z in top_logits]
    head = math.fsum(s * math.exp(-s) for s in surprisals)
    rest = max(0.0, 1.0 - math.fsum(math.exp(-s) for s in surprisals))
    num_others = vocab_size - len(top_logits)
    if rest == 0.0 or num_others == 0:
        return EntropyBounds(head, head)
    least = min(math.exp(-max(surprisals)), rest)
    lower = head - rest * math.log(least) if least > 0.0 else head
    upper = head + rest * math.log(num_others / rest)
    return EntropyBounds(lower, max(lower, upper))


def topk_renorm_entropy(top_logits: list[float]) -> float:
    """Entropy of the top tokens renormalised: for display only, biased low by up to several nats."""
    return measure(top_logits).entropy_nats


def estimate_entropy(estimator: Estimator, top_logits: list[float], log_sum_exp: float, vocab_size: int) -> float:
    """Entropy that an estimate makes of the `top_logits` of a row (of `vocab_size`): any but the exact one.

    Fewer finite ones than `top_logits` has are all that the row holds. The slow oracle of runner/estimating.py. Raises
    ValueError for the exact one, which takes the whole row.
    """
    if estimator == "exact":
        raise ValueError("the exact entropy takes the whole row")
    finite = [z for z in top_logits if math.isfinite(z)]
    if not finite or not math.isfinite(log_sum_exp):
        return math.nan
    if estimator == "topk_renorm":
        return topk_renorm_entropy(finite)
    return entropy_bounds(finite, log_sum_exp, vocab_size if len(finite) == len(top_logits) else len(finite)).mid
