"""Any order of adding, stepping, failing and cancelling keeps every promise; seeded defects are found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from etserve.control.draft import VerifyLaw
from etserve.control.eviction import EvictionConfig
from etserve.errors import PromptTooLongError
from etserve.kv import hashing
from etserve.kv.block_pool import BlockPool
from etserve.kv.manager import KVCacheManager, count_blocks
from etserve.sampling_params import SamplingParams
from etserve.scheduler import eviction as eviction_of_sequences
from etserve.scheduler.ahead import RunningAhead
from etserve.scheduler.scheduler import Scheduler
from etserve.sequence import Sequence, Status
from tests.unit.planning_helpers import EOS, expected_output, make_sequence
from tests.unit.planning_ledger import Ledger

PARAMS = st.sampled_from(
    [
        SamplingParams(ignore_eos=True),
        SamplingParams(),
        SamplingParams(min_tokens=5),
        SamplingParams(stop_token_ids=(3, 9, 30), ignore_eos=True),
        SamplingParams(prompt_logprobs=1),
    ]
)

# Guards that let short sequences lose something.
LAW = EvictionConfig(sink_blocks=1, recent_blocks=1, min_kept_share=0.5, min_kept_blocks=2)
EVICTION = st.sampled_from([None, None, LAW, replace(LAW, recent_blocks=2)])

VERIFY = st.sampled_from(
    [
        None,
        None,
        VerifyLaw("lossless", budget_nats=9.0, max_tokens=3),
        VerifyLaw("lossless", budget_nats=9.0, max_tokens=20),
        VerifyLaw("bounded", budget_nats=9.0, max_tokens=4),
        VerifyLaw("bounded", budget_nats=9.0, max_tokens=20),
    ]
)

PROMPTS = st.builds(
    lambda family, num_shared, tail: [family] * num_shared + tail or [family],
    st.integers(1, 3),
    st.sampled_from([0, 1, 15, 16, 17, 32, 48, 64]),
    st.lists(st.integers(1, 4), max_size=20),
)


class PlanningMachine(RuleBasedStateMachine):
    """Requests from three families of prompts, so that prefixes meet; pools from 3 blocks to thousands."""

    @initialize(
        num_blocks=st.sampled_from([6, 9, 12, 16, 3000]),
        max_num_seqs=st.sampled_from([1, 4, 4, 12, 12]),
        max_step_tokens=st.sampled_from([2, 5, 16, 40, 200]),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks: int, max_num_seqs: int, max_step_tokens: int, prefix_caching: bool) -> None:
        self.ledger = Ledger(num_blocks, max_num_seqs, max_step_tokens, prefix_caching)

    def add(self, prompt: list[int], max_output: int, forced_share: float = 0.0, **options: Any) -> None:
        """Offer one request; whether it is accepted must depend on its size alone."""
        seq = make_sequence(len(self.ledger.sequences), max_output=max_output, token_ids=list(prompt), **options)
        output = expected_output(prompt, seq.cache_salt, max_output, seq.params)
        seq.token_ids += output[: int(forced_share * len(output))]
        if max(len(prompt), len(prompt) + max_output - 1) <= self.ledger.kv.max_tokens:
            self.ledger.add(seq)
        else:
            with pytest.raises(PromptTooLongError):
                self.ledger.add(seq)

    @rule(
        prompt=PROMPTS,
        max_output=st.integers(0, 30),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=st.sampled_from([b"", b"", b"other"]),
        params=PARAMS,
        forced_share=st.sampled_from([0.0, 0.0, 0.5, 0.9]),
        eviction=EVICTION,
        block_budget=st.sampled_from([None, None, 3]),
        verify=VERIFY,
    )
    def add_one(self, prompt: list[int], max_output: int, forced_share: float, **options: Any) -> None:
        self.add(prompt, max_output, forced_share, **options)

    @rule(prompt=PROMPTS, tails=st.lists(st.integers(1, 9), min_size=2, max_size=8))
    def add_burst(self, prompt: list[int], tails: list[int]) -> None:
        for tail in tails:
            self.add([*prompt[:14], tail], 60 - tail)

    @rule(
        data=st.data(),
        salt=st.sampled_from([b"", b"", b"other"]),
        tail=st.one_of(st.none(), st.lists(st.integers(1, 4), max_size=17)),
    )
    def add_next_turn(self, data: st.DataObject, salt: bytes, tail: list[int] | None) -> None:
        """Go on from what an earlier request has so far; without a tail, from its whole blocks only."""
        if self.ledger.sequences:
            known = self.ledger.sequences[data.draw(st.sampled_from(sorted(self.ledger.sequences)))].token_ids
            whole = known[: len(known) // 16 * 16] or known
            self.add(whole if tail is None else [*known, *tail], 3, salt=salt)

    @rule(
        num_tokens=st.integers(30, 90),
        max_output=st.integers(1, 60),
        eviction=EVICTION,
        block_budget=st.sampled_from([None, 3]),
        protected=st.sampled_from([(), ((20, 40),)]),
        verify=VERIFY,
    )
    def add_long(self, num_tokens: int, max_output: int, **options: Any) -> None:
        self.add([7] * num_tokens, max_output, **options)

    @rule(num_wanted=st.integers(1, 4))
    def evict(self, num_wanted: int) -> None:
        self.ledger.evict(num_wanted)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.ledger.step()

    @rule(data=st.data())
    def step_with_failing_rows(self, data: st.DataObject) -> None:
        ids = sorted(seq.seq_id for seq in self.ledger.live)
        self.ledger.step(failing=data.draw(st.sets(st.sampled_from(ids), max_size=2)) if ids else ())

    @rule(data=st.data())
    def cancel_during_a_step(self, data: st.DataObject) -> None:
        live = sorted(self.ledger.live, key=lambda seq: seq.seq_id)
        chosen = (
            data.draw(st.lists(st.sampled_from(live), max_size=2, unique_by=lambda seq: seq.seq_id)) if live else []
        )
        self.ledger.step(cancelled=chosen)

    @rule(data=st.data())
    def cancel_anyone(self, data: st.DataObject) -> None:
        if self.ledger.sequences:
            self.ledger.cancel(self.ledger.sequences[data.draw(st.sampled_from(sorted(self.ledger.sequences)))])

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.drain()


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=15,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

SEARCH = settings(SETTINGS, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False)

TestPlanning = PlanningMachine.TestCase
TestPlanning.settings = SETTINGS


# --- seeded defects: each replaces one method by a wrong one


def forgets_to_count_a_share(pool: BlockPool, block: int) -> None:
    if pool._refs[block] == 0:
        pool._cached.pop(block)
        pool._refs[block] = 1


def keeps_the_key_of_a_reused_block(pool: BlockPool) -> int:
    block = pool._blank.pop() if pool._blank else pool._cached.popitem(last=False)[0]
    pool._refs[block] = 1
    return block


def hands_out_what_there_is(pool: BlockPool, count: int) -> list[int] | None:
    return [pool._take() for _ in range(min(count, pool.num_allocatable))]


def takes_blocks_though_it_fails(kv: KVCacheManager, seq: Sequence, num_tokens: int) -> bool:
    table = kv._holdings[seq.seq_id].table
    while len(table) * 16 < num_tokens:
        fresh = kv._pool.allocate(1)
        if fresh is None:
            kv._pool.allocate(0)
            kv._holdings[seq.seq_id].table = table[:-1]
            return False
        table.extend(fresh)
    return True


def commits_what_is_not_computed(kv: KVCacheManager, seq: Sequence) -> None:
    holding = kv._holdings[seq.seq_id]
    keys = holding.chain.extend(seq.token_ids, seq.num_tokens)
    for index in range(holding.num_committed, min(len(keys), len(holding.table))):
        kv._pool.register(holding.table[index], keys[index])
    holding.num_committed = max(holding.num_committed, len(keys))


def ignores_the_salt(chain: hashing.BlockChain, salt: bytes) -> None:
    chain.keys = []
    chain._last = b""


def hashes_blocks_alone(chain: hashing.BlockChain, token_ids: list[int], num_tokens: int) -> list[bytes]:
    while (len(chain.keys) + 1) * 16 <= num_tokens:
        start = len(chain.keys) * 16
        chain.keys.append(hashing.hashlib.sha256(repr(token_ids[start : start + 16]).encode()).digest())
    return chain.keys


def finds_the_last_token_too(kv: KVCacheManager, seq: Sequence, holding: Any) -> list[int]:
    keys = holding.chain.extend(seq.token_ids, seq.num_tokens)
    found = [kv._pool.find(key) for key in keys]
    return [block for block in found[: found.index(None) if None in found else None] if block is not None]


def leaks_on_preemption(kv: KVCacheManager, seq: Sequence) -> None:
    holding = kv._holdings[seq.seq_id]
    holding.table.pop()
    kv._give_back(seq, holding)
    kv._holdings[seq.seq_id] = type(holding)(holding.chain)


def keeps_announcing(kv: KVCacheManager, seq: Sequence, key: bytes) -> None:
    return


def keeps_the_content_of_the_failed(kv: KVCacheManager, seq: Sequence, keep_content: bool = True) -> None:
    holding = kv._holdings.pop(seq.seq_id, None)
    if holding is not None:
        for block in holding.table[1:]:
            kv._pool.release(block)


def forgets_what_it_must_recompute(scheduler: Scheduler, draft: Any, seq: Sequence) -> None:
    scheduler._running.remove(seq)
    scheduler.kv.preempt(seq)
    scheduler._wait(seq)
    draft.preempted.append(seq)


def sends_away_the_first(scheduler: Scheduler, draft: Any) -> Sequence:
    return next(seq for seq in scheduler._running if seq.last_scheduled_step != draft.step)


def sends_away_the_planned(scheduler: Scheduler, draft: Any) -> Sequence:
    return next(iter(reversed(scheduler._running)))


def gives_decodes_everything(scheduler: Scheduler) -> int:
    return scheduler._max_step_tokens


def lets_anyone_in(kv: KVCacheManager, seq: Sequence, headroom: int = 0) -> int | None:
    return ADMIT(kv, seq, 0)


def ends_twice(scheduler: Scheduler, seq: Sequence, reason: Any) -> bool:
    return FINISH(scheduler, seq, reason) or True


def forgets_the_waiting(scheduler: Scheduler, seq: Sequence, reason: Any) -> bool:
    if seq.status is Status.WAITING:
        scheduler.kv.free(seq)
        seq.status, seq.finish_reason = Status.FINISHED, reason
        return True
    return FINISH(scheduler, seq, reason)


def stops_at_eos_alone(scheduler: Scheduler, seq: Sequence) -> Any:
    return "stop" if seq.token_ids[-1] == EOS else None


def takes_in_results_of_the_dead(scheduler: Scheduler, plan: Any, output: Any) -> list[Sequence]:
    return [item.seq for item in plan.scheduled if scheduler._advance(item, output, 0.0)]


def shares_what_an_eviction_spoilt(kv: KVCacheManager, seq: Sequence, holding: Any) -> None:
    if seq.may_be_evicted and holding.table:
        kv._commit(seq, holding)


def evicts_without_giving_back(kv: KVCacheManager, seq: Sequence, indices: Any) -> None:
    for index in indices:
        kv._holdings[seq.seq_id].table[index] = 0


def evicts_the_oldest(scores: Any, may_go: Any, num_wanted: int, law: EvictionConfig) -> Any:
    return np.flatnonzero(may_go)[: min(num_wanted, len(scores) // 3)]


def verifies_whatever_was_guessed(ahead: RunningAhead, step: Any, seq: Sequence, most: int, kept: int) -> None:
    VERIFY_GUESSES(ahead, step, seq, 99, kept)


def counts_the_risk_of_what_skips_alone(scheduler: Scheduler, item: Any, sampled: Any) -> bool:
    return item.epsilon > 0.0 and COUNT_RISK(scheduler, item, sampled)


def renews_where_it_stands(scheduler: Scheduler, item: Any, sampled: Any) -> bool:
    seq, computed = item.seq, item.seq.num_computed_tokens
    COUNT_RISK(scheduler, item, sampled)
    if seq.is_refreshing:
        seq.num_computed_tokens, seq.is_refreshing = computed, False
    return False


ADMIT = KVCacheManager.admit
COUNT_RISK = Scheduler._count_risk
VERIFY_GUESSES = RunningAhead.verify
FINISH = Scheduler.finish

DEFECTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (BlockPool, "share", forgets_to_count_a_share),
    (BlockPool, "_take", keeps_the_key_of_a_reused_block),
    (BlockPool, "allocate", hands_out_what_there_is),
    (KVCacheManager, "reserve", takes_blocks_though_it_fails),
    (KVCacheManager, "commit", commits_what_is_not_computed),
    (hashing.BlockChain, "__init__", ignores_the_salt),
    (hashing.BlockChain, "extend", hashes_blocks_alone),
    (KVCacheManager, "_find_prefix_blocks", finds_the_last_token_too),
    (KVCacheManager, "preempt", leaks_on_preemption),
    (KVCacheManager, "_withdraw", keeps_announcing),
    (KVCacheManager, "free", keeps_the_content_of_the_failed),
    (Scheduler, "_preempt", forgets_what_it_must_recompute),
    (Scheduler, "_find_victim", sends_away_the_first),
    (Scheduler, "_decode_budget", gives_decodes_everything),
    (KVCacheManager, "admit", lets_anyone_in),
    (Scheduler, "finish", ends_twice),
    (Scheduler, "finish", forgets_the_waiting),
    (Scheduler, "_finish_reason", stops_at_eos_alone),
    (Scheduler, "update", takes_in_results_of_the_dead),
    (KVCacheManager, "_commit_whole", shares_what_an_eviction_spoilt),
    (KVCacheManager, "evict", evicts_without_giving_back),
    (eviction_of_sequences, "choose_places", evicts_the_oldest),
    (RunningAhead, "verify", verifies_whatever_was_guessed),
    (Scheduler, "_count_risk", counts_the_risk_of_what_skips_alone),
    (Scheduler, "_count_risk", renews_where_it_stands),
]


@pytest.mark.parametrize(("owner", "name", "defect"), DEFECTS, ids=[defect.__name__ for _, _, defect in DEFECTS])
def test_a_seeded_defect_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, defect: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, defect)
    with pytest.raises((AssertionError, KeyError)):  # a check, the audit, or the code itself stumbling
        run_state_machine_as_test(PlanningMachine, settings=SEARCH)


def drain_crowds() -> None:
    """More decodes than budget, in pools that run out while some have been planned already: rare in the machine."""
    for num_blocks in range(8, 18):
        ledger = Ledger(num_blocks, max_num_seqs=8, max_step_tokens=2, prefix_caching=False)
        for seq_id in range(8):
            ledger.add(make_sequence(seq_id, num_tokens=3 + seq_id, max_output=40))
        ledger.drain()


def test_crowds_that_take_turns_in_a_short_pool_come_through() -> None:
    drain_crowds()


def test_a_victim_that_is_planned_already_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_find_victim", sends_away_the_planned)
    with pytest.raises(AssertionError, match="planned and preempted"):
        drain_crowds()


LOSSLESS = VerifyLaw("lossless", budget_nats=9.0, max_tokens=32)


def drain_guessing_crowds() -> None:
    """Long runs of guesses, in pools that others exhaust meanwhile: rare in the machine."""
    for num_blocks in range(16, 46, 2):
        ledger = Ledger(num_blocks, max_num_seqs=8, max_step_tokens=400, prefix_caching=False)
        for seq_id in range(8):
            verify = LOSSLESS if seq_id in (3, 5) else None
            ledger.add(make_sequence(seq_id, num_tokens=24 + 3 * seq_id, max_output=60, verify=verify))
        ledger.drain()


def test_crowds_whose_guesses_take_blocks_come_through() -> None:
    drain_guessing_crowds()


def test_guesses_give_their_blocks_back_before_anyone_is_preempted() -> None:
    ledger = Ledger(100, max_num_seqs=4, max_step_tokens=100)
    plain = make_sequence(1, num_tokens=10, max_output=60)
    guesser = make_sequence(2, num_tokens=30, max_output=60, verify=LOSSLESS)
    for seq in (plain, guesser):
        ledger.add(seq)
    kv = ledger.kv
    while len(kv.block_table(guesser)) <= count_blocks(guesser.num_tokens) or plain.num_tokens % 16 != 1:
        ledger.step()
    assert kv._pool.allocate(kv.num_allocatable_blocks) is not None  # nobody else's
    plan = ledger.scheduler.schedule()
    assert plan.preempted == ()
    assert plain in [item.seq for item in plan.scheduled]
    assert len(kv.block_table(guesser)) == count_blocks(guesser.num_tokens)


@pytest.mark.parametrize("max_step_tokens", [2, 3, 7, 16])
@pytest.mark.parametrize("mode", ["lossless", "bounded"])
def test_what_is_verified_keeps_to_a_small_step_budget(mode: Any, max_step_tokens: int) -> None:
    """Two that have guessed at length are joined by others: what is verified leaves each of them a token."""
    ledger = Ledger(500, max_num_seqs=16, max_step_tokens=max_step_tokens)
    law = VerifyLaw(mode, budget_nats=9.0, max_tokens=20)
    for seq_id in range(2):
        ledger.add(make_sequence(seq_id, num_tokens=30, max_output=80, verify=law))
    for _ in range(20 + 60 // max_step_tokens):
        ledger.step()
    for seq_id in range(2, 12):
        ledger.add(make_sequence(seq_id, num_tokens=5 + seq_id, max_output=40, verify=law))
    ledger.drain()
