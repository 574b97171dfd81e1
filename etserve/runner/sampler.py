"""From raw logits to drawn tokens. Rows that ask for nothing special take the batched kernels untouched."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.control.keyed_random import uniform
from etserve.kernels import rows
from etserve.outputs import TokenLogprobs
from etserve.plan import Sampled
from etserve.runner.grammar import GrammarCompiler, GrammarMatcher
from etserve.runner.penalties import TokenCounts, has_penalties
from etserve.sequence import Sequence

MIN_TEMPERATURE = 1e-6  # below this a draw is greedy but for ties, and f32 overflows
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
        self.counts = TokenCounts() if has_penalties(params) else None
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

    def __init__(self, eos_token_ids: tuple[int, ...], grammars: GrammarCompiler | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
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
        return wishes.matcher.advance(seq.output_token_ids) and wishes.matcher.is_complete

    def draw(self, seqs: list[Sequence], logits: torch.Tensor) -> DrawnRows:
        """Draw one token per row of `logits` (f32 [len(seqs), vocab]), which is overwritten."""
        drawn = DrawnRows()
        stats = rows.row_pass(logits, max((seq.params.logprobs or 0 for seq in seqs), default=0))
        raw = _RawRows(logits.numpy(), stats)
        tokens = raw.argmax.copy()
        self._reject_nonfinite(seqs, raw, drawn)
        self._apply_wishes(seqs, raw, tokens, drawn)
        self._draw_random(seqs, logits, tokens, drawn)
        for index, seq in enumerate(seqs):
            if seq.seq_id not in drawn.failed:
                drawn.sampled[seq.seq_id] = raw.sampled(index, seq, int(tokens[index]))
        return drawn

    @staticmethod
    def _reject_nonfinite(seqs: list[Sequence], raw: "_RawRows", drawn: DrawnRows) -> None:
        for index in np.flatnonzero(raw.is_bad):
            drawn.failed[seqs[index].seq_id] = "model_numerics"
            drawn.num_nonfinite_rows += 1

    def _apply_wishes(self, seqs: list[Sequence], raw: "_RawRows", tokens: NDArray[np.int32], drawn: DrawnRows) -> None:
        for index, seq in enumerate(seqs):
            wishes = self._wishes[seq.seq_id]
            if seq.seq_id in drawn.failed or not wishes.are_wanted(seq):
                continue
            if seq.params.logprobs is not None:
                raw.keep(index)
            row = raw.logits[index]
            if code := wishes.apply(row, seq):
                drawn.failed[seq.seq_id] = code
            else:
                tokens[index] = row.argmax()

    @staticmethod
    def _draw_random(seqs: list[Sequence], logits: torch.Tensor, tokens: NDArray[np.int32], drawn: DrawnRows) -> None:
        """Overwrite the tokens of the rows that are not greedy."""
        chosen = [i for i, seq in enumerate(seqs) if not seq.params.is_greedy and seq.seq_id not in drawn.failed]
        if not chosen:
            return
        picked = [seqs[i] for i in chosen]
        params = [seq.params for seq in picked]
        vocab = logits.shape[1]
        samples = rows.sample(
            logits if len(chosen) == len(seqs) else logits[chosen],
            temperature=np.array([max(p.temperature, MIN_TEMPERATURE) for p in params], np.float32),
            top_k=np.array([p.top_k if p.top_k < vocab else 0 for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            uniform=np.array([uniform(s.seed, s.num_output_tokens, s.choice) for s in picked], np.float64),
        )
        tokens[chosen] = samples.token_ids
        for seq, token_id in zip(picked, samples.token_ids.tolist(), strict=True):
            if token_id < 0:  # nothing left to draw from
                drawn.failed[seq.seq_id] = "model_numerics"


class _RawRows:
    """Measurements of the raw logits, kept while the logits themselves are changed."""

    def __init__(self, logits: Row, stats: rows.RowStats) -> None:
        self.logits = logits
        self.argmax = np.asarray(stats.argmax)
        self.is_bad = (np.asarray(stats.nonfinite) > 0) | ~np.isfinite(np.asarray(stats.entropy))
        self._entropy = stats.entropy.tolist()
        self._varentropy = stats.varentropy.tolist()
        self._log_sum_exp = stats.log_sum_exp
        self._top_ids = stats.top_ids
        self._top_values = stats.top_values
        self._kept: dict[int, Row] = {}

    def keep(self, index: int) -> None:
        self._kept[index] = self.logits[index].copy()

    def sampled(self, index: int, seq: Sequence, token_id: int) -> Sampled:
        wanted = seq.params.logprobs
        return Sampled(
            token_id=token_id,
            entropy_nats=self._entropy[index],
            varentropy=self._varentropy[index],
            temperature=seq.params.temperature,
            logprobs=None if wanted is None else self.logprobs(index, token_id, wanted),
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
    raw = _RawRows(logits.numpy(), rows.row_pass(logits, num_top))
    if raw.is_bad.any():
        return None
    return [raw.logprobs(index, token_id, num_top) for index, token_id in enumerate(token_ids)]


def entropies(logits: torch.Tensor) -> list[float]:
    """Entropy in nats of each row."""
    return [float(value) for value in rows.row_pass(logits, 0).entropy.tolist()]
