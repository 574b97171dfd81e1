"""Hands out each step's tokens and blocks, and takes in what the step gave. Knows no tensors, text or model.

One quantity: `num_computed_tokens` chases `num_tokens`. A step computes a piece of that gap for each chosen sequence.
"""

from collections.abc import Callable, Collection, Iterator

from etserve.control.draft import DraftRun
from etserve.errors import PromptTooLongError, RequestError
from etserve.kv.manager import KVCacheManager
from etserve.outputs import FinishReason
from etserve.plan import ModelRunnerOutput, Sampled, ScheduledSequence, SchedulerOutput
from etserve.scheduler.ahead import RunningAhead
from etserve.scheduler.draft import RankedQueue, StepDraft
from etserve.scheduler.eviction import Evictor
from etserve.scheduler.policy import StepPolicy, fcfs, is_decode, is_decoding
from etserve.scheduler.speculation import Speculation
from etserve.sequence import Sequence, Status

_PREFILL_SHARE = 4  # decodes leave 1/4 of the budget while a prompt is to be computed, so that neither side starves


class Scheduler:
    """Waiting and running sequences of one engine.

    A running sequence holds blocks for all tokens known at its admission; after that it grows block by block, and
    when there is none, the worst-ranked running sequence is preempted: it loses its blocks and waits again, where it
    ranks before everyone of its priority who came later. What it had computed is recomputed or found in the cache.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        eos_token_ids: Collection[int],
        now: Callable[[], float],
        policy: StepPolicy | None = None,
        evictor: Evictor | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`now` is the engine's monotonic clock in seconds; without a policy it is first come, first served.

        `evictor`: over the same `kv`; it takes blocks only of sequences that may be evicted from. Without `speculation`
        no step computes drafted tokens.
        Raises ValueError if a limit is too small to run.
        """
        if max_num_seqs < 1 or max_step_tokens < 2:
            raise ValueError(f"a step needs a sequence and 2 tokens, got {max_num_seqs} and {max_step_tokens}")
        self.kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._now = now
        self._policy = policy
        self._evictor = Evictor(kv) if evictor is None else evictor
        self._speculation = speculation
        self._ahead = RunningAhead(kv, eos_token_ids)
        self._rank = fcfs if policy is None else policy
        self._waiting = RankedQueue(self._rank)
        self._running = RankedQueue(self._rank)
        self._num_waiting_tokens = 0
        self._step = -1

    @property
    def has_work(self) -> bool:
        return bool(len(self._running) or len(self._waiting))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of the waiting sequences, whether or not the prefix cache will spare them."""
        return self._num_waiting_tokens

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait. Raises RequestError without a token, PromptTooLongError if it can never fit."""
        if not seq.token_ids:
            raise RequestError("The prompt is empty.", param="prompt")
        # the last token drawn is never computed
        num_tokens = max(seq.num_tokens, seq.num_prompt_tokens + seq.max_output_tokens - 1)
        if num_tokens > self.kv.max_tokens:
            raise PromptTooLongError(num_tokens, self.kv.max_tokens)
        self._wait(seq)

    def schedule(self) -> SchedulerOutput:
        """Plan one step. While there is work, the plan is never empty."""
        self._step += 1
        draft = StepDraft(self._step, self._max_step_tokens, self._now(), self._policy)
        if self._policy is not None:
            self._rerank(self._policy, draft)
        self._continue_decodes(draft, self._decode_budget())
        self._continue_prefills(draft)
        if not (draft.preempted or draft.is_short):  # else whoever came in now would only take turns with others
            self._admit_waiting(draft)
        self._continue_decodes(draft, draft.budget)
        if self._speculation is not None:
            self._speculation.extend(draft, self.kv)
        return draft.freeze()

    def update(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Sequence]:
        """Take in what a step computed and drew; return the sequences that it finished.

        A sequence finished since the plan was made is left as it is. Of a sequence whose drafts were accepted only the
        first token is taken; hand the others to `accept` one by one.
        """
        now = self._now()
        live = [item for item in plan.scheduled if item.seq.status is Status.RUNNING]
        return [item.seq for item in live if self._advance(item, output, now)]

    def accept(self, seq: Sequence, sampled: Sampled) -> bool:
        """Take in the token that follows an accepted draft, which the step has computed; True if that ended it."""
        seq.num_computed_tokens += 1
        self.kv.commit(seq)
        seq.drafted = seq.drafted.accept()
        return self._append(seq, sampled, self._now())

    def finish(self, seq: Sequence, reason: FinishReason) -> bool:
        """End a sequence in whatever state it is; False if it had ended before."""
        if seq.status is Status.FINISHED:
            return False
        if seq.status is Status.RUNNING:
            self._running.remove(seq)
        elif seq in self._waiting:
            self._stop_waiting(seq)
        self.kv.free(seq, keep_content=reason != "error")
        self._evictor.forget(seq)
        self._ahead.forget(seq)
        if self._speculation is not None:
            self._speculation.forget(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        return True

    # --- planning

    def _rerank(self, policy: StepPolicy, draft: StepDraft) -> None:
        slots = min(self._max_num_seqs, self._decode_budget())
        policy.begin_step(draft.step, draft.now, list(self._running), list(self._waiting), slots)
        self._running.resort()
        self._waiting.resort()

    def _decode_budget(self) -> int:
        """Return how many tokens decodes may take before prompts get theirs."""
        has_seat = len(self._waiting) > 0 and len(self._running) < self._max_num_seqs
        if has_seat or any(not is_decoding(seq) for seq in self._running):
            return self._max_step_tokens - max(1, self._max_step_tokens // _PREFILL_SHARE)
        return self._max_step_tokens

    def _continue_decodes(self, draft: StepDraft, num_tokens: int) -> None:
        """Give at least one of so many tokens to each decoding sequence that has none yet, while there are tokens.

        If not all get one, the policy says who does; without a policy those unserved for longest. What several tokens
        are worth to (guesses to verify, entries to renew) gets them in the same order, beyond the one of each other.
        """
        if num_tokens <= 0:
            return
        num_kept = draft.budget - num_tokens
        decodes = [seq for seq in self._running if seq.last_scheduled_step != draft.step and is_decoding(seq)]
        if len(decodes) > num_tokens and self._policy is None:
            decodes.sort(key=lambda seq: seq.last_scheduled_step)
        served = decodes[:num_tokens]
        for num_before, seq in enumerate(served):
            most = draft.budget - num_kept - (len(served) - num_before - 1)
            self._continue(draft, seq, most, num_tokens // len(served))

    def _continue_prefills(self, draft: StepDraft) -> None:
        for seq in self._running:
            if draft.budget <= 0:
                return
            if seq.last_scheduled_step != draft.step and not is_decoding(seq):
                self._continue(draft, seq, draft.budget, draft.budget)

    def _continue(self, draft: StepDraft, seq: Sequence, most: int, share: int) -> None:
        """Compute the next tokens of a running sequence, at the cost of worse-ranked ones if it needs their blocks.

        `most`: tokens that it may take, at least 1. `share`: those that it can count on in the steps to come.
        """
        if most <= 0 or seq.status is not Status.RUNNING:  # preempted a moment ago
            return
        if is_decode(seq) and self._ahead.extend(draft, seq, share - 1, len(self._running)):
            return
        num_tokens = min(seq.num_uncomputed_tokens, most)
        if is_decode(seq):
            draft.evicted(seq, self._evictor.keep_budget(seq, seq.num_computed_tokens + num_tokens))
        while not self.kv.reserve(seq, seq.num_computed_tokens + num_tokens):
            if self._ahead.make_room(self._unplanned(draft)) or self._evict(draft):
                continue
            victim = self._find_victim(draft)
            self._preempt(draft, victim)
            if victim is seq:
                return
        draft.add(seq, num_tokens, self.kv.block_table(seq), is_decode(seq))
        self._ahead.verify(draft, seq, most - num_tokens, len(self._running))

    def _evict(self, draft: StepDraft) -> bool:
        """Take blocks of decoding sequences that allow it and are not in the plan yet; False if there are none.

        Each running sequence may soon need one block: so many are asked for at once.
        """
        if draft.is_exhausted:
            return False
        seqs = {seq.seq_id: seq for seq in self._running if seq.may_be_evicted and is_decode(seq)}
        free = [seq for seq in seqs.values() if seq.last_scheduled_step != draft.step]
        taken = self._evictor.make_room(free, len(self._running))
        for seq_id, num_blocks in taken.items():
            draft.evicted(seqs[seq_id], num_blocks)
        draft.is_short, draft.is_exhausted = draft.is_short or bool(taken), not taken
        return bool(taken)

    def _find_victim(self, draft: StepDraft) -> Sequence:
        """Return the worst-ranked running sequence that this step does not compute yet."""
        return next(self._unplanned(draft))

    def _unplanned(self, draft: StepDraft) -> Iterator[Sequence]:
        """Running sequences that this step does not compute yet, worst rank first."""
        return (seq for seq in reversed(self._running) if seq.last_scheduled_step != draft.step)

    def _preempt(self, draft: StepDraft, seq: Sequence) -> None:
        self._running.remove(seq)
        self._ahead.forget(seq)
        if self._speculation is not None:
            self._speculation.forget(seq)
        self.kv.preempt(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.num_evicted_blocks = 0
        seq.num_dense_tokens = None  # what comes now is dense: recomputation reads every block
        seq.run, seq.is_refreshing = DraftRun(), False
        seq.last_served_seconds = draft.now
        self._wait(seq)
        draft.preempted.append(seq)

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Let sequences in, best rank first, until a seat, the budget or the blocks run out.

        Nobody overtakes one for whom only blocks are missing; one whose prefix is being computed is passed over, but
        its seat is kept.
        """
        num_kept_seats = 0
        for seq in self._waiting:
            if draft.budget <= 0 or len(self._running) + num_kept_seats >= self._max_num_seqs:
                return
            if self._has_leader(seq):
                num_kept_seats += 1
                continue
            # each running sequence may soon need one block more: do not let in what would be preempted at once
            headroom = len(self._running) + 1 if len(self._running) else 0
            num_cached = self.kv.admit(seq, headroom)
            if num_cached is None:
                return
            self._start(draft, seq, num_cached)

    def _has_leader(self, seq: Sequence) -> bool:
        """Someone better-ranked is computing the very block that this one needs next: waiting for it is cheaper."""
        leader = self.kv.find_leader(seq)
        return leader is not None and self._rank(leader) < self._rank(seq)

    def _start(self, draft: StepDraft, seq: Sequence, num_cached: int) -> None:
        self._stop_waiting(seq)
        seq.status = Status.RUNNING
        seq.num_computed_tokens = num_cached
        self._running.add(seq)
        if seq.first_scheduled_seconds is None:
            seq.first_scheduled_seconds = self._now()
            seq.num_cached_tokens = min(num_cached, seq.num_prompt_tokens)
            draft.admitted.append(seq)
        self._continue(draft, seq, draft.budget, draft.budget)

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self._waiting.add(seq)
        self._num_waiting_tokens += seq.num_tokens

    def _stop_waiting(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        self._num_waiting_tokens -= seq.num_tokens

    # --- taking in

    def _advance(self, item: ScheduledSequence, output: ModelRunnerOutput, now: float) -> bool:
        """Move one sequence on by what was computed; True if that ended it."""
        if item.ahead_of is not None:
            self._ahead.take(item, item.ahead_of, output, now)
            return False
        seq = item.seq
        seq.flops += output.flops.get(seq.seq_id, 0.0)
        seq.bytes_read += output.seq_bytes.get(seq.seq_id, 0.0)
        seq.last_served_seconds = now
        if item.epsilon > 0.0 and seq.num_dense_tokens is None:
            seq.num_dense_tokens = item.start
        if seq.seq_id in output.failed:
            return self.finish(seq, "error")
        self._evictor.observe_step(item, output)
        samples = item.samples
        seq.num_computed_tokens = item.known_end
        if item.draft:
            self.kv.trim(seq, item.known_end + len(output.followers.get(seq.seq_id, ())))
        self.kv.commit(seq)
        if not samples:
            return False
        if seq.num_output_tokens >= seq.max_output_tokens:  # the prompt was to be scored only
            return self.finish(seq, "length")
        if seq.drafts_ahead or item.draft:
            seq.drafted = seq.drafted.observe(len(item.draft), len(output.followers.get(seq.seq_id, ())))
        sampled = output.sampled[seq.seq_id]
        return self._append(seq, sampled, now) or self._count_risk(item, sampled)

    def _count_risk(self, item: ScheduledSequence, sampled: Sampled) -> bool:
        """Have what was drawn with blocks skipped computed again once its risk is spent (verify bounded); False.

        So too when nothing will be skipped any more: no risk would ever be added.
        """
        seq, law = item.seq, item.seq.control.laws.verification
        if law is None or seq.num_dense_tokens is None:
            return False
        if item.epsilon > 0.0:
            seq.run = law.observe(seq.run, sampled.entropy_nats)
        if law.is_due(seq.run) or seq.control.pruning.disabled_reason is not None:
            seq.num_computed_tokens, seq.num_dense_tokens = seq.num_dense_tokens, None
            seq.run, seq.is_refreshing = DraftRun(), True
        return False

    def _append(self, seq: Sequence, sampled: Sampled, now: float) -> bool:
        seq.token_ids.append(sampled.token_id)
        self._evictor.observe_token(seq, sampled.surprisal_nats)
        seq.clock = seq.clock.observe(sampled.entropy_nats, sampled.surprisal_nats)
        seq.control = seq.control.observe(sampled.entropy_nats, sampled.measured)
        if seq.first_token_seconds is None:
            seq.first_token_seconds = now
        reason = self._finish_reason(seq)
        return reason is not None and self.finish(seq, reason)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        """Say whether the token just drawn is the last. `min_tokens` of them come before any that stops."""
        token_id, params = seq.token_ids[-1], seq.params
        is_stop = token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos)
        if is_stop and seq.num_output_tokens > params.min_tokens:
            return "stop"
        return "length" if seq.num_output_tokens >= seq.max_output_tokens else None
