"""Penalties for tokens that have occurred, as OpenAI and vLLM define them. The slow oracle is in tests/engine."""

import numpy as np
from numpy.typing import NDArray

from etserve.sampling_params import SamplingParams
from etserve.sequence import Sequence


class TokenCounts:
    """Which tokens one sequence contains and how often its output repeats them; grows with the sequence."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._output_counts = np.zeros(64, np.float32)

    def update(self, seq: Sequence) -> None:
        """Count the tokens that were appended since the last call."""
        for position in range(self._num_seen, seq.num_tokens):
            slot = self._slot(seq.token_ids[position])
            if position >= seq.num_prompt_tokens:
                self._output_counts[slot] += 1.0
        self._num_seen = seq.num_tokens

    def _slot(self, token_id: int) -> int:
        slot = self._index.setdefault(token_id, len(self._index))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._output_counts = np.concatenate([self._output_counts, np.zeros_like(self._output_counts)])
        self._ids[slot] = token_id
        return slot

    def apply(self, row: NDArray[np.float32], params: SamplingParams) -> None:
        """Change the logits of one row in place.

        Repetition (prompt and output): z / r if z > 0, else z * r. Then presence and frequency (output only):
        z - presence * (count > 0) - frequency * count.
        """
        num_ids = len(self._index)
        ids, counts = self._ids[:num_ids], self._output_counts[:num_ids]
        values = row[ids]
        repetition = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= np.float32(params.presence_penalty) * (counts > 0)
        values -= np.float32(params.frequency_penalty) * counts
        row[ids] = values
