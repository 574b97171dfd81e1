"""The decoders against transformers, logit by logit."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType

from etserve.config import EngineConfig
from etserve.errors import ConfigError, ModelError
from etserve.models.files import ModelFiles, resolve_model
from etserve.models.loader import LoadedModel, choose, load_model, open_checkpoint
from tests.unit.model_helpers import UNIT_MODEL, demo_oracle, needs_demo, run_chunks, save_tiny, transformers_logits

ODD = {"hidden_size": 108, "intermediate_size": 83}  # head_dim 18; the native kernels start at 16
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 20}),
    "mistral with own head_dim": ("Mistral", {"head_dim": 22, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


HAS_NATIVE = importlib.util.find_spec("etserve._cpu") is not None
BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not HAS_NATIVE, reason="csrc is not built"))]


def load(files: ModelFiles, dtype: str = "float32", backend: str = "torch") -> LoadedModel:
    return load_model(EngineConfig(backend=backend, dtype=dtype), files)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_whole_and_in_chunks(name: str, backend: str, tmp_path: Path) -> None:
    kind, options = CASES[name]
    oracle = save_tiny(tmp_path, kind, **{**ODD, **options})
    decoder = load(ModelFiles("tiny", folder=tmp_path), backend=backend).decoder
    tokens = [random.Random(3).randrange(131) for _ in range(53)]
    expected = transformers_logits(oracle, tokens)
    for chunks in ([53], [1] * 53, [17, 16, 1, 1, 18]):
        torch.testing.assert_close(run_chunks(decoder, tokens, chunks), expected, atol=1e-4, rtol=0)


def test_the_unit_model_gives_transformers_logits() -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(UNIT_MODEL.folder, dtype=torch.float32).eval()
    tokens = list(b"Emma Woodhouse, handsome, clever, and rich, with a comfortable home")
    decoder = load(UNIT_MODEL).decoder
    got = run_chunks(decoder, tokens, [40, 1, 1, len(tokens) - 42])
    torch.testing.assert_close(got, transformers_logits(oracle, tokens), atol=1e-4, rtol=0)


def test_bfloat16_stays_as_close_as_transformers_own(tmp_path: Path) -> None:
    exact = save_tiny(tmp_path, "Llama", torch.bfloat16)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tokens = list(range(40))
    expected = transformers_logits(exact, tokens)
    theirs = (transformers_logits(rounded, tokens) - expected).abs().mean()
    model = load(ModelFiles("tiny", folder=tmp_path), "auto")
    ours = (run_chunks(model.decoder, tokens, [40]) - expected).abs().mean()
    assert model.dtype == model.kv_dtype == "bfloat16"
    assert 0 < ours < 2 * theirs


def test_a_sharded_checkpoint_loads_like_a_whole_one(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "whole", "Qwen3", head_dim=16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    whole, sharded = (load(ModelFiles("m", folder=tmp_path / part)) for part in ("whole", "sharded"))
    assert torch.equal(run_chunks(whole.decoder, [5, 6, 7], [3]), run_chunks(sharded.decoder, [5, 6, 7], [3]))
    assert whole.num_parameters == sharded.num_parameters == sum(p.numel() for p in model.parameters())


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    with pytest.raises(ConfigError, match="max_model_len 257 is beyond the model's own context of 256"):
        load_model(EngineConfig(max_model_len=257), ModelFiles("tiny", folder=tmp_path))


def test_a_kv_dtype_that_a_gpu_cannot_have_is_refused_before_a_weight_is_read() -> None:
    checkpoint = open_checkpoint(UNIT_MODEL)
    config = EngineConfig(device="cuda", kv_dtype="float16")
    with pytest.raises(ConfigError, match=r"kv_dtype float16: .* the weights' dtype, bfloat16"):
        choose(config, checkpoint)
    assert choose(EngineConfig(device="cuda", kv_dtype="bfloat16"), checkpoint).kv_dtype == torch.bfloat16
    slow = EngineConfig(device="cuda", kv_dtype="float16", backend="torch")
    assert choose(slow, checkpoint).kv_dtype == torch.float16


def test_yarn_reaches_as_far_as_it_stretches(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})
    files = ModelFiles("tiny", folder=tmp_path)
    assert load_model(EngineConfig(backend="torch", max_model_len=512), files).max_model_len == 512
    with pytest.raises(ConfigError, match="max_model_len 513 is beyond the model's own context of 512"):
        load_model(EngineConfig(backend="torch", max_model_len=513), files)


@pytest.mark.skipif(not HAS_NATIVE, reason="csrc is not built")
def test_shapes_that_the_native_kernels_do_not_take_are_said_at_the_start(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    with pytest.raises(ModelError, match=r"config\.json: .*head_dim must be .*backend torch"):
        load(ModelFiles("tiny", folder=tmp_path), backend="auto")


def test_what_a_loaded_model_says_of_itself() -> None:
    model = load(UNIT_MODEL, "auto")
    assert (model.dtype, model.kv_dtype, model.quantization) == ("bfloat16", "bfloat16", None)
    assert (model.num_parameters, model.eos_token_ids, model.max_model_len) == (828_544, (257,), 2048)
    assert model.decoder.weight_bytes == 2 * 828_544
    assert model.decoder.kv_bytes_per_block() == 4 * 2 * 16 * 2 * 32 * 2


@needs_demo
def test_the_demo_gives_transformers_logits_on_the_same_dequantised_weights() -> None:
    tokens = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
    ]
    model = load(resolve_model("demo"))
    got = run_chunks(model.decoder, tokens, [13, 1, 6])
    torch.testing.assert_close(got, transformers_logits(demo_oracle(), tokens), atol=1e-3, rtol=0)
    assert (model.quantization, model.eos_token_ids, model.max_model_len) == ("Q4_1", (0, 2), 8192)
    assert model.num_parameters == 134_515_008


@needs_demo
def test_the_demos_embedding_is_what_the_q8_0_blocks_say() -> None:
    files = resolve_model("demo")
    assert files.gguf is not None
    from etserve.tokenizer.gguf_header import read_gguf_header

    row = read_gguf_header(files.gguf).tensors["token_embd.weight"]
    assert row.kind == GGMLQuantizationType.Q8_0
    raw = np.fromfile(files.gguf, dtype=np.uint8, count=34, offset=row.offset)  # one block: f16 scale, 32 int8
    expected = raw[2:].view(np.int8).astype(np.float32) * raw[:2].view(np.float16).astype(np.float32)
    got = open_checkpoint(files).weights.tensor("embedding.weight", torch.float32)[0, :32]
    assert np.array_equal(got.numpy(), expected)
