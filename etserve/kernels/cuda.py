"""The CUDA kernels as functions of tensors, through ctypes. The oracles: reference_rows, _elementwise, _attention.

`load()` finds the library that `pip install` built, where it did; neither that nor importing this needs a driver. The
same functions run the emulator's library on CPU tensors. Tensors are taken as they lie on the device: nothing here
copies to the host or waits.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from etserve.kernels import cuda_abi
from etserve.kernels.native import DTYPE_CODES
from etserve.kernels.reference_attention import BLOCK_SIZE
from etserve.kernels.reference_rows import MAX_TOP

MAX_VOCAB = 1 << 20
MIN_HEAD_DIM, MAX_HEAD_DIM = 64, 256
LIBRARY = "libetserve_cuda.so"


class CudaError(RuntimeError):
    """A kernel could not be launched."""


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


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Attention of one query row per sequence."""

    out: torch.Tensor  # [B, H, D] in q's dtype
    log_sum_exp: torch.Tensor  # f32 [B, H], nats
    block_mass: torch.Tensor | None  # f32 [B, H, max_blocks]: softmax mass of each block, 0 behind the context


@cache
def load() -> "CudaKernels | None":
    """The kernels of this installation, None where it was built without them."""
    places = [Path(__file__).parents[1] / LIBRARY]  # and, with an editable install, among the site packages
    for distribution in metadata.distributions(name="etserve"):
        places.append(Path(str(distribution.locate_file(f"etserve/{LIBRARY}"))))
    found = next((place for place in places if place.exists()), None)
    return None if found is None else CudaKernels(found)


class CudaKernels:
    """One loaded library. Methods raise ValueError for tensors that no kernel takes, CudaError if a launch fails."""

    def __init__(self, library: Path) -> None:
        self._library = cuda_abi.open_library(library)
        self.device_type = "cpu" if self._library.etserve_cuda_is_emulated() else "cuda"

    def set_emulation_seed(self, seed: int) -> None:
        """Choose the emulator's order of blocks, warps and lanes; nothing on a device."""
        self._library.etserve_cuda_set_emulation_seed(seed)

    def row_pass(self, logits: torch.Tensor, k: int) -> DeviceRowStats:
        """f32, bf16 or f16 [R, V], rows contiguous, V <= 2^20; k in 0 .. 64. See rows.row_pass."""
        rows, vocab = self._check_logits(logits)
        if not 0 <= k <= MAX_TOP:
            raise ValueError(f"k must be in 0 .. {MAX_TOP}, got {k}")
        floats = logits.new_empty((3, rows), dtype=torch.float32)
        ints = logits.new_empty((2, rows), dtype=torch.int32)
        top_values = logits.new_empty((rows, k), dtype=torch.float32)
        top_ids = logits.new_empty((rows, k), dtype=torch.int32)
        size = self._library.etserve_cuda_row_pass_scratch_bytes(rows, vocab, k)
        scratch = logits.new_empty(size, dtype=torch.uint8)
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
        self.launch("rms_norm", x, *addresses, out.data_ptr(), _code(x), rows, size, eps)
        return out

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, of one dtype and shape, f32 inside."""
        out = torch.empty_like(gate)
        shape = tuple(gate.shape)
        addresses = (self.check("gate", gate, gate.dtype, shape), self.check("up", up, gate.dtype, shape))
        self.launch("silu_mul", gate, *addresses, out.data_ptr(), _code(gate), gate.numel())
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
        if num_heads % num_kv_heads or head_dim % 2 or head_dim > MAX_HEAD_DIM or 2 * half > head_dim:
            raise ValueError(
                f"no kernel for {num_heads} heads, {num_kv_heads} KV heads of {head_dim}, {2 * half} rotated"
            )
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
            *("rope_and_write", qkv, qkv_address, _code(kv), num_heads, num_kv_heads, head_dim, 2 * half, tokens),
            *(*inputs, *norms, eps, q.data_ptr(), kv_address),
        )
        return q

    def decode_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        want_block_mass: bool = False,
    ) -> DecodeOutput:
        """One query row per sequence, q [B, H, D], over kv [num_blocks, 2, Hkv, 16, D], both bf16 or both f16.

        block_tables int32 [B, max_blocks], context_lens int32 [B] (0: a padding row, whose output is 0), on the device
        and not looked at. D is a multiple of 8 in 64 .. 256. window > 0: only the last `window` positions.
        """
        num_seqs, num_heads, head_dim = q.shape
        num_blocks, _, num_kv_heads, _, _ = kv.shape
        max_blocks = block_tables.shape[1]
        if (
            q.dtype not in (torch.bfloat16, torch.float16)
            or head_dim % 8
            or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
        ):
            raise ValueError(f"no kernel for {q.dtype} heads of {head_dim}")
        if num_kv_heads == 0 or num_heads % num_kv_heads or window < 0:
            raise ValueError(f"no kernel for {num_heads} heads, {num_kv_heads} KV heads, window {window}")
        q_address = self.check("q", q, q.dtype, (num_seqs, num_heads, head_dim))
        out = torch.empty_like(q)
        kv_address = self.check("kv", kv, q.dtype, (num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim))
        batch = (
            self.check("block_tables", block_tables, torch.int32, (num_seqs, max_blocks)),
            self.check("context_lens", context_lens, torch.int32, (num_seqs,)),
        )
        shape = (num_seqs, num_heads, max_blocks)
        mass = q.new_empty(shape, dtype=torch.float32) if want_block_mass else None
        log_sum_exp = q.new_empty(shape[:2], dtype=torch.float32)
        size = self._library.etserve_cuda_decode_scratch_bytes(num_seqs, max_blocks, num_heads, head_dim)
        scratch = q.new_empty(size, dtype=torch.uint8)
        sizes = (num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, window)
        outputs = (0 if mass is None else mass.data_ptr(), log_sum_exp.data_ptr(), scratch.data_ptr())
        self.launch(
            *("decode_attention", q, q_address, out.data_ptr(), kv_address, _code(q), *sizes, scale, *batch, *outputs)
        )
        return DecodeOutput(out, log_sum_exp, mass)

    def launch(self, name: str, near: torch.Tensor, *fields: float) -> None:
        """Launch on the current stream of the device that `near` lies on."""
        launcher = getattr(self._library, f"etserve_cuda_{name}")
        arguments = ctypes.byref(cuda_abi.LAUNCHERS[name](*fields))
        if self.device_type == "cpu":
            code = launcher(arguments, None)
        else:
            with torch.cuda.device(near.device):
                code = launcher(arguments, torch.cuda.current_stream().cuda_stream)
        if code != 0:
            raise CudaError(f"{name}: {self._library.etserve_cuda_error_string(code).decode()}")

    def _check_logits(self, logits: torch.Tensor) -> tuple[int, int]:
        if logits.ndim != 2 or logits.dtype not in DTYPE_CODES or logits.device.type != self.device_type:
            raise ValueError(f"no kernel for logits {logits.dtype} {list(logits.shape)} on {logits.device}")
        rows, vocab = logits.shape
        if not 1 <= vocab <= MAX_VOCAB or (rows and (logits.stride(1) != 1 or (rows > 1 and logits.stride(0) < vocab))):
            raise ValueError(f"logits must be contiguous rows of 1 .. {MAX_VOCAB}, got {list(logits.shape)}")
        return rows, vocab

    def check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Return the address of a contiguous tensor on the library's kind of device. Raises ValueError otherwise."""
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device.type != self.device_type:
            raise ValueError(f"{name} must be on {self.device_type}, got {tensor.device}")
        return tensor.data_ptr()


def _code(tensor: torch.Tensor) -> int:
    if tensor.dtype not in DTYPE_CODES:
        raise ValueError(f"no kernel for {tensor.dtype}")
    return DTYPE_CODES[tensor.dtype]
