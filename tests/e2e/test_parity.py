"""The demo model as transformers computes it, and the same answer under every schedule."""

from typing import Any

import pytest
import torch
import transformers

from etserve.llm import LLM
from etserve.sampling_params import SamplingParams
from tests.unit.model_helpers import demo_oracle, needs_demo

pytestmark = needs_demo

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Dear Sir or Madam, I am writing to",
    "In 1969, the first man on the Moon",
    "List of fruits: apple, banana,",
    "She opened the door and",
    "The theory of evolution was proposed by",
    "1, 2, 3, 4, 5,",
    "import numpy as np\n\ndef mean(values):",
    "It is a truth universally acknowledged, that",
    "The largest planet of the solar system is",
    "To make bread you need flour,",
    "Q: What is the opposite of hot?\nA:",
    "The quick brown fox jumps over",
    "<html>\n<head>\n<title>",
    "Roses are red, violets are",
    "The stock market fell yesterday because",
]
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def oracle() -> Any:
    return demo_oracle()


def _logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def _score(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of tokens 1 .., as the engine measures them."""
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    scored = llm.generate([token_ids], params)[0].choices[0].prompt_logprobs
    assert scored is not None
    return torch.tensor([entry.logprob for entry in scored if entry is not None])


def test_greedy_text_and_logits_in_f32_are_those_of_transformers(oracle: Any) -> None:
    llm = LLM("demo", dtype="float32", num_kv_blocks=600)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    for generation in llm.generate(PROMPTS, params):
        drawn = generation.choices[0].token_ids
        assert len(drawn) == NUM_TOKENS
        first = len(generation.prompt_token_ids) - 1
        expected = _logprobs(oracle, generation.prompt_token_ids + drawn)[first:-1]
        assert expected.argmax(-1).tolist() == drawn  # by induction: greedy decoding gives the same 64 tokens
        ours = torch.tensor([entry.logprob for entry in generation.choices[0].logprobs])
        torch.testing.assert_close(ours, expected.max(-1).values, atol=1e-3, rtol=0)


def test_logprobs_in_bf16_are_within_the_spread_of_transformers_bf16(oracle: Any) -> None:
    llm = LLM("demo", dtype="bfloat16", num_kv_blocks=600)
    halved = transformers.LlamaForCausalLM(oracle.config)
    halved.load_state_dict(oracle.state_dict())
    halved = halved.to(torch.bfloat16).eval()
    text = llm.tokenizer.encode(" ".join(PROMPTS))
    exact = _logprobs(oracle, text)[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    theirs = _logprobs(halved, text)[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    assert (_score(llm, text) - exact).abs().mean() <= (theirs - exact).abs().mean()


SETTINGS: list[dict[str, Any]] = [
    {"max_step_tokens": 512},
    {"max_step_tokens": 32},
    {"prefix_caching": False, "max_num_seqs": 3},
    {"num_kv_blocks": 40, "max_model_len": 512},  # far too small: sequences are preempted again and again
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_does_not_depend_on_schedule_batch_cache_or_memory(temperature: float) -> None:
    prompts = [*PROMPTS[:8], "Here is a long list of words: " + "sea sand sun " * 40]
    params = [
        SamplingParams(temperature=temperature, max_tokens=40, seed=i, ignore_eos=True) for i in range(len(prompts))
    ]
    texts = []
    for settings in SETTINGS:
        llm = LLM("demo", **({"num_kv_blocks": 600} | settings))
        texts.append([g.choices[0].token_ids for g in llm.generate(prompts, params)])
        texts.append([g.choices[0].token_ids for g in llm.generate(prompts, params)])  # now from the prefix cache
    alone = LLM("demo", num_kv_blocks=600)
    texts.append([alone.generate([p], [q])[0].choices[0].token_ids for p, q in zip(prompts, params, strict=True)])
    assert all(other == texts[0] for other in texts[1:])
