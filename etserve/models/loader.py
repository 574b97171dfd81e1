"""From files to a decoder that can run. Knows which backend to take; everything about formats is below it."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from etserve.config import EngineConfig
from etserve.errors import ConfigError, ModelError
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda import load as load_kernels
from etserve.models.config_file import read_config, read_generation_config
from etserve.models.cuda import CudaDecoder
from etserve.models.decode_graphs import CudaCapturer
from etserve.models.decoder import TorchDecoder
from etserve.models.files import ModelFiles
from etserve.models.gguf_source import GgufSource, read_gguf_spec
from etserve.models.registry import read_spec
from etserve.models.rope import rope_tables
from etserve.models.safetensors_source import SafetensorsSource
from etserve.models.types import Decoder, DecoderSpec
from etserve.models.weight_formats import BlockSource, QuantisedAtLoad, describe
from etserve.models.weights import WeightSource
from etserve.tokenizer.gguf_header import read_gguf_header
from etserve.tokenizer.gguf_tokenizer import gguf_end_token_ids
from etserve.tokenizer.loading import load_tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {**DTYPES, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, checked against its headers; no tensor is read yet."""

    spec: DecoderSpec
    weights: WeightSource
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a checkpoint is to be run."""

    dtype: torch.dtype  # of weights that are not quantised
    kv_dtype: torch.dtype
    max_model_len: int
    blocks: BlockSource | None  # of those that are


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its weights in memory, and what the engine says of it."""

    decoder: Decoder
    spec: DecoderSpec
    name: str  # what clients call it
    dtype: str  # "bfloat16", "q4_1+q8_0", ... of weights and matrix products
    kv_dtype: str
    quantization: str | None  # of the file
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens, prompt and output together
    load_seconds: float
    kernels: CudaKernels | None = None  # that also measure and draw, where the logits lie on a device


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Read configs and headers only, in milliseconds. Raises ModelError naming file, and tensor or field."""
    if files.gguf is not None:
        header = read_gguf_header(files.gguf)
        spec = read_gguf_spec(header)
        eos = gguf_end_token_ids(header)
        return Checkpoint(spec, GgufSource(header, spec), _checked_eos(eos, spec, files.gguf))
    path = files.path / "config.json"
    config = read_config(path)
    spec = read_spec(config, path)
    generation = read_generation_config(files.path / "generation_config.json")
    eos = _ids(generation.eos_token_id) or _ids(config.eos_token_id) or load_tokenizer(files).eos_token_ids
    return Checkpoint(spec, SafetensorsSource(files.path, spec), _checked_eos(eos, spec, path))


def choose(config: EngineConfig, checkpoint: Checkpoint) -> Choice:
    """What the settings make of a checkpoint. Raises ConfigError for a context or KV dtype that it cannot have."""
    dtype = checkpoint.weights.dtype if config.dtype == "auto" else DTYPES[config.dtype]
    length, blocks = _context_length(config, checkpoint.spec), _block_source(config, checkpoint)
    return Choice(dtype, _kv_dtype(config, dtype), length, blocks)


def _block_source(config: EngineConfig, checkpoint: Checkpoint) -> BlockSource | None:
    """Where quantised matrices come from. None: all of them are floats."""
    is_native = config.device == "cpu" and _decoder_class(config) is not TorchDecoder
    if config.quantize != "none":
        if not is_native:
            raise ConfigError(f"quantize {config.quantize} needs the native backend")
        return QuantisedAtLoad(checkpoint.weights, checkpoint.spec, config.quantize)
    weights = checkpoint.weights
    return weights if config.dtype == "auto" and is_native and isinstance(weights, GgufSource) else None


def load_model(config: EngineConfig, files: ModelFiles) -> LoadedModel:
    """Read the weights and build the decoder that `config` asks for.

    Raises ModelError for what is wrong with the files, ConfigError for a setting that this model or build cannot meet.
    """
    start = time.monotonic()
    checkpoint = open_checkpoint(files)
    spec, weights, choice = checkpoint.spec, checkpoint.weights, choose(config, checkpoint)
    make_decoder, tables = _decoder_class(config, choice.blocks), rope_tables(spec, choice.max_model_len)
    try:
        decoder = make_decoder(
            spec, weights, choice.dtype, choice.kv_dtype, tables, sketch_bits=_sketch_bits(config, spec)
        )
    except ValueError as error:  # shapes beyond the native kernels; torch takes all of them
        where = files.gguf or files.path / "config.json"
        raise ModelError(f"{where}: the native kernels do not take it: {error}; choose backend torch") from None
    return LoadedModel(
        decoder=decoder,
        spec=spec,
        name=config.served_model_name or files.name,
        dtype=describe(spec, choice.dtype, choice.blocks),
        kv_dtype=_name(choice.kv_dtype),
        quantization=weights.quantization,
        num_parameters=weights.num_parameters,
        eos_token_ids=checkpoint.eos_token_ids,
        max_model_len=choice.max_model_len,
        load_seconds=time.monotonic() - start,
        kernels=_device_kernels(config),
    )


Tables = tuple[torch.Tensor, torch.Tensor]
MAX_CONTEXT = 1 << 20  # tokens; tables are made for the whole context


def _sketch_bits(config: EngineConfig, spec: DecoderSpec) -> int:
    if config.pruning_sketch_bits and spec.sliding_window:
        raise ConfigError("pruning_sketch_bits: nothing can be skipped in a model with a sliding window")
    return config.pruning_sketch_bits


class _MakeDecoder(Protocol):
    def __call__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        rope_tables: Tables,
        *,
        sketch_bits: int,
    ) -> Decoder: ...


def _decoder_class(config: EngineConfig, blocks: BlockSource | None = None) -> _MakeDecoder:
    """auto: the native decoder, with its quantised matrices, where csrc is built."""
    if config.backend == "torch":
        return TorchDecoder if config.device == "cpu" else partial(TorchDecoder, device=_cuda_device())
    if (kernels := _device_kernels(config)) is not None:
        return partial(CudaDecoder, kernels=kernels, capturer=CudaCapturer() if config.cuda_graphs else None)
    try:
        from etserve.models.native import NativeDecoder
    except ImportError as error:
        if config.backend == "native":
            raise ConfigError(f"backend native: the native kernels are not built ({error})") from None
        return TorchDecoder
    return partial(NativeDecoder, blocks=blocks)


def _device_kernels(config: EngineConfig) -> CudaKernels | None:
    """None: the model runs elsewhere, or as the torch reference. Raises ConfigError where a GPU or its kernels lack."""
    if config.device == "cpu" or config.backend == "torch":
        return None
    kernels = load_kernels()
    if kernels is None:
        raise ConfigError("device cuda: etserve was built without the CUDA kernels (nvcc and a CUDA torch at install)")
    _cuda_device()
    return kernels


def _cuda_device() -> str:
    if not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no CUDA device")
    return "cuda"


def _context_length(config: EngineConfig, spec: DecoderSpec) -> int:
    """Dynamic RoPE goes beyond the length a model was described with, YaRN up to what it stretches to."""
    asked = config.max_model_len
    if asked is None:
        return min(spec.max_position, MAX_CONTEXT)
    if asked > MAX_CONTEXT:
        raise ConfigError(f"max_model_len {asked} is more than {MAX_CONTEXT}")
    longest = MAX_CONTEXT if spec.rope.rope_type == "dynamic" else max(spec.max_position, _yarn_length(spec))
    if asked > longest:
        raise ConfigError(f"max_model_len {asked} is beyond the model's own context of {longest}")
    return asked


def _yarn_length(spec: DecoderSpec) -> int:
    parameters = dict(spec.rope.parameters)
    factor, trained = parameters.get("factor"), parameters.get("original_max_position_embeddings")
    if spec.rope.rope_type != "yarn" or not isinstance(factor, float) or not isinstance(trained, float):
        return 0
    return int(factor * trained)


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    if config.kv_dtype == "auto" and config.device == "cuda":
        return dtype
    if config.kv_dtype == "auto":
        return torch.float32 if dtype == torch.float32 else torch.bfloat16
    wanted = KV_DTYPES[config.kv_dtype]
    if config.device == "cuda" and config.backend != "torch" and wanted != dtype:
        given = f"kv_dtype {config.kv_dtype}"
        raise ConfigError(f"{given}: device cuda keeps the KV cache in the weights' dtype, {_name(dtype)} (auto)")
    return wanted


def _name(dtype: torch.dtype) -> str:
    return next(name for name, value in KV_DTYPES.items() if value == dtype)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _checked_eos(ids: tuple[int, ...], spec: DecoderSpec, path: Path) -> tuple[int, ...]:
    if not ids:
        raise ModelError(f"{path}: eos_token_id is missing: nothing would ever end a reply")
    for token_id in ids:
        if token_id >= spec.vocab_size:
            raise ModelError(f"{path}: eos_token_id {token_id} is outside the vocabulary of {spec.vocab_size}")
    return tuple(sorted(set(ids)))
