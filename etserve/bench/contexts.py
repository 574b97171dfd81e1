"""Contexts that decode steps are profiled at: a constant that nobody has read, or text that the model has.

A dense step costs the same over either. Which blocks a step skips depends on what is in them, so there it takes text.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from etserve.bench.ablate.lab import Lab
from etserve.bench.errors import BenchError
from etserve.bench.prompts import PromptMaker
from etserve.config import BLOCK_SIZE, ControlConfig
from etserve.engine.building import Memory
from etserve.outputs import GenerateRequest
from etserve.sampling_params import SamplingParams
from etserve.sequence import Sequence as TokenSequence

_FILL = 0.01  # of keys and values: untouched memory would be one page, read from the cache


class Contexts(Protocol):
    """Where prompts of a length come from, and how a memory gets to know their keys and values."""

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        """The same ones for the same arguments; no two share a block."""

    def memory(self, num_sequences: int, num_tokens: int) -> Memory:
        """For so many sequences of so many tokens."""

    def prepare(self, memory: Memory, prompts: Sequence[list[int]]) -> None:
        """Have the memory hold the prompts as cached prefixes. Raises BenchError where it cannot."""


class ConstantContexts:
    """Random tokens whose entries are a constant: announced, never read."""

    def __init__(self, lab: Lab, sketch_bits: int) -> None:
        self._lab, self._bits = lab, sketch_bits

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        """See Contexts. A shared block would be read from the processor's cache."""
        vocab = self._lab.loaded(self._bits).spec.vocab_size
        return [
            [int(token) for token in np.random.default_rng((index, num_tokens)).integers(0, vocab, num_tokens)]
            for index in range(count)
        ]

    def memory(self, num_sequences: int, num_tokens: int) -> Memory:
        """See Contexts. Raises BenchError for a backend whose cache cannot be filled."""
        memory = self._lab.memory(self._bits, _num_blocks(num_sequences, num_tokens))
        tensor = getattr(memory.cache, "tensor", None)
        if not isinstance(tensor, torch.Tensor):
            raise BenchError("this backend's cache cannot be filled")
        tensor.fill_(_FILL)
        return memory

    def prepare(self, memory: Memory, prompts: Sequence[list[int]]) -> None:
        """See Contexts."""
        for index, prompt in enumerate(prompts):
            _announce(memory, index, prompt)


class TextContexts:
    """Pieces of a novel, read densely by the model before the first step is timed."""

    def __init__(self, lab: Lab, sketch_bits: int) -> None:
        self._lab, self._bits = lab, sketch_bits
        self._maker = PromptMaker(lab.tokenizer, send_ids=True)

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        """See Contexts. Raises BenchError for fewer tokens than the tokenizer puts before a text."""
        return [
            [int(token) for token in self._maker.prompt(num_tokens, (num_tokens, index)).content]
            for index in range(count)
        ]

    def memory(self, num_sequences: int, num_tokens: int) -> Memory:
        """See Contexts."""
        return self._lab.memory(self._bits, _num_blocks(num_sequences, num_tokens))

    def prepare(self, memory: Memory, prompts: Sequence[list[int]]) -> None:
        """See Contexts. What an earlier call has read is found in the cache."""
        engine = self._lab.engine(ControlConfig(), self._bits, num_kv_blocks=memory.cache.num_blocks - 1, memory=memory)
        params = SamplingParams(temperature=0.0, max_tokens=1)
        for index, prompt in enumerate(prompts):
            engine.add_request(GenerateRequest(request_id=f"read-{index}", prompt_token_ids=prompt, params=params))
        while engine.has_work:
            engine.step()


def _num_blocks(num_sequences: int, num_tokens: int) -> int:
    return num_sequences * (-(-num_tokens // BLOCK_SIZE) + 1) + 8


def _announce(memory: Memory, index: int, prompt: list[int]) -> None:
    """Have the memory take its constant for this prompt's entries."""
    seq = TokenSequence(
        seq_id=-1 - index,
        request_id="bench",
        choice=0,
        params=SamplingParams(),
        seed=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_output_tokens=0,
        arrival_seconds=0.0,
    )
    if memory.manager.admit(seq) is None:
        raise BenchError(f"no room for {len(prompt)} tokens")
    seq.num_computed_tokens = len(prompt)
    memory.manager.commit(seq)
    memory.manager.free(seq)
