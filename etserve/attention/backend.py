"""What a decoder asks of attention. A backend knows neither weights nor RoPE nor who the sequences are.

A decoder calls, per layer and step, `write` (this step's rotated keys, and values) and then `attend`.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from etserve.attention.batch import StepBatch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of every layer of one model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads; query head h reads KV head h // (num_heads // num_kv_heads)
    head_dim: int
    scale: float  # of q · k, usually head_dim ** -0.5
    window: int = 0  # > 0: a token sees only the last `window` positions, its own included


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The memory of all blocks: one tensor per layer, in the backend's own layout, zeros at first.

    It is a models.types.KVCache.
    """

    layers: tuple[torch.Tensor, ...]
    num_blocks: int  # the null block 0 included
    num_bytes: int


CacheT = TypeVar("CacheT")


class AttentionBackend(Protocol, Generic[CacheT]):
    """Writes KV entries and attends to them, block tables and all being in the batch.

    keys, values: [T, num_kv_heads, head_dim]; q: [T, num_heads, head_dim]; all of one float dtype, on the backend's
    device. `layer` counts from 0.
    """

    shape: AttentionShape

    def bytes_per_block(self) -> int:
        """Of all layers."""
        ...

    def allocate(self, num_blocks: int) -> CacheT: ...

    def write(self, cache: CacheT, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch) -> None:
        """Store this step's entries in their slots (block_tables[b, position // 16], position % 16)."""
        ...

    def attend(self, cache: CacheT, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Causal attention of every token to positions 0 .. its own; [T, num_heads * head_dim] in q's dtype."""
        ...
