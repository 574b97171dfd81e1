"""Seeded simulations: thousands of requests, random cancels and faults, floods from both sides."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etserve.sampling_params import SamplingParams
from etserve.sequence import Sequence, Status
from tests.unit.planning_helpers import make_sequence
from tests.unit.planning_ledger import Ledger

PREFIXES = [[family] * length for family, length in ((1, 48), (2, 32), (3, 100), (4, 7))]


def random_sequence(rng: random.Random, seq_id: int) -> Sequence:
    prompt = rng.choice(PREFIXES) + [rng.randrange(1, 6) for _ in range(rng.randrange(1, 40))]
    params = SamplingParams(ignore_eos=rng.random() < 0.3, min_tokens=rng.choice([0, 0, 4]))
    return make_sequence(
        seq_id,
        token_ids=prompt,
        max_output=rng.randrange(0, 60),
        priority=rng.choice([0, 0, 0, 1]),
        salt=rng.choice([b"", b"other"]),
        params=params,
    )


@pytest.mark.parametrize(
    ("seed", "num_requests", "num_blocks"),
    [(1, 2000, 24), (2, 300, 14), (3, 300, 5000)],
    ids=["tiny", "tiniest", "roomy"],
)
def test_thousands_of_requests_with_cancels_and_faults_each_end_once(
    seed: int, num_requests: int, num_blocks: int
) -> None:
    rng = random.Random(seed)
    ledger = Ledger(num_blocks, max_num_seqs=12, max_step_tokens=64)
    next_id = 0
    while next_id < num_requests or ledger.scheduler.has_work:
        while next_id < num_requests and rng.random() < 0.4:
            ledger.add(random_sequence(rng, next_id))
            next_id += 1
        live = ledger.live
        doomed = [seq for seq in live if rng.random() < 0.003]
        failing = [seq.seq_id for seq in live if rng.random() < 0.001]
        ledger.step(failing, [seq for seq in doomed if rng.random() < 0.5])
        for seq in doomed:
            ledger.cancel(seq)
        if ledger.num_steps % 50 == 0:
            ledger.check()
    ledger.drain()
    reasons = {seq.finish_reason for seq in ledger.sequences.values()}
    assert len(ledger.sequences) == num_requests
    assert reasons == {"stop", "length", "abort", "error"}  # every way to end was taken
    assert ledger.num_cached_tokens > 0
    assert (ledger.num_preemptions > 0) == (num_blocks < 100)


def test_a_simulation_repeats_itself_exactly() -> None:
    def run() -> list[tuple[int, ...]]:
        rng = random.Random(7)
        ledger = Ledger(20, max_num_seqs=6, max_step_tokens=32)
        for seq_id in range(60):
            ledger.add(random_sequence(rng, seq_id))
        plans = []
        while ledger.scheduler.has_work:
            plans.append(tuple(block for item in ledger.step().scheduled for block in item.block_table))
        return plans

    assert run() == run()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    flood_tokens=st.sampled_from([(5, 3), (200, 3), (5, 60), (200, 60)]),
    probe_tokens=st.sampled_from([(5, 3), (300, 3), (5, 60), (300, 60)]),
    num_blocks=st.sampled_from([30, 60, 2000]),
    max_step_tokens=st.sampled_from([16, 64]),
)
def test_no_flood_starves_anyone(
    flood_tokens: tuple[int, int], probe_tokens: tuple[int, int], num_blocks: int, max_step_tokens: int
) -> None:
    """While new requests keep coming, one that is there ends within the work that stood before it, and its own."""
    ledger = Ledger(num_blocks, max_num_seqs=6, max_step_tokens=max_step_tokens)
    for seq_id in range(12):
        ledger.add(make_sequence(seq_id, *flood_tokens))
    probe = make_sequence(12, *probe_tokens)
    ledger.add(probe)
    # each of the 13 needs at most its chunks and its decodes; prompts get at least a quarter of the budget;
    # 3: what the flood behind it can take by being let in, preempted and let in again while it waits for blocks
    share = max_step_tokens // 4
    bound = 3 * sum(-(-seq.num_prompt_tokens // share) + seq.max_output_tokens for seq in ledger.sequences.values())
    for next_id in range(13, 13 + bound):
        if probe.status is Status.FINISHED:
            break
        ledger.add(make_sequence(next_id, *flood_tokens))
        ledger.step()
    assert probe.status is Status.FINISHED
    ledger.check()


def test_a_stream_gets_a_token_in_every_step_whatever_comes() -> None:
    rng = random.Random(5)
    ledger = Ledger(4000, max_num_seqs=12, max_step_tokens=32)
    stream = make_sequence(0, num_tokens=10, max_output=300)
    ledger.add(stream)
    ledger.step()
    for step in range(2, 300):
        ledger.add(make_sequence(step, num_tokens=rng.choice([3, 700]), max_output=20))
        ledger.step()
        assert stream.num_output_tokens == step
