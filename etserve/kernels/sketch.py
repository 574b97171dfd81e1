"""Key sketches beside the KV cache of one layer, native. Their reference: reference_sketch.py."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.control.sketch import rotation_signs
from etserve.kernels import native
from etserve.kernels.checks import check_tensor
from etserve.kernels.reference_attention import GROUPED, head_dim_of
from etserve.kernels.reference_sketch import ROTATION_SEED
from etserve.kernels.selection import SELECTOR_CODES, SelectionRule


@cache
def sketch_signs(head_dim: int) -> torch.Tensor:
    """The rotation's random signs, f32 [head_dim]; read only."""
    return torch.tensor(rotation_signs(head_dim, ROTATION_SEED), dtype=torch.float32)


def sketch_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one block's sketch for one KV head, whole cache lines. Raises ValueError unless bits is 1 or 2."""
    if bits not in (1, 2):
        raise ValueError(f"sketches have 1 or 2 bits per dimension, got {bits}")
    return int(native.module().sketch_bytes(head_dim, bits))


@dataclass(frozen=True, slots=True)
class LayerSketches:
    """One layer's sketches: uint8 [num_blocks, num_kv_heads, sketch_bytes(head_dim, bits)] (csrc/cpu/sketch_plan.h)."""

    memory: torch.Tensor
    bits: int


def allocate_sketches(num_blocks: int, num_kv_heads: int, head_dim: int, bits: int) -> LayerSketches:
    return LayerSketches(torch.zeros(num_blocks, num_kv_heads, sketch_bytes(head_dim, bits), dtype=torch.uint8), bits)


def write_sketches(kv: torch.Tensor, sketches: LayerSketches, blocks: NDArray[np.int32]) -> None:
    """Sketch full blocks from the keys in the cache; the result depends on nothing else.

    kv: one layer's cache, of any KV dtype · blocks: int32 [n], all different. Raises ValueError or TypeError
    unless everything fits together.
    """
    num_blocks, _, num_kv_heads, _ = kv.shape
    head_dim = head_dim_of(kv)
    if kv.dtype not in GROUPED or head_dim % max(2, GROUPED[kv.dtype]) or not 16 <= head_dim <= 256:
        raise ValueError(f"no sketch of {kv.dtype} keys of {head_dim} dimensions")
    if blocks.dtype != np.int32 or blocks.ndim != 1 or not blocks.flags.c_contiguous:
        raise ValueError(f"blocks must be contiguous int32 [n], got {blocks.dtype} {blocks.shape}")
    if len(blocks) and not (blocks.min() >= 0 and blocks.max() < num_blocks and len(np.unique(blocks)) == len(blocks)):
        raise ValueError(f"blocks must be different and in [0, {num_blocks})")
    native.module().write_sketches(
        *(check_tensor("kv", kv, kv.dtype, tuple(kv.shape)), native.KV_DTYPE_CODES[kv.dtype]),
        *(check_sketches(sketches, num_blocks, num_kv_heads, head_dim), sketches.bits),
        *(sketch_signs(head_dim).data_ptr(), blocks.ctypes.data, len(blocks), num_kv_heads, head_dim),
    )


def check_sketches(sketches: LayerSketches, num_blocks: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the address of sketches of the right shape. Raises ValueError or TypeError."""
    shape = (num_blocks, num_kv_heads, sketch_bytes(head_dim, sketches.bits))
    return check_tensor("sketches", sketches.memory, torch.uint8, shape)


def native_rule(rule: SelectionRule) -> Any:
    """The rule as the native module takes it."""
    return native.module().SelectionRule(
        selector=SELECTOR_CODES[rule.selector],
        share=rule.share,
        seed=rule.seed,
        sink_blocks=rule.sink_blocks,
        recent_blocks=rule.recent_blocks,
        min_kept_blocks=rule.min_kept_blocks,
        min_kept_share=rule.min_kept_share,
        min_context=rule.min_context_tokens,
        dense_layers=rule.dense_layers,
    )
