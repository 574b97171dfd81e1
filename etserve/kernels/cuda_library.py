"""One loaded library of CUDA kernels: the launch, and what must hold of a tensor before its address is used.

Loading needs no driver. Tensors are taken as they lie on the device: nothing here copies to the host or waits.
"""

import ctypes
from pathlib import Path

import torch

from etserve.kernels import cuda_abi
from etserve.kernels.native import DTYPE_CODES


class CudaError(RuntimeError):
    """A kernel could not be launched."""


class CudaLibrary:
    """The device's library, or the emulator's, which takes CPU tensors."""

    def __init__(self, library: Path) -> None:
        self._library = cuda_abi.open_library(library)
        self.device_type = "cpu" if self._library.etserve_cuda_is_emulated() else "cuda"

    def set_emulation_seed(self, seed: int) -> None:
        """Choose the emulator's order of blocks, warps and lanes; nothing on a device."""
        self._library.etserve_cuda_set_emulation_seed(seed)

    def scratch(self, name: str, near: torch.Tensor, *sizes: int) -> torch.Tensor:
        """What the launcher `name` wants beside its tensors for such sizes, uint8 [bytes]."""
        return near.new_empty(self.size_of(f"{name}_scratch_bytes", *sizes), dtype=torch.uint8)

    def size_of(self, name: str, *sizes: int) -> int:
        """The answer of the library's function `name` on sizes."""
        return int(getattr(self._library, f"etserve_cuda_{name}")(*sizes))

    def launch(self, name: str, near: torch.Tensor, *fields: float) -> None:
        """Launch on the current stream of the device that `near` lies on."""
        launcher = getattr(self._library, f"etserve_cuda_{name}")
        arguments = ctypes.byref(cuda_abi.LAUNCHERS[name](*fields))
        if self.device_type == "cpu":
            failure = launcher(arguments, None)
        else:
            with torch.cuda.device(near.device):
                failure = launcher(arguments, torch.cuda.current_stream().cuda_stream)
        if failure != 0:
            raise CudaError(f"{name}: {self._library.etserve_cuda_error_string(failure).decode()}")

    def check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Return the address of a contiguous tensor on the library's kind of device. Raises ValueError otherwise."""
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device.type != self.device_type:
            raise ValueError(f"{name} must be on {self.device_type}, got {tensor.device}")
        return tensor.data_ptr()

    def check_rows(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int], stride: int
    ) -> int:
        """As check, of a matrix whose rows are contiguous and start `stride` elements apart."""
        is_regular = tensor.ndim == 2 and tensor.stride(1) == 1 and (len(tensor) < 2 or tensor.stride(0) == stride)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not is_regular:
            raise ValueError(
                f"{name} must be {dtype} {list(shape)} in rows {stride} apart, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device.type != self.device_type:
            raise ValueError(f"{name} must be on {self.device_type}, got {tensor.device}")
        return tensor.data_ptr()


def dtype_code(tensor: torch.Tensor) -> int:
    """The ABI's number of the tensor's dtype. Raises ValueError where no kernel takes it."""
    if tensor.dtype not in DTYPE_CODES:
        raise ValueError(f"no kernel for {tensor.dtype}")
    return DTYPE_CODES[tensor.dtype]
