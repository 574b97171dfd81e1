"""Documents in one cache, read densely up to a prefix; arms go on from there, each in blocks of its own."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.skipping.sets import MassAverages
from etserve.attention.backend import PagedKV
from etserve.attention.batch import StepBatch
from etserve.config import BLOCK_SIZE
from etserve.kernels.reference_attention import gather_kv
from etserve.kernels.selection import AttentionCounts, BlockSelection
from etserve.kernels.sketch import LayerSketches, write_sketches
from etserve.models.native import NativeKV
from etserve.models.types import Decoder, KVCache

CHUNK = 512  # prompt tokens of a step
WARM_TOKENS = 32  # at the end of each prefix, read one by one: past masses are known before the first scored token

Part = tuple[list[int], int, list[int]]  # token ids, position of the first, block table


class Bed:
    """Documents of one length; the prefix, in tokens, is a multiple of 16. Branch b goes on with every document."""

    def __init__(self, decoder: Decoder, documents: Sequence[list[int]], prefix: int, num_branches: int) -> None:
        """Allocate; nothing is read yet: see read_prefixes and copy_prefixes."""
        if prefix % BLOCK_SIZE:
            raise ValueError(f"the prefix must be a multiple of {BLOCK_SIZE}, got {prefix}")
        self.decoder, self.documents, self.prefix = decoder, documents, prefix
        self._prefix_blocks = prefix // BLOCK_SIZE
        self._branch_blocks = -(-(len(documents[0]) - prefix) // BLOCK_SIZE)
        own = num_branches * len(documents) * self._branch_blocks
        self.cache: KVCache = decoder.allocate_cache(self.num_shared_blocks + own)

    @property
    def num_shared_blocks(self) -> int:
        """The null block and those of the prefixes, which come first in every bed of the same documents."""
        return 1 + len(self.documents) * self._prefix_blocks

    @property
    def max_blocks(self) -> int:
        """Of a document."""
        return self._prefix_blocks + self._branch_blocks

    @property
    def num_steps(self) -> int:
        """Tokens that are fed behind the prefix and scored by the token behind each."""
        return len(self.documents[0]) - 1 - self.prefix

    @property
    def counts(self) -> AttentionCounts:
        """What the last step read."""
        if self.decoder.attention_counts is None:
            raise ValueError("nothing was counted")
        return self.decoder.attention_counts

    def num_blocks(self, step: int) -> int:
        """Blocks of a document in a step, the first of which feeds the first token behind the prefix."""
        return (self.prefix + step) // BLOCK_SIZE + 1

    def targets(self, step: int) -> torch.Tensor:
        """int64 [documents]: the tokens that follow."""
        return torch.tensor([tokens[self.prefix + step + 1] for tokens in self.documents])

    def read_prefixes(self) -> MassAverages:
        """Read them densely; return the averages of the blocks' masses at their end."""
        warm = min(WARM_TOKENS, self.prefix)
        for index, tokens in enumerate(self.documents):
            for begin in range(0, self.prefix - warm, CHUNK):
                end = min(begin + CHUNK, self.prefix - warm)
                self._run([(tokens[begin:end], begin, self._table(index, 0))])
        averages = MassAverages(len(self.documents), self.max_blocks)
        for position in range(self.prefix - warm, self.prefix):
            self._run(self._next(position, [0]), wants_masses=True)
            averages.observe(_masses(self.counts), position // BLOCK_SIZE + 1)
        return averages

    def decode(
        self, branches: Sequence[int], selections: Sequence[BlockSelection], *, wants_masses: bool = False
    ) -> Iterator[torch.Tensor]:
        """Feed the tokens behind the prefixes; log-probabilities [branches x documents, V] of each step.

        selections: by step, of branches x documents sequences.
        """
        for step in range(self.num_steps):
            parts = self._next(self.prefix + step, branches)
            hidden = self._run(parts, selections[step], wants_masses=wants_masses)
            yield self.decoder.logits(hidden).log_softmax(-1)

    def _next(self, position: int, branches: Sequence[int]) -> list[Part]:
        return [
            ([tokens[position]], position, self._table(index, branch))
            for branch in branches
            for index, tokens in enumerate(self.documents)
        ]

    def _table(self, document: int, branch: int) -> list[int]:
        first = 1 + document * self._prefix_blocks
        own = self.num_shared_blocks + (branch * len(self.documents) + document) * self._branch_blocks
        return [*range(first, first + self._prefix_blocks), *range(own, own + self._branch_blocks)]

    def _run(
        self, parts: Sequence[Part], selection: BlockSelection | None = None, *, wants_masses: bool = False
    ) -> torch.Tensor:
        starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in parts)]).astype(np.int32)
        return self.decoder.forward(
            StepBatch(
                token_ids=np.array([t for tokens, _, _ in parts for t in tokens], np.int32),
                positions=np.array([at + i for tokens, at, _ in parts for i in range(len(tokens))], np.int32),
                query_start=starts,
                context_lens=np.array([at + len(tokens) for tokens, at, _ in parts], np.int32),
                block_tables=np.array([table for _, _, table in parts], np.int32),
                logit_rows=starts[1:] - 1 if selection is not None or wants_masses else np.zeros(0, np.int32),
                selection=selection,
                wants_block_mass=wants_masses,
            ),
            self.cache,
        )


def copy_prefixes(source: Bed, to: Bed, sketch_bits: int = 0) -> None:
    """Copy what a native bed has read instead of reading it again; sketches of `sketch_bits` are made anew.

    Raises TypeError for a cache that is neither native nor torch's, ValueError for beds of other prefixes.
    """
    if source.prefix != to.prefix or source.num_shared_blocks != to.num_shared_blocks:
        raise ValueError("the beds do not share their prefixes")
    if not isinstance(source.cache, NativeKV):
        raise TypeError("prefixes are read by the native decoder")
    shared = source.num_shared_blocks
    blocks = np.arange(shared, dtype=np.int32)
    if isinstance(to.cache, PagedKV):
        for layer, entries in enumerate(to.cache.layers):
            for which, part in enumerate(gather_kv(source.cache.tensor[layer], blocks, shared * BLOCK_SIZE)):
                entries[which, : len(part)] = part.to(entries.dtype)
    elif isinstance(to.cache, NativeKV):
        to.cache.tensor[:, :shared] = source.cache.tensor[:, :shared]
        for layer, sketches in enumerate(to.cache.sketches if to.cache.sketches is not None else ()):
            write_sketches(to.cache.tensor[layer], LayerSketches(sketches, sketch_bits), blocks[1:])
    else:
        raise TypeError("neither a native nor a torch cache")


def _masses(counts: AttentionCounts) -> NDArray[np.float32]:
    if counts.block_mass is None:
        raise ValueError("no masses were measured")
    return counts.block_mass
