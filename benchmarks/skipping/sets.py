"""One set of blocks per sequence, for all layers and heads that may skip: made from past masses, or the step's own.

Such a set is handed to the engine as protected blocks, and everything else but the first and last ones is skipped.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from etserve.control.eviction import EvictionConfig
from etserve.control.pruning import select_blocks
from etserve.kernels.reference_selection import always_read, minimum_kept
from etserve.kernels.selection import BlockSelection, SelectionRule

IS_ON = 0.5  # epsilon of a rule that does not look at it: above 0


class MassAverages:
    """Of each document and block control.eviction.MassAverage, the average that eviction judges by, in arrays."""

    def __init__(self, num_documents: int, max_blocks: int, decay: float = EvictionConfig().mass_decay) -> None:
        self._decay = decay
        self._weighted = np.zeros((num_documents, max_blocks))
        self._weight = np.zeros(max_blocks)  # all documents are at one position

    def observe(self, masses: NDArray[np.float32], num_blocks: int) -> None:
        """Take in one step's largest masses over layers and heads, [documents, max_blocks]; `num_blocks` exist."""
        seen, fresh = slice(0, num_blocks), 1.0 - self._decay
        self._weighted[:, seen] = self._decay * self._weighted[:, seen] + fresh * masses[:, seen]
        self._weight[seen] = self._decay * self._weight[seen] + fresh

    def copy(self) -> "MassAverages":
        found = MassAverages(*self._weighted.shape, self._decay)
        found._weighted, found._weight = self._weighted.copy(), self._weight.copy()
        return found

    @property
    def values(self) -> NDArray[np.float64]:
        """[documents, max_blocks]; infinite for a block that nobody has measured: it is kept."""
        known = self._weight > 0.0
        found = np.full(self._weighted.shape, math.inf)
        found[:, known] = self._weighted[:, known] / self._weight[known]
        return found


def heaviest_blocks(
    masses: NDArray[np.floating], num_blocks: int, share: float, rule: SelectionRule
) -> NDArray[np.uint8]:
    """Mask [documents, max_blocks] of `share` of the blocks, rounded up: what the rule always reads, then by mass.

    As many as a placebo of the same share reads; of equal masses the newer stays.
    """
    smallest = minimum_kept(replace(rule, selector="recency", share=share), num_blocks)
    mask = np.zeros(masses.shape, np.uint8)
    for document, row in enumerate(masses):
        kept = select_blocks(row[:num_blocks].tolist(), math.inf, always_read(rule, num_blocks, []), smallest)
        mask[document, list(kept)] = 1
    return mask


def read_only(mask: NDArray[np.uint8], rule: SelectionRule) -> BlockSelection:
    """Read the blocks of a mask [sequences, max_blocks] and those that the rule always reads, and no others."""
    nothing_else = replace(rule, selector="recency", share=0.0, min_kept_blocks=0, min_kept_share=0.0)
    return BlockSelection(np.full(len(mask), IS_ON, np.float32), mask, nothing_else)
