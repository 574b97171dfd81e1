"""What the thermostat is told of a row of logits, and what mirostat takes out of it. Decides no temperature.

H_ctl is measured after penalties, bias and grammar, at the temperature in force, before top-k, top-p and min-p.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.control.choice import TokenMeasure
from etserve.kernels import rows
from etserve.sequence import Sequence

MIN_TEMPERATURE = 1e-6  # below this a draw is greedy but for ties, and f32 overflows


@dataclass(frozen=True, slots=True)
class _Distribution:
    """softmax(row / temperature)."""

    entropy_nats: float
    varentropy: float
    log_sum_exp: float
    temperature: float


class SteeredRows:
    """Measurements of the rows whose sequences steer their temperature by entropy, by row number."""

    def __init__(
        self, seqs: list[Sequence], logits: torch.Tensor, chosen: list[int], raw: rows.RowStats, changed: set[int]
    ) -> None:
        """`logits`: f32 [len(seqs), vocab]; `raw` measured all rows before those in `changed` were changed."""
        self._found: dict[int, _Distribution] = {}
        temperatures = {index: _measuring_temperature(seqs[index]) for index in chosen}
        fresh = [index for index in chosen if index in changed or temperatures[index] != 1.0]
        for index in chosen:
            if index not in changed and temperatures[index] == 1.0:
                self._take(index, raw, index, 1.0)
        if fresh:
            scale = torch.tensor([temperatures[index] for index in fresh], dtype=torch.float32)
            stats = rows.row_pass(logits[fresh].div_(scale[:, None]), 0)
            for position, index in enumerate(fresh):
                self._take(index, stats, position, temperatures[index])

    def _take(self, index: int, stats: rows.RowStats, position: int, temperature: float) -> None:
        self._found[index] = _Distribution(
            entropy_nats=float(stats.entropy[position]),
            varentropy=float(stats.varentropy[position]),
            log_sum_exp=float(stats.log_sum_exp[position]),
            temperature=temperature,
        )

    @staticmethod
    def cuts(seq: Sequence) -> bool:
        """Whether the sequence's mode takes tokens out of its rows."""
        return seq.control.laws.thermostat.mode == "mirostat"

    def cut(self, index: int, seq: Sequence, row: NDArray[np.float32]) -> None:
        """Take the tokens that mirostat finds too surprising out of the row; the likeliest stays in any case."""
        found = self._found[index]
        too_low = row < (found.log_sum_exp - seq.control.thermostat.max_surprisal_nats) * found.temperature
        too_low[row.argmax()] = False
        row[too_low] = -np.inf

    def measure(
        self, index: int, seq: Sequence, token_id: int, row: NDArray[np.float32], end_probability: float
    ) -> TokenMeasure:
        """What the control loop is told of the token drawn from the row."""
        found = self._found.get(index)
        if found is None:
            return TokenMeasure(end_probability=end_probability)
        return TokenMeasure(
            entropy_nats=found.entropy_nats,
            varentropy=found.varentropy,
            surprisal_nats=found.log_sum_exp - float(row[token_id]) / found.temperature,
            is_forced=seq.params.grammar is not None and found.entropy_nats == 0.0,
            end_probability=end_probability,
        )


def _measuring_temperature(seq: Sequence) -> float:
    """The temperature in force, save in edt, whose law wants the entropy at temperature 1."""
    return 1.0 if seq.control.laws.thermostat.mode == "edt" else max(seq.temperature, MIN_TEMPERATURE)
