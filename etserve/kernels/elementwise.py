"""RMSNorm, SiLU * mul, and the rotary embedding with its write into the paged cache."""

import torch

from etserve.config import BLOCK_SIZE
from etserve.kernels import native
from etserve.kernels.checks import check_rope, check_tensor
from etserve.kernels.reference_attention import GROUPED, head_dim_of, kv_head_size

_HEAD_DIMS = 16, 256


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x / rms(x) * weight over the last axis: f32 [M, N] and f32 [N] -> [M, N] in f32 or bf16."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=_checked_output(dtype))
    x_address = check_tensor("x", x, torch.float32, (rows, size))
    weight_address = check_tensor("weight", weight, torch.float32, (size,))
    native.module().rms_norm(x_address, rows, size, weight_address, eps, native.DTYPE_CODES[dtype], out.data_ptr())
    return out


def silu_mul(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """silu(gate) * up: f32 [M, N] twice -> [M, N] in f32 or bf16."""
    rows, size = gate.shape
    out = torch.empty(rows, size, dtype=_checked_output(dtype))
    gate_address = check_tensor("gate", gate, torch.float32, (rows, size))
    up_address = check_tensor("up", up, torch.float32, (rows, size))
    native.module().silu_mul(gate_address, up_address, rows, size, native.DTYPE_CODES[dtype], out.data_ptr())
    return out


def rope_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    num_heads: int,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate q and k, write k and v into the cache, return q.

    qkv: f32 [T, (num_heads + 2 num_kv_heads) * head_dim] · positions: int32 [T] · slots: int64 [T], block * 16 +
    offset, all different · tables: cos and sin, f32 [max_position, rotary_dim / 2] · kv: one layer's cache, of any KV
    dtype, [num_blocks, 2, num_kv_heads, kv_head_size], laid out as csrc/cpu/kernels.h says, written in place ·
    head_norms: RMSNorm weights of q and k over head_dim, f32, applied before the rotation.
    Returns f32 [T, num_heads, head_dim].
    """
    tokens = len(qkv)
    num_blocks, _, num_kv_heads, _ = kv.shape
    if kv.dtype not in GROUPED:
        raise TypeError(f"kv must be float32, bfloat16, float16 or int8, got {kv.dtype}")
    head_dim, rotary_dim = head_dim_of(kv), 2 * tables[0].shape[1]
    check_rope(num_heads, num_kv_heads, head_dim, rotary_dim, _HEAD_DIMS)
    if head_dim % GROUPED[kv.dtype]:
        raise ValueError(f"a {kv.dtype} cache takes a head_dim that is a multiple of {GROUPED[kv.dtype]}")
    addresses = (
        check_tensor("positions", positions, torch.int32, (tokens,)),
        check_tensor("slots", slots, torch.int64, (tokens,)),
    )
    _check_range("positions", positions, len(tables[0]))
    _check_range("slots", slots, num_blocks * BLOCK_SIZE)
    cos, sin = (check_tensor("tables", table, torch.float32, (len(tables[0]), rotary_dim // 2)) for table in tables)
    norms = (check_tensor("head_norms", norm, torch.float32, (head_dim,)) for norm in head_norms or ())
    q_norm, k_norm = norms if head_norms else (0, 0)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv_address = check_tensor("qkv", qkv, torch.float32, (tokens, width))
    kv_address = check_tensor("kv", kv, kv.dtype, (num_blocks, 2, num_kv_heads, kv_head_size(head_dim, kv.dtype)))
    q = torch.empty(tokens, num_heads, head_dim)
    native.module().rope_and_write(
        *(qkv_address, tokens, num_heads, num_kv_heads, head_dim, rotary_dim, cos, sin, *addresses),
        *(q_norm, k_norm, eps, q.data_ptr(), kv_address, native.KV_DTYPE_CODES[kv.dtype]),
    )
    return q


def _checked_output(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"the output is float32 or bfloat16, not {dtype}")
    return dtype


def _check_range(name: str, values: torch.Tensor, end: int) -> None:
    if len(values) and not (values.min().item() >= 0 and values.max().item() < end):
        raise ValueError(f"{name} must be in [0, {end})")
