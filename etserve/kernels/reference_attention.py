"""Paged attention in plain torch, float64 inside: what the native kernel means, and how its cache is laid out.

Cache of one layer: [num_blocks, 2, num_kv_heads, kv_head_size]; index 0 keys, 1 values. A block's last axis is, per KV
head (csrc/cpu/kv_layout.h):
    float32             keys [head_dim][16]          values [16][head_dim]
    bfloat16, float16   keys [head_dim / 2][16][2]   values [8][head_dim][2]
    int8                keys [head_dim / 4][16][4]   values [4][head_dim][4], then the tokens' scales, float32 [16]
An int8 entry is code * scale, the scale of a token and KV head its largest magnitude / 127. A float16 entry that
is finite stays finite: at most 65504.
"""

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_SIZE = 16

GROUPED = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2, torch.int8: 4}  # entries side by side, by KV dtype
_SCALE_BYTES = 4  # of a token and KV head, int8

Int32 = NDArray[np.int32]


def kv_head_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of the keys, or of the values, of one block and KV head."""
    return BLOCK_SIZE * (head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim)


def kv_head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    return kv_head_size(head_dim, dtype) * dtype.itemsize


def head_dim_of(cache: torch.Tensor) -> int:
    """The head_dim of one layer's cache."""
    size = cache.shape[-1] // BLOCK_SIZE
    return size - _SCALE_BYTES if cache.dtype == torch.int8 else size


def round_to_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> int8 codes [..., D] and float32 scales [..., 1]; what is not finite makes a scale NaN."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) * torch.tensor(1.0 / 127.0)
    is_usable = (scales > 0.0) & scales.isfinite()
    codes = torch.where(is_usable, wide * (1.0 / scales), 0.0).round().to(torch.int8)
    return codes, torch.where(scales.isfinite(), scales, float("nan"))


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to the dtype of a cache, not int8. What is finite stays finite: behind a mask 0 * inf would be NaN."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        x = torch.where(x.isfinite(), x.clamp(-most, most), x)
    return x.to(dtype)


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
    num_blocks, _, num_kv_heads, _ = cache.shape
    head_dim, pair = head_dim_of(cache), GROUPED[cache.dtype]
    entries = cache[..., : BLOCK_SIZE * head_dim]
    keys = entries[:, 0].view(num_blocks, num_kv_heads, head_dim // pair, BLOCK_SIZE, pair)
    values = entries[:, 1].view(num_blocks, num_kv_heads, BLOCK_SIZE // pair, head_dim, pair)
    return keys, values


def _scales(cache: torch.Tensor) -> torch.Tensor:
    """float32 [N, 2, Hkv, 16] of an int8 cache, sharing memory."""
    return cache[..., BLOCK_SIZE * head_dim_of(cache) :].view(torch.float32)


def write_kv(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: NDArray[np.int64]) -> None:
    """Store keys and values [T, Hkv, D] at `slots` [T] of one layer's cache, rounded to its dtype."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    where = torch.from_numpy(slots)
    block, offset = where // BLOCK_SIZE, where % BLOCK_SIZE
    key_view, value_view = _views(cache)
    pair = key_view.shape[-1]
    if cache.dtype == torch.int8:
        scales = _scales(cache)
        keys, scales[block, 0, :, offset] = _split_scales(keys)
        values, scales[block, 1, :, offset] = _split_scales(values)
    key_view[block, :, :, offset] = narrow(keys, cache.dtype).view(num_tokens, num_kv_heads, head_dim // pair, pair)
    value_view[block, :, offset // pair, :, offset % pair] = narrow(values, cache.dtype)


def _split_scales(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = round_to_bytes(entries)
    return codes, scales[..., 0]


def gather_kv(cache: torch.Tensor, block_table: Int32, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [length, Hkv, D] of one sequence, in the cache's dtype; float32 of an int8 cache."""
    num_blocks = -(-length // BLOCK_SIZE)
    chosen = torch.from_numpy(block_table[:num_blocks].astype(np.int64))
    key_view, value_view = _views(cache[chosen])
    num_kv_heads = key_view.shape[1]
    keys = key_view.permute(0, 3, 1, 2, 4).reshape(num_blocks * BLOCK_SIZE, num_kv_heads, -1)
    values = value_view.permute(0, 2, 4, 1, 3).reshape(num_blocks * BLOCK_SIZE, num_kv_heads, -1)
    if cache.dtype == torch.int8:
        scales = _scales(cache[chosen]).permute(1, 0, 3, 2).reshape(2, num_blocks * BLOCK_SIZE, num_kv_heads, 1)
        keys, values = keys * scales[0], values * scales[1]
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
