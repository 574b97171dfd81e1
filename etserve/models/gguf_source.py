"""Weights and description from a GGUF file: read tensor by tensor, dequantised by the gguf package."""

import os
import weakref
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray

from etserve.errors import ModelError
from etserve.kernels.quant import BLOCK_BYTES, Format
from etserve.models.config_file import convert_config
from etserve.models.registry import read_spec
from etserve.models.tensors import check_tensors, expected_shapes, gguf_name
from etserve.models.types import DecoderSpec, RopeSpec
from etserve.tokenizer.gguf_header import GgufHeader, GgufTensor

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_NATIVE: dict[GGMLQuantizationType, Format] = {GGMLQuantizationType[name.upper()]: name for name in BLOCK_BYTES}
SLICE_ELEMENTS = 1 << 20  # dequantised at once: 4 MiB of f32
_ROPE_DIVISORS = "rope_freqs.weight"
# config.json's name -> llama.cpp's key, below the architecture's name
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}


def read_gguf_spec(header: GgufHeader) -> DecoderSpec:
    """Describe the model from its metadata, by way of the same registry. Raises ModelError naming file and field."""
    metadata, path = header.metadata, header.path
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise ModelError(f"{path}: general.architecture {kind!r} is not supported ({', '.join(_ARCHITECTURES)} are)")
    if metadata.get(f"{kind}.expert_count"):
        raise ModelError(f"{path}: {kind}.expert_count: mixtures of experts are not supported")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    values = {name: metadata[f"{kind}.{key}"] for name, key in _KEYS.items() if f"{kind}.{key}" in metadata}
    architecture = "MistralForCausalLM" if kind == "llama" and "sliding_window" in values else _ARCHITECTURES[kind]
    values |= {
        "architectures": [architecture],
        "vocab_size": embedding.shape[0],
        "attention_bias": "blk.0.attn_q.bias" in header.tensors and kind != "qwen2",
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    values |= _rope_scaling(metadata, kind, path)
    spec = read_spec(convert_config(values, path), path)
    rotated = metadata.get(f"{kind}.rope.dimension_count", spec.head_dim)
    if rotated != spec.head_dim:
        raise ModelError(f"{path}: {kind}.rope.dimension_count {rotated} differs from the head's {spec.head_dim}")
    return _with_divisors(spec, header)


def _rope_scaling(metadata: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return {}
    if scaling not in ("linear", "yarn"):
        raise ModelError(f"{path}: {kind}.rope.scaling.type {scaling!r} is not supported (none, linear and yarn are)")
    settings = {"rope_type": scaling, "factor": metadata.get(f"{kind}.rope.scaling.factor")}
    if scaling == "yarn":
        settings["original_max_position_embeddings"] = metadata.get(f"{kind}.rope.scaling.original_context_length")
    return {"rope_scaling": settings}


def _with_divisors(spec: DecoderSpec, header: GgufHeader) -> DecoderSpec:
    tensor = header.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        return spec
    if tensor.shape != (spec.head_dim // 2,) or tensor.kind != GGMLQuantizationType.F32:
        raise ModelError(f"{header.path}: tensor {_ROPE_DIVISORS} has shape {list(tensor.shape)}")
    divisors = tuple(_read(_TensorFile(header.path), tensor, torch.float32).tolist())
    if not all(np.isfinite(value) and value > 0 for value in divisors):
        raise ModelError(f"{header.path}: tensor {_ROPE_DIVISORS} holds a value that is no positive number")
    rope = RopeSpec(spec.rope.theta, "divided", (("divisors", divisors),))
    return replace(spec, rope=rope)


class GgufSource:
    """A WeightSource, and a BlockSource for the types that the native kernels run."""

    def __init__(self, header: GgufHeader, spec: DecoderSpec) -> None:
        """Raises ModelError naming file and tensor for whatever does not fit `spec`."""
        self._header, self._spec = header, spec
        self._shapes = expected_shapes(spec)
        check_tensors(
            header.path,
            {gguf_name(name): shape for name, shape in self._shapes.items()},
            {name: (header.path, tensor.shape) for name, tensor in header.tensors.items()},
            frozenset({_ROPE_DIVISORS}),
        )
        matrices = [header.tensors[gguf_name(name)] for name, shape in self._shapes.items() if len(shape) == 2]
        _check_kinds(header.path, matrices)
        kind = Counter(tensor.kind for tensor in matrices).most_common(1)[0][0]
        self.dtype = _PLAIN.get(kind, torch.bfloat16)
        self.quantization = None if kind in _PLAIN else _file_type(header) or kind.name
        self.num_parameters = sum(prod(shape) for shape in self._shapes.values())
        self._file = _TensorFile(header.path)
        self._is_permuted = header.metadata.get("general.architecture") == "llama"

    def has(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        return self._ordered(name, _read(self._file, self._header.tensors[gguf_name(name)], dtype))

    def block_format(self, name: str) -> Format | None:
        """See BlockSource."""
        return _NATIVE.get(self._header.tensors[gguf_name(name)].kind)

    def blocks(self, name: str) -> torch.Tensor:
        """See BlockSource: the file's own, rows of q and k in our order."""
        return self._ordered(name, torch.from_numpy(self._file.rows(self._header.tensors[gguf_name(name)])))

    def _ordered(self, name: str, values: torch.Tensor) -> torch.Tensor:
        part = name.split(".")[2] if name.startswith("layers.") else ""
        if self._is_permuted and part in ("q", "k"):
            values = _unpermute(values, self._spec.num_heads if part == "q" else self._spec.num_kv_heads)
        return values


def _unpermute(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp pairs neighbouring rows for RoPE; Hugging Face (and we) pair a row with the one half a head away."""
    paired = values.view(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return paired.transpose(1, 2).reshape(values.shape)


class _TensorFile:
    """The tensors' bytes, by positioned reads.

    Of a mapping every page that was read stays resident beside its packed copy, and a file that shrinks is a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError naming the file."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)

    def rows(self, tensor: GgufTensor, first: int = 0, count: int | None = None) -> NDArray[np.uint8]:
        """`count` rows from `first` on (None: all) as they lie in the file, uint8 [count, bytes]. Raises ModelError."""
        num_rows, row_bytes = quant_shape_to_byte_shape((_num_rows(tensor), tensor.shape[-1]), tensor.kind)
        found = np.empty((num_rows if count is None else count, row_bytes), dtype=np.uint8)
        wanted, position = found.reshape(-1).data, tensor.offset + first * row_bytes
        while len(wanted):
            try:
                num_read = os.preadv(self._descriptor, [wanted], position)
            except OSError as error:
                raise ModelError(f"{self.path}: tensor {tensor.name}: {error.strerror}") from None
            if num_read == 0:
                raise ModelError(f"{self.path}: tensor {tensor.name}: the file has become shorter")
            wanted, position = wanted[num_read:], position + num_read
        return found


def _num_rows(tensor: GgufTensor) -> int:
    """A vector is one row."""
    return prod(tensor.shape[:-1])


def _read(file: _TensorFile, tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
    """Some rows at a time: the package's f32 temporaries stay in the caches, and no f32 copy of a matrix is made."""
    num_rows = _num_rows(tensor)
    out = torch.empty((num_rows, tensor.shape[-1]), dtype=dtype)
    step = max(1, SLICE_ELEMENTS // tensor.shape[-1])
    for start in range(0, num_rows, step):
        rows = file.rows(tensor, start, min(step, num_rows - start))
        try:
            values = dequantize(rows, tensor.kind)
        except (ValueError, NotImplementedError) as error:
            raise ModelError(f"{file.path}: tensor {tensor.name}: {error}") from None
        out[start : start + len(rows)] = torch.from_numpy(values)
    return out.view(tensor.shape)


def _check_kinds(path: Path, tensors: list[GgufTensor]) -> None:
    """Try the package's dequantiser on one block of each kind, so that a missing one is found before loading."""
    for kind, name in {tensor.kind: tensor.name for tensor in tensors}.items():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            raise ModelError(f"{path}: tensor {name} has type {kind.name}, which cannot be dequantised") from None


def _file_type(header: GgufHeader) -> str | None:
    try:
        name = LlamaFileType(header.metadata.get("general.file_type", -1)).name
    except ValueError:
        return None
    return str(name.removeprefix("MOSTLY_"))
