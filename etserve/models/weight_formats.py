"""In which number format each matrix of a model is held and multiplied. Reads names and shapes only, no weights."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from etserve.kernels.matrix import packed_bytes
from etserve.kernels.quant import BLOCK, Format, Rounded, quantise, quantised_bytes
from etserve.models.types import DecoderSpec
from etserve.models.weights import WeightSource


class BlockSource(Protocol):
    """Matrices as quantised blocks that the native kernels run. Names as in WeightSource, ".weight" included."""

    def block_format(self, name: str) -> Format | None:
        """None: the matrix is only to be had as floats."""

    def blocks(self, name: str) -> torch.Tensor:
        """ggml blocks, uint8 [rows, bytes], un-permuted. Raises ModelError naming file and tensor."""


class QuantisedAtLoad:
    """A BlockSource: a checkpoint's own matrices, rounded to `kind` one by one."""

    def __init__(self, weights: WeightSource, spec: DecoderSpec, kind: Rounded) -> None:
        self._weights, self._spec, self._kind = weights, spec, kind

    def block_format(self, name: str) -> Format | None:
        """None where the rows do not divide into blocks."""
        return self._kind if _num_inputs(self._spec, name) % BLOCK == 0 else None

    def blocks(self, name: str) -> torch.Tensor:
        return quantise(self._weights.tensor(name, torch.float32), self._kind)


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """One packed matrix: its parts lie one below the other or, paired, are gate and up."""

    parts: tuple[tuple[str, int], ...]  # canonical name without .weight, rows
    num_inputs: int
    kind: Format | None  # None: floats
    paired: bool = False

    @property
    def num_outputs(self) -> int:
        """Of one half, if paired."""
        return self.parts[0][1] if self.paired else sum(rows for _, rows in self.parts)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """`dtype`: of matrices that are floats."""
        if self.kind is None:
            return packed_bytes(self.num_outputs, self.num_inputs, dtype, paired=self.paired)
        return quantised_bytes(self.num_outputs, self.num_inputs, self.kind, paired=self.paired)


def plan_layer(spec: DecoderSpec, index: int, blocks: BlockSource | None) -> dict[str, MatrixPlan]:
    """The packed matrices of a layer but for q, k and v, by the name of LayerWeights (csrc/cpu/decoder.h)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    parts = {
        "o": (("o", hidden),),
        "gate_up": (("gate", inner), ("up", inner)),
        "down": (("down", hidden),),
    }
    named = {key: tuple((f"layers.{index}.{part}", rows) for part, rows in value) for key, value in parts.items()}
    return {key: _plan(spec, value, blocks, paired=key == "gate_up") for key, value in named.items()}


def plan_qkv(spec: DecoderSpec, index: int, blocks: BlockSource | None) -> list[MatrixPlan]:
    """q, k and v of a layer, in one matrix as far as neighbours are of one format: they often are not in a file."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts = [(f"layers.{index}.{name}", rows) for name, rows in (("q", queries), ("k", keys), ("v", keys))]
    runs = groupby(parts, lambda part: None if blocks is None else blocks.block_format(f"{part[0]}.weight"))
    return [_plan(spec, tuple(run), blocks) for _, run in runs]


def plan_head(spec: DecoderSpec, blocks: BlockSource | None) -> MatrixPlan:
    """The matrix of the logits; tied, embeddings are read from it as well."""
    return _plan(spec, (("embedding" if spec.tied_head else "head", spec.vocab_size),), blocks)


def plan_table(spec: DecoderSpec, blocks: BlockSource | None) -> MatrixPlan | None:
    """The embeddings, where they are packed in a matrix of their own; None: the head has them, or they are floats."""
    plan = _plan(spec, (("embedding", spec.vocab_size),), blocks)
    return None if spec.tied_head or plan.kind is None else plan


def all_matrices(spec: DecoderSpec, blocks: BlockSource | None) -> Iterator[MatrixPlan]:
    """Everything that is packed, in the order in which it is read."""
    for index in range(spec.num_layers):
        yield from plan_qkv(spec, index, blocks)
        yield from plan_layer(spec, index, blocks).values()
    table = plan_table(spec, blocks)
    if table is not None:
        yield table
    yield plan_head(spec, blocks)


def held_bytes(spec: DecoderSpec, dtype: torch.dtype, blocks: BlockSource | None) -> int:
    """What the matrices take once they are packed, an embedding of its own included."""
    packed = sum(plan.num_bytes(dtype) for plan in all_matrices(spec, blocks))
    is_apart = not spec.tied_head and plan_table(spec, blocks) is None
    return packed + (spec.vocab_size * spec.hidden_size * dtype.itemsize if is_apart else 0)


def describe(spec: DecoderSpec, dtype: torch.dtype, blocks: BlockSource | None) -> str:
    """What runs, as ModelInfo.dtype says it: "bfloat16", "q8_0", "q4_1+q8_0"; by descending number of weights."""
    counts: Counter[str] = Counter()
    for plan in all_matrices(spec, blocks):
        size = plan.num_outputs * plan.num_inputs * (2 if plan.paired else 1)
        counts[plan.kind or str(dtype).removeprefix("torch.")] += size
    return "+".join(name for name, _ in counts.most_common())


def _plan(
    spec: DecoderSpec, parts: tuple[tuple[str, int], ...], blocks: BlockSource | None, *, paired: bool = False
) -> MatrixPlan:
    """A pair of different formats runs as floats: it is multiplied in one piece."""
    kinds = {None if blocks is None else blocks.block_format(f"{name}.weight") for name, _ in parts}
    kind = kinds.pop() if len(kinds) == 1 else None
    return MatrixPlan(parts, _num_inputs(spec, f"{parts[0][0]}.weight"), kind, paired)


def _num_inputs(spec: DecoderSpec, name: str) -> int:
    part = name.split(".")[-2]
    return {"o": spec.num_heads * spec.head_dim, "down": spec.intermediate_size}.get(part, spec.hidden_size)
