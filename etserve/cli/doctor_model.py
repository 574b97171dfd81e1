"""Whether a model fits into memory, from its headers alone: no weight is read."""

from dataclasses import dataclass

from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.engine.resources import fit_context, num_kv_blocks
from etserve.errors import ConfigError
from etserve.kernels import native
from etserve.kernels.reference_attention import kv_head_bytes
from etserve.models.files import resolve_model
from etserve.models.loader import choose, open_checkpoint
from etserve.models.weight_formats import describe, held_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """What a start with these settings would take."""

    name: str
    architecture: str
    num_parameters: int
    dtype: str
    kv_dtype: str
    weight_bytes: int  # of the matrices; norms add a little
    kv_bytes_per_token: int  # of all layers, with the sketches if there are any
    block_size: int
    num_kv_blocks: int  # without the null block
    kv_cache_bytes: int
    max_model_len: int  # that would be served
    wanted_model_len: int  # the model's own, or the setting


def fit_model(config: EngineConfig, free_bytes: int) -> Fit:
    """Size weights and KV pool as the engine's start does, with `free_bytes` before the weights are read.

    Raises ModelError for what is wrong with the files, ConfigError for what does not fit.
    """
    files = resolve_model(config.model)
    checkpoint = open_checkpoint(files)
    choice, spec = choose(config, checkpoint), checkpoint.spec
    weight_bytes = held_bytes(spec, choice.dtype, choice.blocks)
    if weight_bytes > free_bytes:
        raise ConfigError(f"the weights take {weight_bytes:,} bytes, {free_bytes:,} are free")
    keys_and_values = 2 * kv_head_bytes(spec.head_dim, choice.kv_dtype)
    block_bytes = spec.num_layers * spec.num_kv_heads * (keys_and_values + _sketch_bytes(config, spec.head_dim))
    num_blocks = num_kv_blocks(config, block_bytes, choice.max_model_len, free_bytes - weight_bytes)
    return Fit(
        name=config.served_model_name or files.name,
        architecture=spec.architecture,
        num_parameters=checkpoint.weights.num_parameters,
        dtype=describe(spec, choice.dtype, choice.blocks),
        kv_dtype=str(choice.kv_dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=block_bytes // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks - 1,
        kv_cache_bytes=num_blocks * block_bytes,
        max_model_len=fit_context(config, num_blocks, choice.max_model_len),
        wanted_model_len=choice.max_model_len,
    )


def _sketch_bytes(config: EngineConfig, head_dim: int) -> int:
    """What a block and KV head keeps to be skipped by; only the native backend does."""
    if config.pruning_sketch_bits == 0 or config.backend == "torch" or not native.is_available():
        return 0
    from etserve.kernels.sketch import sketch_bytes

    return sketch_bytes(head_dim, config.pruning_sketch_bits)
