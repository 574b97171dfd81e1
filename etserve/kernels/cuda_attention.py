"""Attention of one query row per sequence over its paged context on the device. The oracle: reference_attention.py."""

from dataclasses import dataclass

import torch

from etserve.config import BLOCK_SIZE
from etserve.kernels.cuda import MAX_HEAD_DIM, CudaKernels
from etserve.kernels.cuda_library import dtype_code
from etserve.kernels.cuda_selection import SelectedBlocks

MIN_HEAD_DIM = 8


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Attention of one query row per sequence."""

    out: torch.Tensor  # [B, H, D] in q's dtype
    log_sum_exp: torch.Tensor  # f32 [B, H], nats
    block_mass: torch.Tensor | None  # f32 [B, H, max_blocks]: softmax mass of each block, 0 behind the context


def decode_attention(
    kernels: CudaKernels,
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    selected: SelectedBlocks | None = None,
    want_block_mass: bool = False,
) -> DecodeOutput:
    """One query row per sequence, q [B, H, D], over kv [num_blocks, 2, Hkv, 16, D], of one dtype.

    block_tables int32 [B, max_blocks], context_lens int32 [B] (0: a padding row, whose output is 0), on the device
    and not looked at. D is a multiple of 8 up to 256. window > 0: only the last `window` positions.
    `selected`: what each KV head reads, None: everything; then the masses are among what is read.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, _, num_kv_heads, _, _ = kv.shape
    max_blocks = block_tables.shape[1]
    check_heads(num_heads, num_kv_heads, head_dim)
    if window < 0:
        raise ValueError(f"window must be >= 0, got {window}")
    q_address = kernels.check("q", q, q.dtype, (num_seqs, num_heads, head_dim))
    out = torch.empty_like(q)
    kv_address = kernels.check("kv", kv, q.dtype, (num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim))
    batch = (
        kernels.check("block_tables", block_tables, torch.int32, (num_seqs, max_blocks)),
        kernels.check("context_lens", context_lens, torch.int32, (num_seqs,)),
    )
    shape = (num_seqs, num_heads, max_blocks)
    mass = q.new_empty(shape, dtype=torch.float32) if want_block_mass else None
    log_sum_exp = q.new_empty(shape[:2], dtype=torch.float32)
    scratch = kernels.scratch("decode", q, num_seqs, max_blocks, num_heads, head_dim)
    sizes = (num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, window)
    lists = (0, 0)
    if selected is not None:
        rows = (num_seqs, num_kv_heads)
        lists = (
            kernels.check("kept", selected.kept, torch.int32, (*rows, max_blocks)),
            kernels.check("num_kept", selected.num_kept, torch.int32, rows),
        )
    outputs = (0 if mass is None else mass.data_ptr(), log_sum_exp.data_ptr(), scratch.data_ptr())
    kernels.launch(
        *(
            "decode_attention",
            q,
            q_address,
            out.data_ptr(),
            kv_address,
            dtype_code(q),
            *sizes,
            scale,
            *batch,
            *lists,
            *outputs,
        )
    )
    return DecodeOutput(out, log_sum_exp, mass)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ValueError where there is no kernel for such heads."""
    if head_dim % 8 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"no kernel for {num_heads} heads, {num_kv_heads} KV heads of {head_dim}")
