"""The element-wise kernels in torch, f64 inside: the oracle of elementwise.py."""

import torch

from etserve.config import BLOCK_SIZE


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).to(dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.nn.functional.silu(gate.double()) * up.double()).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """NeoX halves of the first 2 * cos.shape[-1] dims: [T, H, D] with cos, sin [T, half]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    num_kv_heads: int,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv into rotated q [T, H, D], rotated k and plain v [T, H_kv, D], all f32."""
    heads = qkv.double().view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    if head_norms is not None:
        q, k = (rms_norm(part, weight, eps, torch.float64) for part, weight in zip((q, k), head_norms, strict=True))
    cos, sin = (table[positions.long()].double() for table in tables)
    return rotate(q, cos, sin).float(), rotate(k, cos, sin).float(), v.float()


def write_kv(kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k and v [T, H_kv, D] into a layer's cache [N, 2, H_kv, 16 D] of csrc/cpu/kernels.h, entry by entry."""
    num_blocks, _, num_kv_heads, size = kv.shape
    dim, pairs = size // BLOCK_SIZE, kv.dtype == torch.bfloat16
    blocks = kv.view(num_blocks, 2, num_kv_heads, size)
    for t, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        keys, values = blocks[block, 0], blocks[block, 1]
        if pairs:
            keys.view(num_kv_heads, dim // 2, BLOCK_SIZE, 2)[:, :, offset] = k[t].view(num_kv_heads, dim // 2, 2).to(kv)
            values.view(num_kv_heads, BLOCK_SIZE // 2, dim, 2)[:, offset // 2, :, offset % 2] = v[t].to(kv)
        else:
            keys.view(num_kv_heads, dim, BLOCK_SIZE)[:, :, offset] = k[t]
            values.view(num_kv_heads, BLOCK_SIZE, dim)[:, offset] = v[t]
