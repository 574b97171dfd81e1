"""Verification in entropic time (section 4 of the entropic-control page) of tokens that nobody has been told yet.

A copy of the sequence runs ahead of it with blocks skipped. What it draws are guesses: nobody is told of them, and they
enter no statistics. When their risk is spent the sequence itself computes them densely, in one step, as it does with
any draft (runner/drafts.py), and the copy is dropped. So the output is that of dense attention.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from etserve.config import BLOCK_SIZE
from etserve.control.draft import DraftRun
from etserve.kv.manager import KVCacheManager
from etserve.plan import ModelRunnerOutput, ScheduledSequence
from etserve.scheduler.draft import StepDraft
from etserve.sequence import Sequence


class RunningAhead:
    """The copies of one engine's sequences that are ahead of them."""

    def __init__(self, kv: KVCacheManager, eos_token_ids: Collection[int]) -> None:
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._copies: dict[int, Sequence] = {}  # by seq_id

    def forget(self, seq: Sequence) -> None:
        """Drop the guesses of a sequence that has ended or lost its blocks. Idempotent."""
        self._copies.pop(seq.seq_id, None)

    def make_room(self, seqs: Iterable[Sequence]) -> bool:
        """Drop the guesses of the first of these sequences that hold a block for nothing else; False: none does."""
        for seq in seqs:
            if seq.seq_id in self._copies:
                num_free = self._kv.num_allocatable_blocks
                self._kv.trim(seq, seq.num_tokens)
                if self._kv.num_allocatable_blocks > num_free:
                    self.forget(seq)
                    return True
        return False

    def extend(self, step: StepDraft, seq: Sequence, most: int, num_kept_blocks: int) -> bool:
        """Plan one more guess for a decoding sequence; False where it is to compute its own tokens instead.

        `most`: guesses that a step can verify beside the sequence's own token. So many blocks are left to others.
        """
        if step.budget <= 0 or not seq.control.is_lossless or not _may_guess(seq):
            return False
        tip = self._copies.get(seq.seq_id, seq)
        epsilon = tip.control.guess_epsilon(tip.num_tokens)
        if self._is_due(tip, seq, most) or not epsilon > 0.0:
            return False
        if not self._reserve(seq, tip.num_tokens, num_kept_blocks):
            return False
        copy = self._copies.get(seq.seq_id)
        if copy is None:
            copy = self._copies[seq.seq_id] = replace(seq, token_ids=seq.token_ids.copy(), run=DraftRun())
        step.add_ahead(copy, seq, self._kv.block_table(seq), epsilon)
        return True

    def verify(self, step: StepDraft, seq: Sequence, most: int, num_kept_blocks: int) -> None:
        """Let the sequence, which was planned last and densely, compute its guesses as well: `most` of them at most.

        The step has tokens for so many. So many blocks are left to others.
        """
        copy = self._copies.pop(seq.seq_id, None)
        if copy is None:
            return
        guesses = tuple(copy.token_ids[seq.num_tokens :])
        if guesses and self._is_end(guesses[-1], seq):
            guesses = guesses[:-1]  # drawn again after those before it
        guesses = guesses[: max(0, most)]
        if not self._reserve(seq, seq.num_tokens + len(guesses), num_kept_blocks):
            guesses = guesses[:-1]  # nothing was computed behind the last one: there may be no block for it
        self._kv.trim(seq, seq.num_tokens + len(guesses))
        if guesses:
            step.lengthen(len(step.decodes) - 1, guesses)
            step.num_verifications += 1

    def take(self, item: ScheduledSequence, seq: Sequence, output: ModelRunnerOutput, now: float) -> None:
        """Take in what the step gave the copy of a sequence.

        One that failed guesses no more: its sequence will say what is wrong.
        """
        copy, law = item.seq, seq.control.laws.verification
        seq.flops += output.flops.get(seq.seq_id, 0.0)
        seq.bytes_read += output.seq_bytes.get(seq.seq_id, 0.0)
        seq.last_served_seconds = now
        sampled = output.sampled.get(seq.seq_id)
        if sampled is None or law is None:
            copy.run = DraftRun(max(1, copy.run.num_tokens), math.inf)
            return
        copy.num_computed_tokens = item.end
        copy.token_ids.append(sampled.token_id)
        copy.control = copy.control.observe(sampled.entropy_nats, sampled.measured)
        copy.run = law.observe(copy.run, sampled.entropy_nats)

    def _reserve(self, seq: Sequence, num_tokens: int, num_kept_blocks: int) -> bool:
        """Make the table cover so many tokens, of which one at most is new; False where the block would be missed."""
        is_covered = num_tokens <= len(self._kv.block_table(seq)) * BLOCK_SIZE
        return is_covered or (self._kv.num_allocatable_blocks > num_kept_blocks and self._kv.reserve(seq, num_tokens))

    def _is_due(self, copy: Sequence, seq: Sequence, most: int) -> bool:
        law = seq.control.laws.verification
        num_guesses = copy.num_tokens - seq.num_tokens
        return (
            law is None
            or law.is_due(copy.run)
            or num_guesses >= most
            or num_guesses + 1 >= seq.max_output_tokens - seq.num_output_tokens  # the last token is its own
            or (num_guesses > 0 and self._is_end(copy.token_ids[-1], seq))
        )

    def _is_end(self, token_id: int, seq: Sequence) -> bool:
        return token_id in seq.params.stop_token_ids or (not seq.params.ignore_eos and token_id in self._eos_token_ids)


def _may_guess(seq: Sequence) -> bool:
    """Grammars and penalties follow the tokens as they are drawn, and a replay measures them first."""
    params = seq.params
    return params.grammar is None and not params.has_penalties and seq.clock.count >= seq.num_forced_tokens
