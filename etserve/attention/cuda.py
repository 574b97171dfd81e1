"""Attention by the CUDA kernels: paged decode for single rows, a prefill over gathered pages for the others.

A layer's cache: [num_blocks, 2, num_kv_heads, 16, head_dim], index 0 keys, 1 values, written by rope_and_write.
"""

import torch

from etserve.attention.backend import AttentionShape, PagedKV
from etserve.attention.device_step import DecodeRows, DeviceStep
from etserve.attention.prefill import Prefill, PrefillRows, choose_prefill
from etserve.config import BLOCK_SIZE
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda_attention import check_heads, decode_attention


class CudaAttention:
    """Also on the emulator's kernels, whose device is the CPU."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, kernels: CudaKernels, prefill: Prefill | None = None
    ) -> None:
        """`dtype` of queries and cache. `prefill` None: what this machine has. Raises ValueError for other heads."""
        check_heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self._dtype = dtype
        self._kernels = kernels
        self.prefill_name, found = choose_prefill(kernels.device_type, dtype)
        self._prefill = found if prefill is None else prefill

    def bytes_per_block(self) -> int:
        shape = self.shape
        return shape.num_layers * 2 * BLOCK_SIZE * shape.num_kv_heads * shape.head_dim * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> PagedKV:
        size = (num_blocks, 2, self.shape.num_kv_heads, BLOCK_SIZE, self.shape.head_dim)
        device = self._kernels.device_type
        layers = tuple(torch.zeros(size, dtype=self._dtype, device=device) for _ in range(self.shape.num_layers))
        return PagedKV(layers, num_blocks, num_blocks * self.bytes_per_block())

    def attend(self, kv: torch.Tensor, q: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """Causal attention of every token to positions 0 .. its own, whose entries are written: [T, H * D]."""
        if step.prefill is None and step.decode is not None and step.decode.rows is None:
            return self._decode(kv, q, step.decode).flatten(1)
        out = torch.empty_like(q)
        if step.decode is not None:
            rows = step.decode.rows
            out[rows] = self._decode(kv, q[rows], step.decode)
        if step.prefill is not None:
            out[step.prefill.rows] = self._attend_prefill(kv, q[step.prefill.rows], step.prefill)
        return out.flatten(1)

    def _decode(self, kv: torch.Tensor, q: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        scale, window = self.shape.scale, self.shape.window
        found = decode_attention(self._kernels, q, kv, rows.block_tables, rows.context_lens, scale=scale, window=window)
        return found.out

    def _attend_prefill(self, kv: torch.Tensor, q: torch.Tensor, rows: PrefillRows) -> torch.Tensor:
        keys, values = (kv[:, which].transpose(1, 2)[rows.blocks, rows.offsets] for which in (0, 1))
        return self._prefill(q, keys, values, rows, self.shape)
