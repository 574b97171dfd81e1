"""From raw logits to drawn tokens. Rows that ask for nothing special take the batched kernels untouched."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.control.choice import NOT_MEASURED
from etserve.control.keyed_random import uniform
from etserve.kernels import rows
from etserve.plan import Sampled
from etserve.runner.estimating import EXACT, EntropyReader
from etserve.runner.grammar import GrammarCompiler, GrammarMatcher
from etserve.runner.measuring import RawRows, entropies
from etserve.runner.penalties import TokenCounts
from etserve.runner.steering import SteeredRows
from etserve.sequence import Sequence

Row = NDArray[np.float32]


@dataclass(slots=True)
class DrawnRows:
    """What a set of rows gave, by seq_id."""

    sampled: dict[int, Sampled] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # seq_id -> error code
    num_nonfinite_rows: int = 0


class _Wishes:
    """What one sequence asks of its rows beyond temperature and truncation; lives as long as the sequence."""

    def __init__(self, seq: Sequence, eos_token_ids: tuple[int, ...], matcher: GrammarMatcher | None) -> None:
        params = seq.params
        self.counts = TokenCounts() if params.has_penalties else None
        self.matcher = matcher
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), np.float32)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.end_ids = np.array(sorted(ends), np.int64)
        self._is_constant = self.counts is not None or matcher is not None or bool(params.logit_bias)

    def are_wanted(self, seq: Sequence) -> bool:
        return self._is_constant or seq.num_output_tokens < seq.params.min_tokens

    def apply(self, row: Row, seq: Sequence) -> str | None:
        """Change the row in place; an error code if nothing can be drawn from it."""
        if self.counts is not None:
            self.counts.update(seq)
            self.counts.apply(row, seq.params)
        if len(self.bias_ids):
            row[self.bias_ids] += self.bias
        if self.matcher is not None and not self._mask_grammar(row, seq, self.matcher):
            return "grammar"
        if seq.num_output_tokens < seq.params.min_tokens:
            self._mask_ends(row)
        return None if np.isfinite(row.max(initial=-np.inf)) else "grammar"

    @staticmethod
    def _mask_grammar(row: Row, seq: Sequence, matcher: GrammarMatcher) -> bool:
        allowed = matcher.allowed() if matcher.advance(seq.output_token_ids) else None
        if allowed is None:
            return False
        row[~allowed] = -np.inf
        return True

    def _mask_ends(self, row: Row) -> None:
        """Forbid the ends, unless the grammar allows nothing else: then the output is over all the same."""
        kept = row[self.end_ids]
        row[self.end_ids] = -np.inf
        if self.matcher is not None and not np.isfinite(row.max()):
            row[self.end_ids] = kept


class Sampler:
    """Draws next tokens. Holds per-sequence state that is rebuilt from the tokens alone; `forget` frees it."""

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        grammars: GrammarCompiler | None = None,
        reader: EntropyReader = EXACT,
    ) -> None:
        """`reader`: what every entropy is read by, of raw rows and of those that a temperature is steered by."""
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._reader = reader
        self._wishes: dict[int, _Wishes] = {}

    def admit(self, seq: Sequence) -> None:
        """Make the sequence's state. Raises RequestError if its grammar cannot be compiled."""
        matcher = None
        if seq.params.grammar is not None:
            if self._grammars is None:
                raise ValueError("a grammar needs a GrammarCompiler")
            matcher = self._grammars.matcher(seq.params.grammar)
        self._wishes[seq.seq_id] = _Wishes(seq, self._eos_token_ids, matcher)

    def forget(self, seq: Sequence) -> None:
        """Idempotent."""
        self._wishes.pop(seq.seq_id, None)

    def is_complete(self, seq: Sequence) -> bool:
        """Whether the sequence's grammar allows nothing but the end after its latest token."""
        wishes = self._wishes.get(seq.seq_id)
        if wishes is None or wishes.matcher is None:
            return False
        return wishes.matcher.advance(seq.output_token_ids) and wishes.matcher.is_complete(seq.num_output_tokens)

    def draw(self, seqs: list[Sequence], logits: torch.Tensor) -> DrawnRows:
        """Draw one token per row of `logits` (f32 [len(seqs), vocab]), which is overwritten."""
        drawn = DrawnRows()
        stats = self._reader.row_pass(logits, max((seq.params.logprobs or 0 for seq in seqs), default=0))
        raw = RawRows(logits.numpy(), stats)
        tokens = raw.argmax.copy()
        ends = {index: self._end_probability(seq, index, raw) for index, seq in enumerate(seqs)}
        self._reject_nonfinite(seqs, raw, drawn)
        changed = self._apply_wishes(seqs, raw, tokens, drawn)
        steered = self._steer(seqs, logits, raw, drawn, changed)
        self._draw_random(seqs, logits, tokens, drawn, steered)
        for index, seq in enumerate(seqs):
            if seq.seq_id in drawn.failed:
                continue
            token_id, measured = int(tokens[index]), NOT_MEASURED
            if seq.control.is_measured:
                measured = steered.measure(index, seq, token_id, raw.logits[index], ends[index])
            drawn.sampled[seq.seq_id] = raw.sampled(index, seq, token_id, measured, steered.scale(index, seq))
        return drawn

    def replay(self, seq: Sequence, position: int, logits: torch.Tensor) -> list[tuple[float, float]]:
        """Move the sequence's control loop over output tokens that were drawn before an engine restart.

        `logits`: raw, f32 [R, vocab], of positions position .. position + R - 1; overwritten. Returns their entropies
        and surprisals in nats. One row at a time, for each token's temperature depends on the one before.
        """
        found = entropies(logits, seq.token_ids[position + 1 : position + 1 + len(logits)], self._reader)
        wishes = self._wishes[seq.seq_id]
        for offset, (entropy_nats, _) in enumerate(found):
            measured, next_position = NOT_MEASURED, position + 1 + offset
            if seq.control.measures_temperature:
                row = logits[offset : offset + 1]
                stats, changed = self._reader.row_pass(row), set[int]()
                past = replace(seq, token_ids=seq.token_ids[:next_position])
                if wishes.are_wanted(past):
                    wishes.apply(row[0].numpy(), past)
                    changed.add(0)
                steered = SteeredRows([past], row, [0], stats, changed, self._reader)
                measured = steered.measure(0, past, seq.token_ids[next_position], row[0].numpy(), math.nan)
            seq.control = seq.control.observe(entropy_nats, measured)
        return found

    def _end_probability(self, seq: Sequence, index: int, raw: RawRows) -> float:
        """p(EOS) of the raw row, for those who are ranked by it; NaN for others."""
        if not seq.control.laws.ranks_by_entropy:
            return math.nan
        return raw.probability(index, self._wishes[seq.seq_id].end_ids)

    def _steer(
        self,
        seqs: list[Sequence],
        logits: torch.Tensor,
        raw: RawRows,
        drawn: DrawnRows,
        changed: set[int],
    ) -> SteeredRows:
        """Measure the rows whose temperature is steered, and take out what mirostat does not want drawn."""
        chosen = [i for i, s in enumerate(seqs) if s.control.measures_temperature and s.seq_id not in drawn.failed]
        for index in chosen:
            if seqs[index].params.logprobs is not None:
                raw.keep(index)
        steered = SteeredRows(seqs, logits, chosen, raw.stats, changed, self._reader)
        for index in chosen:
            if steered.cuts(seqs[index]):
                steered.cut(index, seqs[index], raw.logits[index])
        return steered

    @staticmethod
    def _reject_nonfinite(seqs: list[Sequence], raw: RawRows, drawn: DrawnRows) -> None:
        for index in np.flatnonzero(raw.is_bad):
            drawn.failed[seqs[index].seq_id] = "model_numerics"
            drawn.num_nonfinite_rows += 1

    def _apply_wishes(
        self, seqs: list[Sequence], raw: RawRows, tokens: NDArray[np.int32], drawn: DrawnRows
    ) -> set[int]:
        """Change the rows that ask for it; return which were changed."""
        changed: set[int] = set()
        for index, seq in enumerate(seqs):
            wishes = self._wishes[seq.seq_id]
            if seq.seq_id in drawn.failed or not wishes.are_wanted(seq):
                continue
            raw.keep(index)
            row = raw.logits[index]
            changed.add(index)
            if code := wishes.apply(row, seq):
                drawn.failed[seq.seq_id] = code
            else:
                tokens[index] = row.argmax()
        return changed

    @staticmethod
    def _draw_random(
        seqs: list[Sequence], logits: torch.Tensor, tokens: NDArray[np.int32], drawn: DrawnRows, steered: SteeredRows
    ) -> None:
        """Overwrite the tokens of the rows that are not greedy."""
        chosen = [i for i, seq in enumerate(seqs) if not seq.params.is_greedy and seq.seq_id not in drawn.failed]
        if not chosen:
            return
        picked = [seqs[i] for i in chosen]
        params = [seq.params for seq in picked]
        vocab = logits.shape[1]
        samples = rows.sample(
            logits if len(chosen) == len(seqs) else logits[chosen],
            temperature=np.array([steered.temperature(i, seqs[i]) for i in chosen], np.float32),
            top_k=np.array([p.top_k if p.top_k < vocab else 0 for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            uniform=np.array([uniform(s.seed, s.num_output_tokens, s.choice) for s in picked], np.float64),
        )
        tokens[chosen] = samples.token_ids
        for seq, token_id in zip(picked, samples.token_ids.tolist(), strict=True):
            if token_id < 0:  # nothing left to draw from
                drawn.failed[seq.seq_id] = "model_numerics"
