"""Rows of logits: measure them in one pass, draw tokens from them. Native on the CPU, torch elsewhere or without csrc.

Shapes: R rows, V vocabulary. Results are numpy arrays, which the planning floors can read without torch.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from etserve.kernels import native
from etserve.kernels.reference_rows import MAX_TOP, RowStats, Samples, reference_row_pass, reference_sample

__all__ = ["MAX_TOP", "RowStats", "Samples", "row_pass", "sample"]

_Scalar = TypeVar("_Scalar", bound=np.generic)
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"logits must be float32 [rows, vocab], got {logits.dtype} {list(logits.shape)}")
    if logits.shape[1] == 0 or logits.shape[1] >= 2**31 - 16:
        raise ValueError(f"logits must have 1 .. 2^31 - 17 columns, got {logits.shape[1]}")
    if logits.shape[0] and (logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]) and logits.numel() > 1:
        raise ValueError(f"each row of logits must be contiguous, got strides {list(logits.stride())}")


def _is_native(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" and native.is_available()


def row_pass(logits: torch.Tensor, k: int) -> RowStats:
    """Entropy, varentropy, log-sum-exp, argmax and the k likeliest tokens of each row of f32 [R, V].

    Raises ValueError for other dtypes and shapes, and for k outside 0 .. 64.
    """
    _check_logits(logits)
    if not 0 <= k <= MAX_TOP:
        raise ValueError(f"k must be in 0 .. {MAX_TOP}, got {k}")
    if not _is_native(logits):
        return reference_row_pass(logits, k)
    rows, vocab = logits.shape
    floats = np.empty((3, rows), np.float32)
    ints = np.empty((2, rows), np.int32)
    top_values = np.empty((rows, k), np.float32)
    top_ids = np.empty((rows, k), np.int32)
    outputs = (*floats, *ints, top_values, top_ids)
    if rows:
        addresses = [a.ctypes.data for a in outputs]
        native.module().row_pass(logits.data_ptr(), rows, vocab, logits.stride(0), k, *addresses)
    return RowStats(floats[0], floats[1], floats[2], ints[0], ints[1], top_values, top_ids)


def sample(
    logits: torch.Tensor,
    temperature: ArrayLike,
    top_k: ArrayLike,
    top_p: ArrayLike,
    min_p: ArrayLike,
    uniform: ArrayLike,
) -> Samples:
    """Draw one token per row of f32 [R, V], penalties and masks applied; R values (or one for all) of the rest.

    What the values mean: reference_rows.truncated. temperature > 0; top_k >= 0, 0 off; top_p in [0, 1], 1 off; min_p
    in [0, 1], 0 off; uniform in [0, 1). A draw depends on its own row and values alone. Raises ValueError outside that.
    """
    _check_logits(logits)
    rows, vocab = logits.shape
    temperatures = _column("temperature", temperature, np.float32, rows, low=_TINY, high=_HUGE)
    ranks = _column("top_k", top_k, np.int32, rows, low=0, high=2**31 - 1)
    masses = _column("top_p", top_p, np.float32, rows, low=0, high=1)
    floors = _column("min_p", min_p, np.float32, rows, low=0, high=1)
    uniforms = _column("uniform", uniform, np.float64, rows, low=0, high=float(np.nextafter(1.0, 0.0)))
    if not _is_native(logits):
        return reference_sample(logits, temperatures, ranks, masses, floors, uniforms)
    token_ids = np.empty(rows, np.int32)
    entropy = np.empty(rows, np.float32)
    if rows:
        arrays = (temperatures, ranks, masses, floors, uniforms, token_ids, entropy)
        addresses = [a.ctypes.data for a in arrays]
        native.module().sample(logits.data_ptr(), rows, vocab, logits.stride(0), *addresses)
    return Samples(token_ids, entropy)


def _column(
    name: str, values: ArrayLike, dtype: type[_Scalar], rows: int, *, low: float, high: float
) -> NDArray[_Scalar]:
    given = np.asarray(values, dtype)
    column = given if given.shape == (rows,) else np.broadcast_to(given, (rows,))
    if rows and not (column.min() >= low and column.max() <= high):  # a NaN is neither
        raise ValueError(f"{name} must be in [{low}, {high}], got {column.tolist()}")
    return np.ascontiguousarray(column)
