"""ggml's super-blocks of 256, written by plain rounding: the gguf package can read them but not write them."""

import numpy as np
import torch

from etserve.kernels import quant
from etserve.kernels.quant import BLOCK_WEIGHTS, Format

Array = np.ndarray


def encode(weight: torch.Tensor, kind: Format) -> torch.Tensor:
    """Float [N, K] -> ggml blocks, uint8 [N, bytes], of any format."""
    if kind in ("q8_0", "q4_0", "q4_1"):
        return quant.quantise(weight, kind)
    x = weight.float().numpy().reshape(-1, 256)
    blocks = _six_bits(x) if kind == "q6_k" else _with_minima(x, 4 if kind == "q4_k" else 5)
    return torch.from_numpy(blocks.reshape(len(weight), -1))


def width(kind: Format, k: int) -> int:
    """`k` rounded up to whole blocks."""
    return -(-k // BLOCK_WEIGHTS[kind]) * BLOCK_WEIGHTS[kind]


def _divide(a: Array, b: Array) -> Array:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _half(x: Array) -> tuple[Array, Array]:
    """As f16: its bytes, and its value as f32."""
    halves = x.astype(np.float16)
    return halves.view(np.uint8), halves.astype(np.float32)


def _six_bits(x: Array) -> Array:
    parts = x.reshape(-1, 16, 16)
    extreme = np.take_along_axis(parts, abs(parts).argmax(-1, keepdims=True), -1)[..., 0] / -32
    scale_bytes, scale = _half(abs(extreme).max(-1, keepdims=True) / 127)
    small = np.rint(_divide(extreme, scale)).clip(-128, 127).astype(np.int8)
    steps = np.rint(_divide(parts, (scale * small)[..., None])) + 32
    q = steps.clip(0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    bits = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    count = len(x)
    parts_of_block = (nibbles.reshape(count, 128), bits.reshape(count, 64), small.view(np.uint8), scale_bytes)
    return np.concatenate(parts_of_block, axis=-1)


def _with_minima(x: Array, num_bits: int) -> Array:
    parts = x.reshape(-1, 8, 32)
    lowest, top = np.minimum(parts.min(-1), 0), (1 << num_bits) - 1
    scales = (parts.max(-1) - lowest) / top
    scale_bytes, scale = _half(scales.max(-1, keepdims=True) / 63)
    minimum_bytes, minimum = _half(-lowest.min(-1, keepdims=True) / 63)
    small = np.rint(_divide(scales, scale)).clip(0, 63).astype(np.uint8)
    offset = np.rint(_divide(-lowest, minimum)).clip(0, 63).astype(np.uint8)
    steps = np.rint(_divide(parts + (minimum * offset)[..., None], (scale * small)[..., None]))
    q = steps.clip(0, top).astype(np.uint8)
    packed = (
        small[:, :4] | small[:, 4:] >> 4 << 6,
        offset[:, :4] | offset[:, 4:] >> 4 << 6,
        (small[:, 4:] & 15) | (offset[:, 4:] & 15) << 4,
    )
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(x), 128)
    bits = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate((scale_bytes, minimum_bytes, *packed, *([bits] if num_bits == 5 else []), nibbles), axis=-1)
