"""A scheduler under supervision: every step and every end is checked against what must hold."""

from collections import Counter
from collections.abc import Collection

from etserve.kv.block_pool import NULL_BLOCK
from etserve.kv.manager import KVCacheManager, count_blocks
from etserve.plan import SchedulerOutput
from etserve.scheduler.policy import fcfs
from etserve.scheduler.scheduler import Scheduler
from etserve.sequence import Sequence, Status
from tests.unit.planning_helpers import EOS, FakeClock, GhostModel, expected_output, take_followers


def is_decode(seq: Sequence) -> bool:
    return seq.num_computed_tokens == seq.num_tokens - 1 and seq.num_tokens > seq.num_prompt_tokens


def _longest_run(seq: Sequence) -> int:
    """Steps that guess before one that tells."""
    law = seq.control.laws.verification
    return 0 if law is None else law.max_tokens


class Ledger:
    """Drives a real scheduler and block manager with the ghost model, and keeps its own books."""

    def __init__(self, num_blocks: int, max_num_seqs: int, max_step_tokens: int, prefix_caching: bool = True) -> None:
        self.kv = KVCacheManager(num_blocks, prefix_caching)
        self.model = GhostModel(self.kv)
        self.max_num_seqs = max_num_seqs
        self.max_step_tokens = max_step_tokens
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens, eos_token_ids=[EOS], now=FakeClock()
        )
        self.sequences: dict[int, Sequence] = {}  # all ever accepted
        self.ends: Counter[int] = Counter()
        self.taus: dict[int, float] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_evicted_blocks = 0

    @property
    def live(self) -> list[Sequence]:
        return [seq for seq in self.sequences.values() if seq.status is not Status.FINISHED]

    def add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)
        self.sequences[seq.seq_id] = seq

    def cancel(self, seq: Sequence) -> None:
        was_live = seq.status is not Status.FINISHED
        told = self.scheduler.finish(seq, "abort")
        assert told is was_live, "an end was told twice, or not at all"
        self.ends[seq.seq_id] += told
        assert self.kv.block_table(seq) == []

    def evict(self, num_wanted: int) -> None:
        """Let the law take blocks of the decoding sequences that allow it, between two steps."""
        seqs = [seq for seq in self.live if seq.may_be_evicted and seq.status is Status.RUNNING and is_decode(seq)]
        before = self.kv.num_allocatable_blocks
        taken = self.scheduler._evictor.make_room(seqs, num_wanted)
        assert sum(taken.values()) == self.kv.num_allocatable_blocks - before <= num_wanted, "evicted, but not free"

    def step(self, failing: Collection[int] = (), cancelled: Collection[Sequence] = ()) -> SchedulerOutput:
        """Run one step; `cancelled` sequences end while the model is at work."""
        before = [seq for seq in self.live if seq.status is Status.RUNNING]
        decodes = [seq for seq in before if is_decode(seq) or seq.is_refreshing]
        starts = {seq.seq_id: seq.num_computed_tokens for seq in before}
        had_work = self.scheduler.has_work
        plan = self.scheduler.schedule()
        assert bool(plan.scheduled) == had_work, "work, but nothing planned"
        self._check_plan(plan, starts)
        self._check_fairness(plan, before, decodes)
        output = self.model.execute(plan, failing)
        for seq in cancelled:
            self.cancel(seq)
        finished = self.scheduler.update(plan, output)
        finished += take_followers(self.scheduler, plan, output)
        self._check_ends(plan, finished, output.failed)
        self.num_steps += 1
        return plan

    def _check_plan(self, plan: SchedulerOutput, starts: dict[int, int]) -> None:
        ids = [item.seq.seq_id for item in plan.scheduled]
        assert len(set(ids)) == len(ids), "a sequence is planned twice"
        assert plan.num_tokens <= self.max_step_tokens, "more tokens than the budget"
        assert self.scheduler.num_running <= self.max_num_seqs, "more sequences than seats"
        assert set(ids).isdisjoint(seq.seq_id for seq in plan.preempted), "planned and preempted"
        order = [item.is_decode for item in plan.scheduled]
        assert order == sorted(order, reverse=True), "decodes do not come first"
        for item in plan.scheduled:
            assert item.seq.status is Status.RUNNING
            assert item.start == item.seq.num_computed_tokens, "a gap, or computed twice"
            assert 1 <= item.num_tokens - len(item.draft) <= item.seq.num_uncomputed_tokens
            assert item.is_decode == is_decode(item.seq)
            assert not (item.is_refresh and item.is_decode)
            assert item.block_table == self.kv.block_table(item.seq)
            assert item.num_evicted_blocks == item.block_table.count(NULL_BLOCK)
            if item.ahead_of is not None:
                assert item.ahead_of.status is Status.RUNNING
                assert item.epsilon > 0.0, "a guess that costs as much as the token"
            else:
                assert item.start == starts.get(item.seq.seq_id, item.start)
        self._check_guesses_yield(plan)
        for seq in plan.preempted:
            assert (seq.status, seq.num_computed_tokens) == (Status.WAITING, 0), "preempted, but not back at the start"
        self.num_preemptions += len(plan.preempted)
        self.num_evicted_blocks += plan.num_blocks_evicted
        self.num_cached_tokens += sum(seq.num_cached_tokens for seq in plan.admitted)

    def _check_guesses_yield(self, plan: SchedulerOutput) -> None:
        """Nobody was preempted while a sequence that this step does not compute held a block for guesses alone."""
        if not plan.preempted:
            return
        planned = {item.seq.seq_id for item in plan.scheduled}
        for seq in self.live:
            if seq.status is Status.RUNNING and seq.seq_id not in planned:
                assert len(self.kv.block_table(seq)) <= count_blocks(seq.num_tokens), "preempted for guesses"

    def _check_fairness(self, plan: SchedulerOutput, before: list[Sequence], decodes: list[Sequence]) -> None:
        planned = {item.seq.seq_id for item in plan.scheduled}
        preempted = {seq.seq_id for seq in plan.preempted}
        fits = len(decodes) <= self.max_step_tokens - max(1, self.max_step_tokens // 4)
        if fits:
            assert {seq.seq_id for seq in decodes} <= planned | preempted, "a decode was held up"
        prefills = {seq.seq_id for seq in before if seq not in decodes} - preempted
        assert not prefills or prefills & planned, "all prompts were held up"
        only_decodes = all(item.is_decode or item.is_refresh for item in plan.scheduled)
        drops_guesses_late = not fits and any(seq.control.is_lossless for seq in before)
        if only_decodes and not preempted and not drops_guesses_late:
            self._check_nobody_could_come_in()
        if before:
            assert min(before, key=fcfs) not in plan.preempted, "the first in rank gave way"
        started = self.scheduler.num_running - (len(before) - len(preempted))
        if started and fits and self.scheduler.num_running > 1:
            assert self.kv.num_allocatable_blocks >= self.scheduler.num_running, "blocks are over-committed"

    def _check_nobody_could_come_in(self) -> None:
        head = min((seq for seq in self.live if seq.status is Status.WAITING), key=fcfs, default=None)
        if head is not None and self.scheduler.num_running < self.max_num_seqs:
            room = self.kv.num_allocatable_blocks - self.scheduler.num_running - 1
            assert count_blocks(head.num_tokens) > room, "who could come in does not"

    def _check_ends(self, plan: SchedulerOutput, finished: list[Sequence], failed: Collection[int]) -> None:
        self.ends.update(seq.seq_id for seq in finished)
        for item in plan.scheduled:
            if item.ahead_of is not None:
                continue
            seq = item.seq
            assert seq.num_output_tokens <= seq.max_output_tokens, "more output than asked for"
            assert seq.clock.tau_nats >= self.taus.get(seq.seq_id, 0.0), "the clock ran backwards"
            self.taus[seq.seq_id] = seq.clock.tau_nats
            if seq.seq_id in failed and seq.finish_reason != "abort":
                assert seq.finish_reason == "error"

    def check(self) -> None:
        """Check what must hold between steps."""
        self.kv.audit()
        counts = Counter(seq.status for seq in self.sequences.values())
        assert counts[Status.WAITING] == self.scheduler.num_waiting
        assert counts[Status.RUNNING] == self.scheduler.num_running
        waiting = [seq for seq in self.live if seq.status is Status.WAITING]
        assert self.scheduler.num_waiting_tokens == sum(seq.num_tokens for seq in waiting)
        for seq in self.sequences.values():
            has_blocks = bool(self.kv.block_table(seq))
            assert has_blocks or seq.num_computed_tokens == 0 or seq.status is Status.FINISHED, "computed, but where?"
            assert has_blocks == (seq.status is Status.RUNNING), f"{seq.status} and blocks: {has_blocks}"
            assert self.ends[seq.seq_id] == (seq.status is Status.FINISHED), "not exactly one end"
            assert (seq.finish_reason is not None) == (seq.status is Status.FINISHED)
            if seq.status is Status.RUNNING:
                self._check_guards(seq)
                self._check_verification(seq)
            else:
                assert not seq.is_refreshing, "renews what it does not hold"

    def _check_guards(self, seq: Sequence) -> None:
        table, law = self.kv.block_table(seq), seq.control.laws.eviction
        places = [place for place, block in enumerate(table) if block == NULL_BLOCK]
        assert len(places) == seq.num_evicted_blocks
        if not places:
            return
        assert law is not None, "evicted from one who does not allow it"
        spans = seq.control.laws.protected_spans
        protected = [place for start, end in spans for place in range(start // 16, -(-end // 16))]
        assert law.sink_blocks <= min(places), "a sink is gone"
        assert max(places) < seq.num_computed_tokens // 16 - law.recent_blocks, "a recent block is gone"
        assert set(places).isdisjoint(protected), "a protected block is gone"
        num_full = seq.num_computed_tokens // 16
        assert num_full - len(places) >= max(law.min_kept_share * num_full, law.min_kept_blocks), "too little is left"

    def _check_verification(self, seq: Sequence) -> None:
        law = seq.control.laws.verification
        if law is None or law.mode == "lossless":
            assert seq.num_dense_tokens is None, "nothing renews what was computed with blocks skipped"
        elif seq.num_dense_tokens is not None:
            assert not law.is_due(seq.run), "the risk is spent, but nothing is renewed"
            assert seq.control.pruning.disabled_reason is None, "no risk will be added, and nothing is renewed"

    def drain(self) -> None:
        """Run to the end and check it: all have ended, once, with the tokens that the oracle says; no block is held."""
        most = sum(seq.num_prompt_tokens + seq.max_output_tokens for seq in self.live)
        most *= 2 + max((_longest_run(seq) for seq in self.live), default=0)  # a token may take a whole run of guesses
        for _ in range(most * (1 + len(self.live)) + 1):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "somebody starves"
        self.check()
        assert self.kv.num_active_blocks == 0, "blocks have leaked"
        for seq in self.sequences.values():
            self._check_output(seq)

    def _check_output(self, seq: Sequence) -> None:
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        expected = expected_output(prompt, seq.cache_salt, seq.max_output_tokens, seq.params)
        if seq.finish_reason in ("abort", "error"):
            expected = expected[: seq.num_output_tokens]
        assert seq.output_token_ids == expected, "the tokens are not those of the request alone"
