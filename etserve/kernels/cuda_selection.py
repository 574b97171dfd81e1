"""Key sketches and the choice of blocks on the device. The oracles: reference_sketch.py, reference_selection.py."""

from dataclasses import dataclass
from functools import cache

import torch

from etserve.config import BLOCK_SIZE
from etserve.control.sketch import rotation_signs
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda_library import dtype_code
from etserve.kernels.reference_sketch import ROTATION_SEED
from etserve.kernels.selection import SELECTOR_CODES, SelectionRule


@dataclass(frozen=True, slots=True)
class DeviceSketches:
    """One layer's sketches: uint8 [num_blocks, num_kv_heads, sketch_bytes(...)] (csrc/cuda/sketch.h)."""

    memory: torch.Tensor
    bits: int


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """selection.BlockSelection of B sequences with one query row each, on the device and not looked at."""

    epsilon: torch.Tensor  # f32 [B], in [0, 1); 0: dense
    protected: torch.Tensor | None  # uint8 [B, max_blocks], not 0: always read
    rule: SelectionRule


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """What each KV head of each sequence reads in one layer."""

    kept: torch.Tensor  # int32 [B, Hkv, max_blocks], the first num_kept of a row, ascending
    num_kept: torch.Tensor  # int32 [B, Hkv]
    missing: torch.Tensor  # f32 [B, Hkv], estimated mass of what is skipped; NaN where a placebo skips
    estimated_mass: torch.Tensor | None  # f32 [B, Hkv, max_blocks], what was cut by; NaN where nothing was


def sketch_bytes(kernels: CudaKernels, head_dim: int, bits: int) -> int:
    """Bytes of one block's sketch for one KV head. Raises ValueError unless bits is 1 or 2."""
    if bits not in (1, 2):
        raise ValueError(f"sketches have 1 or 2 bits per dimension, got {bits}")
    return kernels.size_of("sketch_bytes", head_dim, bits)


def allocate_sketches(
    kernels: CudaKernels, num_blocks: int, num_kv_heads: int, head_dim: int, bits: int
) -> DeviceSketches:
    size = sketch_bytes(kernels, head_dim, bits)
    memory = torch.zeros(num_blocks, num_kv_heads, size, dtype=torch.uint8, device=kernels.device_type)
    return DeviceSketches(memory, bits)


@cache
def device_signs(head_dim: int, device: torch.device) -> torch.Tensor:
    """The rotation's random signs, f32 [head_dim]; read only."""
    return torch.tensor(rotation_signs(head_dim, ROTATION_SEED), dtype=torch.float32, device=device)


def write_sketches(kernels: CudaKernels, kv: torch.Tensor, slots: torch.Tensor, sketches: DeviceSketches) -> None:
    """Sketch the blocks of kv [num_blocks, 2, Hkv, 16, D] that the tokens at slots int64 [T] have filled.

    A block is filled by the token in its last slot; its keys must be written. Raises ValueError for what does not fit.
    """
    num_blocks, _, num_kv_heads, _, head_dim = kv.shape
    kernels.launch(
        *("sketch", kv, kernels.check("kv", kv, kv.dtype, tuple(kv.shape)), dtype_code(kv), sketches.bits),
        *(num_kv_heads, head_dim, len(slots), kernels.check("slots", slots, torch.int64, (len(slots),))),
        device_signs(head_dim, kv.device).data_ptr(),
        _check_sketches(kernels, sketches, num_blocks, num_kv_heads, head_dim),
    )


def select_blocks(
    kernels: CudaKernels,
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    sketches: DeviceSketches | None,
    selection: DeviceSelection,
    seed: int,
    want_estimates: bool = False,
) -> SelectedBlocks:
    """What the rows q [B, H, D] are to read of contexts over kv, as decode_attention takes them.

    `sketches` must hold every full block of the sequences with an epsilon; None for the placebos. `seed`: of random, in
    this layer. Raises ValueError for what does not fit.
    """
    (num_seqs, num_heads, head_dim), max_blocks = q.shape, block_tables.shape[1]
    num_blocks, _, num_kv_heads, _, _ = kv.shape
    rule, shape = selection.rule, (num_seqs, num_kv_heads, max_blocks)
    if sketches is None and rule.selector == "sketch":
        raise ValueError("nothing can be skipped without sketches")
    memory = 0 if sketches is None else _check_sketches(kernels, sketches, num_blocks, num_kv_heads, head_dim)
    found = SelectedBlocks(
        kept=q.new_empty(shape, dtype=torch.int32),
        num_kept=q.new_empty(shape[:2], dtype=torch.int32),
        missing=q.new_empty(shape[:2], dtype=torch.float32),
        estimated_mass=q.new_empty(shape, dtype=torch.float32) if want_estimates else None,
    )
    log_mass = q.new_empty((num_seqs, num_heads, max_blocks), dtype=torch.float32)
    keys = q.new_empty(shape, dtype=torch.int32)
    inputs = (
        kernels.check("q", q, kv.dtype, (num_seqs, num_heads, head_dim)),
        kernels.check("kv", kv, kv.dtype, (num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim)),
    )
    batch = (
        kernels.check("block_tables", block_tables, torch.int32, (num_seqs, max_blocks)),
        kernels.check("context_lens", context_lens, torch.int32, (num_seqs,)),
        *(memory, device_signs(head_dim, q.device).data_ptr()),
        *_check_selection(kernels, selection, num_seqs, max_blocks),
    )
    guards = (rule.sink_blocks, rule.recent_blocks, rule.min_kept_blocks, rule.min_context_tokens)
    sizes = (num_seqs, max_blocks, num_heads, num_kv_heads, head_dim)
    bits = 2 if sketches is None else sketches.bits
    estimates = 0 if found.estimated_mass is None else found.estimated_mass.data_ptr()
    outputs = (t.data_ptr() for t in (log_mass, keys, found.kept, found.num_kept, found.missing))
    kernels.launch(
        *("select", q, *inputs, dtype_code(kv), bits, *sizes, SELECTOR_CODES[rule.selector], *guards, scale),
        *(rule.share, rule.min_kept_share, seed, *batch, *outputs, estimates),
    )
    return found


def _check_selection(
    kernels: CudaKernels, selection: DeviceSelection, num_seqs: int, max_blocks: int
) -> tuple[int, int]:
    epsilon, protected = selection.epsilon, selection.protected
    address = kernels.check("epsilon", epsilon, torch.float32, (num_seqs,))
    if protected is None:
        return address, 0
    return address, kernels.check("protected", protected, torch.uint8, (num_seqs, max_blocks))


def _check_sketches(
    kernels: CudaKernels, sketches: DeviceSketches, num_blocks: int, num_kv_heads: int, head_dim: int
) -> int:
    size = sketch_bytes(kernels, head_dim, sketches.bits)
    return kernels.check("sketches", sketches.memory, torch.uint8, (num_blocks, num_kv_heads, size))
