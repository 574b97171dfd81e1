"""Score known tokens as a server would produce them: one decode step each, under the pruning law of an arm.

The engine cannot be told what to draw at each position, so this drives the decoder as the model runner does (same law,
same watchdog, same selection), with the text's own tokens in place of drawn ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from etserve.attention.batch import Int32, StepBatch
from etserve.bench.ablate.texts import ScoredText
from etserve.config import BLOCK_SIZE, ControlConfig
from etserve.control.choice import ChoiceControl, TokenMeasure
from etserve.engine.building import selection_rule
from etserve.engine.steering import start_control
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.models.types import Decoder
from etserve.runner.estimating import reader_of
from etserve.runner.skipping import divergence
from etserve.sampling_params import SamplingParams

_PREFILL_TOKENS = 512  # of one step


@dataclass(slots=True)
class TokenScores:
    """Of one text's scored tokens, in order."""

    nll_nats: list[float] = field(default_factory=list)  # of softmax(raw logits)
    entropies: list[float] = field(default_factory=list)  # of the distribution that each was scored under
    kept_fractions: list[float] = field(default_factory=list)
    is_likeliest: list[bool] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)  # KL(dense || skipped) in nats, of the checked steps
    divergence_entropies: list[float] = field(default_factory=list)  # H of the same steps, as the law is told it

    def observe_check(self, entropy_nats: float, divergence_nats: float | None) -> None:
        if divergence_nats is not None:
            self.divergences.append(divergence_nats)
            self.divergence_entropies.append(entropy_nats)

    @property
    def total_nll(self) -> float:
        return sum(self.nll_nats)

    @property
    def is_hit(self) -> bool:
        return all(self.is_likeliest)


class TextBatch:
    """Texts in one cache, their beginnings read once, densely; then scored under as many laws as wanted."""

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, texts: Sequence[ScoredText]) -> None:
        self._decoder = decoder
        self._texts = list(texts)
        widths = [-(-len(text.token_ids) // BLOCK_SIZE) for text in texts]
        self._tables = np.zeros((len(widths), max(widths)), np.int32)
        first = 1  # block 0 is the null block
        for index, width in enumerate(widths):
            self._tables[index, :width] = np.arange(first, first + width)
            first += width
        self._cache = decoder.allocate_cache(first)
        for index, text in enumerate(self._texts):
            for start in range(0, text.first_decoded - 1, _PREFILL_TOKENS):
                self._forward([index], [start], min(_PREFILL_TOKENS, text.first_decoded - 1 - start))

    @torch.inference_mode()
    def score(self, control: ControlConfig) -> list[TokenScores]:
        """One per text. What a law writes lies behind the beginnings, so laws do not see each other."""
        rule, reader = selection_rule(control), reader_of(control)
        states = [start_control(control, SamplingParams()) for _ in self._texts]
        scores = [TokenScores() for _ in self._texts]
        positions = [text.first_decoded - 1 for text in self._texts]
        while live := [i for i, text in enumerate(self._texts) if positions[i] < len(text.token_ids) - 1]:
            at = [positions[i] for i in live]
            logits, measured = self._step(live, at, [states[i] for i in live], rule)
            log_p = torch.log_softmax(logits.double(), -1)
            entropies = (-(log_p.exp() * log_p.clamp_min(-1e30)).sum(-1)).tolist()
            read = entropies if reader.is_exact else reader.row_pass(logits).entropy.tolist()  # what the law is told
            best = logits.argmax(-1).tolist()
            for row, i in enumerate(live):
                states[i] = states[i].observe(read[row], measured[row])
                text, target = self._texts[i], self._texts[i].token_ids[positions[i] + 1]
                if positions[i] + 1 >= text.first_scored:
                    scores[i].nll_nats.append(-float(log_p[row, target]))
                    scores[i].entropies.append(entropies[row])
                    scores[i].kept_fractions.append(measured[row].kept_fraction)
                    scores[i].is_likeliest.append(best[row] == target)
                    scores[i].observe_check(read[row], measured[row].divergence_nats)
                positions[i] += 1
        return scores

    def _step(
        self, live: list[int], at: list[int], states: list[ChoiceControl], rule: SelectionRule
    ) -> tuple[torch.Tensor, list[TokenMeasure]]:
        """Logits f32 [len(live), vocab] of one decode step each, and what the loop is to know of it."""
        checks = [state.check_epsilon(position + 1) for state, position in zip(states, at, strict=True)]
        divergences = self._checked(live, at, checks, rule)
        epsilon = [state.epsilon(position + 1) for state, position in zip(states, at, strict=True)]
        logits, kept = self._decode(live, at, epsilon, rule)
        measured = []
        for row, share in enumerate(kept):
            found = TokenMeasure(kept_fraction=share)
            if row in divergences:
                found = replace(found, divergence_nats=divergence(logits[row], divergences[row]))
            measured.append(found)
        return logits, measured

    def _checked(
        self, live: list[int], at: list[int], checks: list[float], rule: SelectionRule
    ) -> dict[int, torch.Tensor]:
        """Logits of the skipping pass where the watchdog compares, by row; the dense pass overwrites its entries."""
        rows = [row for row, epsilon in enumerate(checks) if epsilon > 0.0]
        if not rows:
            return {}
        logits, _ = self._decode([live[r] for r in rows], [at[r] for r in rows], [checks[r] for r in rows], rule)
        return {row: logits[index].clone() for index, row in enumerate(rows)}

    def _decode(
        self, live: list[int], at: list[int], epsilon: list[float], rule: SelectionRule
    ) -> tuple[torch.Tensor, list[float]]:
        selection = BlockSelection(np.array(epsilon, np.float32), None, rule) if any(epsilon) else None
        hidden = self._forward(live, at, 1, selection)
        logits = self._decoder.logits(hidden).clone()
        counts = self._decoder.attention_counts
        if selection is None or counts is None:
            return logits, [1.0] * len(live)
        return logits, (counts.read_blocks / np.maximum(counts.total_blocks, 1)).tolist()

    def _forward(
        self, live: list[int], starts: list[int], count: int, selection: BlockSelection | None = None
    ) -> torch.Tensor:
        """`count` tokens of each text from its start on; hidden state of the last one of each."""
        ids = [token for i, s in zip(live, starts, strict=True) for token in self._texts[i].token_ids[s : s + count]]
        ends = np.array(starts, np.int32) + count
        query_start: Int32 = np.arange(0, (len(live) + 1) * count, count, dtype=np.int32)
        positions = (np.array(starts, np.int32)[:, None] + np.arange(count, dtype=np.int32)).reshape(-1)
        width = int(-(-int(ends.max()) // BLOCK_SIZE))
        batch = StepBatch(
            token_ids=np.array(ids, np.int32),
            positions=np.ascontiguousarray(positions, np.int32),
            query_start=query_start,
            context_lens=ends.astype(np.int32),
            block_tables=np.ascontiguousarray(self._tables[live, :width]),
            logit_rows=(query_start[1:] - 1).astype(np.int32),
            selection=selection,
        )
        return self._decoder.forward(batch, self._cache)
