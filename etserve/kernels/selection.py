"""Which blocks an attention call may skip: what the caller says, and what it is told. Knows no tensor and no cache."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from etserve.control.pruning import PruningConfig

Selector = Literal["sketch", "random", "recency"]

SELECTOR_CODES: dict[Selector, int] = {"sketch": 0, "random": 1, "recency": 2}  # enum Selector of csrc/cpu/kernels.h


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """Guards of a selection, the same for all sequences. Raises ValueError for a value out of range.

    sketch keeps what the law keeps (control/pruning.py, select_blocks, over group_masses of estimated masses). The
    placebos keep `share` of the blocks whatever the query: drawn anew for each position, layer and KV head, or the
    newest. All obey the guards.
    """

    selector: Selector = "sketch"
    share: float = 1.0  # of the blocks, for random and recency; rounded up
    seed: int = 0  # of random
    sink_blocks: int = 1
    recent_blocks: int = 4
    min_kept_blocks: int = 8
    min_kept_share: float = 0.03
    min_context_tokens: int = 512
    dense_layers: int = 2

    def __post_init__(self) -> None:
        if self.selector not in SELECTOR_CODES:
            raise ValueError(f"selector must be one of {', '.join(SELECTOR_CODES)}, got {self.selector!r}")
        if not (0.0 <= self.share <= 1.0 and 0.0 <= self.min_kept_share <= 1.0):
            raise ValueError("share and min_kept_share must be in [0, 1]")
        if self.recent_blocks < 1:
            raise ValueError(f"recent_blocks must be >= 1: the last block is always read, got {self.recent_blocks}")
        counts = (
            self.sink_blocks,
            self.recent_blocks,
            self.min_kept_blocks,
            self.min_context_tokens,
            self.dense_layers,
        )
        if not (min(counts) >= 0 and max(counts) < 1 << 31 and 0 <= self.seed < 1 << 64):
            raise ValueError("counts must be in [0, 2^31), the seed in [0, 2^64)")


def layer_seed(rule: SelectionRule, layer: int) -> int:
    """The seed of random in one layer."""
    return (rule.seed + layer * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)


def rule_of(config: PruningConfig) -> SelectionRule:
    """The guards of the law's own settings."""
    return SelectionRule(
        sink_blocks=config.sink_blocks,
        recent_blocks=config.recent_blocks,
        min_kept_blocks=config.min_kept_blocks,
        min_kept_share=config.min_kept_share,
        min_context_tokens=config.min_context_tokens,
        dense_layers=config.dense_layers,
    )


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """What a step may skip. Only sequences with one token in the step skip: prompts are read densely."""

    epsilon: NDArray[np.float32]  # [B], estimated mass that each head may miss, in [0, 1); 0: dense
    protected: NDArray[np.uint8] | None = None  # [B, max_blocks], not 0: always read
    rule: SelectionRule = field(default_factory=SelectionRule)

    def check(self, num_seqs: int, max_blocks: int) -> None:
        """Raise ValueError unless the arrays fit a batch of so many sequences and block table entries."""
        epsilon, protected = self.epsilon, self.protected
        if epsilon.dtype != np.float32 or epsilon.shape != (num_seqs,) or not epsilon.flags.c_contiguous:
            raise ValueError(f"epsilon must be contiguous float32 [{num_seqs}], got {epsilon.dtype} {epsilon.shape}")
        if not bool(((epsilon >= 0.0) & (epsilon < 1.0)).all()):
            raise ValueError(f"epsilon must be in [0, 1), got {epsilon.tolist()}")
        if protected is None:
            return
        shape = (num_seqs, max_blocks)
        if protected.dtype != np.uint8 or protected.shape != shape or not protected.flags.c_contiguous:
            raise ValueError(f"protected must be contiguous uint8 {shape}, got {protected.dtype} {protected.shape}")


@dataclass(frozen=True, slots=True)
class AttentionCounts:
    """What a step's attention read, per sequence; block counts are sums over layers and KV heads."""

    read_blocks: NDArray[np.int64]  # [B]
    total_blocks: NDArray[np.int64]  # [B], what dense attention reads
    missing_mass: NDArray[np.float32]  # [B], estimated; mean over KV heads and layers that may skip; NaN for placebos
    # [B, max_blocks], if wanted: the largest exact softmax mass of each block over layers and heads, of last rows
    block_mass: NDArray[np.float32] | None = None
