"""Whether a model fits into memory, from its headers alone: no weight is read."""

from dataclasses import dataclass

from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.engine.resources import fit_context, num_kv_blocks
from etserve.errors import ConfigError
from etserve.models.files import resolve_model
from etserve.models.loader import choose, open_checkpoint


@dataclass(frozen=True, slots=True)
class Fit:
    """What a start with these settings would take."""

    name: str
    architecture: str
    num_parameters: int
    dtype: str
    kv_dtype: str
    weight_bytes: int  # parameters times their size; packing adds a little
    kv_bytes_per_token: int  # of all layers
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
    weight_bytes = checkpoint.weights.num_parameters * choice.dtype.itemsize
    if weight_bytes > free_bytes:
        raise ConfigError(f"the weights take {weight_bytes:,} bytes, {free_bytes:,} are free")
    block_bytes = spec.num_layers * 2 * spec.num_kv_heads * BLOCK_SIZE * spec.head_dim * choice.kv_dtype.itemsize
    num_blocks = num_kv_blocks(config, block_bytes, choice.max_model_len, free_bytes - weight_bytes)
    return Fit(
        name=config.served_model_name or files.name,
        architecture=spec.architecture,
        num_parameters=checkpoint.weights.num_parameters,
        dtype=str(choice.dtype).removeprefix("torch."),
        kv_dtype=str(choice.kv_dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=block_bytes // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks - 1,
        kv_cache_bytes=num_blocks * block_bytes,
        max_model_len=fit_context(config, num_blocks, choice.max_model_len),
        wanted_model_len=choice.max_model_len,
    )
