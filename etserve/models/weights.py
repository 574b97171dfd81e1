"""Checkpoints under one set of names, so that a decoder is built without knowing file format or architecture."""

from typing import Protocol

import torch

# Canonical names: embedding.weight, final_norm.weight, head.weight, and for each layer i
# layers.{i}.{input_norm|q|k|v|o|post_norm|gate|up|down|q_norm|k_norm}.{weight|bias}. Matrices are [out, in].


class WeightSource(Protocol):
    """An opened checkpoint. Tensors are read when asked for, one at a time, so that loading never holds two models."""

    dtype: torch.dtype  # of the checkpoint; bfloat16 where it is quantised
    quantization: str | None  # "Q4_1", ... for GGUF
    num_parameters: int

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor, dequantised and un-permuted. Raises ModelError naming file and tensor."""
