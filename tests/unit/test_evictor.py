"""The evictor's arrays against the law's own averages and choice, and its choice over several sequences."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.eviction import Block, EvictionConfig, MassAverage, choose_evictions
from etserve.kv.manager import KVCacheManager
from etserve.plan import ModelRunnerOutput, ScheduledSequence
from etserve.scheduler.eviction import BlockScores, Evictor
from etserve.sequence import Sequence
from tests.unit.planning_helpers import GhostModel, make_scheduler, make_sequence, run_step

LAW = EvictionConfig(recent_blocks=1, min_kept_blocks=2)
LAWS = [LAW, replace(LAW, sink_blocks=0, recent_blocks=0), replace(LAW, min_kept_share=0.25, recent_blocks=3)]
MASS = st.one_of(st.floats(0.0, 1.0, width=32), st.just(math.nan))
STEPS = st.lists(st.dictionaries(st.integers(0, 200), MASS, min_size=1), min_size=1, max_size=6)


@given(STEPS, st.sampled_from([0.0, 0.5, 0.8]))
def test_arrays_hold_what_the_law_holds_block_by_block(steps: list[dict[int, float]], decay: float) -> None:
    scores, law = BlockScores.empty(), dict[int, MassAverage]()
    for step in steps:
        places = sorted(step)
        scores.observe_masses(np.array(places), np.array([step[p] for p in places], np.float32), decay)
        for place in places:
            law[place] = law.get(place, MassAverage()).observe(float(np.float32(step[place])), decay)
    for place in range(len(scores.weight)):
        expected = law.pop(place, MassAverage())
        assert math.isclose(scores.weighted[place], expected.weighted, abs_tol=1e-12)
        assert math.isclose(scores.weight[place], expected.weight, abs_tol=1e-12)
    assert not law


def test_surprisal_is_the_mean_of_what_was_measured() -> None:
    scores = BlockScores.empty()
    assert np.isnan(scores.values(2)).all()
    scores.observe_masses(np.arange(3), np.ones(3, np.float32), 0.8)
    scores.observe_surprisals(dict.fromkeys(range(1, 16), 1.0))  # nothing tells of the first token
    scores.observe_surprisals({16: 2.0, 20: 4.0})
    np.testing.assert_array_equal(scores.values(4), [1.0, 3.0, math.nan, math.nan])


def running(kv: KVCacheManager, seq_id: int, evictor: Evictor, masses: list[float], **options: Any) -> Sequence:
    """A sequence whose full blocks have these masses, and are equally surprising."""
    seq = make_sequence(seq_id, num_tokens=16 * len(masses), eviction=LAW, **options)
    assert kv.admit(seq) is not None
    item = ScheduledSequence(seq, 0, seq.num_tokens, kv.block_table(seq), is_decode=False)
    seq.num_computed_tokens = seq.num_tokens
    told = ModelRunnerOutput({}, block_masses={seq_id: np.array(masses, np.float32)})
    told.given_surprisals[seq_id] = dict.fromkeys(range(1, seq.num_tokens, 4), 1.0)
    evictor.observe_step(item, told)
    return seq


def holes(kv: KVCacheManager, seq: Sequence) -> list[int]:
    return [place for place, block in enumerate(kv.block_table(seq)) if block == 0]


def leave_prefix(kv: KVCacheManager, token_ids: list[int], *, is_live: bool) -> None:
    """Let somebody else have computed these tokens."""
    if token_ids:
        other = make_sequence(99, token_ids=token_ids)
        kv.admit(other)
        other.num_computed_tokens = other.num_tokens
        kv.commit(other)
        if not is_live:
            kv.free(other)


def as_the_law_sees_them(kv: KVCacheManager, seq: Sequence, known: list[tuple[float, float]]) -> list[Block]:
    """The full blocks that a sequence holds, one by one. `known`: mass and surprisal by place."""
    spans = seq.control.laws.protected_spans
    return [
        Block(
            place,
            MassAverage().observe(mass, LAW.mass_decay),
            nats,
            is_protected=any(start < 16 * place + 16 and end > 16 * place and start < end for start, end in spans),
            num_refs=kv._pool.num_refs(block),
            is_cached=kv._pool.key_of(block) is not None,
        )
        for place, ((mass, nats), block) in enumerate(zip(known, kv.block_table(seq), strict=False))
        if block != 0
    ]


@given(
    # products and means of these are exact
    known=st.lists(
        st.tuples(st.sampled_from([0.0, 0.125, 0.5, 1.0, math.nan]), st.sampled_from([0.5, 1.0, 4.0, math.nan])),
        min_size=1,
        max_size=40,
    ),
    tail=st.integers(0, 15),
    num_cached=st.integers(0, 3),
    is_shared=st.booleans(),
    spans=st.lists(st.tuples(st.integers(0, 640), st.integers(0, 640)), max_size=2),
    wanted=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    law=st.sampled_from(LAWS),
)
def test_what_goes_is_what_the_law_chooses_among_blocks_one_by_one(
    known: list[tuple[float, float]],
    tail: int,
    num_cached: int,
    is_shared: bool,
    spans: list[tuple[int, int]],
    wanted: list[int],
    law: EvictionConfig,
) -> None:
    kv = KVCacheManager(100)
    evictor, num_blocks = Evictor(kv), len(known)
    seq = make_sequence(1, num_tokens=16 * num_blocks + tail, eviction=law, protected=tuple(spans))
    leave_prefix(kv, seq.token_ids[: 16 * num_cached], is_live=is_shared)
    kv.admit(seq)
    seq.num_computed_tokens = seq.num_tokens
    scores = evictor._scores[1] = BlockScores.empty()
    scores.observe_masses(np.arange(num_blocks), np.array([mass for mass, _ in known], np.float32), law.mass_decay)
    scores.observe_surprisals({16 * place + at: nats for place, (_, nats) in enumerate(known) for at in (1, 7, 15)})
    for num in wanted:
        expected = choose_evictions(as_the_law_sees_them(kv, seq, known), num_blocks, num, law)
        before = holes(kv, seq)
        assert evictor.make_room([seq], num) == ({1: len(expected)} if expected else {})
        assert holes(kv, seq) == sorted([*before, *expected])
    kv.audit()


def test_room_is_made_where_it_costs_least_over_all_sequences() -> None:
    kv = KVCacheManager(40)
    evictor = Evictor(kv)
    first = running(kv, 1, evictor, [0.9, 0.2, 0.5, 0.4, 0.3, 0.9])
    second = running(kv, 2, evictor, [0.0, 0.6, 0.1, 0.7, 0.8, 0.0])
    assert evictor.make_room([first, second], 3) == {1: 2, 2: 1}
    assert (holes(kv, first), holes(kv, second)) == ([1, 4], [2])
    assert (first.num_evicted_blocks, second.total_evicted_blocks) == (2, 1)
    assert evictor.make_room([first], 9) == {1: 1}  # half of the sequence stays
    assert evictor.make_room([first], 9) == {}
    kv.audit()


def test_the_blocks_of_a_sequence_that_has_lost_what_may_go_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVCacheManager(40)
    evictor = Evictor(kv)
    pressed, thrifty = running(kv, 1, evictor, [0.1] * 6), running(kv, 2, evictor, [0.1] * 6, block_budget=2)
    assert evictor.make_room([pressed], 9) == {1: 3}
    assert evictor.keep_budget(thrifty, thrifty.num_tokens + 1) == 3

    def scan(scores: BlockScores, num_blocks: int) -> Any:
        raise AssertionError("looked at every block again")

    monkeypatch.setattr(BlockScores, "values", scan)
    assert evictor.make_room([pressed], 9) == {}
    assert evictor.keep_budget(thrifty, thrifty.num_tokens + 1) == 0


class CountingEvictor(Evictor):
    """Counts how often it is asked for room."""

    num_asked = 0

    def make_room(self, seqs: Any, num_wanted: int) -> dict[int, int]:
        self.num_asked += 1
        return super().make_room(seqs, num_wanted)


def test_a_step_in_which_nothing_may_go_asks_for_it_once() -> None:
    """Eight sequences need their third block in the same step, and none is free: three of them give way."""
    scheduler = make_scheduler(num_blocks=17, max_num_seqs=8, max_step_tokens=128)
    model, evictor = GhostModel(scheduler.kv), CountingEvictor(scheduler.kv)
    scheduler._evictor = evictor
    for seq_id in range(8):
        scheduler.add(make_sequence(seq_id, num_tokens=16, max_output=24, eviction=EvictionConfig()))
    most_preempted = 0
    while scheduler.has_work:
        evictor.num_asked = 0
        plan, _ = run_step(scheduler, model)
        assert evictor.num_asked <= 1
        most_preempted = max(most_preempted, len(plan.preempted))
    assert most_preempted > 1


def test_blocks_that_nobody_measured_stay() -> None:
    kv = KVCacheManager(40)
    evictor = Evictor(kv)
    seq = make_sequence(1, num_tokens=96, eviction=LAW)
    kv.admit(seq)
    seq.num_computed_tokens = 96
    assert evictor.make_room([seq], 4) == {}
    evictor.forget(running(kv, 2, evictor, [0.1] * 6))
    assert list(evictor._scores) == []
