"""The matrix products in torch, f64 inside: the oracle of matrix.py."""

import torch
from torch.nn.functional import silu


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """f32 [M, K], [N, K] -> f32 [M, N]; x is rounded to bf16 first where the weight is bf16."""
    return _product(x, weight, bias).float()


def linear_silu_mul(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(x gate^T + bias[0]) * (x up^T + bias[1]), in bf16 for bf16 weights, else f32."""
    parts = (None, None) if bias is None else (bias[0], bias[1])
    y = silu(_product(x, gate, parts[0])) * _product(x, up, parts[1])
    return y.to(torch.bfloat16 if gate.dtype == torch.bfloat16 else torch.float32)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rounded = x.bfloat16() if weight.dtype == torch.bfloat16 else x
    y = rounded.double() @ weight.double().T
    return y if bias is None else y + bias.double()
