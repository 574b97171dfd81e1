"""Attention in plain torch on any device and dtype: the oracle of the native backend, and slow."""

import torch

from etserve.attention.backend import AttentionShape, PagedKV
from etserve.attention.batch import StepBatch
from etserve.kernels.reference_attention import BLOCK_SIZE, masked_attention, slot_mapping


class ReferenceAttention:
    """A layer's cache is [2, num_blocks * 16, num_kv_heads, head_dim]: plain slots, keys then values."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self._dtype = dtype
        self._device = torch.device(device)

    def bytes_per_block(self) -> int:
        shape = self.shape
        return shape.num_layers * 2 * BLOCK_SIZE * shape.num_kv_heads * shape.head_dim * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> PagedKV:
        size = (2, num_blocks * BLOCK_SIZE, self.shape.num_kv_heads, self.shape.head_dim)
        layers = tuple(torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(self.shape.num_layers))
        return PagedKV(layers, num_blocks, num_blocks * self.bytes_per_block())

    def write(self, cache: PagedKV, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch) -> None:
        """See AttentionBackend.write."""
        slots = torch.from_numpy(slot_mapping(batch.query_start, batch.context_lens, batch.block_tables))
        where = slots.to(self._device)
        cache.layers[layer][0, where] = keys.to(self._dtype)
        cache.layers[layer][1, where] = values.to(self._dtype)

    def attend(self, cache: PagedKV, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See AttentionBackend.attend. Scores and sums are f32 at least."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        for b, length in enumerate(batch.context_lens.tolist()):
            rows = slice(int(batch.query_start[b]), int(batch.query_start[b + 1]))
            keys, values = self._gather(cache.layers[layer], batch, b, length)
            attended, _ = masked_attention(
                q[rows].to(wide), keys.to(wide), values.to(wide), self.shape.scale, self.shape.window
            )
            out[rows] = attended.to(q.dtype)
        return out.flatten(1)

    def _gather(self, layer: torch.Tensor, batch: StepBatch, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.from_numpy(batch.block_tables[b, : -(-length // BLOCK_SIZE)]).to(self._device, torch.int64)
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=self._device)).flatten()[:length]
        return layer[0, slots], layer[1, slots]
