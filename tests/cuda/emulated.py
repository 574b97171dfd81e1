"""Engines over the unit model whose decoder is the CUDA one, on the emulator's kernels."""

import dataclasses
import functools
from typing import Any

import torch

from etserve.engine.llm_engine import LLMEngine
from etserve.kernels.cuda import CudaKernels
from etserve.models.cuda import CudaDecoder
from etserve.models.decode_graphs import Capturer
from etserve.models.files import resolve_model
from etserve.models.loader import DTYPES, LoadedModel, open_checkpoint
from etserve.models.rope import rope_tables
from tests.engine.helpers import UNIT_MODEL, load_unit, make_engine


@functools.cache
def load_emulated(
    kernels: CudaKernels, dtype: str = "float32", sketch_bits: int = 0, capturer: Capturer | None = None
) -> LoadedModel:
    """The unit model as load_model gives it for device cuda."""
    checkpoint, plain = open_checkpoint(resolve_model(UNIT_MODEL)), load_unit("torch", dtype)
    tables = rope_tables(checkpoint.spec, plain.max_model_len)
    number, kv_dtype = DTYPES[dtype], DTYPES[dtype]
    decoder = CudaDecoder(
        checkpoint.spec, checkpoint.weights, number, kv_dtype, tables, sketch_bits, kernels=kernels, capturer=capturer
    )
    kv_name = str(kv_dtype).removeprefix("torch.")
    return dataclasses.replace(plain, decoder=decoder, kv_dtype=kv_name, kernels=kernels)


def emulated_engine(kernels: CudaKernels, dtype: str = "float32", **changes: Any) -> LLMEngine:
    torch.set_num_threads(1)
    return make_engine(load_emulated(kernels, dtype, changes.get("pruning_sketch_bits", 0)), **changes)
