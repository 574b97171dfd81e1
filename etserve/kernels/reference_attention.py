"""Paged attention in plain torch, float64 inside: what the native kernel means, and how its cache is laid out.

Cache of one layer: [num_blocks, 2, num_kv_heads, 16 * head_dim], float32 or bfloat16; index 0 keys, 1 values. A block's
last axis is, per KV head (csrc/cpu/kernels.h):
    float32    keys [head_dim][16]          values [16][head_dim]
    bfloat16   keys [head_dim / 2][16][2]   values [8][head_dim][2]
"""

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_SIZE = 16

Int32 = NDArray[np.int32]


def token_positions(query_start: Int32, context_lens: Int32) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequence and position of each of the T tokens, both int64 [T]."""
    starts = query_start.astype(np.int64)
    counts = np.diff(starts)
    sequences = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = context_lens.astype(np.int64) - counts - starts[:-1]
    return sequences, np.arange(starts[-1], dtype=np.int64) + first[sequences]


def slot_mapping(query_start: Int32, context_lens: Int32, block_tables: Int32) -> NDArray[np.int64]:
    """Where each token's KV entry lives: block * 16 + offset, int64 [T]."""
    sequences, positions = token_positions(query_start, context_lens)
    blocks = block_tables[sequences, positions // BLOCK_SIZE].astype(np.int64)
    slots: NDArray[np.int64] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return slots


def _views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, Hkv, D / pair, 16, pair] and values [N, Hkv, 16 / pair, D, pair] of a layer's cache, sharing memory."""
    num_blocks, _, num_kv_heads, size = cache.shape
    head_dim = size // BLOCK_SIZE
    pair = 2 if cache.dtype == torch.bfloat16 else 1
    keys = cache[:, 0].view(num_blocks, num_kv_heads, head_dim // pair, BLOCK_SIZE, pair)
    values = cache[:, 1].view(num_blocks, num_kv_heads, BLOCK_SIZE // pair, head_dim, pair)
    return keys, values


def write_kv(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: NDArray[np.int64]) -> None:
    """Store keys and values [T, Hkv, D] at `slots` [T] of one layer's cache, rounded to its dtype."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    where = torch.from_numpy(slots)
    block, offset = where // BLOCK_SIZE, where % BLOCK_SIZE
    key_view, value_view = _views(cache)
    pair = key_view.shape[-1]
    key_view[block, :, :, offset] = keys.to(cache.dtype).view(num_tokens, num_kv_heads, head_dim // pair, pair)
    value_view[block, :, offset // pair, :, offset % pair] = values.to(cache.dtype)


def gather_kv(cache: torch.Tensor, block_table: Int32, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [length, Hkv, D] of one sequence, in the cache's dtype."""
    num_blocks = -(-length // BLOCK_SIZE)
    chosen = torch.from_numpy(block_table[:num_blocks].astype(np.int64))
    key_view, value_view = _views(cache[chosen])
    num_kv_heads = key_view.shape[1]
    keys = key_view.permute(0, 3, 1, 2, 4).reshape(num_blocks * BLOCK_SIZE, num_kv_heads, -1)
    values = value_view.permute(0, 2, 4, 1, 3).reshape(num_blocks * BLOCK_SIZE, num_kv_heads, -1)
    return keys[:length], values[:length]


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int = 0,
    skipped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last n of L positions: q [n, H, D], keys and values [L, Hkv, D].

    `skipped`: bool [Hkv, L], positions that the heads of a KV head do not see.
    Returns the output [n, H, D] and the softmax weights [n, H, L], in q's dtype.
    """
    n, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = keys.shape
    grouped = q.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, keys) * scale
    own = torch.arange(length - n, length, device=q.device)[:, None]
    position = torch.arange(length, device=q.device)[None, :]
    hidden = position > own
    if window > 0:
        hidden = hidden | (position <= own - window)
    unseen = hidden[:, None, None, :]
    if skipped is not None:
        unseen = unseen | skipped[None, :, None, :]
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    out = torch.einsum("nkgl,lkd->nkgd", weights, values)
    return out.reshape(n, num_heads, head_dim), weights.reshape(n, num_heads, length)


def reference_paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_start: Int32,
    context_lens: Int32,
    block_tables: Int32,
    *,
    scale: float,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D] -> output [T, H * D] in q's dtype and block masses [B, H, max_blocks] f32.

    The masses are the softmax weights of each sequence's last query row, summed by block.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float64)
    num_seqs, max_blocks = block_tables.shape
    masses = torch.zeros(num_seqs, num_heads, max_blocks * BLOCK_SIZE, dtype=torch.float64)
    for b, length in enumerate(context_lens.tolist()):
        begin, end = int(query_start[b]), int(query_start[b + 1])
        keys, values = gather_kv(cache, block_tables[b], length)
        out[begin:end], weights = masked_attention(q[begin:end].double(), keys.double(), values.double(), scale, window)
        masses[b, :, :length] = weights[-1]
    by_block = masses.view(num_seqs, num_heads, max_blocks, BLOCK_SIZE).sum(-1)
    return out.reshape(num_tokens, num_heads * head_dim).to(q.dtype), by_block.float()
