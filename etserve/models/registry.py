"""One entry per architecture: from its config.json to a DecoderSpec. A new architecture is a function here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from etserve.errors import ModelError
from etserve.models.config_file import ConfigFile
from etserve.models.rope_config import read_rope
from etserve.models.types import DecoderSpec

Reader = Callable[[ConfigFile, Path], DecoderSpec]


def _llama(config: ConfigFile, path: Path) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return _spec(config, path, max_position=2048, attention_bias=bias, output_bias=bias, mlp_bias=bool(config.mlp_bias))


def _mistral(config: ConfigFile, path: Path) -> DecoderSpec:
    window = 4096 if isinstance(config.sliding_window, msgspec.UnsetType) else config.sliding_window or 0
    return _spec(config, path, max_position=131_072, num_kv_heads=8, sliding_window=window)


def _qwen2(config: ConfigFile, path: Path) -> DecoderSpec:
    return _spec(config, path, max_position=32_768, num_kv_heads=32, attention_bias=True)


def _qwen3(config: ConfigFile, path: Path) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return _spec(
        config,
        path,
        max_position=32_768,
        num_kv_heads=32,
        head_dim=128,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


ARCHITECTURES: dict[str, Reader] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def read_spec(config: ConfigFile, path: Path) -> DecoderSpec:
    """Describe the model. Raises ModelError naming `path` and the field for what is unknown, absurd or unsupported."""
    names = config.architectures or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        asked = ", ".join(names) or "none"
        raise ModelError(f"{path}: architectures: {asked[:200]} is not supported ({', '.join(ARCHITECTURES)} are)")
    _refuse_unsupported(config, path)
    return ARCHITECTURES[known[0]](config, path)


def _refuse_unsupported(config: ConfigFile, path: Path) -> None:
    """Options that change the result and that no decoder here honours."""
    if config.quantization_config is not None:
        raise ModelError(f"{path}: quantization_config is not supported (safetensors must hold f32, f16 or bf16)")
    if config.hidden_act not in (None, "silu", "swish"):
        raise ModelError(f"{path}: hidden_act {config.hidden_act[:40]!r} is not supported (silu is)")
    if config.use_sliding_window:
        raise ModelError(f"{path}: use_sliding_window is not supported")
    kinds = set(config.layer_types or [])
    if len(kinds) > 1 or not kinds <= {"full_attention", "sliding_attention"}:
        raise ModelError(f"{path}: layer_types {sorted(kinds)} is not supported (all layers must be of one kind)")


def _spec(
    config: ConfigFile,
    path: Path,
    *,
    max_position: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    **special: Any,
) -> DecoderSpec:
    """The keyword values are the architecture's defaults, as transformers has them."""
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or num_kv_heads or heads
    if heads % kv_heads:
        raise ModelError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = config.head_dim or head_dim or _derived_head_dim(config, path)
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim {head_dim} is odd")
    max_position = config.max_position_embeddings or max_position
    return DecoderSpec(
        architecture=next(name for name in config.architectures or [] if name in ARCHITECTURES),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position=max_position,
        rms_norm_eps=config.rms_norm_eps or 1e-6,
        rope=read_rope(config, max_position, head_dim, path),
        tied_head=bool(config.tie_word_embeddings),
        **special,
    )


def _derived_head_dim(config: ConfigFile, path: Path) -> int:
    if config.hidden_size % config.num_attention_heads:
        raise ModelError(
            f"{path}: hidden_size {config.hidden_size} is no multiple of num_attention_heads "
            f"{config.num_attention_heads}, and head_dim is absent"
        )
    return config.hidden_size // config.num_attention_heads
