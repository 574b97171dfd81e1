"""Attention by the native kernel over its own cache layout (kernels/reference_attention.py); torch writes it."""

import torch

from etserve.attention.backend import AttentionShape, PagedKV
from etserve.attention.batch import StepBatch
from etserve.kernels.attention import paged_attention
from etserve.kernels.reference_attention import GROUPED, kv_head_bytes, kv_head_size, slot_mapping, write_kv


class NativeAttention:
    """On the CPU; the cache is float32, bfloat16, float16 or int8. Raises ValueError for another dtype."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        if dtype not in GROUPED:
            raise ValueError(f"the native KV cache is float32, bfloat16, float16 or int8, not {dtype}")
        self.shape = shape
        self._dtype = dtype

    def bytes_per_block(self) -> int:
        shape = self.shape
        return shape.num_layers * 2 * shape.num_kv_heads * kv_head_bytes(shape.head_dim, self._dtype)

    def allocate(self, num_blocks: int) -> PagedKV:
        size = (num_blocks, 2, self.shape.num_kv_heads, kv_head_size(self.shape.head_dim, self._dtype))
        layers = tuple(torch.zeros(size, dtype=self._dtype) for _ in range(self.shape.num_layers))
        return PagedKV(layers, num_blocks, num_blocks * self.bytes_per_block())

    def write(self, cache: PagedKV, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch) -> None:
        """See AttentionBackend.write."""
        slots = slot_mapping(batch.query_start, batch.context_lens, batch.block_tables)
        write_kv(cache.layers[layer], keys, values, slots)

    def attend(self, cache: PagedKV, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See AttentionBackend.attend. Raises ValueError for a selection: it keeps no sketches."""
        if batch.selection is not None:
            raise ValueError("this backend skips nothing: kernels.selective_attention does")
        out, _ = paged_attention(
            q.float().contiguous(),
            cache.layers[layer],
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            scale=self.shape.scale,
            window=self.shape.window,
        )
        return out.to(q.dtype)
