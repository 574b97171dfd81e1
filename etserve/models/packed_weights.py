"""A model's weights as the native decoder wants them: packed once, at load, floats or quantised blocks."""

from typing import Any

import torch

from etserve.kernels import native
from etserve.kernels.matrix import PackedMatrix
from etserve.kernels.memory import Arena, aligned
from etserve.kernels.quant import QuantMatrix
from etserve.models.types import DecoderSpec
from etserve.models.weight_formats import (
    BlockSource,
    MatrixPlan,
    all_matrices,
    plan_head,
    plan_layer,
    plan_qkv,
    plan_table,
)
from etserve.models.weights import WeightSource

_cpu = native.module()


class PackedWeights:
    """Every tensor of a model, read and packed one at a time into one arena. The native decoder points into it."""

    def __init__(
        self, spec: DecoderSpec, weights: WeightSource, dtype: torch.dtype, blocks: BlockSource | None = None
    ) -> None:
        """`blocks`: where quantised matrices come from; the others are read from `weights` as `dtype`."""
        self._spec, self._source, self._dtype, self._blocks = spec, weights, dtype, blocks
        plans = list(all_matrices(spec, blocks))
        # Floats of 16 bits decide what the activations are; quantised matrices take either.
        is_narrow = dtype == torch.bfloat16 and any(plan.kind is None for plan in plans)
        self._activation = torch.bfloat16 if is_narrow else torch.float32
        self._arena = Arena(sum(aligned(plan.num_bytes(dtype)) for plan in plans))
        self._kept: list[torch.Tensor] = []  # norms and biases, f32
        self.layers = [self._layer(index) for index in range(spec.num_layers)]
        self.final_norm = self._vector("final_norm.weight")
        # Tied: embeddings are read from the packed head, which is held once.
        table = plan_table(spec, blocks)
        self.table = None if table is None else self._packed(table)
        is_float = not spec.tied_head and table is None
        self.embedding = weights.tensor("embedding.weight", dtype) if is_float else None
        self.head = self._packed(plan_head(spec, blocks))
        # What a step reads: of the table only rows.
        read = sum(plan.num_bytes(dtype) for plan in plans) - (self.table.num_bytes if self.table else 0)
        self.num_bytes = read + sum(t.numel() * 4 for t in self._kept)

    def _layer(self, index: int) -> Any:
        qkv = [self._packed(plan).handle for plan in plan_qkv(self._spec, index, self._blocks)]
        matrices = {
            name: self._packed(plan).handle for name, plan in plan_layer(self._spec, index, self._blocks).items()
        }
        name = f"layers.{index}"
        return _cpu.LayerWeights(
            qkv=qkv,
            **matrices,
            input_norm=self._vector(f"{name}.input_norm.weight").data_ptr(),
            post_norm=self._vector(f"{name}.post_norm.weight").data_ptr(),
            q_norm=self._vector(f"{name}.q_norm.weight").data_ptr() if self._spec.qk_norm else 0,
            k_norm=self._vector(f"{name}.k_norm.weight").data_ptr() if self._spec.qk_norm else 0,
        )

    def _packed(self, plan: MatrixPlan) -> PackedMatrix | QuantMatrix:
        """Read and pack the parts, with their biases where the checkpoint has them."""
        packed = self._empty(plan)
        first = 0
        for index, (part, rows) in enumerate(plan.parts):
            place = {"half": index} if plan.paired else {"first": first}
            packed.pack(self._read(plan, f"{part}.weight"), **place)
            first += rows
        return packed

    def _read(self, plan: MatrixPlan, name: str) -> torch.Tensor:
        if plan.kind is None or self._blocks is None:
            return self._source.tensor(name, self._dtype)
        return self._blocks.blocks(name)

    def _empty(self, plan: MatrixPlan) -> PackedMatrix | QuantMatrix:
        shape, memory, bias = (plan.num_outputs, plan.num_inputs), self._memory(plan), self._bias(plan)
        if plan.kind is None:
            return PackedMatrix(*shape, self._dtype, paired=plan.paired, bias=bias, memory=memory)
        return QuantMatrix(*shape, plan.kind, paired=plan.paired, bias=bias, memory=memory, activation=self._activation)

    def _memory(self, plan: MatrixPlan) -> torch.Tensor:
        return self._arena.take(plan.num_bytes(self._dtype))

    def _bias(self, plan: MatrixPlan) -> torch.Tensor | None:
        if not self._source.has(f"{plan.parts[0][0]}.bias"):
            return None
        bias = torch.cat([self._source.tensor(f"{part}.bias", torch.float32) for part, _ in plan.parts])
        return self._keep(bias.view(2, plan.num_outputs) if plan.paired else bias)

    def _vector(self, name: str) -> torch.Tensor:
        return self._keep(self._source.tensor(name, torch.float32))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor
