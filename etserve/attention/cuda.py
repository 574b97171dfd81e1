"""Attention by the CUDA kernels: paged decode for single rows, a prefill over gathered pages for the others.

A layer's cache: [num_blocks, 2, num_kv_heads, 16, head_dim], index 0 keys, 1 values, written by rope_and_write.
"""

from dataclasses import dataclass

import torch

from etserve.attention.backend import AttentionShape
from etserve.attention.device_reads import DeviceReads
from etserve.attention.device_step import DecodeRows, DeviceStep
from etserve.attention.prefill import Prefill, choose_prefill
from etserve.config import BLOCK_SIZE
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda_attention import DecodeOutput, check_heads, decode_attention
from etserve.kernels.cuda_selection import (
    DeviceSketches,
    SelectedBlocks,
    allocate_sketches,
    select_blocks,
    sketch_bytes,
    write_sketches,
)
from etserve.kernels.selection import layer_seed


@dataclass(frozen=True, slots=True)
class DeviceKV:
    """The memory of all blocks on the device, zeros at first. It is a models.types.KVCache."""

    layers: tuple[torch.Tensor, ...]  # one per layer, see above
    sketches: tuple[DeviceSketches, ...]  # one per layer, or none
    num_blocks: int  # the null block 0 included
    num_bytes: int


class CudaAttention:
    """Also on the emulator's kernels, whose device is the CPU."""

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        kernels: CudaKernels,
        prefill: Prefill | None = None,
        sketch_bits: int = 0,
    ) -> None:
        """`dtype` of queries and cache. `prefill` None: what this machine has. `sketch_bits` 0: no sketches are kept.

        Raises ValueError for heads without a kernel.
        """
        check_heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self._dtype = dtype
        self._kernels = kernels
        self._bits = sketch_bits
        self.prefill_name, found = choose_prefill(kernels.device_type, dtype)
        self._prefill = found if prefill is None else prefill

    def bytes_per_block(self) -> int:
        """Of all layers, sketches included."""
        shape = self.shape
        keys_and_values = 2 * BLOCK_SIZE * shape.head_dim * self._dtype.itemsize
        size = sketch_bytes(self._kernels, shape.head_dim, self._bits) if self._bits else 0
        return shape.num_layers * shape.num_kv_heads * (keys_and_values + size)

    def allocate(self, num_blocks: int) -> DeviceKV:
        shape = self.shape
        size = (num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        device = self._kernels.device_type
        layers = tuple(torch.zeros(size, dtype=self._dtype, device=device) for _ in range(shape.num_layers))
        each = (num_blocks, shape.num_kv_heads, shape.head_dim, self._bits)
        sketches = [allocate_sketches(self._kernels, *each) for _ in layers] if self._bits else []
        return DeviceKV(layers, tuple(sketches), num_blocks, num_blocks * self.bytes_per_block())

    def note_written(self, cache: DeviceKV, layer: int, step: DeviceStep) -> None:
        """Sketch the blocks that this step's keys, which are written, have filled."""
        if cache.sketches:
            write_sketches(self._kernels, cache.layers[layer], step.slots, cache.sketches[layer])

    def attend(
        self, cache: DeviceKV, layer: int, q: torch.Tensor, step: DeviceStep, reads: DeviceReads
    ) -> torch.Tensor:
        """Causal attention of every token to positions 0 .. its own, whose entries are written: [T, H * D]."""
        if step.prefill is None and step.decode is not None and step.decode.rows is None:
            return self._decode(cache, layer, q, step, step.decode, reads).flatten(1)
        out = torch.empty_like(q)
        if step.decode is not None:
            rows = step.decode.rows
            out[rows] = self._decode(cache, layer, q[rows], step, step.decode, reads)
        if step.prefill is not None:
            kv, rows = cache.layers[layer], step.prefill.rows
            keys, values = (kv[:, i].transpose(1, 2)[step.prefill.blocks, step.prefill.offsets] for i in (0, 1))
            out[rows] = self._prefill(q[rows], keys, values, step.prefill, self.shape)
        if step.last_rows is not None:
            last = self._attend_rows(cache, layer, q[step.last_rows.rows], step.last_rows, None, want_mass=True)
            reads.add_mass(self._kernels, "several", last.block_mass)
        return out.flatten(1)

    def _decode(
        self, cache: DeviceKV, layer: int, q: torch.Tensor, step: DeviceStep, rows: DecodeRows, reads: DeviceReads
    ) -> torch.Tensor:
        selected = self._select(cache, layer, q, rows)
        if selected is not None:
            reads.selected.append(selected)
        found = self._attend_rows(cache, layer, q, rows, selected, want_mass=step.wants_block_mass)
        reads.add_mass(self._kernels, "single", found.block_mass)
        return found.out

    def _select(self, cache: DeviceKV, layer: int, q: torch.Tensor, rows: DecodeRows) -> SelectedBlocks | None:
        if rows.selection is None or layer < rows.selection.rule.dense_layers:
            return None
        rule = rows.selection.rule
        return select_blocks(
            *(self._kernels, q, cache.layers[layer], rows.block_tables, rows.context_lens),
            scale=self.shape.scale,
            sketches=cache.sketches[layer] if rule.selector == "sketch" else None,
            selection=rows.selection,
            seed=layer_seed(rule, layer),
        )

    def _attend_rows(
        self,
        cache: DeviceKV,
        layer: int,
        q: torch.Tensor,
        rows: DecodeRows,
        selected: SelectedBlocks | None,
        *,
        want_mass: bool,
    ) -> DecodeOutput:
        return decode_attention(
            *(self._kernels, q, cache.layers[layer], rows.block_tables, rows.context_lens),
            scale=self.shape.scale,
            window=self.shape.window,
            selected=selected,
            want_block_mass=want_mass,
        )
