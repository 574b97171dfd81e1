"""Quantised weights end to end: a GGUF file's own blocks, rounding at load, and what is said of either."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from gguf import GGMLQuantizationType

from etserve.config import EngineConfig
from etserve.errors import ConfigError
from etserve.kernels import native, reference_quant
from etserve.kernels.quant import Format, Rounded, quantise
from etserve.models.decoder import TorchDecoder
from etserve.models.files import ModelFiles, resolve_model
from etserve.models.loader import load_model, open_checkpoint
from etserve.models.native import NativeDecoder
from etserve.models.types import DecoderSpec
from etserve.models.weight_formats import QuantisedAtLoad, all_matrices, describe
from etserve.models.weights import WeightSource
from tests.kernels.decoders import BASE, RandomWeights, chunked_among_others, make_batch, prompt, tables
from tests.unit.gguf_helpers import write_gguf
from tests.unit.model_helpers import run_chunks, save_tiny

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native module is not built")
FORMATS, ROUNDED = get_args(Format), get_args(Rounded)
F32 = torch.float32
SPECS = {
    "tied head": replace(BASE, hidden_size=64, intermediate_size=96, tied_head=True),
    "own head": replace(BASE, hidden_size=64, intermediate_size=96),
    "biases": replace(
        BASE, hidden_size=96, intermediate_size=160, attention_bias=True, output_bias=True, mlp_bias=True
    ),
    "some rows too short": replace(BASE, hidden_size=64, intermediate_size=100, num_heads=2),
}


class RoundedWeights(RandomWeights):
    """What the blocks stand for, as floats: the oracle's weights."""

    def __init__(self, spec: DecoderSpec, kind: Rounded) -> None:
        super().__init__(spec)
        blocks = QuantisedAtLoad(self, spec, kind)
        planned = {f"{name}.weight" for plan in all_matrices(spec, blocks) if plan.kind for name, _ in plan.parts}
        for name in planned:
            self._tensors[name] = reference_quant.dequantise(quantise(self._tensors[name], kind), kind)


def make_native(spec: DecoderSpec, kind: Rounded, weights: WeightSource | None = None) -> NativeDecoder:
    source = weights or RandomWeights(spec)
    return NativeDecoder(spec, source, F32, F32, tables(spec), blocks=QuantisedAtLoad(source, spec, kind))


def logits(decoder: NativeDecoder | TorchDecoder, batch: Any) -> torch.Tensor:
    return decoder.logits(decoder.forward(batch, decoder.allocate_cache(12))).clone()


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", SPECS)
def test_logits_stay_near_those_of_the_dequantised_weights(name: str, kind: Rounded) -> None:
    spec = SPECS[name]
    oracle = TorchDecoder(spec, RoundedWeights(spec, kind), F32, F32, tables(spec))
    batch = make_batch([(prompt(37, 1, spec.vocab_size), 0, [3, 1, 7]), (prompt(5, 2, spec.vocab_size), 0, [2])])
    got, expected = logits(make_native(spec, kind), batch), logits(oracle, batch)
    assert (got - expected).square().mean().sqrt() < 0.03 * expected.square().mean().sqrt()
    assert not torch.equal(got, expected)  # activations are rounded


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", SPECS)
def test_a_token_is_the_same_alone_in_chunks_and_among_others(name: str, kind: Rounded) -> None:
    spec = SPECS[name]
    tokens, other = prompt(50, 1, spec.vocab_size), prompt(20, 2, spec.vocab_size)
    decoder = make_native(spec, kind)
    whole = logits(decoder, make_batch([(tokens, 0, [1, 2, 3, 4])]))
    assert torch.equal(chunked_among_others(decoder, tokens, other), whole)


def test_formats_may_be_mixed_and_bf16_ones_take_bf16_activations() -> None:
    spec = SPECS["some rows too short"]
    weights = RandomWeights(spec)
    blocks = QuantisedAtLoad(weights, spec, "q8_0")
    assert describe(spec, torch.bfloat16, blocks) == "q8_0+bfloat16"
    decoder = NativeDecoder(spec, weights, torch.bfloat16, F32, tables(spec), blocks=blocks)
    oracle = TorchDecoder(spec, RoundedWeights(spec, "q8_0"), F32, F32, tables(spec))
    batch = make_batch([(prompt(37, 1, spec.vocab_size), 0, [3, 1, 7])])
    got, expected = logits(decoder, batch), logits(oracle, batch)
    assert (got - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def write_model(
    folder: Path,
    kind: GGMLQuantizationType,
    kind_of: Callable[[str], GGMLQuantizationType] | None = None,
    **options: Any,
) -> Path:
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind.name.lower() in ("q4_k", "q5_k", "q6_k"):
        wide |= {"hidden_size": 256, "intermediate_size": 512}
    model = save_tiny(folder / "hf", "Llama", **{**wide, **options})
    spec = open_checkpoint(ModelFiles("hf", folder=folder / "hf")).spec
    return write_gguf(folder / "m.gguf", spec, model.state_dict(), kind=kind, kind_of=kind_of)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_gguf_file_runs_from_its_own_blocks_unless_a_dtype_is_asked_for(
    kind: Format, is_tied: bool, tmp_path: Path
) -> None:
    path = write_model(tmp_path, GGMLQuantizationType[kind.upper()], tie_word_embeddings=is_tied)
    files = resolve_model(str(path))
    own = load_model(EngineConfig(backend="native"), files)
    wide = load_model(EngineConfig(backend="native", dtype="float32"), files)
    assert (own.dtype, wide.dtype) == (kind, "float32")
    assert own.decoder.weight_bytes < 0.45 * wide.decoder.weight_bytes
    tokens = [7, 100, 3, 55, 130, 0, 9]
    got, expected = run_chunks(own.decoder, tokens, [4, 1, 2]), run_chunks(wide.decoder, tokens, [7])
    assert (got - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def mixed_as_q4_k_m(name: str) -> GGMLQuantizationType:
    """As llama.cpp mixes Q4_K_M: v and down of some layers in more bits, so q and k are not in one format with v."""
    is_wide = name.startswith("layers.0") and name.split(".")[2] in ("v", "down")
    return GGMLQuantizationType.Q6_K if is_wide or name == "embedding.weight" else GGMLQuantizationType.Q4_K


def test_a_file_of_mixed_types_runs_each_from_its_own_blocks(tmp_path: Path) -> None:
    files = resolve_model(
        str(write_model(tmp_path, GGMLQuantizationType.Q4_K, mixed_as_q4_k_m, tie_word_embeddings=True))
    )
    own = load_model(EngineConfig(backend="native", kv_dtype="float32"), files)
    wide = load_model(EngineConfig(backend="native", kv_dtype="float32", dtype="float32"), files)
    assert own.dtype == "q4_k+q6_k"
    tokens = [7, 100, 3, 55, 130, 0, 9, 12]
    whole, expected = run_chunks(own.decoder, tokens, [8]), run_chunks(wide.decoder, tokens, [8])
    assert (whole - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()
    assert torch.equal(run_chunks(own.decoder, tokens, [1, 6, 1]), whole)


def test_types_without_a_kernel_are_dequantised_and_it_is_said(tmp_path: Path) -> None:
    files = resolve_model(str(write_model(tmp_path, GGMLQuantizationType.Q5_0)))
    loaded = load_model(EngineConfig(backend="native"), files)
    assert (loaded.dtype, loaded.quantization) == ("bfloat16", "Q5_0")


@pytest.mark.parametrize("kind", ROUNDED)
def test_quantising_at_load_equals_the_file_quantised_before(kind: Rounded, tmp_path: Path) -> None:
    path = write_model(tmp_path, GGMLQuantizationType[kind.upper()])
    before = load_model(EngineConfig(backend="native", kv_dtype="float32"), resolve_model(str(path)))
    at_load = load_model(
        EngineConfig(backend="native", kv_dtype="float32", quantize=kind), resolve_model(str(tmp_path / "hf"))
    )
    assert at_load.dtype == before.dtype == kind
    tokens = [7, 100, 3, 55]
    assert torch.equal(run_chunks(at_load.decoder, tokens, [4]), run_chunks(before.decoder, tokens, [4]))


def test_quantising_needs_the_native_backend(tmp_path: Path) -> None:
    path = write_model(tmp_path, GGMLQuantizationType.F32)
    with pytest.raises(ConfigError, match="quantize q8_0 needs the native backend"):
        load_model(EngineConfig(backend="torch", quantize="q8_0"), resolve_model(str(path)))
