"""Which blocks of a live sequence give their memory back for good, and which never do. Knows no pool.

Section 4, "Evict", of the entropic-control page: opt-in, irreversible until the sequence is recomputed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """Guards of eviction. Raises ValueError when a value is out of range."""

    mass_decay: float = 0.8  # weight of the past in the average of attention masses
    sink_blocks: int = 1  # first blocks, which every head leans on
    recent_blocks: int = 4  # last blocks of the sequence
    min_kept_share: float = 0.5  # of the sequence's blocks, evicted ones counted
    min_kept_blocks: int = 32

    def __post_init__(self) -> None:
        if not 0.0 <= self.mass_decay < 1.0:
            raise ValueError(f"mass_decay must be in [0, 1), got {self.mass_decay}")
        if not 0.0 <= self.min_kept_share <= 1.0:
            raise ValueError(f"min_kept_share must be in [0, 1], got {self.min_kept_share}")
        if min(self.sink_blocks, self.recent_blocks, self.min_kept_blocks) < 0:
            raise ValueError("block counts must be >= 0")


@dataclass(frozen=True, slots=True)
class MassAverage:
    """Average of a block's attention mass, EMA with bias correction: a young block is not taken for an idle one."""

    weighted: float = 0.0
    weight: float = 0.0  # 1 - decay^steps

    def observe(self, mass: float, decay: float) -> "MassAverage":
        """Take in the largest exp(lse_b - lse) over heads and layers of one step; an unknown mass changes nothing."""
        if not math.isfinite(mass):
            return self
        fresh = 1.0 - decay
        return replace(self, weighted=decay * self.weighted + fresh * mass, weight=decay * self.weight + fresh)

    @property
    def value(self) -> float:
        """The average, within the range of what was seen; NaN before anything was."""
        return self.weighted / self.weight if self.weight > 0.0 else math.nan


@dataclass(frozen=True, slots=True)
class Block:
    """One block that a live sequence still holds."""

    index: int  # in the sequence's block table
    mass: MassAverage
    mean_surprisal_nats: float  # of its tokens, mean of -ln p(x); NaN: never measured
    is_protected: bool = False  # in a span that the request or its chat roles protect
    num_refs: int = 1
    is_cached: bool = False  # a prefix-cache entry points to it

    @property
    def score(self) -> float:
        """Mass x surprisal: little read and easily guessed goes first. NaN when either is unknown."""
        return self.mass.value * self.mean_surprisal_nats


def is_evictable(block: Block, num_sequence_blocks: int, config: EvictionConfig) -> bool:
    """Whether no guard holds the block: sinks, recent, protected, shared, cached, or a score that nobody knows."""
    is_inside = config.sink_blocks <= block.index < num_sequence_blocks - config.recent_blocks
    is_ours_alone = block.num_refs == 1 and not block.is_cached
    return is_inside and is_ours_alone and not block.is_protected and math.isfinite(block.score)


def max_evictable(num_held_blocks: int, num_sequence_blocks: int, config: EvictionConfig) -> int:
    """Return how many blocks may still go before the floor: max(50 % of the sequence, 32 blocks)."""
    floor = max(math.ceil(config.min_kept_share * num_sequence_blocks), config.min_kept_blocks)
    return max(0, num_held_blocks - floor)


def choose_evictions(
    held: Sequence[Block], num_sequence_blocks: int, num_wanted: int, config: EvictionConfig
) -> tuple[int, ...]:
    """Return the table indices to evict, lowest score first and the older of equals; may be fewer than wanted.

    `held` are the blocks not yet evicted; `num_sequence_blocks` counts evicted ones too.
    """
    allowed = min(num_wanted, max_evictable(len(held), num_sequence_blocks, config))
    candidates = [block for block in held if is_evictable(block, num_sequence_blocks, config)]
    candidates.sort(key=lambda block: (block.score, block.index))
    return tuple(block.index for block in candidates[: max(0, allowed)])


def num_over_budget(num_held_blocks: int, block_budget: int | None) -> int:
    """Return how many blocks a request's own budget (None: no limit) asks to give back."""
    return 0 if block_budget is None else max(0, num_held_blocks - block_budget)


def may_be_prefix_source(num_evicted_blocks: int) -> bool:
    """Whether blocks of the sequence may enter the prefix cache.

    After an eviction later KV entries depend on what was missing: their content no longer follows from their tokens.
    """
    return num_evicted_blocks == 0
