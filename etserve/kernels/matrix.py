"""Matrix products over packed weights: y[M, N] = x[M, K] W[N, K]^T (+ bias), f32 sums in one fixed order.

A row's result does not depend on its batch, bit for bit. Layouts: csrc/cpu/matrix.h.
"""

import torch

from etserve.kernels import native
from etserve.kernels.checks import check_tensor
from etserve.kernels.memory import zeros

_PANEL = 16  # outputs side by side in a vector register
_STORE, _ADD, _SILU_MUL = 0, 1, 2  # enum Epilogue of csrc/cpu/matrix.h


def activation_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """What the products round their inputs to: bf16 for bf16 weights, else f32."""
    return torch.bfloat16 if weight_dtype == torch.bfloat16 else torch.float32


def packed_bytes(num_outputs: int, num_inputs: int, dtype: torch.dtype, *, paired: bool = False) -> int:
    """Bytes of a packed matrix: outputs padded to 16, inputs (bf16) to 2."""
    panels = -(-num_outputs // _PANEL) * (2 if paired else 1)
    depth = num_inputs + (num_inputs % 2 if dtype == torch.bfloat16 else 0)
    return panels * _PANEL * depth * dtype.itemsize


class NativeMatrix:
    """A weight matrix [num_outputs, num_inputs] that the native kernels multiply by, whatever its format.

    Paired: two such matrices (gate and up), whose product is silu(x Gate^T) * (x Up^T).
    """

    def __init__(
        self,
        code: int,
        num_outputs: int,
        num_inputs: int,
        num_bytes: int,
        *,
        activation: torch.dtype,
        paired: bool,
        bias: torch.Tensor | None,
        memory: torch.Tensor | None,
    ) -> None:
        """`code`: enum DType of csrc/cpu/kernels.h; `activation`: what inputs are rounded to and silu * mul comes in.

        Zeroed until it is packed. `bias`: f32 [N], [2, N] if paired; `memory`: zeroed uint8 [num_bytes].
        """
        self._memory = zeros(num_bytes) if memory is None else memory
        self._bias = bias
        address = check_tensor("memory", self._memory, torch.uint8, (num_bytes,))
        bias_shape = (2, num_outputs) if paired else (num_outputs,)
        bias_address = 0 if bias is None else check_tensor("bias", bias, torch.float32, bias_shape)
        self.num_outputs, self.num_inputs, self.is_paired = num_outputs, num_inputs, paired
        self.num_bytes, self.activation = num_bytes, activation
        self.handle = native.module().make_matrix(
            *(code, num_outputs, num_inputs, paired, address, bias_address, native.DTYPE_CODES[activation])
        )

    def row(self, index: int) -> torch.Tensor:
        """One row as f32 [num_inputs]: an embedding, where the head is tied to it."""
        out = torch.empty(self.num_inputs, dtype=torch.float32)
        native.module().unpack_row(self.handle, index, out.data_ptr())
        return out


class PackedMatrix(NativeMatrix):
    """One in bf16, f16 or f32."""

    def __init__(
        self,
        num_outputs: int,
        num_inputs: int,
        dtype: torch.dtype,
        *,
        paired: bool = False,
        bias: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        """See NativeMatrix; `memory`: [packed_bytes]."""
        super().__init__(
            native.DTYPE_CODES[dtype],
            num_outputs,
            num_inputs,
            packed_bytes(num_outputs, num_inputs, dtype, paired=paired),
            activation=activation_dtype(dtype),
            paired=paired,
            bias=bias,
            memory=memory,
        )
        self.dtype = dtype

    def pack(self, weight: torch.Tensor, *, first: int = 0, half: int = 0) -> None:
        """Copy `weight` [rows, num_inputs] to the rows from `first` on; half 1: of the second matrix of a pair."""
        address = check_tensor("weight", weight, self.dtype, (len(weight), self.num_inputs))
        native.module().pack_rows(self.handle, address, len(weight), first, half)


def pack(weight: torch.Tensor, up: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> PackedMatrix:
    """Pack [N, K], or a pair of them; `bias` f32 [N], or [2, N] for a pair."""
    packed = PackedMatrix(len(weight), weight.shape[1], weight.dtype, paired=up is not None, bias=bias)
    packed.pack(weight)
    if up is not None:
        if up.shape != weight.shape:
            raise ValueError(f"a pair needs two equal shapes, got {list(weight.shape)} and {list(up.shape)}")
        packed.pack(up, half=1)
    return packed


def linear(x: torch.Tensor, weight: NativeMatrix) -> torch.Tensor:
    """f32 [M, K] -> x W^T + bias, f32 [M, N]; x is rounded to the matrix's activation first, or to 8 bits."""
    return _run(x, weight, torch.empty(len(x), weight.num_outputs), _STORE)


def linear_add_(out: torch.Tensor, x: torch.Tensor, weight: NativeMatrix) -> torch.Tensor:
    """Add x W^T + bias to `out`, f32 [M, N], and return it."""
    return _run(x, weight, out, _ADD)


def linear_silu_mul(x: torch.Tensor, weight: NativeMatrix) -> torch.Tensor:
    """f32 [M, K] -> silu(x Gate^T) * (x Up^T), [M, N] of the matrix's activation."""
    return _run(x, weight, torch.empty(len(x), weight.num_outputs, dtype=weight.activation), _SILU_MUL)


def _run(x: torch.Tensor, weight: NativeMatrix, out: torch.Tensor, epilogue: int) -> torch.Tensor:
    if weight.is_paired != (epilogue == _SILU_MUL):
        raise ValueError("a paired matrix is for linear_silu_mul, and only for it")
    out_dtype = weight.activation if weight.is_paired else torch.float32
    x_address = check_tensor("x", x, torch.float32, (len(x), weight.num_inputs))
    out_address = check_tensor("out", out, out_dtype, (len(x), weight.num_outputs))
    if len(x):
        native.module().matmul(x_address, len(x), weight.handle, epilogue, out_address, weight.num_outputs)
    return out
