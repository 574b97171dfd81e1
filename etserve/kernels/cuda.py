"""The CUDA kernels as functions of tensors, through ctypes. The oracles: reference_rows, _elementwise, _attention.

`load()` finds the library that `pip install` built, where it did; neither that nor importing this needs a driver. The
same functions run the emulator's library on CPU tensors. Tensors are taken as they lie on the device: nothing here
copies to the host or waits.
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from etserve.kernels.checks import check_rope
from etserve.kernels.cuda_library import CudaLibrary, dtype_code
from etserve.kernels.native import DTYPE_CODES
from etserve.kernels.reference_attention import BLOCK_SIZE
from etserve.kernels.reference_rows import MAX_TOP

MAX_VOCAB = 1 << 20
MAX_HEAD_DIM = 256
LIBRARY = "libetserve_cuda.so"


@dataclass(frozen=True, slots=True)
class DeviceRowStats:
    """reference_rows.RowStats as tensors on the device."""

    log_sum_exp: torch.Tensor  # f32 [R]
    entropy: torch.Tensor  # f32 [R]
    varentropy: torch.Tensor  # f32 [R]
    argmax: torch.Tensor  # int32 [R]
    nonfinite: torch.Tensor  # int32 [R]
    top_values: torch.Tensor  # f32 [R, k]
    top_ids: torch.Tensor  # int32 [R, k]


@cache
def load() -> "CudaKernels | None":
    """The kernels of this installation, None where it was built without them."""
    places = [Path(__file__).parents[1] / LIBRARY]  # and, with an editable install, among the site packages
    for distribution in metadata.distributions(name="etserve"):
        places.append(Path(str(distribution.locate_file(f"etserve/{LIBRARY}"))))
    found = next((place for place in places if place.exists()), None)
    return None if found is None else CudaKernels(found)


class CudaKernels(CudaLibrary):
    """Methods raise ValueError for tensors that no kernel takes, CudaError if a launch fails."""

    def row_pass(self, logits: torch.Tensor, k: int) -> DeviceRowStats:
        """f32, bf16 or f16 [R, V], rows contiguous, V <= 2^20; k in 0 .. 64. See rows.row_pass."""
        rows, vocab = self._check_logits(logits)
        if not 0 <= k <= MAX_TOP:
            raise ValueError(f"k must be in 0 .. {MAX_TOP}, got {k}")
        floats = logits.new_empty((3, rows), dtype=torch.float32)
        ints = logits.new_empty((2, rows), dtype=torch.int32)
        top_values = logits.new_empty((rows, k), dtype=torch.float32)
        top_ids = logits.new_empty((rows, k), dtype=torch.int32)
        scratch = self.scratch("row_pass", logits, rows, vocab, k)
        outputs = (*floats, *ints, top_values, top_ids, scratch)
        self.launch(
            *("row_pass", logits, logits.data_ptr(), DTYPE_CODES[logits.dtype], k, rows, vocab, logits.stride(0)),
            *(t.data_ptr() for t in outputs),
        )
        return DeviceRowStats(*outputs[:-1])

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, V] as in row_pass and R values each (f32, int32, f32, f32, f64) -> token ids int32, entropy f32 [R].

        The values lie on the device and are not looked at: their ranges, as in rows.sample, are the caller's.
        """
        rows, vocab = self._check_logits(logits)
        columns = (temperature, top_k, top_p, min_p, uniform)
        wanted = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        addresses = [self.check(n, t, d, (rows,)) for n, t, d in zip(names, columns, wanted, strict=True)]
        token_ids = logits.new_empty(rows, dtype=torch.int32)
        entropy = logits.new_empty(rows, dtype=torch.float32)
        self.launch(
            *("sample", logits, logits.data_ptr(), DTYPE_CODES[logits.dtype], rows, vocab, logits.stride(0)),
            *(*addresses, token_ids.data_ptr(), entropy.data_ptr()),
        )
        return token_ids, entropy

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[M, N] and [N] of one dtype -> [M, N] in it, f32 inside."""
        rows, size = x.shape
        out = torch.empty_like(x)
        addresses = (self.check("x", x, x.dtype, (rows, size)), self.check("weight", weight, x.dtype, (size,)))
        self.launch("rms_norm", x, *addresses, out.data_ptr(), dtype_code(x), rows, size, eps)
        return out

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up -> contiguous [M, N]; both of one dtype and shape, rows equally far apart. f32 inside."""
        rows, size = gate.shape
        stride = gate.stride(0) if rows > 1 else size
        out = gate.new_empty(rows, size)
        parts = (("gate", gate), ("up", up))
        addresses = [self.check_rows(name, part, gate.dtype, (rows, size), stride) for name, part in parts]
        self.launch("silu_mul", gate, *addresses, out.data_ptr(), dtype_code(gate), rows, size, stride)
        return out

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: torch.Tensor,
        num_heads: int,
        head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v into the cache, return q [T, num_heads, D]; elementwise.rope_and_write.

        qkv, kv [num_blocks, 2, Hkv, 16, D] and the norms' weights are of one dtype. Slots below 0 are not written.
        Positions and slots (int32, int64) lie on the device and are not looked at.
        """
        tokens = len(qkv)
        num_blocks, _, num_kv_heads, _, head_dim = kv.shape
        half = tables[0].shape[1]
        check_rope(num_heads, num_kv_heads, head_dim, 2 * half, (2, MAX_HEAD_DIM))
        width = (num_heads + 2 * num_kv_heads) * head_dim
        qkv_address = self.check("qkv", qkv, kv.dtype, (tokens, width))
        inputs = (
            self.check("positions", positions, torch.int32, (tokens,)),
            self.check("slots", slots, torch.int64, (tokens,)),
            *(self.check("tables", table, torch.float32, (len(tables[0]), half)) for table in tables),
        )
        norms = [self.check("head_norms", norm, kv.dtype, (head_dim,)) for norm in head_norms or ()] or [0, 0]
        kv_address = self.check("kv", kv, kv.dtype, (num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim))
        q = qkv.new_empty(tokens, num_heads, head_dim)
        self.launch(
            *("rope_and_write", qkv, qkv_address, dtype_code(kv), num_heads, num_kv_heads, head_dim, 2 * half, tokens),
            *(*inputs, *norms, eps, q.data_ptr(), kv_address),
        )
        return q

    def _check_logits(self, logits: torch.Tensor) -> tuple[int, int]:
        if logits.ndim != 2 or logits.dtype not in DTYPE_CODES or logits.device.type != self.device_type:
            raise ValueError(f"no kernel for logits {logits.dtype} {list(logits.shape)} on {logits.device}")
        rows, vocab = logits.shape
        if not 1 <= vocab <= MAX_VOCAB or (rows and (logits.stride(1) != 1 or (rows > 1 and logits.stride(0) < vocab))):
            raise ValueError(f"logits must be contiguous rows of 1 .. {MAX_VOCAB}, got {list(logits.shape)}")
        return rows, vocab
