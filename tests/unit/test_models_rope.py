"""Rotary tables against transformers' own rotary embedding, every variant, at the length the tables are for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from etserve.models.config_file import convert_config
from etserve.models.registry import read_spec
from etserve.models.rope import rope_tables
from etserve.models.types import DecoderSpec
from tests.unit.model_helpers import TINY

ORIGINAL = {"original_max_position_embeddings": 64}
VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.5, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, **ORIGINAL},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 9.0], **ORIGINAL},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
]


def spec_of(**settings: Any) -> DecoderSpec:
    values = {**TINY, "architectures": ["LlamaForCausalLM"], **settings}
    return read_spec(convert_config(values, Path("config.json")), Path("config.json"))


@pytest.mark.parametrize("max_len", [48, 256, 300])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v["rope_type"])
def test_tables_are_transformers(variant: dict[str, Any], max_len: int) -> None:
    settings = {"rope_theta": 50_000.0, **variant}
    config = transformers.LlamaConfig(**TINY, rope_parameters=dict(settings))
    theirs_cos, theirs_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(max_len)[None])
    cos, sin = rope_tables(spec_of(rope_parameters=settings), max_len)
    assert cos.shape == sin.shape == (max_len, 4)
    torch.testing.assert_close(torch.cat((cos, cos), -1), theirs_cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.cat((sin, sin), -1), theirs_sin[0], atol=2e-5, rtol=0)


def test_both_spellings_mean_the_same() -> None:
    old = spec_of(rope_theta=7e4, rope_scaling={"type": "linear", "factor": 3})
    new = spec_of(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 7e4})
    assert old.rope == new.rope
    assert old.rope.theta == 7e4


def test_a_variant_that_needs_the_trained_length_takes_it_from_where_it_is() -> None:
    inside = {"rope_type": "yarn", "factor": 2.0}
    assert dict(spec_of(rope_parameters=inside).rope.parameters)["original_max_position_embeddings"] == 256
    beside = spec_of(rope_parameters=inside, original_max_position_embeddings=128)
    assert dict(beside.rope.parameters)["original_max_position_embeddings"] == 128
