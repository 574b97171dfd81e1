"""Draft lengths fall with entropy and with what a row costs, and risk is verified in time."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.draft import (
    DraftLaw,
    DraftRecord,
    DraftRun,
    RiskTable,
    acceptance_estimate,
    allocate_drafts,
    draft_length,
    expected_accepted,
)

entropies = st.floats(0.0, 12.0)
probabilities = st.floats(0.0, 1.0)
thresholds = st.floats(0.01, 1.0)


@given(entropies, entropies)
def test_acceptance_falls_with_entropy_and_stays_a_probability(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0.0 <= acceptance_estimate(high) <= acceptance_estimate(low) <= 1.0


def test_acceptance_at_known_points() -> None:
    assert acceptance_estimate(0.0) == 1.0
    assert acceptance_estimate(1.25) == pytest.approx(0.5)
    assert acceptance_estimate(5.0) == 0.0
    assert acceptance_estimate(9.0) == 0.0
    assert acceptance_estimate(math.nan) == 0.0
    assert acceptance_estimate(math.inf) == 0.0


@given(probabilities, thresholds, st.integers(0, 16))
def test_a_draft_ends_where_the_next_token_no_longer_pays(acceptance: float, threshold: float, limit: int) -> None:
    length = draft_length(acceptance, threshold, limit)
    assert 0 <= length <= limit
    if length:
        assert acceptance**length >= threshold * (1.0 - 1e-9)
    if length < limit:
        assert acceptance ** (length + 1) < threshold * (1.0 + 1e-9)


def test_a_threshold_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold"):
        draft_length(1.0, 0.0, 8)


@given(st.lists(st.tuples(probabilities, st.integers(0, 6)), max_size=6), st.integers(0, 20))
def test_a_shared_budget_goes_where_most_tokens_are_accepted(wishes: list[tuple[float, int]], budget: int) -> None:
    acceptances, limits = [a for a, _ in wishes], [k for _, k in wishes]
    lengths = allocate_drafts(acceptances, limits, budget)
    assert sum(lengths) == min(budget, sum(limits))
    assert all(k <= top for k, top in zip(lengths, limits, strict=True))

    # Moving one token from any sequence to any other never expects more.
    def value(ks: list[int]) -> float:
        return sum(expected_accepted(a, k) for a, k in zip(acceptances, ks, strict=True))

    for i, k in enumerate(lengths):
        for j in range(len(lengths)):
            if i != j and k > 0 and lengths[j] < limits[j]:
                moved = list(lengths)
                moved[i] -= 1
                moved[j] += 1
                assert value(moved) <= value(lengths) + 1e-9


def test_a_sure_sequence_gets_a_long_draft_and_an_unsure_or_unknown_one_none() -> None:
    law, fresh = DraftLaw(max_tokens=8, row_cost=0.1), DraftRecord()

    def length(entropy: float, num_decodes: int = 1, record: DraftRecord = fresh) -> int:
        return law.length(law.acceptance(record, entropy), law.threshold(num_decodes), entropy)

    assert length(0.0) == 8
    assert 0 < length(1.0) < 8
    assert length(5.0) == 0
    assert length(math.nan) == 0
    assert length(0.3, num_decodes=32) < length(0.3)  # a shared step must be worth it
    good = DraftRecord()
    for _ in range(10):
        good = good.observe(8, 8)
    assert length(1.0, record=good) == 8
    assert length(5.0, record=good) == 0  # lost now, however well it went


def test_a_choice_whose_drafts_fail_stops_drafting_and_is_tried_again_later() -> None:
    law, record, entropy = DraftLaw(max_tokens=8, row_cost=0.1), DraftRecord(), 0.5
    lengths = []
    for _ in range(60):
        length = law.length(law.acceptance(record, entropy), law.threshold(4), entropy)
        lengths.append(length)
        record = record.observe(length, 0)
    assert lengths[0] > 0
    assert 0 in lengths
    assert any(later > 0 for later in lengths[lengths.index(0) :])
    assert sum(lengths) < 30
    assert record.num_drafted == sum(lengths)


def test_only_drafted_tokens_that_reach_the_output_count_as_accepted() -> None:
    record = DraftRecord().observe(5, 3)
    assert (record.num_drafted, record.num_accepted) == (5, 0)
    assert record.accept().accept().num_accepted == 2
    assert (record.recent_trials, record.recent_hits) == (4.0, 3.0)


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"row_cost": 0.0}, {"row_cost": math.nan}, {"prior_trials": 0.0}])
def test_a_law_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        DraftLaw(**wrong)


def test_expected_accepted_is_the_geometric_sum() -> None:
    assert expected_accepted(0.5, 3) == pytest.approx(0.875)
    assert expected_accepted(1.0, 4) == 4.0
    assert expected_accepted(0.5, 0) == 0.0


TABLE = RiskTable((0.5, 2.0, 4.0), (0.001, 0.01, 0.05))


@given(st.floats(0.0, 20.0))
def test_risk_stays_between_the_knots_of_its_table(entropy: float) -> None:
    assert 0.001 <= TABLE.risk_nats(entropy) <= 0.05 + 1e-15


def test_risk_at_knots_between_them_and_unknown() -> None:
    assert [TABLE.risk_nats(h) for h in (0.5, 2.0, 4.0)] == pytest.approx([0.001, 0.01, 0.05])
    assert TABLE.risk_nats(3.0) == pytest.approx(0.03)
    assert TABLE.risk_nats(0.0) == 0.001
    assert TABLE.risk_nats(99.0) == 0.05
    assert TABLE.risk_nats(math.nan) == math.inf
    assert RiskTable((1.0,), (0.2,)).risk_nats(5.0) == 0.2


@pytest.mark.parametrize(
    ("hs", "risks"),
    [((), ()), ((1.0,), (0.1, 0.2)), ((2.0, 1.0), (0.1, 0.2)), ((1.0,), (math.nan,)), ((-1.0,), (0.1,))],
)
def test_a_broken_risk_table_is_refused(hs: tuple[float, ...], risks: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="risk table"):
        RiskTable(hs, risks)


@given(st.lists(entropies | st.just(math.nan), max_size=60), st.floats(0.0, 0.3), st.integers(1, 16))
def test_an_unchecked_run_never_exceeds_its_length_and_its_budget_by_more_than_one_token(
    hs: list[float], budget: float, longest: int
) -> None:
    run = DraftRun()
    for h in hs:
        before = run
        run = run.observe(TABLE, h)
        assert run.num_tokens <= longest
        assert before.risk_nats < budget or before.num_tokens == 0
        if run.is_check_due(budget, longest):
            run = DraftRun()


def test_sure_stretches_run_long_and_lost_ones_are_checked_at_once() -> None:
    def run_length(h: float) -> int:
        run = DraftRun()
        while not run.is_check_due(0.04, 32):
            run = run.observe(TABLE, h)
        return run.num_tokens

    assert run_length(0.1) == 32
    assert run_length(2.0) == 4
    assert run_length(5.0) == 1
    assert run_length(math.nan) == 1
    assert not DraftRun().is_check_due(0.0, 1)


def test_a_table_of_bins_has_each_mean_at_its_bins_middle() -> None:
    table = RiskTable.of_bins([(1.0, 0.001), (3.0, 0.005), (4.0, 0.004)])
    assert table == RiskTable((0.5, 2.0, 3.5), (0.001, 0.005, 0.004))
    assert [table.risk_nats(h) for h in (0.0, 0.5, 1.25, 9.0)] == pytest.approx([0.001, 0.001, 0.003, 0.004])
    assert RiskTable.of_bins([(20.0, 0.7)]).risk_nats(3.0) == 0.7


@pytest.mark.parametrize("edges", [(1.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
def test_bins_that_do_not_ascend_are_refused(edges: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="risk table"):
        RiskTable.of_bins([(edge, 0.1) for edge in edges])
