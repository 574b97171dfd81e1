"""The quantised products in torch, f64 over blocks: the oracle of quant.py, by the definition in csrc/cpu/quant.h."""

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as ggml_dequantize
from gguf.quants import quantize as ggml_quantize
from torch.nn.functional import silu

from etserve.kernels.quant import BLOCK_BYTES, BLOCK_WEIGHTS, Format

_BLOCK = 32
# Where a block's f16 lie, and how much smaller than 1 they must be for weights of a few units.
_HALVES: dict[Format, slice] = {
    "q8_0": slice(2),
    "q4_0": slice(2),
    "q4_1": slice(4),
    "q4_k": slice(4),
    "q5_k": slice(4),
    "q6_k": slice(208, 210),
}
_SPREAD: dict[Format, int] = {"q8_0": 1, "q4_0": 1, "q4_1": 1, "q4_k": 64, "q5_k": 64, "q6_k": 128}
_TINY = 2.0**-100  # a block whose largest magnitude is below it counts as zeros


def quantise(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Float [N, K] -> ggml blocks, uint8 [N, bytes]."""
    return torch.from_numpy(ggml_quantize(weight.float().numpy(), GGMLQuantizationType[kind.upper()]))


def random_blocks(num_outputs: int, num_inputs: int, kind: Format, random: torch.Generator) -> torch.Tensor:
    """Blocks of random bits with scales in 0 .. 1 over _SPREAD, uint8 [num_outputs, bytes]: any bits are weights."""
    size = BLOCK_BYTES[kind]
    num_blocks = num_inputs // BLOCK_WEIGHTS[kind]
    blocks = torch.randint(256, (num_outputs, num_blocks, size), generator=random, dtype=torch.uint8)
    halves = blocks[..., _HALVES[kind]]
    scales = torch.rand(num_outputs, num_blocks, halves.shape[-1] // 2, generator=random) / _SPREAD[kind]
    halves.copy_(scales.half().view(torch.uint8))
    return blocks.flatten(1)


def dequantise(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """ggml blocks, uint8 [N, bytes] -> f32 [N, K]."""
    return torch.from_numpy(ggml_dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()]))


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """f32 [M, K] -> what the kernels multiply instead, f64: each block of 32 as 8-bit steps of its largest / 127."""
    blocks = x.float().view(len(x), -1, _BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    is_zero = largest < _TINY
    steps = torch.round(blocks * torch.where(is_zero, 0.0, 127.0 / largest))
    scale = largest * torch.tensor(1.0 / 127.0)
    values = torch.where(is_zero, 0.0, steps.double() * scale.double())
    is_finite = blocks.isfinite().all(-1, keepdim=True)
    return torch.where(is_finite, values, torch.nan).flatten(-2)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """f32 [M, K] and the dequantised [N, K] -> f32 [M, N]."""
    return _product(x, weight, bias).float()


def linear_silu_mul(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(x gate^T + bias[0]) * (x up^T + bias[1]), f32; gate and up are dequantised."""
    parts = (None, None) if bias is None else (bias[0], bias[1])
    return (silu(_product(x, gate, parts[0])) * _product(x, up, parts[1])).float()


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = rounded_activations(x) @ weight.double().T
    return y if bias is None else y + bias.double()
