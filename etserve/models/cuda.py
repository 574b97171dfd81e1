"""The decoder on a GPU: torch multiplies matrices, our kernels do the rest (kernels/cuda.py).

On the emulator's library everything lies on the CPU, so that tests run this very code without a GPU. torch chooses its
matrix kernels by shape: unlike the native decoder's, a row may differ in its last bits with its batch mates.
"""

import torch
from torch.nn.functional import embedding, linear

from etserve.attention.backend import AttentionShape
from etserve.attention.batch import StepBatch
from etserve.attention.cuda import CudaAttention, DeviceKV
from etserve.attention.device_reads import DeviceReads
from etserve.attention.device_step import DeviceStep, check_step, upload
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.native import DTYPE_CODES
from etserve.kernels.selection import AttentionCounts
from etserve.models.decode_graphs import Capturer, DecodeGraphs
from etserve.models.device_weights import DeviceLayer, DeviceWeights
from etserve.models.types import DecoderSpec, KVCache
from etserve.models.weights import WeightSource


class CudaDecoder:
    """Implements Decoder, but for the promise of equal bits in any company."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        rope_tables: tuple[torch.Tensor, torch.Tensor],
        sketch_bits: int = 0,
        *,
        kernels: CudaKernels,
        capturer: Capturer | None = None,
    ) -> None:
        """`dtype` of weights, and `kv_dtype` the same. `rope_tables`: cos and sin, f32 [max_len, rotary_dim / 2].

        `capturer`: of decode steps as graphs; None: every step is launched anew.
        Raises ModelError as the weights are read, ValueError for shapes and dtypes that the kernels do not take.
        """
        if dtype not in DTYPE_CODES or kv_dtype != dtype:
            raise ValueError(f"weights of {dtype} with a KV cache of {kv_dtype}: both must be of one dtype")
        self.spec = spec
        self._kernels, self._dtype = kernels, dtype
        self._device = torch.device(kernels.device_type)
        shape = AttentionShape(
            spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, spec.sliding_window
        )
        self._attention = CudaAttention(shape, kv_dtype, kernels, sketch_bits=sketch_bits)
        where = "emulated" if kernels.device_type == "cpu" else torch.cuda.get_device_name()
        self.backend = f"cuda/{where}, prefill {self._attention.prefill_name}"
        self._weights = DeviceWeights(spec, weights, dtype, self._device)
        self.weight_bytes = self._weights.num_bytes
        cos, sin = (table.to(self._device, torch.float32).contiguous() for table in rope_tables)
        self._tables = cos, sin
        self._last: tuple[StepBatch, DeviceReads] | None = None
        self.graphs = None if capturer is None else DecodeGraphs(capturer, self._run, self._device)

    @property
    def attention_counts(self) -> AttentionCounts | None:
        """See Decoder. Waits for the device."""
        if self._last is None:
            return None
        batch, reads = self._last
        return reads.counts(batch, self._attention.shape)

    def kv_bytes_per_block(self) -> int:
        return self._attention.bytes_per_block()

    def allocate_cache(self, num_blocks: int) -> KVCache:
        return self._attention.allocate(num_blocks)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """See Decoder.forward; on the device. Raises ValueError before a write if the batch points out of range."""
        if not isinstance(cache, DeviceKV):
            raise TypeError("the cache is another decoder's")
        self._check(batch, cache)
        if self.graphs is not None and self.graphs.takes(batch):
            self._last = None
            return self.graphs.forward(batch, cache)
        reads = DeviceReads()
        self._last = None if batch.selection is None and not batch.wants_block_mass else (batch, reads)
        return self._run(upload(batch, self._device), cache, reads)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Decoder.logits; on the device."""
        return linear(hidden.to(self._device, self._dtype), self._weights.head).float()

    def _check(self, batch: StepBatch, cache: DeviceKV) -> None:
        check_step(batch, cache.num_blocks, len(self._tables[0]), self.spec.vocab_size)
        if batch.selection is None:
            return
        if self.spec.sliding_window:
            raise ValueError("nothing can be skipped in a sliding window")
        if batch.selection.rule.selector == "sketch" and not cache.sketches:
            raise ValueError("nothing can be skipped without sketches")

    def _run(self, step: DeviceStep, cache: DeviceKV, reads: DeviceReads | None = None) -> torch.Tensor:
        """Launches only: nothing here waits for the device or looks at what lies there."""
        reads = DeviceReads() if reads is None else reads
        hidden = embedding(step.token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            q = self._write(layer, cache.layers[index], normed, step)
            self._attention.note_written(cache, index, step)
            attended = self._attention.attend(cache, index, q, step, reads)
            hidden = hidden + linear(attended, layer.o.weight, layer.o.bias)
            hidden = hidden + self._feed_forward(layer, self._norm(hidden, layer.post_norm))
        wanted = hidden if step.logit_rows is None else hidden[step.logit_rows]
        return self._norm(wanted, self._weights.final_norm).float()

    def _write(self, layer: DeviceLayer, kv: torch.Tensor, hidden: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """Write this step's keys and values; return the queries, [T, H, D]."""
        return self._kernels.rope_and_write(
            linear(hidden, layer.qkv.weight, layer.qkv.bias),
            step.positions,
            step.slots,
            self._tables,
            kv,
            self.spec.num_heads,
            layer.head_norms,
            self.spec.rms_norm_eps,
        )

    def _feed_forward(self, layer: DeviceLayer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = linear(hidden, layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=-1)
        return linear(self._kernels.silu_mul(gate, up), layer.down.weight, layer.down.bias)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(hidden, weight, self.spec.rms_norm_eps)
