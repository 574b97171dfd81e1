"""Measurements of raw logits: entropies, log-probabilities, probabilities of the end. Draws nothing."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.control.choice import TokenMeasure
from etserve.kernels import rows
from etserve.outputs import TokenLogprobs
from etserve.plan import Sampled
from etserve.runner.estimating import EntropyReader
from etserve.sequence import Sequence

Row = NDArray[np.float32]


class RawRows:
    """Measurements of the raw logits, kept while the logits themselves are changed."""

    def __init__(self, logits: Row, stats: rows.RowStats) -> None:
        self.logits = logits
        self.stats = stats
        self.argmax = np.asarray(stats.argmax)
        self.is_bad = (np.asarray(stats.nonfinite) > 0) | ~np.isfinite(np.asarray(stats.entropy))
        self._entropy = stats.entropy.tolist()
        self._varentropy = stats.varentropy.tolist()
        self._log_sum_exp = stats.log_sum_exp
        self._top_ids = stats.top_ids
        self._top_values = stats.top_values
        self._kept: dict[int, Row] = {}

    def keep(self, index: int) -> None:
        """Save the raw row before it is changed, once."""
        if index not in self._kept:
            self._kept[index] = self.logits[index].copy()

    def probability(self, index: int, ids: NDArray[np.int64]) -> float:
        """Of any of these tokens, in the row as it stands."""
        return float(np.exp(self.logits[index][ids] - self._log_sum_exp[index]).sum())

    def surprisal(self, index: int, token_id: int, scale: float) -> float:
        """-ln p of a token in the raw row; `scale`: what the row was divided by, if it was not kept."""
        row = self._kept.get(index)
        raw = float(self.logits[index][token_id]) * scale if row is None else float(row[token_id])
        return float(self._log_sum_exp[index]) - raw

    def sampled(self, index: int, seq: Sequence, token_id: int, measured: TokenMeasure, scale: float = 1.0) -> Sampled:
        """What the row gave; `scale` as for `surprisal`."""
        wanted = seq.params.logprobs
        return Sampled(
            token_id=token_id,
            entropy_nats=self._entropy[index],
            varentropy=self._varentropy[index],
            temperature=seq.temperature,
            surprisal_nats=self.surprisal(index, token_id, scale),
            logprobs=None if wanted is None else self.logprobs(index, token_id, wanted),
            measured=measured,
        )

    def logprobs(self, index: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Log-softmax of the raw row: of one token and of the `num_top` likeliest."""
        log_sum_exp = float(self._log_sum_exp[index])
        row = self._kept.get(index, self.logits[index])
        ids = self._top_ids[index][:num_top].tolist()
        values = self._top_values[index][:num_top].tolist()
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(row[token_id]) - log_sum_exp,
            top_ids=[i for i in ids if i >= 0],
            top_logprobs=[v - log_sum_exp for i, v in zip(ids, values, strict=True) if i >= 0],
        )


def prompt_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs] | None:
    """Log-probabilities of known tokens, one row of f32 [len(token_ids), vocab] each; None if a row is not finite."""
    raw = RawRows(logits.numpy(), rows.row_pass(logits, num_top))
    if raw.is_bad.any():
        return None
    return [raw.logprobs(index, token_id, num_top) for index, token_id in enumerate(token_ids)]


def surprisals(logits: torch.Tensor, token_ids: list[int]) -> list[float]:
    """-ln p in nats of known tokens, one row of f32 [len(token_ids), vocab] each; NaN where a row is not finite."""
    raw = RawRows(logits.numpy(), rows.row_pass(logits, 0))
    found = [raw.surprisal(index, token_id, 1.0) for index, token_id in enumerate(token_ids)]
    return [math.nan if is_bad else nats for is_bad, nats in zip(raw.is_bad.tolist(), found, strict=True)]


def entropies(logits: torch.Tensor, token_ids: list[int], reader: EntropyReader) -> list[tuple[float, float]]:
    """Entropy of each row and surprisal -ln p of the token that was drawn from it, in nats."""
    raw = RawRows(logits.numpy(), reader.row_pass(logits))
    surprisals = [raw.surprisal(index, token_id, 1.0) for index, token_id in enumerate(token_ids)]
    return list(zip(raw.stats.entropy.tolist(), surprisals, strict=True))
