"""Small GGUF files, written by the gguf package from a transformers model, permuted as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from etserve.models.tensors import expected_shapes, gguf_name, hf_name
from etserve.models.types import DecoderSpec
from tests.kernels.super_blocks import encode

TOKENS = [*(chr(i) for i in range(0x21, 0x7F)), "ab", "cd", "<|end|>", "<|im_end|>"]


def write_gguf(
    path: Path,
    spec: DecoderSpec,
    state: dict[str, torch.Tensor],
    *,
    arch: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    kind_of: Callable[[str], GGMLQuantizationType] | None = None,
) -> Path:
    """`metadata` overrides or, with None, drops keys below the architecture's name.

    `kind_of`: a matrix's type by its canonical name, instead of `kind` for all.
    """
    writer = GGUFWriter(path, arch)
    values: dict[str, Any] = {
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "block_count": spec.num_layers,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "context_length": spec.max_position,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope.theta,
        **(metadata or {}),
    }
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    _add_tokenizer(writer, spec.vocab_size)
    for name in expected_shapes(spec):
        data = state[hf_name(name)].float().numpy()
        part = name.split(".")[2] if name.startswith("layers.") else ""
        if arch == "llama" and part in ("q", "k"):
            data = permute(data, spec.num_heads if part == "q" else spec.num_kv_heads)
        chosen = kind if kind_of is None else kind_of(name)
        used = chosen if data.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), _blocks(data, used), raw_dtype=used)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _blocks(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    name = kind.name.lower()
    if name == "q4_k" or name == "q5_k" or name == "q6_k":
        return encode(torch.from_numpy(data), name).numpy()
    return quantize(data, kind)


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    rows = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weights.shape))


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    tokens = [*TOKENS, *(f"[PAD{i}]" for i in range(len(TOKENS), vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(TOKENS.index("<|end|>"))
