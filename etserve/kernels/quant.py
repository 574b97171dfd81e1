"""Matrix products over quantised weights, run from ggml's own blocks (formats: csrc/cpu/quant.h).

Activations are rounded to 8 bits in blocks of 32 on the way; sums of a block are exact, blocks are added in order, so a
row's result does not depend on its batch, bit for bit.
"""

from typing import Literal

import torch

from etserve.kernels import native
from etserve.kernels.checks import check_tensor
from etserve.kernels.memory import zeros

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
_STORE, _ADD, _SILU_MUL = 0, 1, 2  # enum Epilogue of csrc/cpu/matrix.h


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


class QuantMatrix:
    """A quantised weight matrix [num_outputs, num_inputs], laid out for the kernels.

    Paired: two such matrices (gate and up), whose product is silu(x Gate^T) * (x Up^T).
    """

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
        """Zeroed until `pack` fills it. `bias`: f32 [N], [2, N] if paired; `memory`: zeroed uint8 [quantised_bytes].

        `activation`: float32 or bfloat16, what the native decoder hands in and takes from silu * mul.
        """
        if num_inputs % BLOCK_WEIGHTS[kind]:
            raise ValueError(f"{kind} takes inputs in blocks of {BLOCK_WEIGHTS[kind]}, got {num_inputs}")
        size = quantised_bytes(num_outputs, num_inputs, kind, paired=paired)
        self._memory = zeros(size) if memory is None else memory
        self._bias = bias
        address = check_tensor("memory", self._memory, torch.uint8, (size,))
        bias_shape = (2, num_outputs) if paired else (num_outputs,)
        bias_address = 0 if bias is None else check_tensor("bias", bias, torch.float32, bias_shape)
        self.num_outputs, self.num_inputs, self.kind, self.is_paired = num_outputs, num_inputs, kind, paired
        self.num_bytes = size
        self.handle = native.module().make_matrix(
            *(_CODES[kind], num_outputs, num_inputs, paired, address, bias_address, native.DTYPE_CODES[activation])
        )

    def pack(self, blocks: torch.Tensor, *, first: int = 0, half: int = 0) -> None:
        """Copy ggml blocks, uint8 [rows, bytes], to the rows from `first` on; half 1: of up."""
        row_bytes = self.num_inputs // BLOCK_WEIGHTS[self.kind] * BLOCK_BYTES[self.kind]
        address = check_tensor("blocks", blocks, torch.uint8, (len(blocks), row_bytes))
        native.module().pack_rows(self.handle, address, len(blocks), first, half)

    def row(self, index: int) -> torch.Tensor:
        """One row as f32 [num_inputs]: an embedding, where the head is tied to it."""
        out = torch.empty(self.num_inputs, dtype=torch.float32)
        native.module().unpack_row(self.handle, index, out.data_ptr())
        return out


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


def linear(x: torch.Tensor, weight: QuantMatrix) -> torch.Tensor:
    """f32 [M, K] -> x W^T + bias, f32 [M, N]."""
    return _run(x, weight, torch.empty(len(x), weight.num_outputs), _STORE)


def linear_add_(out: torch.Tensor, x: torch.Tensor, weight: QuantMatrix) -> torch.Tensor:
    """Add x W^T + bias to `out`, f32 [M, N], and return it."""
    return _run(x, weight, out, _ADD)


def linear_silu_mul(x: torch.Tensor, weight: QuantMatrix) -> torch.Tensor:
    """f32 [M, K] -> silu(x Gate^T) * (x Up^T), f32 [M, N]."""
    return _run(x, weight, torch.empty(len(x), weight.num_outputs), _SILU_MUL)


def _run(x: torch.Tensor, weight: QuantMatrix, out: torch.Tensor, epilogue: int) -> torch.Tensor:
    if weight.is_paired != (epilogue == _SILU_MUL):
        raise ValueError("a paired matrix is for linear_silu_mul, and only for it")
    x_address = check_tensor("x", x, torch.float32, (len(x), weight.num_inputs))
    out_address = check_tensor("out", out, torch.float32, (len(x), weight.num_outputs))
    if len(x):
        native.module().matmul(x_address, len(x), weight.handle, epilogue, out_address, weight.num_outputs)
    return out
