"""config.json as data: our own schema with bounds. Code that a config names (auto_map) is never looked at."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from etserve.errors import ModelError

MAX_CONFIG_BYTES = 16 * 1024 * 1024

Layers = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=4096)]
HeadDim = Annotated[int, msgspec.Meta(ge=2, le=1024)]
Vocabulary = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Positions = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Epsilon = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Theta = Annotated[float, msgspec.Meta(gt=0.0, le=1e15)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]

T = TypeVar("T")


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that decide results. None: absent or null; the architecture's default then holds."""

    architectures: list[str] | None = None
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    vocab_size: Vocabulary
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    max_position_embeddings: Positions | None = None
    original_max_position_embeddings: Positions | None = None
    rms_norm_eps: Epsilon | None = None
    rope_theta: Theta | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    hidden_act: str | None = None
    sliding_window: Positions | msgspec.UnsetType | None = msgspec.UNSET  # Mistral's default is not none
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None


class GenerationFile(msgspec.Struct, frozen=True, kw_only=True):
    """What generation_config.json is read for."""

    eos_token_id: TokenId | list[TokenId] | None = None


def read_config(path: Path) -> ConfigFile:
    """Raises ModelError naming file and field."""
    return _read(path, ConfigFile)


def read_generation_config(path: Path) -> GenerationFile:
    """As read_config; a file that is not there says nothing."""
    return _read(path, GenerationFile) if path.exists() else GenerationFile()


def convert_config(values: dict[str, Any], path: Path) -> ConfigFile:
    """The same checks on values from elsewhere (GGUF metadata)."""
    try:
        return msgspec.convert(values, ConfigFile)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from None


def _read(path: Path, kind: type[T]) -> T:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise ModelError(f"{path}: {error}") from None
