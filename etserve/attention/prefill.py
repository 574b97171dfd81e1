"""Attention of several query rows per sequence on the device: flash-attn where it imports, torch's own otherwise.

Both take keys and values that were gathered from the pages, one sequence behind the other. They agree up to rounding;
neither promises the same bits for another chunking.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from etserve.attention.backend import AttentionShape


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The B sequences of a step that bring several tokens: T of them, at the ends of contexts of S in all."""

    rows: torch.Tensor  # int64 [T], among the step's tokens
    blocks: torch.Tensor  # int64 [S], of each position of each context
    offsets: torch.Tensor  # int64 [S], in its block
    query_start: torch.Tensor  # int32 [B + 1], on the device
    context_start: torch.Tensor  # int32 [B + 1], on the device
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]


# (q [T, H, D], keys and values [S, Hkv, D] of one dtype, rows, shape) -> [T, H, D]
Prefill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PrefillRows, AttentionShape], torch.Tensor]


def choose_prefill(device_type: str, dtype: torch.dtype) -> tuple[str, Prefill]:
    """The way to run prompts on this machine, and its name for the log."""
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        try:
            function = importlib.import_module("flash_attn").flash_attn_varlen_func
        except (ImportError, AttributeError):
            return "sdpa", sdpa_prefill
        return "flash-attn", flash_prefill(function)
    return "sdpa", sdpa_prefill


def flash_prefill(function: Callable[..., Any]) -> Prefill:
    """`function`: flash_attn's flash_attn_varlen_func, whose causal mask is aligned to the end of the context."""

    def attend(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PrefillRows, shape: AttentionShape
    ) -> torch.Tensor:
        out: torch.Tensor = function(
            q,
            keys,
            values,
            cu_seqlens_q=rows.query_start,
            cu_seqlens_k=rows.context_start,
            max_seqlen_q=max(rows.query_lens),
            max_seqlen_k=max(rows.context_lens),
            softmax_scale=shape.scale,
            causal=True,
            window_size=(shape.window - 1, 0) if shape.window else (-1, -1),
        )
        return out

    return attend


def sdpa_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PrefillRows, shape: AttentionShape
) -> torch.Tensor:
    """torch's attention, sequence by sequence."""
    queries = q.split_with_sizes(rows.query_lens)
    contexts = (part.split_with_sizes(rows.context_lens) for part in (keys, values))
    return torch.cat([_attend_one(own, k, v, shape) for own, k, v in zip(queries, *contexts, strict=True)])


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """q [n, H, D] at the end of keys and values [L, Hkv, D]."""
    group = shape.num_heads // shape.num_kv_heads  # repeated: only some of torch's kernels know of groups
    heads = [q.transpose(0, 1), *(part.transpose(0, 1).repeat_interleave(group, 0) for part in (keys, values))]
    is_whole = len(q) == len(keys) and not 0 < shape.window < len(keys)
    mask = None if is_whole else _visible(len(q), len(keys), shape.window, q.device)
    query, key, value = (part[None] for part in heads)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_whole, scale=shape.scale)
    return out[0].transpose(0, 1)


def _visible(num_queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [num_queries, length]: which positions each of the last `num_queries` sees."""
    own = torch.arange(length - num_queries, length, device=device)[:, None]
    position = torch.arange(length, device=device)[None]
    is_seen = position <= own
    return is_seen & (position > own - window) if window else is_seen
