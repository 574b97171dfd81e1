"""The evictor's arrays against the law's own averages, and its choice over several sequences."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.eviction import EvictionConfig, MassAverage
from etserve.kv.manager import KVCacheManager
from etserve.plan import ModelRunnerOutput, ScheduledSequence
from etserve.scheduler.eviction import BlockScores, Evictor
from etserve.sequence import Sequence
from tests.unit.planning_helpers import make_sequence

LAW = EvictionConfig(recent_blocks=1, min_kept_blocks=2)
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
    for place in range(300):
        expected, found = law.get(place, MassAverage()), scores.average(place)
        assert math.isclose(found.weighted, expected.weighted, abs_tol=1e-12)
        assert math.isclose(found.weight, expected.weight, abs_tol=1e-12)


def test_surprisal_is_the_mean_of_what_was_measured() -> None:
    scores = BlockScores.empty()
    assert math.isnan(scores.mean_surprisal(0))
    scores.observe_surprisals(dict.fromkeys(range(1, 16), 1.0))  # nothing tells of the first token
    scores.observe_surprisals({16: 2.0, 20: 4.0})
    assert (scores.mean_surprisal(0), scores.mean_surprisal(1)) == (1.0, 3.0)
    assert math.isnan(scores.mean_surprisal(2))


def running(kv: KVCacheManager, seq_id: int, evictor: Evictor, masses: list[float]) -> Sequence:
    """A sequence whose full blocks have these masses, and are equally surprising."""
    seq = make_sequence(seq_id, num_tokens=16 * len(masses), eviction=LAW)
    assert kv.admit(seq) is not None
    item = ScheduledSequence(seq, 0, seq.num_tokens, kv.block_table(seq), is_decode=False)
    seq.num_computed_tokens = seq.num_tokens
    told = ModelRunnerOutput({}, block_masses={seq_id: np.array(masses, np.float32)})
    told.prompt_surprisals[seq_id] = dict.fromkeys(range(1, seq.num_tokens, 4), 1.0)
    evictor.observe_step(item, told)
    return seq


def holes(kv: KVCacheManager, seq: Sequence) -> list[int]:
    return [place for place, block in enumerate(kv.block_table(seq)) if block == 0]


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


def test_blocks_that_nobody_measured_stay() -> None:
    kv = KVCacheManager(40)
    evictor = Evictor(kv)
    seq = make_sequence(1, num_tokens=96, eviction=LAW)
    kv.admit(seq)
    seq.num_computed_tokens = 96
    assert evictor.make_room([seq], 4) == {}
    evictor.forget(running(kv, 2, evictor, [0.1] * 6))
    assert list(evictor._scores) == []
