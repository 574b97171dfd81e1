"""What must hold of a tensor before its address is used."""

import torch


def check_rope(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, head_dims: tuple[int, int]) -> None:
    """Raise ValueError unless a kernel for head dimensions `head_dims[0]` .. `head_dims[1]` rotates such heads."""
    smallest, largest = head_dims
    is_head = head_dim % 2 == 0 and smallest <= head_dim <= largest
    if not is_head or num_kv_heads == 0 or num_heads % num_kv_heads or rotary_dim > head_dim:
        raise ValueError(
            f"no kernel for {num_heads} heads, {num_kv_heads} KV heads of {head_dim}, {rotary_dim} rotated"
        )


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the address of a contiguous CPU tensor. Raises TypeError for a wrong dtype, else ValueError."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    return tensor.data_ptr()
