"""Which decoding sequences compute guesses at their next tokens, and how many: from what the step has left over.

Nobody waits or is preempted for a guess.
"""

from collections.abc import Collection
from typing import Protocol

from etserve.config import BLOCK_SIZE
from etserve.control.draft import DraftLaw, allocate_drafts
from etserve.kv.manager import KVCacheManager
from etserve.plan import ScheduledSequence
from etserve.scheduler.draft import StepDraft
from etserve.sequence import Sequence


class Drafter(Protocol):
    """Guesses the tokens to come."""

    def begin_step(self) -> None:
        """What a step may spend on guesses is whole again."""
        ...

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` guesses at the tokens after the last known one; [] where it has none."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Free what is kept for a sequence that has ended or was preempted. Idempotent."""
        ...


class Speculation:
    """A drafter under the law of control/draft.py."""

    def __init__(self, drafter: Drafter, law: DraftLaw, eos_token_ids: Collection[int]) -> None:
        self._drafter = drafter
        self._law = law
        self._eos_token_ids = frozenset(eos_token_ids)

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._drafter.forget(seq)

    def extend(self, step: StepDraft, kv: KVCacheManager) -> None:
        """Give drafts to the planned decodes, as far as the step's budget and the free blocks go."""
        if step.budget <= 0:
            return
        self._drafter.begin_step()
        decodes = step.decodes
        threshold = self._law.threshold(len(decodes))
        acceptances = [self._law.acceptance(item.seq.drafted, item.seq.clock.entropy_nats) for item in decodes]
        guesses = [self._guess(item, a, threshold) for item, a in zip(decodes, acceptances, strict=True)]
        lengths = allocate_drafts(acceptances, [len(guess) for guess in guesses], step.budget)
        for index, (item, guess, length) in enumerate(zip(decodes, guesses, lengths, strict=True)):
            if length > 0 and not kv.reserve(item.seq, item.end + length):
                length = len(item.block_table) * BLOCK_SIZE - item.end  # what the last block has room for
            if length > 0:
                step.lengthen(index, tuple(guess[:length]))

    def _guess(self, item: ScheduledSequence, acceptance: float, threshold: float) -> list[int]:
        """Tokens worth computing, none of which may end the sequence."""
        seq = item.seq
        is_taken = item.draft or item.ahead_of is not None  # verifies guesses of its own, or makes one
        if not seq.drafts_ahead or is_taken or not item.samples or seq.may_be_evicted:
            return []  # what is evicted is decided by the attention of each step
        length = min(
            self._law.length(acceptance, threshold, seq.clock.entropy_nats),
            seq.max_output_tokens - seq.num_output_tokens - 1,  # the token after the draft is drawn as well
            int(min(seq.control.num_sure_dense_tokens - 1 - item.end, self._law.max_tokens)),
        )
        if length <= 0:
            return []
        guess = self._drafter.propose(seq, length)
        ends = (
            seq.params.stop_token_ids if seq.params.ignore_eos else (*seq.params.stop_token_ids, *self._eos_token_ids)
        )
        first_end = next((i for i, token_id in enumerate(guess) if token_id in ends), len(guess))
        return guess[:first_end]
