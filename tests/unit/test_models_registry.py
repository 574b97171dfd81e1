"""config.json as data: what is read, what is refused by name, and that nothing of it is ever run."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from etserve.errors import ModelError
from etserve.models.config_file import convert_config, read_config
from etserve.models.files import ModelFiles
from etserve.models.loader import open_checkpoint
from etserve.models.registry import read_spec
from etserve.models.tensors import expected_shapes
from etserve.models.types import DecoderSpec
from tests.unit.model_helpers import TINY, edit_json, save_tiny

PATH = Path("somewhere/config.json")


def spec_of(architecture: str = "LlamaForCausalLM", **changes: Any) -> DecoderSpec:
    values = {**TINY, "architectures": [architecture], **changes}
    return read_spec(convert_config({k: v for k, v in values.items() if v is not None}, PATH), PATH)


def test_the_four_architectures_differ_where_they_should() -> None:
    assert not spec_of().attention_bias
    qwen2 = spec_of("Qwen2ForCausalLM")
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = spec_of("Qwen3ForCausalLM")
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert spec_of("MistralForCausalLM", sliding_window=7).sliding_window == 7


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_absent_keys_take_transformers_defaults(kind: str) -> None:
    needed = {k: TINY[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    heads = 32 if kind in ("Qwen2", "Qwen3") else 8
    theirs = getattr(transformers, f"{kind}Config")(**needed, num_attention_heads=heads, head_dim=6)
    ours = spec_of(
        f"{kind}ForCausalLM",
        num_attention_heads=heads,
        head_dim=6,
        num_key_value_heads=None,
        max_position_embeddings=None,
    )
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied_head == theirs.tie_word_embeddings
    if kind == "Mistral":
        assert ours.sliding_window == theirs.sliding_window


def test_an_unknown_architecture_is_named_beside_the_known() -> None:
    with pytest.raises(ModelError, match=r"config\.json: architectures: GPT2LMHeadModel .*LlamaForCausalLM.*Qwen3"):
        spec_of("GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": -48}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"hidden_size": 49}, "hidden_size 49 is no multiple of num_attention_heads 6"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"vocab_size": 2**63}, "vocab_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type 'su'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_an_absurd_or_unsupported_value_is_named_with_its_file(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(**changes)
    assert str(caught.value).startswith("somewhere/config.json: ")
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_that_a_config_names_is_never_run(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    canary = tmp_path / "ran"
    for name in ("modeling_evil.py", "configuration_evil.py"):
        (tmp_path / name).write_text(f"open({str(canary)!r}, 'w').close()\n")
    edit_json(
        tmp_path / "config.json",
        auto_map={"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"},
    )
    assert open_checkpoint(ModelFiles("evil", folder=tmp_path)).spec.num_layers == 3
    assert not canary.exists()


def test_harmless_keys_are_read_past(tmp_path: Path) -> None:
    values = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps({**values, "x": [], "attention_dropout": 0.5}))
    assert read_config(tmp_path / "config.json").hidden_size == 8


def test_every_tensor_of_a_transformers_model_is_expected_and_no_other() -> None:
    for kind in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        config = getattr(transformers, f"{kind}Config")(**TINY, head_dim=8)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        ours = expected_shapes(spec_of(f"{kind}ForCausalLM", head_dim=8))
        assert sorted(map(tuple, (p.shape for p in model.parameters()))) == sorted(ours.values())
