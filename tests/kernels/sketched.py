"""Decode rows over paged caches with key sketches, native and by the reference."""

from dataclasses import dataclass

import numpy as np
import torch

from etserve.kernels.reference_attention import BLOCK_SIZE, gather_kv, masked_attention
from etserve.kernels.reference_selection import RowChoice, choose_for_row
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.kernels.selective_attention import SelectiveResult, selective_attention
from etserve.kernels.sketch import LayerSketches, allocate_sketches, write_sketches
from tests.kernels.paged import Paged, make_paged, rounded_query

NUM_KV_HEADS = 2


@dataclass(frozen=True)
class Sketched:
    """The last row of each sequence attends; queries are sharp enough that some blocks hardly matter."""

    paged: Paged
    q: torch.Tensor  # [B, H, D]
    sketches: LayerSketches

    def keys(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_kv(self.paged.cache, self.paged.tables[sequence], self.paged.lengths[sequence])

    def run(self, selection: BlockSelection, sequences: list[int] | None = None) -> SelectiveResult:
        """`selection` is of those sequences alone."""
        chosen = list(range(len(self.paged.lengths))) if sequences is None else sequences
        return selective_attention(
            self.q[chosen].contiguous(),
            self.paged.cache,
            np.arange(len(chosen) + 1, dtype=np.int32),
            np.array([self.paged.lengths[b] for b in chosen], np.int32),
            np.ascontiguousarray(self.paged.tables[chosen]),
            scale=self.paged.scale,
            sketches=None if selection.rule.selector != "sketch" else self.sketches,
            selection=selection,
            want_masses=True,
        )

    def choice(self, selection: BlockSelection, sequence: int) -> RowChoice:
        keys, _ = self.keys(sequence)
        return choose_for_row(selection, sequence, self.q[sequence], keys, self.paged.scale, self.sketches.bits)

    def attend(self, sequence: int, kept: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [H * D] and block masses [H, N] of reading only the kept blocks of each KV head, by the reference."""
        keys, values = self.keys(sequence)
        length, row = self.paged.lengths[sequence], self.q[sequence, None].double()
        skipped = RowChoice(kept, ()).skipped(length)
        out, weights = masked_attention(row, keys.double(), values.double(), self.paged.scale, skipped=skipped)
        padded = torch.nn.functional.pad(weights[0], (0, -length % BLOCK_SIZE))
        return out.flatten().float(), padded.view(len(padded), -1, BLOCK_SIZE).sum(-1).float()


def make_sketched(
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    head_dim: int = 64,
    group: int = 3,
    bits: int = 2,
    sharpness: float = 1.5,
    seed: int = 0,
) -> Sketched:
    paged = make_paged(lengths, dtype, head_dim=head_dim, group=group, num_kv_heads=NUM_KV_HEADS, seed=seed)
    q = torch.stack([queries[-1] for queries in paged.queries]) * sharpness
    sketches = allocate_sketches(paged.cache.shape[0], NUM_KV_HEADS, head_dim, bits)
    full = [paged.tables[b, : n // BLOCK_SIZE] for b, n in enumerate(lengths)]
    write_sketches(paged.cache, sketches, np.ascontiguousarray(np.concatenate(full)))
    return Sketched(paged, rounded_query(q, dtype), sketches)


def uniform(epsilon: float, num_seqs: int, rule: SelectionRule | None = None) -> BlockSelection:
    return BlockSelection(np.full(num_seqs, epsilon, np.float32), rule=rule or SelectionRule())


def read_blocks(result: SelectiveResult, sequence: int, head: int) -> list[int]:
    """Blocks with exact mass, which are those that the head's KV head read (a softmax weight may round to 0)."""
    found: list[int] = result.block_mass[sequence, head].nonzero().flatten().tolist()
    return found
