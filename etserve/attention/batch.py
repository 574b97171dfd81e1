"""The varlen batch of one step: prefill, chunk, cache hit and decode are the same case."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etserve.kernels.selection import BlockSelection

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """B sequences, T tokens in all; C-contiguous int32 arrays.

    Token t of sequence b (query_start[b] <= t < query_start[b+1]) stands at place
    context_lens[b] - (query_start[b+1] - t) of what is kept. Its KV entry goes to slot place % 16 of block
    block_tables[b, place // 16]. It attends to places 0 .. its own. `positions` is for the rotary embedding: the
    place, plus 16 for each block of the sequence that was evicted and so is not in its table.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    query_start: Int32  # [B + 1]
    context_lens: Int32  # [B], this step's tokens included, evicted ones not
    block_tables: Int32  # [B, max_blocks], padded with 0 (block 0 is the null block: never allocated)
    logit_rows: Int32  # [R], tokens whose final hidden state is wanted, ascending
    selection: BlockSelection | None = None  # None: every token reads all of its context
    wants_block_mass: bool = False  # measure AttentionCounts.block_mass
