"""Engines over the unit model. The weights are loaded once; every engine gets a fresh pool and scheduler."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from etserve.config import EngineConfig
from etserve.engine.building import assemble, set_threads
from etserve.engine.llm_engine import LLMEngine
from etserve.engine.streams import merge
from etserve.models.files import resolve_model
from etserve.models.loader import LoadedModel, load_model
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from etserve.sampling_params import SamplingParams
from etserve.tokenizer.loading import load_tokenizer
from etserve.tokenizer.tokenizer import Tokenizer

UNIT_MODEL = str(Path(__file__).parents[1] / "data" / "unit_model")
PROMPTS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "Emma Woodhouse, handsome, clever, and rich, with a comfortable home",
    "The man was ",
    "No one who had ever seen Catherine Morland in her infancy would have supposed her born to be an heroine. " * 2,
    "a",
]


@functools.cache
def unit_config(**changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"model": UNIT_MODEL, "dtype": "float32", "num_kv_blocks": 512, "threads": 1}
    return EngineConfig(**{**settings, **changes})


@functools.cache
def load_unit(backend: str = "auto", dtype: str = "float32", sketch_bits: int = 0) -> LoadedModel:
    config = unit_config(backend=backend, dtype=dtype, pruning_sketch_bits=sketch_bits)
    set_threads(config.threads)
    return load_model(config, resolve_model(config.model))


@functools.cache
def unit_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(UNIT_MODEL))


def make_engine(loaded: LoadedModel | None = None, **changes: Any) -> LLMEngine:
    config = unit_config(**changes)
    loaded = loaded or load_unit(sketch_bits=config.pruning_sketch_bits)
    loaded = dataclasses.replace(loaded, max_model_len=config.max_model_len or loaded.max_model_len)
    return LLMEngine(assemble(config, loaded, unit_tokenizer(), "unit", {}))


def encode(text: str) -> list[int]:
    return unit_tokenizer().encode(text, add_special_tokens=False)


def request(request_id: str, prompt: str | list[int], **params: Any) -> GenerateRequest:
    """Greedy and 24 tokens unless said otherwise."""
    token_ids = encode(prompt) if isinstance(prompt, str) else prompt
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params})
    return GenerateRequest(request_id=request_id, prompt_token_ids=token_ids, params=wanted)


def run_steps(engine: LLMEngine, requests: Iterable[GenerateRequest]) -> tuple[list[SequenceOutput], list[StepStats]]:
    """All outputs and statistics until the engine has nothing to do; its books must balance then."""
    for item in requests:
        engine.add_request(item)
    outputs: list[SequenceOutput] = []
    stats: list[StepStats] = []
    while engine.has_work:
        step_outputs, step_stats = engine.step()
        outputs += step_outputs
        stats.append(step_stats)
    check_idle(engine)
    return outputs, stats


def run(engine: LLMEngine, requests: Iterable[GenerateRequest]) -> dict[tuple[str, int], SequenceOutput]:
    """The whole output of every choice; each ends exactly once."""
    by_choice: dict[tuple[str, int], list[SequenceOutput]] = {}
    for output in run_steps(engine, requests)[0]:
        by_choice.setdefault((output.request_id, output.choice), []).append(output)
    for parts in by_choice.values():
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    return {key: merge(parts) for key, parts in by_choice.items()}


def run_one(engine: LLMEngine, wanted: GenerateRequest) -> SequenceOutput:
    return run(engine, [wanted])[wanted.request_id, 0]


def check_idle(engine: LLMEngine) -> None:
    """Nothing is held for anyone: blocks, renderers, sampling state."""
    kv = engine._scheduler.kv
    kv.audit()
    assert kv.num_active_blocks == 0
    assert engine.num_open_choices == 0
    assert engine._requests == {}
    assert engine._sampler._wishes == {}


@functools.cache
def reference_model() -> Any:
    """transformers' own implementation, f32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(UNIT_MODEL, dtype=torch.float32).eval()


def reference_logits(token_ids: list[int]) -> torch.Tensor:
    """f32 [len(token_ids), vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model()(torch.tensor([token_ids])).logits[0]
    return logits


def reference_greedy(prompt: str, num_tokens: int) -> list[int]:
    tokens = encode(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(tokens)[-1].argmax()))
        if tokens[-1] == 257:
            break
    return tokens[len(encode(prompt)) :]
