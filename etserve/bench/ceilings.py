"""What this machine can do at most, measured: bytes read per second and products per second. Knows no model."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_READ_BYTES = 512 * 1_000_000  # beyond any cache
_ROWS, _SIZE = 1024, 2048  # of the matrix product


class Ceilings(NamedTuple):
    """Of all threads that torch has been given."""

    gb_per_second: float  # read, one stream a thread
    gflop_per_second: float | None  # of a large matrix product in `dtype`; None: not known

    def seconds(self, weight_bytes: float, kv_bytes: float, flops: float) -> float:
        """The least that a step takes: its matrices at the slower of the known bounds, and its keys and values."""
        products = 0.0 if self.gflop_per_second is None else flops / self.gflop_per_second
        matrices = max(weight_bytes / self.gb_per_second, products)
        return (matrices + kv_bytes / self.gb_per_second) * 1e-9


def measure(dtype: torch.dtype | None, passes: int = 8) -> Ceilings:
    """The best of so many passes each. `dtype` of the matrix product; None: none is measured."""
    numbers = torch.ones(_READ_BYTES // 4)
    read = best_seconds(lambda: numbers.sum(), passes)
    if dtype is None:
        return Ceilings(_READ_BYTES / read * 1e-9, None)
    left, right = torch.randn(_ROWS, _SIZE).to(dtype), torch.randn(_SIZE, _SIZE).to(dtype)
    product = best_seconds(lambda: left @ right.T, passes)
    return Ceilings(_READ_BYTES / read * 1e-9, 2 * _ROWS * _SIZE * _SIZE / product * 1e-9)


def best_seconds(call: Callable[[], object], passes: int) -> float:
    """Of so many calls, the fastest: what the machine can do, less what disturbed it."""
    best = float("inf")
    for _ in range(passes):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best
