"""Who gets the step, who waits, who gives way, and how it ends."""

from dataclasses import replace

import pytest

from etserve.control.draft import VerifyLaw
from etserve.control.pruning import disable
from etserve.errors import PromptTooLongError, RequestError
from etserve.kv.manager import count_blocks
from etserve.plan import ModelRunnerOutput, Sampled, SchedulerOutput
from etserve.sampling_params import SamplingParams
from etserve.scheduler.draft import StepDraft
from etserve.scheduler.scheduler import Scheduler
from etserve.sequence import Sequence, Status
from tests.unit.planning_helpers import (
    EOS,
    FakeClock,
    GhostModel,
    expected_output,
    make_scheduler,
    make_sequence,
    run_step,
    run_until_idle,
)


def parts(plan: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(item.seq.seq_id, item.start, item.num_tokens) for item in plan.scheduled]


def answer(plan: SchedulerOutput, token_id: int = 7) -> ModelRunnerOutput:
    return ModelRunnerOutput({i.seq.seq_id: Sampled(token_id, 1.0, 1.0, 1.0) for i in plan.scheduled if i.samples})


def test_a_prompt_goes_through_in_chunks_and_then_token_by_token() -> None:
    scheduler = make_scheduler(max_step_tokens=16)
    seq = make_sequence(1, num_tokens=35, max_output=3)
    scheduler.add(seq)
    plans = run_until_idle(scheduler, GhostModel(scheduler.kv))
    assert [parts(plan)[0][1:] for plan in plans] == [(0, 16), (16, 16), (32, 3), (35, 1), (36, 1)]
    assert [plan.scheduled[0].is_decode for plan in plans] == [False, False, False, True, True]
    assert seq.finish_reason == "length"
    assert seq.output_token_ids == expected_output(seq.token_ids[:35], b"", 3, seq.params)


def test_steps_are_counted_and_admission_is_told_once() -> None:
    scheduler = make_scheduler(max_step_tokens=16)
    seq = make_sequence(1, num_tokens=20, max_output=2)
    scheduler.add(seq)
    plans = run_until_idle(scheduler, GhostModel(scheduler.kv))
    assert [plan.step for plan in plans] == [0, 1, 2]
    assert [plan.admitted for plan in plans] == [(seq,), (), ()]
    assert scheduler.schedule().scheduled == ()  # nothing to do is an empty plan


def test_decodes_come_first_and_a_long_prompt_gets_the_rest() -> None:
    scheduler = make_scheduler(max_step_tokens=32)
    model = GhostModel(scheduler.kv)
    for seq_id in (1, 2):
        scheduler.add(make_sequence(seq_id, num_tokens=5, max_output=50))
    run_step(scheduler, model)
    scheduler.add(make_sequence(3, num_tokens=100))
    plan, _ = run_step(scheduler, model)
    assert parts(plan) == [(1, 5, 1), (2, 5, 1), (3, 0, 30)]


def test_a_long_prompt_never_holds_up_running_streams() -> None:
    scheduler = make_scheduler(num_blocks=1000, max_step_tokens=64)
    model = GhostModel(scheduler.kv)
    streams = [make_sequence(seq_id, num_tokens=5, max_output=60) for seq_id in range(4)]
    for seq in streams:
        scheduler.add(seq)
    run_step(scheduler, model)
    for seq_id in range(10, 14):
        scheduler.add(make_sequence(seq_id, num_tokens=1000))
    for num_tokens in range(2, 60):
        run_step(scheduler, model)
        assert [seq.num_output_tokens for seq in streams] == [num_tokens] * 4


def test_more_decodes_than_budget_take_turns_and_leave_a_share_for_prompts() -> None:
    scheduler = make_scheduler(num_blocks=1000, max_num_seqs=41, max_step_tokens=16)
    model = GhostModel(scheduler.kv)
    streams = [make_sequence(seq_id, num_tokens=1, max_output=500) for seq_id in range(40)]
    for seq in streams:
        scheduler.add(seq)
    while any(seq.num_output_tokens == 0 for seq in streams):
        run_step(scheduler, model)
    prompt = make_sequence(100, num_tokens=200)
    scheduler.add(prompt)
    for step in range(1, 21):
        plan, _ = run_step(scheduler, model)
        assert plan.num_tokens == 16
        assert prompt.num_computed_tokens == step * 4
        # 12 of 40 a step: everyone within four steps, and one more as the round's border moves
        assert min(seq.last_scheduled_step for seq in streams) >= plan.step - 5


def test_without_prompts_decodes_take_the_whole_budget() -> None:
    scheduler = make_scheduler(num_blocks=1000, max_num_seqs=16, max_step_tokens=16)
    model = GhostModel(scheduler.kv)
    for seq_id in range(16):
        scheduler.add(make_sequence(seq_id, num_tokens=1, max_output=20))
    plans = run_until_idle(scheduler, model)
    assert all(len(plan.scheduled) == 16 for plan in plans[1:20])


def test_no_more_sequences_run_than_there_are_seats() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for seq_id in range(5):
        scheduler.add(make_sequence(seq_id, num_tokens=5))
    plan = scheduler.schedule()
    assert [item.seq.seq_id for item in plan.scheduled] == [0, 1]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_tokens) == (2, 3, 15)


def test_lower_priority_numbers_go_first_and_equals_by_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for seq_id, priority in ((1, 5), (2, 0), (3, 0), (4, -1)):
        scheduler.add(make_sequence(seq_id, priority=priority, max_output=1))
    plans = run_until_idle(scheduler, GhostModel(scheduler.kv))
    assert [plan.scheduled[0].seq.seq_id for plan in plans] == [4, 2, 3, 1]


def test_nobody_overtakes_one_for_whom_blocks_are_missing() -> None:
    scheduler = make_scheduler(num_blocks=11)
    model = GhostModel(scheduler.kv)
    scheduler.add(make_sequence(1, num_tokens=40, max_output=5))
    run_step(scheduler, model)
    big = make_sequence(2, num_tokens=100, max_output=5)
    scheduler.add(big)
    for seq_id in range(3, 8):
        scheduler.add(make_sequence(seq_id, num_tokens=5, max_output=5))
    while big.first_scheduled_seconds is None:
        plan, _ = run_step(scheduler, model)
        assert {item.seq.seq_id for item in plan.scheduled} <= {1, 2}
    run_until_idle(scheduler, model)


def test_a_sequence_that_can_never_fit_is_refused_at_once() -> None:
    scheduler = make_scheduler(num_blocks=4)  # 48 tokens
    scheduler.add(make_sequence(1, num_tokens=40, max_output=9))  # the last one drawn is never computed
    with pytest.raises(PromptTooLongError, match="48"):
        scheduler.add(make_sequence(2, num_tokens=40, max_output=10))
    with pytest.raises(PromptTooLongError):
        scheduler.add(make_sequence(3, num_tokens=49, max_output=0))
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(make_sequence(4, token_ids=[]))
    assert scheduler.num_waiting == 1
    run_until_idle(scheduler, GhostModel(scheduler.kv))


@pytest.mark.parametrize(("max_num_seqs", "max_step_tokens"), [(0, 16), (1, 1)])
def test_limits_that_cannot_run_are_refused(max_num_seqs: int, max_step_tokens: int) -> None:
    with pytest.raises(ValueError, match="step needs"):
        make_scheduler(max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens)


# --- shortage of blocks


def fill_to_the_brim(num_blocks: int = 7) -> tuple[list[Sequence], list[SchedulerOutput]]:
    """Run three sequences that outgrow the pool together, though each fits alone."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_step_tokens=64, prefix_caching=False)
    sequences = [make_sequence(seq_id, num_tokens=14, max_output=40) for seq_id in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    return sequences, run_until_idle(scheduler, GhostModel(scheduler.kv))


def test_the_latest_gives_way_and_recomputes_to_the_same_tokens() -> None:
    sequences, plans = fill_to_the_brim()
    preempted = [seq for plan in plans for seq in plan.preempted]
    assert preempted
    assert sequences[0] not in preempted
    for seq in sequences:
        assert seq.output_token_ids == expected_output(seq.token_ids[:14], b"", 40, seq.params)
        assert seq.clock.count == 40  # recomputed tokens are not counted twice
    assert [plan.admitted for plan in plans].count(()) >= len(plans) - 3  # a comeback is no admission


def test_memory_is_not_passed_back_and_forth() -> None:
    _, plans = fill_to_the_brim()
    assert sum(len(plan.preempted) for plan in plans) <= 4


def test_nobody_planned_in_this_step_gives_way_in_it() -> None:
    _, plans = fill_to_the_brim()
    for plan in plans:
        planned = {item.seq.seq_id for item in plan.scheduled}
        assert planned.isdisjoint(seq.seq_id for seq in plan.preempted)


def test_the_lowest_priority_gives_way_before_the_latest() -> None:
    scheduler = make_scheduler(num_blocks=7, prefix_caching=False)
    model = GhostModel(scheduler.kv)
    early_but_low = make_sequence(1, num_tokens=14, max_output=40, priority=9)
    late_but_high = make_sequence(2, num_tokens=14, max_output=40, priority=0)
    middle = make_sequence(3, num_tokens=14, max_output=40, priority=0)
    for seq in (early_but_low, late_but_high, middle):
        scheduler.add(seq)
    run_until_idle(scheduler, model)
    assert early_but_low.num_preemptions > 0
    assert late_but_high.num_preemptions == 0


def test_a_preempted_sequence_returns_before_later_arrivals() -> None:
    scheduler = make_scheduler(num_blocks=7, prefix_caching=False)
    model = GhostModel(scheduler.kv)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, num_tokens=14, max_output=40))
    returned: list[int] = []
    victims: list[int] = []
    for step in range(400):
        if step == 10:
            scheduler.add(make_sequence(99, num_tokens=14, max_output=10))
        plan, _ = run_step(scheduler, model)
        victims += [seq.seq_id for seq in plan.preempted]
        returned += [seq.seq_id for seq in plan.admitted]
    assert victims
    assert returned == [0, 1, 2, 99]
    assert not scheduler.has_work


def test_one_is_let_in_only_with_room_to_grow() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_sequence(1, num_tokens=30, max_output=4))
    scheduler.add(make_sequence(2, num_tokens=20, max_output=4))  # 2 blocks of the 3 left: none for either to grow
    assert [item.seq.seq_id for item in scheduler.schedule().scheduled] == [1]


def test_a_lone_sequence_may_fill_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=4)
    seq = make_sequence(1, num_tokens=33, max_output=16)
    scheduler.add(seq)
    run_until_idle(scheduler, GhostModel(scheduler.kv))
    assert seq.num_output_tokens == 16


# --- shared prefixes


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=32, max_step_tokens=64)
    prefix = [3] * 160
    burst = [make_sequence(i, token_ids=[*prefix, 10 + i, 11, 12], max_output=3) for i in range(20)]
    for seq in burst:
        scheduler.add(seq)
    plans = run_until_idle(scheduler, GhostModel(scheduler.kv))
    prefill = sum(item.num_tokens for plan in plans for item in plan.scheduled if not item.is_decode)
    assert prefill == 160 + 20 * 3
    assert [seq.num_cached_tokens for seq in burst] == [0] + [160] * 19


def test_without_prefix_caching_a_burst_runs_side_by_side() -> None:
    scheduler = make_scheduler(max_step_tokens=64, prefix_caching=False)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, token_ids=[3] * 20, max_output=3))
    assert len(scheduler.schedule().scheduled) == 3


def test_others_pass_those_who_wait_for_a_prefix() -> None:
    scheduler = make_scheduler(max_step_tokens=64)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, token_ids=[3] * 40, max_output=3))
    scheduler.add(make_sequence(9, num_tokens=10))
    assert [item.seq.seq_id for item in scheduler.schedule().scheduled] == [0, 9]


def test_those_who_wait_for_a_prefix_keep_their_seats() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_step_tokens=64)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, token_ids=[3] * 40, max_output=30))
    scheduler.add(make_sequence(9, num_tokens=10))
    model = GhostModel(scheduler.kv)
    first, _ = run_step(scheduler, model)
    second, _ = run_step(scheduler, model)
    assert parts(first) == [(0, 0, 40)]
    assert parts(second) == [(0, 40, 1), (1, 32, 8), (2, 32, 8)]


def test_a_follower_goes_on_when_its_leader_is_cancelled() -> None:
    scheduler = make_scheduler(max_step_tokens=16)
    model = GhostModel(scheduler.kv)
    leader, follower = (make_sequence(i, token_ids=[3] * 80, max_output=3) for i in (1, 2))
    scheduler.add(leader)
    scheduler.add(follower)
    run_step(scheduler, model)
    scheduler.finish(leader, "abort")
    plan, _ = run_step(scheduler, model)
    assert parts(plan) == [(2, 16, 16)]
    run_until_idle(scheduler, model)


def test_an_urgent_sequence_does_not_wait_for_a_leader_of_low_priority() -> None:
    scheduler = make_scheduler(max_step_tokens=32)
    scheduler.add(make_sequence(1, token_ids=[3] * 80, priority=5))
    model = GhostModel(scheduler.kv)
    run_step(scheduler, model)
    run_step(scheduler, model)
    scheduler.add(make_sequence(2, token_ids=[3] * 90, priority=0))  # misses the block that 1 computes now
    scheduler.add(make_sequence(3, token_ids=[3] * 90, priority=6))
    plan, _ = run_step(scheduler, model)
    assert parts(plan) == [(1, 64, 16), (2, 64, 16)]
    run_until_idle(scheduler, model)


# --- the end


def test_eos_is_kept_as_the_last_token_and_stops() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1, max_output=9, params=SamplingParams())
    scheduler.add(seq)
    plan = scheduler.schedule()
    assert scheduler.update(plan, answer(plan, EOS)) == [seq]
    assert (seq.finish_reason, seq.output_token_ids, seq.status) == ("stop", [EOS], Status.FINISHED)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("params", "token_id", "expected"),
    [
        (SamplingParams(ignore_eos=True), EOS, None),
        (SamplingParams(stop_token_ids=(7,)), 7, "stop"),
        (SamplingParams(stop_token_ids=(7,)), 8, None),
        (SamplingParams(stop_token_ids=(7,), ignore_eos=True), 7, "stop"),
        (SamplingParams(min_tokens=1), EOS, None),
        (SamplingParams(min_tokens=1, stop_token_ids=(7,)), 7, None),
    ],
)
def test_what_stops_the_first_token(params: SamplingParams, token_id: int, expected: str | None) -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1, max_output=9, params=params)
    scheduler.add(seq)
    plan = scheduler.schedule()
    scheduler.update(plan, answer(plan, token_id))
    assert seq.finish_reason == expected


def test_after_min_tokens_eos_stops() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1, max_output=9, params=SamplingParams(min_tokens=2))
    scheduler.add(seq)
    for _ in range(3):
        assert seq.finish_reason is None
        plan = scheduler.schedule()
        scheduler.update(plan, answer(plan, EOS))
    assert (seq.finish_reason, seq.num_output_tokens) == ("stop", 3)


def test_eos_as_the_very_last_token_is_a_stop() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1, max_output=1, params=SamplingParams())
    scheduler.add(seq)
    plan = scheduler.schedule()
    scheduler.update(plan, answer(plan, EOS))
    assert seq.finish_reason == "stop"


def test_scoring_a_prompt_draws_nothing() -> None:
    scheduler = make_scheduler(max_step_tokens=16)
    seq = make_sequence(1, num_tokens=20, max_output=0)
    scheduler.add(seq)
    plans = run_until_idle(scheduler, GhostModel(scheduler.kv))
    assert len(plans) == 2
    assert (seq.finish_reason, seq.num_output_tokens, seq.clock.count) == ("length", 0, 0)


def test_forced_tokens_are_computed_but_not_drawn_again() -> None:
    alone = make_scheduler()
    whole = make_sequence(1, num_tokens=20, max_output=10)
    alone.add(whole)
    run_until_idle(alone, GhostModel(alone.kv))
    scheduler = make_scheduler(max_step_tokens=16)
    resumed = make_sequence(1, num_tokens=20, max_output=10, forced=whole.output_token_ids[:6])
    scheduler.add(resumed)
    run_until_idle(scheduler, GhostModel(scheduler.kv))
    assert resumed.token_ids == whole.token_ids
    assert resumed.clock.count == 4


def test_a_failed_row_ends_only_its_sequence_and_leaves_no_content() -> None:
    scheduler = make_scheduler()
    bad, good = make_sequence(1, num_tokens=40), make_sequence(2, num_tokens=40)
    scheduler.add(bad)
    scheduler.add(good)
    model = GhostModel(scheduler.kv)
    _, finished = run_step(scheduler, model, failing=[1])
    assert finished == [bad]
    assert (bad.finish_reason, bad.num_output_tokens) == ("error", 0)
    assert scheduler.kv.find_prefix(make_sequence(3, token_ids=bad.token_ids)) == 0
    run_until_idle(scheduler, model)
    assert good.finish_reason == "length"


@pytest.mark.parametrize("num_steps", range(6))
def test_cancelling_works_once_in_every_state(num_steps: int) -> None:
    scheduler = make_scheduler(max_step_tokens=16)
    seq = make_sequence(1, num_tokens=30, max_output=3)
    scheduler.add(seq)
    model = GhostModel(scheduler.kv)
    for _ in range(num_steps):
        run_step(scheduler, model)
    was_finished = seq.status is Status.FINISHED
    reason = seq.finish_reason
    assert scheduler.finish(seq, "abort") is not was_finished
    assert not scheduler.finish(seq, "abort")
    assert seq.finish_reason == (reason or "abort")
    assert (scheduler.has_work, scheduler.num_waiting_tokens, scheduler.kv.num_active_blocks) == (False, 0, 0)
    scheduler.kv.audit()


def test_cancelling_between_plan_and_result_is_safe() -> None:
    scheduler = make_scheduler()
    gone, stays = make_sequence(1), make_sequence(2)
    scheduler.add(gone)
    scheduler.add(stays)
    plan = scheduler.schedule()
    output = GhostModel(scheduler.kv).execute(plan)
    scheduler.finish(gone, "abort")
    assert scheduler.update(plan, output) == []
    assert (gone.num_output_tokens, stays.num_output_tokens) == (0, 1)
    scheduler.kv.audit()


def test_finishing_one_that_was_never_added_is_harmless() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(1)
    assert scheduler.finish(seq, "abort")
    assert seq.status is Status.FINISHED


def test_times_and_flops_are_written_down() -> None:
    scheduler = make_scheduler(max_step_tokens=16)
    clock = scheduler._now
    assert isinstance(clock, FakeClock)
    seq = make_sequence(1, num_tokens=30, max_output=2)
    scheduler.add(seq)
    model = GhostModel(scheduler.kv)
    for second in (5.0, 6.0, 7.0):
        clock.seconds = second
        run_step(scheduler, model)
    assert (seq.first_scheduled_seconds, seq.first_token_seconds) == (5.0, 6.0)
    assert (seq.flops, seq.last_scheduled_step) == (31.0, 2)


BOUNDED = VerifyLaw("bounded", budget_nats=9.0, max_tokens=4)


def run_until_refresh(scheduler: Scheduler, model: GhostModel, seq: Sequence) -> None:
    for _ in range(100):
        if seq.is_refreshing:
            return
        run_step(scheduler, model)
    raise AssertionError("nothing is ever renewed")


def test_who_renews_entries_counts_as_decoding_not_as_a_prompt() -> None:
    """All decodes go on beside it, with the whole budget; what is left of it renews."""
    scheduler = make_scheduler(max_num_seqs=16, max_step_tokens=16)
    model = GhostModel(scheduler.kv)
    seq = make_sequence(0, num_tokens=30, max_output=60, verify=BOUNDED)
    others = [make_sequence(seq_id, num_tokens=2, max_output=200) for seq_id in range(1, 15)]
    for each in (seq, *others):
        scheduler.add(each)
    while any(each.num_output_tokens == 0 for each in (seq, *others)):
        run_step(scheduler, model)
    run_until_refresh(scheduler, model, seq)
    num_pieces = -(-(seq.num_uncomputed_tokens - 1) // 2)  # the budget leaves two tokens a step; one alone is a decode
    plan, _ = run_step(scheduler, model)
    given = {item.seq.seq_id: item.num_tokens for item in plan.scheduled}
    assert given == {0: 2, **{other.seq_id: 1 for other in others}}
    assert [item.seq.seq_id for item in plan.scheduled if item.is_refresh] == [0]
    counts = [plan.num_verifications]
    while seq.is_refreshing:
        counts.append(run_step(scheduler, model)[0].num_verifications)
    assert counts == [0] * (num_pieces - 1) + [1]


def test_a_preempted_sequence_has_nothing_to_renew() -> None:
    scheduler = make_scheduler()
    model = GhostModel(scheduler.kv)
    seq = make_sequence(1, num_tokens=30, max_output=60, verify=BOUNDED)
    scheduler.add(seq)
    run_until_refresh(scheduler, model, seq)
    scheduler._preempt(StepDraft(0, 16, 0.0), seq)
    assert not seq.is_refreshing
    plan, _ = run_step(scheduler, model)
    assert not plan.scheduled[0].is_refresh


def test_entries_are_renewed_at_once_when_skipping_is_disabled() -> None:
    scheduler = make_scheduler()
    model = GhostModel(scheduler.kv)
    seq = make_sequence(1, num_tokens=30, max_output=60, verify=VerifyLaw("bounded", 9.0, 1000))
    scheduler.add(seq)
    while seq.num_dense_tokens is None:
        run_step(scheduler, model)
    first = seq.num_dense_tokens
    seq.control = replace(seq.control, pruning=disable(seq.control.pruning, "watchdog"))
    run_step(scheduler, model)
    assert seq.is_refreshing
    plan, _ = run_step(scheduler, model)
    assert parts(plan) == [(1, first, 3)]
    assert seq.num_dense_tokens is None


def test_a_guess_leaves_a_block_to_each_running_sequence() -> None:
    """It may be anyone's next one: where none is to spare, the guesser computes its own tokens instead."""
    scheduler = make_scheduler(num_blocks=5)
    model = GhostModel(scheduler.kv)
    law = VerifyLaw("lossless", budget_nats=9.0, max_tokens=30)
    scheduler.add(make_sequence(1, num_tokens=30, max_output=30, verify=law))
    num_held = 0
    while scheduler.has_work:
        plan, _ = run_step(scheduler, model)
        for item in plan.scheduled:
            if item.ahead_of is not None and len(item.block_table) > count_blocks(item.ahead_of.num_tokens):
                num_held += 1
                assert scheduler.kv.num_allocatable_blocks >= 1
    assert num_held > 0
