"""The decoder in plain torch, any dtype and device: the slow oracle of the native one, and readable.

Unlike the native decoder its matrix products are torch's, so a row may differ in the last bits with its batch mates.
"""

import numpy as np
import torch
from torch.nn.functional import embedding, linear, silu

from etserve.attention.backend import AttentionShape, PagedKV
from etserve.attention.batch import StepBatch
from etserve.attention.reference import LayerReads, ReferenceAttention
from etserve.config import BLOCK_SIZE
from etserve.kernels.selection import AttentionCounts
from etserve.models.tensors import expected_shapes
from etserve.models.types import DecoderSpec, KVCache
from etserve.models.weights import WeightSource


class TorchDecoder:
    """Implements Decoder."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        rope_tables: tuple[torch.Tensor, torch.Tensor],
        device: torch.device | str = "cpu",
        sketch_bits: int = 0,
    ) -> None:
        """`rope_tables`: cos and sin, f32 [max_len, head_dim / 2].

        `sketch_bits`: as in NativeDecoder, but sketches are made anew at each step; EXACT_BITS: selects by true masses.
        """
        self.spec = spec
        self.backend = f"torch/{torch.device(device).type}"
        self._dtype, self._device = dtype, torch.device(device)
        self._weights = {name: weights.tensor(name, dtype).to(device) for name in expected_shapes(spec)}
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())
        self._cos, self._sin = (table.to(device) for table in rope_tables)
        shape = AttentionShape(
            spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, spec.sliding_window
        )
        self._attention = ReferenceAttention(shape, kv_dtype, device, sketch_bits)
        self.attention_counts: AttentionCounts | None = None
        self._reads: list[LayerReads] = []

    def kv_bytes_per_block(self) -> int:
        return self._attention.bytes_per_block()

    def allocate_cache(self, num_blocks: int) -> KVCache:
        return self._attention.allocate(num_blocks)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """See Decoder.forward."""
        if not isinstance(cache, PagedKV):
            raise TypeError("the cache is another decoder's")
        self._reads = []
        positions = self._index(batch.positions)
        rotation = self._cos[positions, None, :], self._sin[positions, None, :]
        hidden = embedding(self._index(batch.token_ids), self._weights["embedding.weight"])
        for layer in range(self.spec.num_layers):
            hidden = hidden + self._attend(
                layer, self._norm(f"layers.{layer}.input_norm", hidden), rotation, batch, cache
            )
            hidden = hidden + self._feed_forward(layer, self._norm(f"layers.{layer}.post_norm", hidden))
        self.attention_counts = _summed(self.spec, batch, self._reads)
        return self._norm("final_norm", hidden[self._index(batch.logit_rows)]).float()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Decoder.logits."""
        head = self._weights["embedding.weight" if self.spec.tied_head else "head.weight"]
        return linear(hidden.to(self._device, self._dtype), head).float()

    def _attend(
        self,
        layer: int,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: StepBatch,
        cache: PagedKV,
    ) -> torch.Tensor:
        q, k, v = (self._linear(f"layers.{layer}.{name}", hidden) for name in ("q", "k", "v"))
        q, k, v = (part.view(len(part), -1, self.spec.head_dim) for part in (q, k, v))  # [T, heads, head_dim]
        if self.spec.qk_norm:
            q, k = self._norm(f"layers.{layer}.q_norm", q), self._norm(f"layers.{layer}.k_norm", k)
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        self._attention.write(cache, layer, k, v, batch)
        attended, reads = self._attention.attend_and_count(cache, layer, q, batch)
        self._reads.append(reads)
        return self._linear(f"layers.{layer}.o", attended)

    def _feed_forward(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(f"layers.{layer}.{name}", hidden) for name in ("gate", "up"))
        return self._linear(f"layers.{layer}.down", silu(gate) * up)

    def _linear(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last axis, f32 inside, rounded before the weight as transformers does."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return self._weights[f"{name}.weight"] * (wide * scale).to(self._dtype)

    def _index(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)


def _summed(spec: DecoderSpec, batch: StepBatch, reads: list[LayerReads]) -> AttentionCounts | None:
    """Counts over all layers; None if nobody wants any."""
    if batch.selection is None and not batch.wants_block_mass:
        return None
    dense_layers = 0 if batch.selection is None else batch.selection.rule.dense_layers
    num_selecting = max(1, spec.num_layers - dense_layers) * spec.num_kv_heads
    blocks = -(-batch.context_lens.astype(np.int64) // BLOCK_SIZE)
    mass = torch.stack([layer.block_mass for layer in reads]).amax(0).numpy()
    return AttentionCounts(
        read_blocks=np.sum([layer.num_blocks for layer in reads], axis=0, dtype=np.int64),
        total_blocks=blocks * spec.num_layers * spec.num_kv_heads,
        missing_mass=(np.sum([layer.missing for layer in reads], axis=0) / num_selecting).astype(np.float32),
        block_mass=mass if batch.wants_block_mass else None,
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in halves on [T, heads, head_dim]; cos and sin are f32 [T, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
