"""What the thermostat is told of a row of logits, and what mirostat takes out of it. Decides no temperature.

H_ctl is measured after penalties, bias and grammar, at the temperature in force, before top-k, top-p and min-p.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.control.choice import TokenMeasure
from etserve.kernels import rows
from etserve.runner.estimating import EntropyReader
from etserve.sequence import Sequence

MIN_TEMPERATURE = 1e-6  # below this a draw is greedy but for ties, and f32 overflows


@dataclass(frozen=True, slots=True)
class _Distribution:
    """softmax of a row as it is drawn from."""

    entropy_nats: float
    varentropy: float
    log_sum_exp: float


class SteeredRows:
    """Measurements of the rows whose sequences steer their temperature by entropy, by row number.

    Their logits are divided by the temperature in place, so that what is measured is what is drawn from; copies of
    rows would cost more than all else here.
    """

    def __init__(
        self,
        seqs: list[Sequence],
        logits: torch.Tensor,
        chosen: list[int],
        raw: rows.RowStats,
        changed: set[int],
        reader: EntropyReader,
    ) -> None:
        """`logits`: f32 [len(seqs), vocab], overwritten. `chosen` ascends.

        `raw`: what `reader` measured of all rows before those in `changed` were changed.
        """
        self._found: dict[int, _Distribution] = {}
        values = logits.numpy()  # one row at a time is too little for torch to wake its threads for
        self._scaled: set[int] = set()
        fresh: list[int] = []
        for index in chosen:
            temperature = _measuring_temperature(seqs[index])
            if temperature != 1.0:
                values[index] /= np.float32(temperature)
                self._scaled.add(index)
            if temperature != 1.0 or index in changed:
                fresh.append(index)
            else:
                self._take(index, raw, index)
        for begin, end in _runs(fresh):
            stats = reader.row_pass(logits[begin:end])
            for index in range(begin, end):
                self._take(index, stats, index - begin)

    def _take(self, index: int, stats: rows.RowStats, position: int) -> None:
        self._found[index] = _Distribution(
            entropy_nats=float(stats.entropy[position]),
            varentropy=float(stats.varentropy[position]),
            log_sum_exp=float(stats.log_sum_exp[position]),
        )

    def temperature(self, index: int, seq: Sequence) -> float:
        """By which the row is still to be divided when the next token is drawn."""
        return 1.0 if index in self._scaled else max(seq.temperature, MIN_TEMPERATURE)

    def scale(self, index: int, seq: Sequence) -> float:
        """What the row has been divided by."""
        return _measuring_temperature(seq) if index in self._scaled else 1.0

    @staticmethod
    def cuts(seq: Sequence) -> bool:
        """Whether the sequence's mode takes tokens out of its rows."""
        return seq.control.laws.thermostat.mode == "mirostat"

    def cut(self, index: int, seq: Sequence, row: NDArray[np.float32]) -> None:
        """Take the tokens that mirostat finds too surprising out of the row; the likeliest stays in any case."""
        found = self._found[index]
        too_low = row < found.log_sum_exp - seq.control.thermostat.max_surprisal_nats
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
            surprisal_nats=found.log_sum_exp - float(row[token_id]),
            is_forced=seq.params.grammar is not None and found.entropy_nats == 0.0,
            end_probability=end_probability,
        )


def _measuring_temperature(seq: Sequence) -> float:
    """The temperature in force, save in edt, whose law wants the entropy at temperature 1."""
    return 1.0 if seq.control.laws.thermostat.mode == "edt" else max(seq.temperature, MIN_TEMPERATURE)


def _runs(ascending: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring numbers as [begin, end)."""
    for index, value in enumerate(ascending):
        if index == 0 or ascending[index - 1] != value - 1:
            begin = value
        if index + 1 == len(ascending) or ascending[index + 1] != value + 1:
            yield begin, value + 1
