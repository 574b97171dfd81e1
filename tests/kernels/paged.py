"""Paged caches of random keys and values for attention tests."""

from dataclasses import dataclass

import numpy as np
import torch

from etserve.kernels.attention import paged_attention
from etserve.kernels.reference_attention import (
    BLOCK_SIZE,
    Int32,
    kv_head_size,
    reference_paged_attention,
    slot_mapping,
    write_kv,
)


@dataclass(frozen=True)
class Paged:
    """Sequences of `lengths` tokens over shuffled blocks. Slots that no token fills hold NaN."""

    lengths: list[int]
    tables: Int32
    cache: torch.Tensor
    queries: list[torch.Tensor]  # [length, H, D] of each sequence
    window: int = 0

    @property
    def scale(self) -> float:
        return float(self.queries[0].shape[2] ** -0.5)

    def batch(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, Int32, Int32, Int32]:
        """(sequence, begin, end) each -> q, query_start, context_lens, block_tables."""
        q = torch.cat([self.queries[s][begin:end] for s, begin, end in parts])
        starts = np.cumsum([0] + [end - begin for _, begin, end in parts]).astype(np.int32)
        contexts = np.array([end for _, _, end in parts], np.int32)
        return q, starts, contexts, np.ascontiguousarray(self.tables[[s for s, _, _ in parts]])

    def native(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        q, *rest = self.batch(parts)
        out, _ = paged_attention(q, self.cache, *rest, scale=self.scale, window=self.window)
        return out

    def native_with_masses(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        q, *rest = self.batch(parts)
        out, masses = paged_attention(q, self.cache, *rest, scale=self.scale, window=self.window, want_block_mass=True)
        assert masses is not None
        return out, masses

    def reference(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        q, *rest = self.batch(parts)
        return reference_paged_attention(q, self.cache, *rest, scale=self.scale, window=self.window)


def rounded_query(q: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """As the dot products of a cache see it: rounded if the cache is bf16, at least under AVX-512."""
    return q.to(torch.bfloat16).float() if kv_dtype == torch.bfloat16 else q


def make_paged(
    lengths: list[int],
    dtype: torch.dtype,
    *,
    head_dim: int = 64,
    group: int = 3,
    num_kv_heads: int = 2,
    window: int = 0,
    seed: int = 0,
) -> Paged:
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = np.random.default_rng(seed).permutation(np.arange(1, sum(counts) + 1))
    tables = np.zeros((len(lengths), max(counts) + 2), np.int32)
    for b, part in enumerate(np.split(order, np.cumsum(counts)[:-1])):
        tables[b, : len(part)] = part
    unwritten = -1 if dtype == torch.int8 else float("nan")  # four bytes of -1 are a scale of NaN
    cache = torch.full((sum(counts) + 1, 2, num_kv_heads, kv_head_size(head_dim, dtype)), unwritten, dtype=dtype)
    total = sum(lengths)
    keys, values = (torch.randn(total, num_kv_heads, head_dim, generator=random) for _ in range(2))
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    write_kv(cache, keys, values, slot_mapping(starts, np.array(lengths, np.int32), tables))
    queries = [torch.randn(n, group * num_kv_heads, head_dim, generator=random) * 1.5 for n in lengths]
    rounded = [rounded_query(q, dtype) for q in queries]
    return Paged(lengths, tables, cache, rounded, window)
