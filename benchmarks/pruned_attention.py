"""Time attention of decode rows with and without skipping, outside the decoder, over caches larger than the CPU's.

    python benchmarks/pruned_attention.py --threads 2
Random keys, and queries so sharp that epsilon 0.1 keeps about the share of real text. Phases are told apart by what
they leave out: an epsilon next to 0 scans and skips nothing; recency skips without a scan.
"""

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
import torch

from etserve.kernels import native
from etserve.kernels.attention import paged_attention
from etserve.kernels.memory import zeros
from etserve.kernels.reference_attention import BLOCK_SIZE, Int32, slot_mapping, write_kv
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.kernels.selective_attention import selective_attention
from etserve.kernels.sketch import LayerSketches, sketch_bytes, write_sketches

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LAYERS = 8  # caches in turn, so that each comes from memory


class Bench:
    """B sequences of `context` tokens over shuffled blocks."""

    def __init__(self, num_seqs: int, context: int, sharpness: float) -> None:
        self.num_seqs, self.context = num_seqs, context
        self.num_blocks = -(-context // BLOCK_SIZE)
        total = num_seqs * self.num_blocks + 1
        order = np.random.default_rng(0).permutation(np.arange(1, total, dtype=np.int32))
        self.tables: Int32 = np.ascontiguousarray(order.reshape(num_seqs, self.num_blocks))
        self.contexts = np.full(num_seqs, context, np.int32)
        self.starts = np.arange(num_seqs + 1, dtype=np.int32)
        random = torch.Generator().manual_seed(0)
        self.q = torch.randn(num_seqs, HEADS, HEAD_DIM, generator=random) * sharpness
        size = total * KV_HEADS * sketch_bytes(HEAD_DIM, 2)
        self.kv = [
            zeros(total * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2).view(torch.bfloat16).view(total, 2, KV_HEADS, -1)
            for _ in range(LAYERS)
        ]
        self.sketches = [LayerSketches(zeros(size).view(total, KV_HEADS, -1), 2) for _ in range(LAYERS)]
        self._fill(random)

    def _fill(self, random: torch.Generator) -> None:
        starts = (np.arange(self.num_seqs + 1) * self.context).astype(np.int32)
        slots = slot_mapping(starts, self.contexts, self.tables)
        keys = torch.randn(len(slots), KV_HEADS, HEAD_DIM, generator=random)
        full = np.ascontiguousarray(self.tables[:, : self.context // BLOCK_SIZE].ravel())
        write_kv(self.kv[0], keys, keys.flip(0), slots)
        write_sketches(self.kv[0], self.sketches[0], full)
        for kv, sketches in zip(self.kv[1:], self.sketches[1:], strict=True):
            kv.copy_(self.kv[0])
            sketches.memory.copy_(self.sketches[0].memory)

    def plain(self, layer: int) -> None:
        scale = HEAD_DIM**-0.5
        paged_attention(self.q, self.kv[layer], self.starts, self.contexts, self.tables, scale=scale)

    def selective(self, layer: int, selection: BlockSelection) -> float:
        """Returns the share of blocks read."""
        result = selective_attention(
            *(self.q, self.kv[layer], self.starts, self.contexts, self.tables),
            scale=HEAD_DIM**-0.5,
            sketches=self.sketches[layer],
            selection=selection,
        )
        return float(result.num_kept.mean()) / self.num_blocks

    def selection(self, epsilon: float, rule: SelectionRule | None = None) -> BlockSelection:
        return BlockSelection(np.full(self.num_seqs, epsilon, np.float32), rule=rule or SelectionRule())


def best_seconds(call: Callable[[int], object], rounds: int) -> float:
    """Least time of one call, over all layers in turn."""
    best = float("inf")
    for _ in range(rounds):
        for layer in range(LAYERS):
            began = time.perf_counter()
            call(layer)
            best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--sharpness", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    native.set_num_threads(options.threads)
    bench = Bench(options.sequences, options.context, options.sharpness)
    pairs = options.sequences * KV_HEADS * bench.num_blocks
    share = bench.selective(0, bench.selection(0.1))
    recency = SelectionRule(selector="recency", share=share)
    arms: dict[str, Callable[[int], object]] = {
        "dense": bench.plain,
        "epsilon 0.1": lambda layer: bench.selective(layer, bench.selection(0.1)),
        "scan and select, nothing skipped": lambda layer: bench.selective(layer, bench.selection(1e-12)),
        "recency at the same share": lambda layer: bench.selective(layer, bench.selection(0.1, recency)),
    }
    work = f"{options.sequences} x {options.context} tokens, {share:.1%} kept at epsilon 0.1"
    print(f"{native.backend_name()}, {options.threads} threads, {work}")
    for name, call in arms.items():
        seconds = best_seconds(call, options.rounds)
        per_block = seconds * 1e9 * options.threads / pairs
        print(f"{name:34s} {seconds * 1e6:8.0f} us {per_block:7.1f} ns of one thread per block and KV head")


if __name__ == "__main__":
    main()
