"""The decoder on the native CPU kernels: weights packed once, one native call a step.

Importing this raises ImportError where csrc is not built. No output depends on its batch mates, bit for bit.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.config import BLOCK_SIZE
from etserve.kernels import native
from etserve.kernels.memory import zeros
from etserve.kernels.reference_attention import GROUPED, kv_head_bytes, kv_head_size
from etserve.kernels.selection import AttentionCounts
from etserve.kernels.sketch import native_rule, sketch_bytes, sketch_signs
from etserve.models.packed_weights import PackedWeights
from etserve.models.types import DecoderSpec, KVCache
from etserve.models.weight_formats import BlockSource
from etserve.models.weights import WeightSource

_cpu = native.module()


@dataclass(frozen=True, slots=True)
class NativeKV:
    """All layers' blocks: [layer, block, keys and values, KV head, kv_head_size], layout of csrc/cpu/kernels.h."""

    tensor: torch.Tensor
    num_blocks: int
    num_bytes: int
    sketches: torch.Tensor | None = None  # uint8 [layer, block, KV head, sketch_bytes]


class NativeDecoder:
    """Implements Decoder."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        rope_tables: tuple[torch.Tensor, torch.Tensor],
        sketch_bits: int = 0,
        blocks: BlockSource | None = None,
    ) -> None:
        """`dtype` of weights that are not quantised: bfloat16, float16 or float32; `kv_dtype`: one of those or int8.

        `rope_tables`: cos and sin, f32 [max_len, rotary_dim / 2]. `sketch_bits`: per dimension of each key's sketch,
        1 or 2; 0: no sketches, and only the placebos can skip. `blocks`: where quantised matrices come from; None: all
        are floats. Raises ModelError as the weights are read, ValueError for shapes that the kernels do not take.
        """
        if kv_dtype not in GROUPED:
            raise ValueError(f"the KV cache is bfloat16, float16, float32 or int8, not {kv_dtype}")
        self.spec = spec
        self.backend = native.backend_name()
        self.attention_counts: AttentionCounts | None = None
        self._kv_dtype = kv_dtype
        self._sketch_bits = sketch_bits
        self._sketch_bytes = sketch_bytes(spec.head_dim, sketch_bits) if sketch_bits else 0  # a block and KV head
        self._signs = sketch_signs(spec.head_dim)
        self._tables = tuple(table.to(torch.float32).contiguous() for table in rope_tables)
        self._weights = PackedWeights(spec, weights, dtype, blocks)
        self.weight_bytes = self._weights.num_bytes
        embedding, table = self._weights.embedding, self._weights.table
        self._decoder = _cpu.Decoder(
            shape=self._shape(),
            layers=self._weights.layers,
            final_norm=self._weights.final_norm.data_ptr(),
            head=self._weights.head.handle,
            embedding=0 if embedding is None else embedding.data_ptr(),
            embedding_type=native.DTYPE_CODES[dtype],
            cos=self._tables[0].data_ptr(),
            sin=self._tables[1].data_ptr(),
            table=None if table is None else table.handle,
        )

    def kv_bytes_per_block(self) -> int:
        spec = self.spec
        keys_and_values = 2 * kv_head_bytes(spec.head_dim, self._kv_dtype)
        return spec.num_layers * spec.num_kv_heads * (keys_and_values + self._sketch_bytes)

    def allocate_cache(self, num_blocks: int) -> KVCache:
        spec = self.spec
        heads = (spec.num_layers, num_blocks, spec.num_kv_heads)
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, kv_head_size(spec.head_dim, self._kv_dtype))
        cache = zeros(math.prod(shape) * self._kv_dtype.itemsize).view(self._kv_dtype).view(shape)
        size = self._sketch_bytes
        sketches = zeros(math.prod(heads) * size).view(*heads, size) if size else None
        return NativeKV(cache, num_blocks, num_blocks * self.kv_bytes_per_block(), sketches)

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """See Decoder.forward. Raises ValueError, before anything is written, if the batch points out of range."""
        if not isinstance(cache, NativeKV):
            raise TypeError("the cache is another decoder's")
        counts = _empty_counts(self.spec, batch)
        hidden = torch.empty(len(batch.logit_rows), self.spec.hidden_size)
        self._decoder.forward(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            batch.logit_rows,
            cache.tensor.data_ptr(),
            cache.num_blocks,
            hidden.data_ptr(),
            sketches=0 if cache.sketches is None else cache.sketches.data_ptr(),
            sketch_bits=self._sketch_bits,
            signs=self._signs.data_ptr(),
            selection=_native_selection(batch, counts),
            block_mass=0 if counts is None or counts.block_mass is None else counts.block_mass.ctypes.data,
        )
        self.attention_counts = counts
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Decoder.logits."""
        rows = hidden.to(torch.float32).contiguous()
        if rows.dim() != 2 or rows.shape[1] != self.spec.hidden_size:
            raise ValueError(f"hidden must be [rows, {self.spec.hidden_size}], got {list(rows.shape)}")
        out = torch.empty(len(rows), self.spec.vocab_size)
        self._decoder.logits(rows.data_ptr(), len(rows), out.data_ptr())
        return out

    def measure_phases(self, is_on: bool) -> None:
        """Time the phases of each call from now on, or no more; it costs about a microsecond a layer."""
        self._decoder.measure_phases(is_on)

    def take_phases(self) -> dict[str, float]:
        """Seconds by phase, summed over the calls since the last time that this was asked."""
        found: dict[str, float] = self._decoder.take_phases()
        return found

    def _shape(self) -> Any:
        spec = self.spec
        return _cpu.DecoderShape(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=2 * self._tables[0].shape[1],
            vocab=spec.vocab_size,
            max_position=len(self._tables[0]),
            window=spec.sliding_window,
            eps=spec.rms_norm_eps,
            kv_type=native.KV_DTYPE_CODES[self._kv_dtype],
        )


def _empty_counts(spec: DecoderSpec, batch: StepBatch) -> AttentionCounts | None:
    """Counts of a dense step, to be overwritten; None if nobody wants any."""
    if batch.selection is None and not batch.wants_block_mass:
        return None
    blocks = -(-batch.context_lens.astype(np.int64) // BLOCK_SIZE) * spec.num_layers * spec.num_kv_heads
    mass = np.zeros(batch.block_tables.shape, np.float32) if batch.wants_block_mass else None
    return AttentionCounts(blocks.copy(), blocks, np.zeros(len(blocks), np.float32), mass)


def _native_selection(batch: StepBatch, counts: AttentionCounts | None) -> Any:
    """The step's selection; it points into `batch` and `counts`. Raises ValueError if its arrays do not fit."""
    selection = batch.selection
    if selection is None or counts is None:
        return None
    selection.check(*batch.block_tables.shape)
    return _cpu.StepSelection(
        rule=native_rule(selection.rule),
        epsilon=selection.epsilon.ctypes.data,
        is_protected=0 if selection.protected is None else selection.protected.ctypes.data,
        read_blocks=counts.read_blocks.ctypes.data,
        missing=counts.missing_mass.ctypes.data,
    )
