"""GGUF files: the header against the gguf package's own reader, the logits against transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from etserve.config import EngineConfig
from etserve.errors import ModelError
from etserve.models.files import ModelFiles, resolve_model
from etserve.models.loader import LoadedModel, load_model, open_checkpoint
from etserve.models.rope import rope_tables
from etserve.tokenizer import load_tokenizer
from etserve.tokenizer.gguf_header import read_gguf_header
from tests.unit.gguf_helpers import TOKENS, write_gguf
from tests.unit.model_helpers import needs_demo, run_chunks, save_tiny, transformers_logits

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = [7, 100, 3, 55, 130, 0, 9]


def make(folder: Path, model: str, **options: Any) -> tuple[torch.nn.Module, Any]:
    """A transformers model and our description of it."""
    oracle = save_tiny(folder / "hf", model, **{**WIDE, **options})
    return oracle, open_checkpoint(ModelFiles("hf", folder=folder / "hf")).spec


def load(path: Path) -> LoadedModel:
    return load_model(EngineConfig(backend="torch", dtype="float32"), resolve_model(str(path)))


@pytest.mark.parametrize(
    ("model", "arch", "options"),
    [
        ("Llama", "llama", {}),
        ("Llama", "llama", {"tie_word_embeddings": True, "head_dim": 10}),
        ("Mistral", "llama", {"sliding_window": 4}),
        ("Qwen2", "qwen2", {}),
        ("Qwen3", "qwen3", {"head_dim": 16}),
    ],
)
def test_logits_equal_transformers(model: str, arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    oracle, spec = make(tmp_path, model, **options)
    window = {"attention.sliding_window": 4} if "sliding_window" in options else {}
    path = write_gguf(tmp_path / "m.gguf", spec, oracle.state_dict(), arch=arch, metadata=window)
    loaded = load(path)
    assert replace(loaded.spec, rms_norm_eps=spec.rms_norm_eps) == spec  # GGUF has it as an f32
    got = run_chunks(loaded.decoder, PROMPT, [4, 1, 2])
    torch.testing.assert_close(got, transformers_logits(oracle, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "dtype", "label", "tolerance"),
    [
        (GGMLQuantizationType.F16, torch.float16, None, 0.01),
        (GGMLQuantizationType.BF16, torch.bfloat16, None, 0.1),
        (GGMLQuantizationType.Q8_0, torch.bfloat16, "Q8_0", 0.2),
        (GGMLQuantizationType.Q4_0, torch.bfloat16, "Q4_0", 3.0),
    ],
)
def test_other_types_are_read_as_the_numbers_they_stand_for(
    kind: GGMLQuantizationType, dtype: torch.dtype, label: str | None, tolerance: float, tmp_path: Path
) -> None:
    oracle, spec = make(tmp_path, "Llama")
    path = write_gguf(tmp_path / "m.gguf", spec, oracle.state_dict(), kind=kind)
    weights = open_checkpoint(resolve_model(str(path))).weights
    assert (weights.dtype, weights.quantization) == (dtype, label)
    got = run_chunks(load(path).decoder, PROMPT, [7])
    torch.testing.assert_close(got, transformers_logits(oracle, PROMPT), atol=tolerance, rtol=0)


def test_llama_3s_divisors_scale_the_tables(tmp_path: Path) -> None:
    settings = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 5e5,
    }
    oracle, spec = make(tmp_path, "Llama", rope_parameters={**settings, "original_max_position_embeddings": 64})
    plain = 1.0 / (5e5 ** (np.arange(0, 16, 2) / 16))
    divisors = (plain / oracle.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", spec, oracle.state_dict(), extra={"rope_freqs.weight": divisors})
    loaded = load(path)
    assert loaded.spec.rope.rope_type == "divided"
    for ours, theirs in zip(rope_tables(loaded.spec, 200), rope_tables(spec, 200), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_its_tokenizer_and_its_ends_come_from_metadata(tmp_path: Path) -> None:
    oracle, spec = make(tmp_path, "Llama")
    path = write_gguf(tmp_path / "m.gguf", spec, oracle.state_dict())
    tokenizer = load_tokenizer(resolve_model(str(path)))
    assert tokenizer.encode("abz<|end|>") == [TOKENS.index(token) for token in ("ab", "z", "<|end|>")]
    assert load(path).eos_token_ids == (TOKENS.index("<|end|>"), TOKENS.index("<|im_end|>"))


@pytest.mark.parametrize(
    ("arch", "metadata", "reason"),
    [
        ("gemma3", {}, "general.architecture 'gemma3' is not supported"),
        ("llama", {"expert_count": 8}, "llama.expert_count"),
        ("llama", {"rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ("llama", {"rope.dimension_count": 8}, "llama.rope.dimension_count 8"),
        ("llama", {"block_count": 4_000_000}, "num_hidden_layers"),
        ("llama", {"block_count": 4}, "tensor blk.3"),
        ("llama", {"block_count": 2}, "tensor blk.2"),
        ("llama", {"feed_forward_length": 95}, "tensor blk.0.ffn_gate.weight has shape [96, 64]"),
        ("llama", {"context_length": 0}, "max_position_embeddings"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    arch: str, metadata: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    oracle, spec = make(tmp_path, "Llama")
    path = write_gguf(tmp_path / "m.gguf", spec, oracle.state_dict(), arch=arch, metadata=metadata)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def check_header(path: Path) -> None:
    ours, theirs = read_gguf_header(path), GGUFReader(path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.kind, found.offset, found.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_the_header_is_what_the_gguf_packages_reader_finds(tmp_path: Path) -> None:
    oracle, spec = make(tmp_path, "Qwen3", head_dim=16)
    kind = GGMLQuantizationType.Q8_0
    check_header(write_gguf(tmp_path / "m.gguf", spec, oracle.state_dict(), arch="qwen3", kind=kind))


@needs_demo
def test_the_demos_header_is_what_the_gguf_packages_reader_finds() -> None:
    path = resolve_model("demo").gguf
    assert path is not None
    check_header(path)
