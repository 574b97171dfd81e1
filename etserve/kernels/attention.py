"""Causal varlen attention over the paged cache of one layer, native. Its reference: reference_attention.py.

Every query row is reduced in one fixed order over its positions, so its bits do not depend on the batch, on how the
sequence was cut into steps, or on the number of threads.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.kernels import native
from etserve.kernels.reference_attention import BLOCK_SIZE, GROUPED, Int32, kv_head_size

MAX_HEAD_DIM = 256


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start: Int32,
    context_lens: Int32,
    block_tables: Int32,
    *,
    scale: float,
    window: int = 0,
    want_block_mass: bool = False,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q f32 [T, H, D] -> output [T, H * D] in out_dtype (f32 or bf16), and block masses if wanted.

    kv: [num_blocks, 2, Hkv, kv_head_size], of a KV dtype, this step's entries written (reference_attention.py).
    query_start [B + 1], context_lens [B], block_tables [B, max_blocks]: attention/batch.py. window > 0: only the last
    `window` positions. The masses [B, H, max_blocks] f32 are the softmax weights of each sequence's last query row,
    summed by block. With a bf16 cache and AVX-512, q and the weights are rounded to bf16 before the products.
    Raises ValueError unless everything has the stated dtype and shape and stays in range.
    """
    check_tensors(q, kv, out_dtype)
    check_batch(query_start, context_lens, block_tables, q.shape[0], kv.shape[0])
    if window < 0:
        raise ValueError(f"window must be >= 0, got {window}")
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, max_blocks = block_tables.shape
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=out_dtype)
    mass = torch.empty(num_seqs, num_heads, max_blocks) if want_block_mass else None
    if num_tokens:
        native.module().paged_attention(
            *(
                q.data_ptr(),
                out.data_ptr(),
                native.DTYPE_CODES[out_dtype],
                kv.data_ptr(),
                native.KV_DTYPE_CODES[kv.dtype],
            ),
            *(num_tokens, num_seqs, query_start.ctypes.data, context_lens.ctypes.data, block_tables.ctypes.data),
            *(max_blocks, num_heads, kv.shape[2], head_dim, scale, window, 0 if mass is None else mass.data_ptr()),
            None,
        )
    return out, mass


def check_tensors(q: torch.Tensor, kv: torch.Tensor, out_dtype: torch.dtype) -> None:
    if q.dtype != torch.float32 or q.ndim != 3 or q.device.type != "cpu" or not q.is_contiguous():
        raise ValueError(f"q must be contiguous float32 [T, H, D] on the CPU, got {q.dtype} {list(q.shape)} {q.device}")
    if kv.dtype not in GROUPED or kv.device.type != "cpu" or not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous, of a KV dtype and on the CPU, got {kv.dtype} {kv.device}")
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out_dtype must be float32 or bfloat16, got {out_dtype}")
    head_dim, num_heads = q.shape[2], q.shape[1]
    if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        raise ValueError(f"head_dim must be even and in 16 .. {MAX_HEAD_DIM}, got {head_dim}")
    size = kv_head_size(head_dim, kv.dtype)
    if head_dim % GROUPED[kv.dtype] or kv.ndim != 4 or kv.shape[1] != 2 or kv.shape[3] != size:
        raise ValueError(f"{kv.dtype} kv must be [num_blocks, 2, Hkv, {size}], got {list(kv.shape)}")
    if num_heads == 0 or kv.shape[2] == 0 or num_heads % kv.shape[2]:
        raise ValueError(f"the KV heads ({kv.shape[2]}) must divide the query heads ({num_heads})")


def check_batch(query_start: Int32, context_lens: Int32, block_tables: Int32, num_tokens: int, num_blocks: int) -> None:
    """Raise ValueError unless the batch is well formed and reads only blocks 0 .. num_blocks - 1."""
    for name, array, ndim in (
        ("query_start", query_start, 1),
        ("context_lens", context_lens, 1),
        ("block_tables", block_tables, 2),
    ):
        if array.dtype != np.int32 or array.ndim != ndim or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous int32 with {ndim} axes, got {array.dtype} {array.shape}")
    num_seqs, max_blocks = block_tables.shape
    if query_start.shape != (num_seqs + 1,) or context_lens.shape != (num_seqs,):
        raise ValueError(f"{num_seqs} block tables, {len(query_start)} query starts, {len(context_lens)} contexts")
    counts: NDArray[np.int32] = np.diff(query_start)
    if query_start[0] != 0 or query_start[-1] != num_tokens or bool((counts < 1).any()):
        raise ValueError(f"query_start must rise from 0 to {num_tokens}, got {query_start.tolist()}")
    if bool((context_lens < counts).any()) or bool((context_lens > max_blocks * BLOCK_SIZE).any()):
        raise ValueError("a context must hold its sequence's new tokens and fit its block table")
    if num_seqs and (block_tables.min(initial=0) < 0 or block_tables.max(initial=0) >= num_blocks):
        raise ValueError(f"block_tables must name blocks 0 .. {num_blocks - 1}")
