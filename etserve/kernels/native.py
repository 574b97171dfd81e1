"""The native module etserve._cpu: whether it is there, what it runs on. Importing this imports torch first."""

import importlib
import importlib.util
from typing import Any

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum DType of csrc/cpu/kernels.h
KV_DTYPE_CODES = {**DTYPE_CODES, torch.int8: 32}
# The AVX-512 set needs, and uses, BF16.
_BACKENDS = {"generic": "generic", "avx2": "avx2", "avx512": "avx512_bf16"}


def is_available() -> bool:
    """Whether csrc is built for this Python."""
    return importlib.util.find_spec("etserve._cpu") is not None


def module() -> Any:
    """The native module. Raises ImportError if it is not built, or if ETSERVE_ISA names no instruction set."""
    return importlib.import_module("etserve._cpu")


def isa() -> str:
    """The instruction set in use: generic, avx2 or avx512."""
    return str(module().isa())


def backend_name() -> str:
    """For logs and ModelInfo, such as "native-cpu/avx512_bf16"."""
    return f"native-cpu/{_BACKENDS[isa()]}"


def set_num_threads(count: int) -> None:
    """Give the native kernels `count` threads, the caller's included; not while they run."""
    module().set_num_threads(count)


def num_threads() -> int:
    return int(module().num_threads())


def measure_bandwidth(num_bytes: int = 1 << 28, seconds: float = 0.5) -> float:
    """Bytes a second that the threads read from a buffer far larger than the caches: the ceiling of small batches."""
    return float(module().measure_bandwidth(num_bytes, seconds))


def measure_matrix_rate(dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s of dot products from registers, in f32 or bf16: the ceiling of large batches."""
    return float(module().measure_matrix_rate(DTYPE_CODES[dtype], seconds))
