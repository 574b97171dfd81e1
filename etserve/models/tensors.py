"""Which tensors a decoder has, of what shape, and what the two file formats call them."""

from collections.abc import Mapping
from pathlib import Path

from etserve.errors import ModelError
from etserve.models.types import DecoderSpec

Shape = tuple[int, ...]

_TOP_HF = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_TOP_GGUF = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
_LAYER_HF = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_LAYER_GGUF = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def expected_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor the decoder reads."""
    shapes: dict[str, Shape] = {
        "embedding.weight": (spec.vocab_size, spec.hidden_size),
        "final_norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, spec.hidden_size)
    layer = _layer_shapes(spec)
    for i in range(spec.num_layers):
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "q": (queries, hidden, spec.attention_bias),
        "k": (keys, hidden, spec.attention_bias),
        "v": (keys, hidden, spec.attention_bias),
        "o": (hidden, queries, spec.output_bias),
        "gate": (inner, hidden, spec.mlp_bias),
        "up": (inner, hidden, spec.mlp_bias),
        "down": (hidden, inner, spec.mlp_bias),
    }
    shapes: dict[str, Shape] = {"input_norm.weight": (hidden,), "post_norm.weight": (hidden,)}
    for name, (rows, columns, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        shapes |= {"q_norm.weight": (spec.head_dim,), "k_norm.weight": (spec.head_dim,)}
    return shapes


def hf_name(name: str) -> str:
    """Canonical -> Hugging Face, as Llama, Mistral and Qwen all have them."""
    return _translate(name, _TOP_HF, _LAYER_HF, "model.layers")


def gguf_name(name: str) -> str:
    """Canonical -> llama.cpp's."""
    return _translate(name, _TOP_GGUF, _LAYER_GGUF, "blk")


def _translate(name: str, top: Mapping[str, str], layer: Mapping[str, str], prefix: str) -> str:
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{top[parts[0]]}.{parts[1]}"
    return f"{prefix}.{parts[1]}.{layer[parts[2]]}.{parts[3]}"


def check_tensors(
    where: Path, expected: Mapping[str, Shape], found: Mapping[str, tuple[Path, Shape]], ignored: frozenset[str]
) -> None:
    """Compare names and shapes of a checkpoint (in its own names) with what the decoder needs.

    `where` is named for a missing tensor: the weight file, or the index of several.
    Raises ModelError naming file and tensor: missing, of another shape, or not known.
    """
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: tensor {name} is missing")
        path, actual = found[name]
        if actual != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(actual)}, the config asks for {list(shape)}")
    for name in sorted(set(found) - set(expected) - ignored):
        raise ModelError(f"{found[name][0]}: tensor {name} is not known to this architecture")
