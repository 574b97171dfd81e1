"""Draft lengths fall with entropy, risk is verified in time, and acceptance keeps the dense distribution."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.draft import (
    DraftRun,
    RiskTable,
    accept_greedy,
    acceptance_estimate,
    acceptance_probability,
    allocate_drafts,
    draft_length,
    expected_accepted,
    residual_distribution,
)

entropies = st.floats(0.0, 12.0)
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


@given(entropies, thresholds, st.integers(0, 16))
def test_a_draft_ends_where_the_next_token_no_longer_pays(entropy: float, threshold: float, limit: int) -> None:
    length = draft_length(entropy, threshold, limit)
    acceptance = acceptance_estimate(entropy)
    assert 0 <= length <= limit
    if length:
        assert acceptance**length >= threshold * (1.0 - 1e-9)
    if length < limit:
        assert acceptance ** (length + 1) < threshold * (1.0 + 1e-9)


def test_a_sure_sequence_gets_a_long_draft_and_an_unsure_or_unknown_one_none() -> None:
    assert draft_length(0.0, 0.2, 8) == 8
    assert draft_length(6.0, 0.2, 8) == 0
    assert draft_length(math.nan, 0.2, 8) == 0
    with pytest.raises(ValueError, match="threshold"):
        draft_length(1.0, 0.0, 8)


@given(st.lists(entropies | st.just(math.nan), max_size=6), st.integers(0, 20), thresholds, st.integers(0, 6))
def test_a_shared_budget_goes_where_most_tokens_are_accepted(
    hs: list[float], budget: int, threshold: float, limit: int
) -> None:
    lengths = allocate_drafts(hs, budget, threshold, limit)
    limits = [draft_length(h, threshold, limit) for h in hs]
    assert sum(lengths) == min(budget, sum(limits))
    assert all(k <= top for k, top in zip(lengths, limits, strict=True))

    # Moving one token from any sequence to any other never expects more.
    def value(ks: list[int]) -> float:
        return sum(expected_accepted(acceptance_estimate(h), k) for h, k in zip(hs, ks, strict=True))

    for i, k in enumerate(lengths):
        for j in range(len(lengths)):
            if i != j and k > 0 and lengths[j] < limits[j]:
                moved = list(lengths)
                moved[i] -= 1
                moved[j] += 1
                assert value(moved) <= value(lengths) + 1e-9


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


@given(st.lists(st.integers(0, 3), max_size=10), st.lists(st.integers(0, 3), min_size=11, max_size=11))
def test_greedy_acceptance_produces_what_dense_decoding_would(draft: list[int], dense_tail: list[int]) -> None:
    # A dense model whose next token depends on the whole prefix.
    def dense_next(prefix: list[int]) -> int:
        return (sum((i + 1) * t for i, t in enumerate(prefix)) + dense_tail[len(prefix)]) % 4

    dense = [dense_next(draft[:i]) for i in range(len(draft) + 1)]
    verdict = accept_greedy(draft, dense)
    produced = [*draft[: verdict.num_accepted], verdict.next_token_id]
    expected: list[int] = []
    while len(expected) < len(produced):
        expected.append(dense_next(expected))
    assert produced == expected
    assert verdict.num_accepted == len(draft) or draft[verdict.num_accepted] != dense[verdict.num_accepted]


def test_greedy_acceptance_needs_one_dense_token_more_than_drafted() -> None:
    with pytest.raises(ValueError, match="dense"):
        accept_greedy([1, 2], [1, 2])


distributions = st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5).filter(lambda x: sum(x) > 1e-3)


@given(distributions, distributions)
def test_speculative_sampling_draws_from_the_dense_distribution_exactly(p_raw: list[float], q_raw: list[float]) -> None:
    p = [x / sum(p_raw) for x in p_raw]
    q = [x / sum(q_raw) for x in q_raw]
    accepted = [qi * acceptance_probability(pi, qi) for pi, qi in zip(p, q, strict=True)]
    rejected = 1.0 - math.fsum(accepted)
    redrawn = residual_distribution(p, q)
    assert sum(redrawn) == pytest.approx(1.0)
    for pi, ai, ri in zip(p, accepted, redrawn, strict=True):
        assert ai + rejected * ri == pytest.approx(pi, abs=1e-9)


def test_what_the_draft_could_not_draw_or_nobody_knows_is_not_accepted() -> None:
    assert acceptance_probability(0.5, 0.0) == 0.0
    assert acceptance_probability(math.nan, 0.5) == 0.0
    assert acceptance_probability(0.5, math.nan) == 0.0
    assert acceptance_probability(0.2, 0.4) == pytest.approx(0.5)
