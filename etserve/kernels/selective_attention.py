"""Attention that reads only the blocks that a rule selects, native. Its reference: reference_selection.py."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.kernels import native
from etserve.kernels.attention import check_batch, check_tensors
from etserve.kernels.reference_attention import Int32
from etserve.kernels.selection import BlockSelection
from etserve.kernels.sketch import LayerSketches, check_sketches, native_rule, sketch_signs


@dataclass(frozen=True, slots=True)
class SelectiveResult:
    """Of one layer's call."""

    output: torch.Tensor  # f32 [T, H * D]
    num_kept: NDArray[np.int32]  # [B, Hkv], blocks read
    missing: NDArray[np.float32]  # [B, Hkv], estimated mass of what was skipped; NaN where a placebo skipped
    # Where masses are wanted, f32 [B, H, max_blocks]: exact softmax weights among what was read, of last query rows;
    # and [B, Hkv, max_blocks]: what was cut by, multiples of 2^-30, NaN where nothing was cut. Else of size 0.
    block_mass: torch.Tensor
    estimated_mass: torch.Tensor


def selective_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start: Int32,
    context_lens: Int32,
    block_tables: Int32,
    *,
    scale: float,
    sketches: LayerSketches | None,
    selection: BlockSelection,
    want_masses: bool = False,
) -> SelectiveResult:
    """As paged_attention, but a sequence with one query row reads only what `selection` selects for each KV head.

    `sketches` must hold every full block of the sequences that may skip; None for the placebos. The rule's
    dense_layers is the caller's business. Raises ValueError unless everything has the stated dtype and shape.
    """
    check_tensors(q, kv, torch.float32)
    check_batch(query_start, context_lens, block_tables, q.shape[0], kv.shape[0])
    num_tokens, num_heads, head_dim = q.shape
    (num_seqs, max_blocks), num_kv_heads = block_tables.shape, kv.shape[2]
    selection.check(num_seqs, max_blocks)
    if sketches is None and selection.rule.selector == "sketch":
        raise ValueError("nothing can be skipped without sketches")
    listed = num_seqs if want_masses else 0
    result = SelectiveResult(
        output=torch.empty(num_tokens, num_heads * head_dim),
        num_kept=np.zeros((num_seqs, num_kv_heads), np.int32),
        missing=np.zeros((num_seqs, num_kv_heads), np.float32),
        block_mass=torch.empty(listed, num_heads, max_blocks),
        estimated_mass=torch.empty(listed, num_kv_heads, max_blocks),
    )
    address = 0 if sketches is None else check_sketches(sketches, kv.shape[0], num_kv_heads, head_dim)
    bits = 2 if sketches is None else sketches.bits
    if num_tokens:
        native.module().paged_attention(
            *(q.data_ptr(), result.output.data_ptr(), 0, kv.data_ptr(), native.KV_DTYPE_CODES[kv.dtype]),
            *(num_tokens, num_seqs, query_start.ctypes.data, context_lens.ctypes.data, block_tables.ctypes.data),
            *(max_blocks, num_heads, num_kv_heads, head_dim, scale, 0, _address(result.block_mass)),
            _arguments(selection, result, address, bits, head_dim),
        )
    return result


def _arguments(selection: BlockSelection, result: SelectiveResult, sketches: int, bits: int, head_dim: int) -> Any:
    return native.module().SelectionArgs(
        rule=native_rule(selection.rule),
        sketches=sketches,
        bits=bits,
        signs=sketch_signs(head_dim).data_ptr(),
        epsilon=selection.epsilon.ctypes.data,
        is_protected=0 if selection.protected is None else selection.protected.ctypes.data,
        num_kept=result.num_kept.ctypes.data,
        missing=result.missing.ctypes.data,
        estimated_mass=_address(result.estimated_mass),
    )


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if len(tensor) else 0
