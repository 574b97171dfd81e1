"""What every decoder offers, whichever way it runs."""

from dataclasses import dataclass
from typing import Protocol

import torch

from etserve.attention.batch import StepBatch
from etserve.kernels.selection import AttentionCounts


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: tables are made once, at load, from this (see transformers' modeling_rope_utils)."""

    theta: float
    rope_type: str = "default"  # default | linear | dynamic | yarn | longrope | llama3
    parameters: tuple[tuple[str, float | tuple[float, ...]], ...] = ()  # the scaling variant's own


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer, as far as running it needs to know. One registry entry makes one from config.json."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE (Qwen3)
    tied_head: bool = False
    sliding_window: int = 0  # 0: none


class KVCache(Protocol):
    """The tensors behind the blocks. num_blocks counts the null block 0."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class Decoder(Protocol):
    """A loaded model. Output of a token never depends on its batch mates, bit for bit."""

    spec: DecoderSpec
    backend: str  # said in the log and in ModelInfo
    weight_bytes: int  # read once per step

    @property
    def attention_counts(self) -> AttentionCounts | None:
        """Of the last forward, if its batch had a selection or wanted masses."""

    def kv_bytes_per_block(self) -> int:
        """Of all layers, key sketches included where they are kept."""

    def allocate_cache(self, num_blocks: int) -> KVCache: ...

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """Write the batch's KV entries and return the final-normed hidden states, f32 [R, hidden_size].

        Valid until the next call.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """f32 [R, hidden_size] -> raw logits, f32 [R, vocab_size]. Valid until the next call."""
