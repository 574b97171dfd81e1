"""The decoder in plain torch, any dtype and device: the slow oracle of the native one, and readable.

Unlike the native decoder its matrix products are torch's, so a row may differ in the last bits with its batch mates.
"""

import torch
from torch.nn.functional import embedding, linear, silu

from etserve.attention.backend import AttentionShape, PagedKV
from etserve.attention.batch import StepBatch
from etserve.attention.reference import ReferenceAttention
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
    ) -> None:
        """`rope_tables`: cos and sin, f32 [max_len, head_dim / 2]."""
        self.spec = spec
        self.backend = f"torch/{torch.device(device).type}"
        self._dtype, self._device = dtype, torch.device(device)
        self._weights = {name: weights.tensor(name, dtype).to(device) for name in expected_shapes(spec)}
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())
        self._cos, self._sin = (table.to(device) for table in rope_tables)
        shape = AttentionShape(
            spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, spec.sliding_window
        )
        self._attention = ReferenceAttention(shape, kv_dtype, device)

    def kv_bytes_per_block(self) -> int:
        return self._attention.bytes_per_block()

    def allocate_cache(self, num_blocks: int) -> KVCache:
        return self._attention.allocate(num_blocks)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """See Decoder.forward."""
        if not isinstance(cache, PagedKV):
            raise TypeError("the cache is another decoder's")
        positions = self._index(batch.positions)
        rotation = self._cos[positions, None, :], self._sin[positions, None, :]
        hidden = embedding(self._index(batch.token_ids), self._weights["embedding.weight"])
        for layer in range(self.spec.num_layers):
            hidden = hidden + self._attend(
                layer, self._norm(f"layers.{layer}.input_norm", hidden), rotation, batch, cache
            )
            hidden = hidden + self._feed_forward(layer, self._norm(f"layers.{layer}.post_norm", hidden))
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
        return self._linear(f"layers.{layer}.o", self._attention.attend(cache, layer, q, batch))

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


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in halves on [T, heads, head_dim]; cos and sin are f32 [T, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
