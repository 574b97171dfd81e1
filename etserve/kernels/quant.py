"""Matrix products over quantised weights, run from ggml's own blocks (formats: csrc/cpu/quant.h).

Activations are rounded to 8 bits in blocks of 32 on the way; sums of a block are exact, blocks are added in order, so a
row's result does not depend on its batch, bit for bit.
"""

from typing import Literal

import torch

from etserve.kernels import native
from etserve.kernels.checks import check_tensor
from etserve.kernels.matrix import NativeMatrix

BLOCK = 32  # weights along K with one scale, of the formats that floats can be rounded to
Rounded = Literal["q8_0", "q4_0", "q4_1"]  # from floats, at load
Format = Literal[Rounded, "q4_k", "q5_k", "q6_k"]  # the last three from files only
# Of ggml's blocks: weights along K, and bytes.
BLOCK_WEIGHTS: dict[Format, int] = {"q8_0": 32, "q4_0": 32, "q4_1": 32, "q4_k": 256, "q5_k": 256, "q6_k": 256}
BLOCK_BYTES: dict[Format, int] = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q4_k": 144, "q5_k": 176, "q6_k": 210}

_PANEL = 16  # outputs side by side
# Of a record of 16 outputs: weights along K, and bytes.
_RECORDS: dict[Format, tuple[int, int]] = {
    "q8_0": (64, 1088),
    "q4_0": (64, 576),
    "q4_1": (64, 640),
    "q4_k": (256, 2368),
    "q5_k": (256, 2880),
    "q6_k": (256, 3392),
}
_CODES: dict[Format, int] = {name: code for code, name in enumerate(BLOCK_BYTES, start=3)}  # enum DType of kernels.h


def quantised_bytes(num_outputs: int, num_inputs: int, kind: Format, *, paired: bool = False) -> int:
    """Bytes of a packed matrix: outputs padded to 16, inputs to 64 (super-blocks: to 256)."""
    weights, num_bytes = _RECORDS[kind]
    return -(-num_outputs // _PANEL) * (2 if paired else 1) * -(-num_inputs // weights) * num_bytes


def quantise(weight: torch.Tensor, kind: Rounded) -> torch.Tensor:
    """Float [N, K] -> ggml blocks, uint8 [N, K / 32 * BLOCK_BYTES], rounded to the bits of the gguf package.

    Raises ValueError where K is no multiple of 32.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"{kind} takes rows in blocks of {BLOCK}, got {list(weight.shape)}")
    floats = weight.float().contiguous()
    blocks = torch.empty(len(floats), floats.shape[1] // BLOCK * BLOCK_BYTES[kind], dtype=torch.uint8)
    native.module().round_to_blocks(_CODES[kind], floats.data_ptr(), *floats.shape, blocks.data_ptr())
    return blocks


class QuantMatrix(NativeMatrix):
    """One in a quantised format."""

    def __init__(
        self,
        num_outputs: int,
        num_inputs: int,
        kind: Format,
        *,
        paired: bool = False,
        bias: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
        activation: torch.dtype = torch.float32,
    ) -> None:
        """See NativeMatrix; `memory`: [quantised_bytes], `activation`: float32 or bfloat16, before it is rounded."""
        if num_inputs % BLOCK_WEIGHTS[kind]:
            raise ValueError(f"{kind} takes inputs in blocks of {BLOCK_WEIGHTS[kind]}, got {num_inputs}")
        super().__init__(
            _CODES[kind],
            num_outputs,
            num_inputs,
            quantised_bytes(num_outputs, num_inputs, kind, paired=paired),
            activation=activation,
            paired=paired,
            bias=bias,
            memory=memory,
        )
        self.kind = kind

    def pack(self, blocks: torch.Tensor, *, first: int = 0, half: int = 0) -> None:
        """Copy ggml blocks, uint8 [rows, bytes], to the rows from `first` on; half 1: of up."""
        row_bytes = self.num_inputs // BLOCK_WEIGHTS[self.kind] * BLOCK_BYTES[self.kind]
        address = check_tensor("blocks", blocks, torch.uint8, (len(blocks), row_bytes))
        native.module().pack_rows(self.handle, address, len(blocks), first, half)


def pack(
    kind: Rounded, weight: torch.Tensor, up: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> QuantMatrix:
    """Quantise and pack float [N, K], or a pair of them; `bias` f32 [N], or [2, N] for a pair."""
    packed = QuantMatrix(len(weight), weight.shape[1], kind, paired=up is not None, bias=bias)
    packed.pack(quantise(weight, kind))
    if up is not None:
        if up.shape != weight.shape:
            raise ValueError(f"a pair needs two equal shapes, got {list(weight.shape)} and {list(up.shape)}")
        packed.pack(quantise(up, kind), half=1)
    return packed
