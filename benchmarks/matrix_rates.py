"""Time the matrix kernels by weight format: one row (bound by memory) and many rows (bound by arithmetic).

    python benchmarks/matrix_rates.py
One thread, its own CPU time, the best of many calls: other load on the machine counts as little as it can. One row is
read at the speed of memory only where the matrix exceeds the last cache (--outputs).
"""

import argparse
import time
from collections.abc import Callable
from typing import get_args

import torch

from etserve.kernels import matrix, native, quant

_SHAPES = [(1536, 576), (576, 1536)]  # outputs, inputs: the demo model's feed-forward matrices


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best


def product(kind: str, weight: torch.Tensor, x: torch.Tensor) -> tuple[Callable[[], object], int]:
    """The call to time, and the bytes of its packed matrix."""
    if kind == "bf16":
        packed = matrix.pack(weight.bfloat16())
        return (lambda: matrix.linear(x, packed)), packed.num_bytes
    name = next(name for name in get_args(quant.Format) if name == kind)
    quantised = quant.pack(name, weight)
    return (lambda: quant.linear(x, quantised)), quantised.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--outputs", type=int, default=98_304, help="of the one-row product")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 256])
    options = parser.parse_args()
    native.set_num_threads(1)
    print(native.backend_name())
    for kind in ("bf16", *get_args(quant.Format)):
        call, num_bytes = product(kind, torch.randn(options.outputs, 576), torch.randn(1, 576))
        seconds = best_seconds(call, 15)
        print(f"{kind:5} 1 row: {seconds * 1e3:.2f} ms, {num_bytes / seconds / 1e9:.1f} GB/s", end="")
        for rows in options.rows:
            rates = []
            for outputs, inputs in _SHAPES:
                call, _ = product(kind, torch.randn(outputs, inputs), torch.randn(rows, inputs))
                rates.append(2 * rows * outputs * inputs / best_seconds(call, 40) / 1e9)
            print(f" · {rows} rows: {' and '.join(f'{rate:.0f}' for rate in rates)} GFLOP/s", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
