"""The row pass and the sampler in plain torch, float64: what the native kernels mean."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

MAX_TOP = 64  # likeliest tokens that one row pass can return
TOP_P_SLACK = 1e-7  # relative; top_p is an f32, and 0.3 of ten equal tokens is three, not four

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowStats:
    """Measurements of R rows of raw logits, in nats. NaN where a row holds NaN or +inf, or nothing but -inf."""

    log_sum_exp: Float32  # [R]; -inf for a row of nothing but -inf
    entropy: Float32  # [R], H = -sum p ln p
    varentropy: Float32  # [R], V = sum p (ln p + H)^2
    argmax: Int32  # [R], lowest id among equals; -1 without a finite entry
    nonfinite: Int32  # [R], count of NaN and +inf entries
    top_values: Float32  # [R, k], finite logits, descending, ties by lower id; -inf where there are fewer
    top_ids: Int32  # [R, k]; -1 there


@dataclass(frozen=True, slots=True)
class Samples:
    """One draw per row."""

    token_ids: Int32  # [R]; -1 where nothing can be drawn: NaN, +inf, or nothing but -inf in the row
    sampled_entropy: Float32  # [R], nats, of the distribution drawn from; NaN there


def reference_row_pass(logits: torch.Tensor, k: int) -> RowStats:
    """f32 [R, V] -> RowStats."""
    stats = [_row_stats(row, k) for row in logits.to("cpu", torch.float64)]
    floats = [np.array([s[i] for s in stats], np.float32) for i in range(3)]
    ints = [np.array([s[i] for s in stats], np.int32) for i in (3, 4)]
    top_values = np.array([s[5] for s in stats], np.float32).reshape(len(stats), k)
    top_ids = np.array([s[6] for s in stats], np.int32).reshape(len(stats), k)
    return RowStats(floats[0], floats[1], floats[2], ints[0], ints[1], top_values, top_ids)


def _row_stats(row: torch.Tensor, k: int) -> tuple[float, float, float, int, int, list[float], list[int]]:
    nonfinite = int((row.isnan() | row.isposinf()).sum())
    finite = row.where(row.isfinite(), -math.inf)
    order = torch.sort(finite, descending=True, stable=True)
    count = int(finite.isfinite().sum())
    ids = order.indices[: min(k, count)].tolist() + [-1] * (k - count)
    values = order.values[: min(k, count)].tolist() + [-math.inf] * (k - count)
    argmax = int(order.indices[0]) if count else -1
    if nonfinite or not count:
        return math.nan if nonfinite else -math.inf, math.nan, math.nan, argmax, nonfinite, values, ids
    log_sum_exp = float(finite.logsumexp(0))
    surprisal = log_sum_exp - finite[finite.isfinite()]
    p = (-surprisal).exp()
    entropy = float((p * surprisal).sum())
    return log_sum_exp, entropy, float((p * (surprisal - entropy) ** 2).sum()), argmax, 0, values, ids


def truncated(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The distribution that one row is drawn from, float64 [V]; `logits` is a row without NaN and +inf.

    softmax(logits / temperature), then: the top_k likeliest (0: all; of equals the lower ids), renormalised; the
    smallest set in the same order whose mass reaches top_p, at least one; what is at least min_p times the likeliest.
    """
    p = (logits.double() / temperature).softmax(0)
    order = torch.sort(logits, descending=True, stable=True).indices
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0.0
    if top_p < 1.0:
        reached = p[order].cumsum(0)
        num_before = int((reached < p.sum() * top_p * (1.0 - TOP_P_SLACK)).sum())
        p[order[num_before + 1 :]] = 0.0
    p[p < p.max() * min_p] = 0.0
    return p / p.sum()


def reference_sample(
    logits: torch.Tensor, temperature: Float32, top_k: Int32, top_p: Float32, min_p: Float32, uniform: Float64
) -> Samples:
    """f32 [R, V] and R values each -> Samples: the first id whose cumulated probability exceeds `uniform`."""
    token_ids = np.full(len(logits), -1, np.int32)
    entropy = np.full(len(logits), np.nan, np.float32)
    for r, row in enumerate(logits.cpu()):
        if row.isnan().any() or row.isposinf().any() or not row.isfinite().any():
            continue
        p = truncated(row, float(temperature[r]), int(top_k[r]), float(top_p[r]), float(min_p[r]))
        possible = p.nonzero().flatten()
        reached = p[possible].cumsum(0)
        index = int((reached <= uniform[r] * reached[-1]).sum())
        token_ids[r] = int(possible[min(index, len(possible) - 1)])
        entropy[r] = -float((p[possible] * p[possible].log()).sum())
    return Samples(token_ids, entropy)
