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

from etserve.kernels import matrix, native, quant, reference_quant

# Outputs, inputs: the demo model's feed-forward matrices, and near them in whole super-blocks.
_SHAPES, _SUPER_SHAPES = [(1536, 576), (576, 1536)], [(1536, 512), (576, 1536)]


def best_seconds(call: Callable[[torch.Tensor], object], x: torch.Tensor, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        call(x)
        best = min(best, time.thread_time() - begin)
    return best


def product(kind: str, outputs: int, inputs: int) -> tuple[Callable[[torch.Tensor], object], int]:
    """The call to time, and the bytes of its packed matrix."""
    random = torch.Generator().manual_seed(0)
    if kind == "bf16":
        packed = matrix.pack(torch.randn(outputs, inputs, generator=random).bfloat16())
        return (lambda x: matrix.linear(x, packed)), packed.num_bytes
    name = next(name for name in get_args(quant.Format) if name == kind)
    quantised = quant.QuantMatrix(outputs, inputs, name)
    quantised.pack(reference_quant.random_blocks(outputs, inputs, name, random))
    return (lambda x: matrix.linear(x, quantised)), quantised.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--outputs", type=int, default=98_304, help="of the products of few rows")
    parser.add_argument("--few", type=int, nargs="+", default=[1, 4], help="rows of the products that memory bounds")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 256])
    options = parser.parse_args()
    native.set_num_threads(1)
    print(native.backend_name())
    for kind in ("bf16", *get_args(quant.Format)):
        shapes = _SUPER_SHAPES if kind.endswith("_k") else _SHAPES
        inputs = shapes[0][1]
        call, num_bytes = product(kind, options.outputs, inputs)
        for rows in options.few:
            x = torch.randn(rows, inputs)
            seconds = best_seconds(call, x, 15)
            print(f"{kind:5} {rows} rows: {seconds * 1e3:.2f} ms, {num_bytes / seconds / 1e9:.1f} GB/s · ", end="")
        for rows in options.rows:
            rates = []
            for outputs, inputs in shapes:
                call, _ = product(kind, outputs, inputs)
                seconds = best_seconds(call, torch.randn(rows, inputs), 40)
                rates.append(2 * rows * outputs * inputs / seconds / 1e9)
            print(f"{rows} rows: {' and '.join(f'{rate:.0f}' for rate in rates)} GFLOP/s · ", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
