"""The macro law on the real scheduler: nobody starves, the better ranked is served first, memory is never lost."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etserve.control.choice import ChoiceControl, ChoiceLaws
from etserve.control.priority import DropAverage, Mode, PriorityConfig
from etserve.kv.manager import KVCacheManager
from etserve.sampling_params import SamplingParams
from etserve.scheduler.policy import LawPolicy
from etserve.scheduler.scheduler import Scheduler
from etserve.sequence import Sequence, Status
from tests.unit.planning_helpers import EOS, FakeClock, GhostModel, expected_output, make_sequence, run_step

MODES: list[Mode] = ["paper", "entropic", "entropic_inverse", "random"]
RANKED = ChoiceLaws(ranks_by_entropy=True)


class Bench:
    """A scheduler under the law, a ghost model, and a clock that a step moves on."""

    def __init__(
        self,
        mode: Mode = "entropic",
        *,
        num_blocks: int = 400,
        max_num_seqs: int = 16,
        max_step_tokens: int = 64,
        step_seconds: float = 0.05,
        cost: Callable[[Sequence], float] = lambda seq: 1.0,
        **law: float,
    ) -> None:
        self.clock = FakeClock()
        self.kv = KVCacheManager(num_blocks)
        self.policy = LawPolicy(PriorityConfig(mode=mode, **law), cost)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            eos_token_ids=[EOS],
            now=self.clock,
            policy=self.policy,
        )
        self.model = GhostModel(self.kv)
        self.step_seconds = step_seconds
        self.num_ids = 0

    def add(self, num_tokens: int = 16, max_output: int = 40, priority: int = 0, drop: float | None = None) -> Sequence:
        seq = make_sequence(self.num_ids, num_tokens, max_output, priority=priority)
        self.num_ids += 1
        seq.arrival_seconds = self.clock.seconds
        seq.control = ChoiceControl(RANKED, drops=DropAverage(1.0, math.nan if drop is None else drop))
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Sequence]:
        """Run one step; return who was served."""
        plan, _ = run_step(self.scheduler, self.model)
        assert plan.scheduled, "work, but an empty step"
        self.clock.seconds += self.step_seconds
        return [item.seq for item in plan.scheduled]

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                self.kv.audit()
                assert self.kv.num_active_blocks == 0
                return
            self.step()
        raise AssertionError("no end in sight")


def decoding(bench: Bench, count: int, max_output: int = 400) -> list[Sequence]:
    """So many sequences of which each has its first token."""
    seqs = [bench.add(max_output=max_output) for _ in range(count)]
    while any(seq.num_output_tokens == 0 for seq in seqs):
        bench.step()
    return seqs


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_the_rank_every_request_gets_its_own_tokens(mode: Mode, data: st.DataObject) -> None:
    """Few blocks and seats: sequences are preempted at the rank's will, and every output is what it is alone."""
    bench = Bench(
        mode,
        num_blocks=data.draw(st.integers(6, 30), "blocks"),
        max_num_seqs=data.draw(st.integers(1, 6), "seats"),
        max_step_tokens=data.draw(st.integers(2, 40), "budget"),
        step_seconds=data.draw(st.sampled_from([0.0, 0.05, 1.0]), "step seconds"),
    )
    seqs: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 10), "requests")):
        num_tokens, max_output = data.draw(st.integers(1, 40), "prompt"), data.draw(st.integers(1, 30), "output")
        if num_tokens + max_output <= bench.kv.max_tokens:
            seqs.append(bench.add(num_tokens, max_output, data.draw(st.integers(-1, 1), "priority")))
        for _ in range(data.draw(st.integers(0, 3), "steps")):
            if bench.scheduler.has_work:
                bench.step()
    bench.run()
    for seq in seqs:
        assert seq.status is Status.FINISHED
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        assert seq.output_token_ids == expected_output(prompt, b"", seq.max_output_tokens, seq.params)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [2, 5, 7])
def test_with_too_few_tokens_for_all_each_decode_is_served_within_its_bound(mode: Mode, budget: int) -> None:
    """Of n decodes with B slots none waits longer than W (paper: 2 W) and another (n - 1) // B + 1 steps."""
    bench = Bench(mode, max_step_tokens=budget, decode_wait_seconds=0.3)
    seqs = decoding(bench, 12)
    ages = 2.0 if mode == "paper" else 1.0
    bound = math.ceil(ages * 0.3 / bench.step_seconds) + (len(seqs) - 1) // budget + 2
    waited = dict.fromkeys(seqs, 0)
    for _ in range(300):
        served = set(bench.step())
        for seq in seqs:
            waited[seq] = 0 if seq in served else waited[seq] + 1
            assert waited[seq] <= bound


@pytest.mark.parametrize("mode", MODES)
def test_a_flood_of_new_requests_does_not_stop_those_that_decode(mode: Mode) -> None:
    bench = Bench(mode, max_num_seqs=8, max_step_tokens=16)
    seqs = decoding(bench, 4, max_output=60)
    for _ in range(200):
        if all(seq.status is Status.FINISHED for seq in seqs):
            return
        bench.add(num_tokens=48, max_output=4)
        bench.step()
    raise AssertionError("the old ones did not end")


@pytest.mark.parametrize("mode", MODES)
def test_a_long_prompt_among_a_flood_of_short_ones_is_served(mode: Mode) -> None:
    """Seats are short: newcomers never overtake one that has waited too long."""
    bench = Bench(mode, max_num_seqs=4, max_step_tokens=32, step_seconds=0.25)
    for _ in range(8):
        bench.add(max_output=6)
    long = bench.add(num_tokens=120, max_output=2)
    for _ in range(200):
        if long.status is Status.FINISHED:
            return
        for _ in range(2):
            bench.add(max_output=6)
        bench.step()
    raise AssertionError("the long one starves")


@pytest.mark.parametrize("mode", MODES)
def test_a_low_priority_waits_for_others_but_not_for_ever(mode: Mode) -> None:
    bench = Bench(mode, max_num_seqs=2, max_step_tokens=32, step_seconds=0.25, batch_wait_seconds=3.0)
    batch = bench.add(max_output=2, priority=5)
    served_after = None
    for step in range(300):
        for _ in range(2):
            bench.add(max_output=2)
        if batch in bench.step():
            served_after = step
            break
    assert served_after is not None
    assert served_after * 0.25 >= 2 * 3.0  # until it was overdue, the others went first


def test_the_order_of_decodes_follows_entropy_resolved_per_cost() -> None:
    bench = Bench("paper", max_step_tokens=2, cost=lambda seq: 10.0 if seq.seq_id == 2 else 1.0)
    seqs = decoding(bench, 4)
    for seq, drop in zip(seqs, (0.1, 0.5, 2.0, 0.3), strict=True):
        seq.control = ChoiceControl(RANKED, drops=DropAverage(1.0, drop))
    assert bench.step() == [seqs[1], seqs[3]]  # 2.0 at ten times the cost is 0.2


def test_under_memory_pressure_the_worst_ranked_gives_way() -> None:
    bench = Bench("paper", num_blocks=7, max_step_tokens=64)
    seqs = [bench.add(num_tokens=31, max_output=40) for _ in range(3)]
    while any(seq.num_output_tokens == 0 for seq in seqs):
        bench.step()
    for seq, drop in zip(seqs, (0.1, 0.5, 0.9), strict=True):
        seq.control = ChoiceControl(RANKED, drops=DropAverage(1.0, drop))
    while not any(seq.num_preemptions for seq in seqs):
        bench.step()
    assert [seq.num_preemptions for seq in seqs] == [1, 0, 0]  # the oldest resolved least


def test_an_overdue_sequence_is_counted_as_forced_with_its_age() -> None:
    bench = Bench("entropic", max_step_tokens=64, decode_wait_seconds=0.1)
    (seq,) = decoding(bench, 1)
    plan = bench.scheduler.schedule()
    assert [(item.age_seconds, item.is_forced) for item in plan.scheduled] == [(pytest.approx(0.05), False)]
    bench.scheduler.update(plan, bench.model.execute(plan))
    bench.clock.seconds += 0.25
    plan = bench.scheduler.schedule()
    assert [(item.age_seconds, item.is_forced) for item in plan.scheduled] == [(pytest.approx(0.25), True)]
    assert seq.last_served_seconds is not None


def test_without_a_policy_nobody_is_forced_and_ages_are_told_all_the_same() -> None:
    kv, clock = KVCacheManager(20), FakeClock()
    scheduler = Scheduler(kv, max_num_seqs=2, max_step_tokens=8, eos_token_ids=[EOS], now=clock)
    seq = make_sequence(0, 4, params=SamplingParams(ignore_eos=True))
    seq.arrival_seconds = 0.0
    scheduler.add(seq)
    clock.seconds = 60.0
    (item,) = scheduler.schedule().scheduled
    assert (item.age_seconds, item.is_forced, item.epsilon) == (60.0, False, 0.0)
