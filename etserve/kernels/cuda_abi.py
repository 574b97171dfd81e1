"""The C ABI of the CUDA kernels (csrc/include/etserve_cuda.h) in ctypes, field by field. Knows no torch."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path


class RowPass(ctypes.Structure):
    _fields_ = (
        *(("logits", c_void_p), ("dtype", c_int32), ("k", c_int32)),
        *(("rows", c_int64), ("vocab", c_int64), ("stride", c_int64)),
        *(("log_sum_exp", c_void_p), ("entropy", c_void_p), ("varentropy", c_void_p), ("argmax", c_void_p)),
        *(("nonfinite", c_void_p), ("top_values", c_void_p), ("top_ids", c_void_p), ("scratch", c_void_p)),
    )


class Sample(ctypes.Structure):
    _fields_ = (
        *(("logits", c_void_p), ("dtype", c_int32), ("rows", c_int64), ("vocab", c_int64), ("stride", c_int64)),
        *(("temperature", c_void_p), ("top_k", c_void_p), ("top_p", c_void_p), ("min_p", c_void_p)),
        *(("uniform", c_void_p), ("token_ids", c_void_p), ("sampled_entropy", c_void_p)),
    )


class RmsNorm(ctypes.Structure):
    _fields_ = (
        *(("x", c_void_p), ("weight", c_void_p), ("out", c_void_p), ("dtype", c_int32)),
        *(("rows", c_int64), ("size", c_int64), ("eps", c_float)),
    )


class SiluMul(ctypes.Structure):
    _fields_ = (
        *(("gate", c_void_p), ("up", c_void_p), ("out", c_void_p), ("dtype", c_int32)),
        *(("rows", c_int64), ("size", c_int64), ("stride", c_int64)),
    )


class Rope(ctypes.Structure):
    _fields_ = (
        *(("qkv", c_void_p), ("dtype", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32)),
        *(("head_dim", c_int32), ("rotary_dim", c_int32), ("tokens", c_int64), ("positions", c_void_p)),
        *(("slots", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p)),
        *(("eps", c_float), ("q", c_void_p), ("kv", c_void_p)),
    )


class Decode(ctypes.Structure):
    _fields_ = (
        *(("q", c_void_p), ("out", c_void_p), ("kv", c_void_p), ("dtype", c_int32), ("num_seqs", c_int32)),
        *(("max_blocks", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32)),
        *(("window", c_int32), ("scale", c_float), ("block_tables", c_void_p), ("context_lens", c_void_p)),
        *(("kept", c_void_p), ("num_kept", c_void_p)),
        *(("block_mass", c_void_p), ("log_sum_exp", c_void_p), ("scratch", c_void_p)),
    )


class Sketch(ctypes.Structure):
    _fields_ = (
        *(("kv", c_void_p), ("dtype", c_int32), ("bits", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32)),
        *(("tokens", c_int64), ("slots", c_void_p), ("signs", c_void_p), ("sketches", c_void_p)),
    )


class Select(ctypes.Structure):
    _fields_ = (
        *(("q", c_void_p), ("kv", c_void_p), ("dtype", c_int32), ("bits", c_int32), ("num_seqs", c_int32)),
        *(("max_blocks", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32)),
        *(("selector", c_int32), ("sink_blocks", c_int32), ("recent_blocks", c_int32), ("min_kept_blocks", c_int32)),
        *(("min_context", c_int32), ("scale", c_float), ("share", c_double), ("min_kept_share", c_double)),
        *(("seed", c_uint64), ("block_tables", c_void_p), ("context_lens", c_void_p), ("sketches", c_void_p)),
        *(("signs", c_void_p), ("epsilon", c_void_p), ("is_protected", c_void_p), ("log_mass", c_void_p)),
        *(("keys", c_void_p), ("kept", c_void_p), ("num_kept", c_void_p), ("missing", c_void_p)),
        ("estimated_mass", c_void_p),
    )


class FoldMass(ctypes.Structure):
    _fields_ = (
        *(("num_seqs", c_int32), ("max_blocks", c_int32), ("num_heads", c_int32)),
        *(("block_mass", c_void_p), ("step_mass", c_void_p)),
    )


class Evict(ctypes.Structure):
    _fields_ = (
        *(("num_seqs", c_int32), ("max_blocks", c_int32), ("sink_blocks", c_int32), ("recent_blocks", c_int32)),
        *(("min_kept_blocks", c_int32), ("mass_decay", c_float), ("min_kept_share", c_double)),
        *(("step_mass", c_void_p), ("block_tables", c_void_p), ("block_index", c_void_p)),
        *(("mass_weighted", c_void_p), ("mass_weight", c_void_p), ("surprisal", c_void_p)),
        *(("is_protected", c_void_p), ("num_held", c_void_p), ("num_sequence_blocks", c_void_p)),
        *(("num_wanted", c_void_p), ("num_refs", c_void_p), ("is_cached", c_void_p), ("evicted", c_void_p)),
        *(("num_evicted", c_void_p), ("free_list", c_void_p), ("num_free", c_void_p)),
        *(("scratch", c_void_p), ("ranks", c_void_p)),
    )


LAUNCHERS: dict[str, type[ctypes.Structure]] = {
    "row_pass": RowPass,
    "sample": Sample,
    "rms_norm": RmsNorm,
    "silu_mul": SiluMul,
    "rope_and_write": Rope,
    "decode_attention": Decode,
    "sketch": Sketch,
    "select": Select,
    "fold_mass": FoldMass,
    "evict": Evict,
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load the shared library and declare its functions; loading needs no driver. Raises OSError if it cannot be."""
    library = ctypes.CDLL(str(path))
    for name, struct in LAUNCHERS.items():
        launcher = getattr(library, f"etserve_cuda_{name}")
        launcher.argtypes, launcher.restype = (POINTER(struct), c_void_p), c_int
    _declare(library, "row_pass_scratch_bytes", c_int64, c_int64, c_int64, c_int32)
    _declare(library, "decode_scratch_bytes", c_int64, *(c_int32,) * 4)
    _declare(library, "sketch_bytes", c_int64, c_int32, c_int32)
    _declare(library, "error_string", c_char_p, c_int)
    _declare(library, "is_emulated", c_int)
    _declare(library, "set_emulation_seed", None, c_uint64)
    return library


def _declare(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> None:
    function = getattr(library, f"etserve_cuda_{name}")
    function.argtypes, function.restype = arguments, result
