"""What one step's attention read, gathered on the device layer by layer and told to the host when it is asked for."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.attention.backend import AttentionShape
from etserve.attention.batch import StepBatch
from etserve.config import BLOCK_SIZE
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda_eviction import fold_mass
from etserve.kernels.cuda_selection import SelectedBlocks
from etserve.kernels.selection import AttentionCounts


@dataclass(slots=True)
class DeviceReads:
    """Of the sequences with one token and, for masses only, of those with several."""

    selected: list[SelectedBlocks] = field(default_factory=list)  # of the layers that selected
    masses: dict[str, torch.Tensor] = field(default_factory=dict)  # f32 [n, max_blocks], largest so far

    def add_mass(self, kernels: CudaKernels, which: str, block_mass: torch.Tensor | None) -> None:
        """Take in one layer's masses f32 [n, H, max_blocks]; None where they are not wanted."""
        if block_mass is None:
            return
        so_far = self.masses.setdefault(which, torch.zeros_like(block_mass[:, 0]))
        fold_mass(kernels, block_mass, so_far)

    def counts(self, batch: StepBatch, shape: AttentionShape) -> AttentionCounts:
        """Copy to the host; waits for the device."""
        blocks = -(-batch.context_lens.astype(np.int64) // BLOCK_SIZE)
        total = blocks * shape.num_layers * shape.num_kv_heads
        read, missing = total.copy(), np.zeros(len(blocks), np.float32)
        single = np.diff(batch.query_start) == 1
        if self.selected:
            kept = torch.stack([layer.num_kept for layer in self.selected]).long().sum((0, 2))
            layers = len(self.selected)
            read[single] = kept.cpu().numpy() + blocks[single] * (shape.num_layers - layers) * shape.num_kv_heads
            mean = torch.stack([layer.missing for layer in self.selected]).double().mean((0, 2))
            missing[single] = mean.float().cpu().numpy()
        return AttentionCounts(read, total, missing, self._block_mass(batch, single))

    def _block_mass(self, batch: StepBatch, single: NDArray[np.bool_]) -> NDArray[np.float32] | None:
        if not batch.wants_block_mass:
            return None
        mass = np.zeros(batch.block_tables.shape, np.float32)
        for which, rows in (("single", single), ("several", ~single)):
            if which in self.masses:
                mass[rows] = self.masses[which].cpu().numpy()
        return mass
