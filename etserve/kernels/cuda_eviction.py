"""Block eviction on the device: score update, selection under the guards, compaction. The law: control/eviction.py.

Works on what `HeldBlocks` says of each sequence and never asks the host. `evict` leaves the free list longer by the
blocks that were given back.
"""

from dataclasses import dataclass

import torch

from etserve.control.eviction import EvictionConfig
from etserve.kernels.cuda import CudaKernels


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The blocks of B sequences, N at most each: the first num_held[b] entries of a row. Changed in place by evict."""

    block_tables: torch.Tensor  # int32 [B, N], block ids
    block_index: torch.Tensor  # int32 [B, N], place in the whole sequence, evicted blocks counted
    mass_weighted: torch.Tensor  # f32 [B, N], MassAverage.weighted
    mass_weight: torch.Tensor  # f32 [B, N], MassAverage.weight
    surprisal: torch.Tensor  # f32 [B, N], nats, mean over the block's tokens; NaN: never measured
    is_protected: torch.Tensor  # uint8 [B, N]
    num_held: torch.Tensor  # int32 [B]
    num_sequence_blocks: torch.Tensor  # int32 [B], evicted ones counted


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """What is known of the P blocks of the pool."""

    num_refs: torch.Tensor  # int32 [P]
    is_cached: torch.Tensor  # uint8 [P], a prefix-cache entry points to it
    free_list: torch.Tensor  # int32 [P], the first num_free entries are free blocks
    num_free: torch.Tensor  # int32 [1]


def fold_mass(kernels: CudaKernels, block_mass: torch.Tensor, step_mass: torch.Tensor) -> None:
    """Take one layer's masses f32 [B, H, N] into the step's largest so far, f32 [B, N], in place; NaN stays NaN."""
    num_seqs, num_heads, max_blocks = block_mass.shape
    mass = kernels.check("block_mass", block_mass, torch.float32, (num_seqs, num_heads, max_blocks))
    step = kernels.check("step_mass", step_mass, torch.float32, (num_seqs, max_blocks))
    kernels.launch("fold_mass", step_mass, num_seqs, max_blocks, num_heads, mass, step)


def evict(
    kernels: CudaKernels,
    config: EvictionConfig,
    step_mass: torch.Tensor,
    held: HeldBlocks,
    memory: BlockMemory,
    num_wanted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Observe a step's masses f32 [B, N] (set to 0 afterwards) and give back up to num_wanted int32 [B] blocks.

    Returns the ids given back, int32 [B, N] in the order of eviction, and how many, int32 [B]. Raises ValueError for
    other shapes and dtypes; what the ids point to is the caller's.
    """
    rows, row = tuple(held.block_tables.shape), (len(held.block_tables),)
    blocks = tuple(memory.num_refs.shape)
    f32, i32, u8 = torch.float32, torch.int32, torch.uint8
    arrays = (
        *(("step_mass", step_mass, f32, rows), ("block_tables", held.block_tables, i32, rows)),
        *(("block_index", held.block_index, i32, rows), ("mass_weighted", held.mass_weighted, f32, rows)),
        *(("mass_weight", held.mass_weight, f32, rows), ("surprisal", held.surprisal, f32, rows)),
        *(("is_protected", held.is_protected, u8, rows), ("num_held", held.num_held, i32, row)),
        *(("num_sequence_blocks", held.num_sequence_blocks, i32, row), ("num_wanted", num_wanted, i32, row)),
        *(("num_refs", memory.num_refs, i32, blocks), ("is_cached", memory.is_cached, u8, blocks)),
    )
    addresses = [kernels.check(*array) for array in arrays]
    free = (
        kernels.check("free_list", memory.free_list, i32, blocks),
        kernels.check("num_free", memory.num_free, i32, (1,)),
    )
    evicted, num_evicted = torch.zeros_like(held.block_tables), torch.zeros_like(held.num_held)
    scratch, ranks = torch.empty_like(step_mass, dtype=torch.float64), torch.empty_like(evicted)
    guards = (
        config.sink_blocks,
        config.recent_blocks,
        config.min_kept_blocks,
        config.mass_decay,
        config.min_kept_share,
    )
    outputs = (evicted.data_ptr(), num_evicted.data_ptr(), *free, scratch.data_ptr(), ranks.data_ptr())
    kernels.launch("evict", step_mass, *rows, *guards, *addresses, *outputs)
    return evicted, num_evicted
