"""What stands for the entropy of a row of logits: the row pass's exact one, or an estimate from its likeliest tokens.

The estimates are those of control/entropy.py, the slow oracle, over all rows at once. Varentropy, log-sum-exp and
whether a row is finite come from the row pass whatever the estimator.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.config import ControlConfig
from etserve.control.entropy import Estimator
from etserve.kernels import rows

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EntropyReader:
    """Measures rows by one estimator. What it says of a row depends on no other row, nor on what others ask for."""

    estimator: Estimator = "exact"
    top_k: int = rows.MAX_TOP  # likeliest tokens that the estimates go by

    @property
    def is_exact(self) -> bool:
        return self.estimator == "exact"

    def num_top(self, wanted: int) -> int:
        """How many likeliest tokens a row pass must return where others want so many."""
        return wanted if self.is_exact else max(wanted, self.top_k)

    def row_pass(self, logits: torch.Tensor, wanted: int = 0) -> rows.RowStats:
        """As rows.row_pass of f32 [R, V], with at least the `wanted` likeliest tokens, and the estimate as entropy."""
        stats = rows.row_pass(logits, self.num_top(wanted))
        if self.is_exact:
            return stats
        found = self.entropies(stats.entropy, stats.log_sum_exp, stats.top_values, logits.shape[1])
        return replace(stats, entropy=found)

    def entropies(self, exact: Float32, log_sum_exp: Float32, top_values: Float32, vocab_size: int) -> Float32:
        """Nats, f32 [R], from the row pass's outputs of rows of `vocab_size`: `top_values` f32 [R, >= top_k].

        NaN where the exact one is. Where tokens are masked the tail is taken to be as long as the vocabulary: the
        bounds of the estimate still hold, but are wider.
        """
        if self.is_exact:
            return exact
        top = top_values[:, : self.top_k].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):  # of rows that are not finite, or have no tail
            if self.estimator == "mid":
                found = _middle(log_sum_exp.astype(np.float64), top, vocab_size)
            else:
                found = _renormalised(top)
        return np.where(np.isfinite(exact), found, np.nan).astype(np.float32)


EXACT = EntropyReader()


def reader_of(control: ControlConfig) -> EntropyReader:
    """As the settings say."""
    return EntropyReader(control.entropy_estimator, control.estimator_top_k)


def _middle(log_sum_exp: Float64, top: Float64, vocab_size: int) -> Float64:
    """Middle of the bounds that control/entropy.py:entropy_bounds derives. [R], [R, k] descending -> [R].

    A row with fewer than k finite values has no tail.
    """
    surprisal = np.maximum(log_sum_exp[:, None] - top, 0.0)
    p = np.exp(-surprisal)
    head = np.where(p > 0.0, p * surprisal, 0.0).sum(axis=1)
    rest = np.maximum(1.0 - p.sum(axis=1), 0.0)
    num_others = np.where(np.isfinite(top).all(axis=1), vocab_size - top.shape[1], 0)
    least = np.minimum(p[:, -1], rest)
    lower = head - rest * np.where(least > 0.0, np.log(least), 0.0)
    upper = head + rest * np.log(num_others / rest)
    middle: Float64 = np.where((rest > 0.0) & (num_others > 0), 0.5 * (lower + np.maximum(lower, upper)), head)
    return middle


def _renormalised(top: Float64) -> Float64:
    """ln Z - S1 / Z over the top values alone. [R, k] descending -> [R]."""
    x = top - top[:, :1]
    weights = np.exp(x)
    z = weights.sum(axis=1)
    s1 = np.where(weights > 0.0, x * weights, 0.0).sum(axis=1)
    found: Float64 = np.maximum(np.log(z) - s1 / z, 0.0)
    return found
