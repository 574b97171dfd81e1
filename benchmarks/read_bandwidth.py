"""Measure how fast this machine reads memory: the bound of a decode step at batch size 1.

    python benchmarks/read_bandwidth.py
A step of the demo model in bfloat16 reads 269 MB of weights, so W1 in tokens/s times 0.269 GB is what it achieved.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # the threads are ours: BLAS keeps a dot product on the thread that calls it

import numpy as np  # noqa: E402  (after the environment is set)


def read_bandwidth(num_threads: int, megabytes: int = 512, passes: int = 12) -> float:
    """Best GB/s over the passes; each thread reduces its own part by a dot product with itself (one read stream)."""
    count = megabytes * 1_000_000 // 4 // num_threads
    parts = [np.ones(count, dtype=np.float32) for _ in range(num_threads)]
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(passes):
            began = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            best = min(best, time.perf_counter() - began)
    return num_threads * count * 4 / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    for num_threads in sorted({1, options.threads}):
        print(f"{num_threads} threads: {read_bandwidth(num_threads):.1f} GB/s")


if __name__ == "__main__":
    main()
