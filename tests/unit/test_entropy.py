"""The entropy laws against plain definitions and against their own bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.entropy import (
    Partial,
    entropy_bounds,
    estimate_entropy,
    measure,
    merge,
    merge_all,
    topk_renorm_entropy,
)

finite = st.floats(-60.0, 60.0)
rows = st.lists(finite, min_size=1, max_size=200)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    return [w / math.fsum(weights) for w in weights]


def entropy_of(p: list[float]) -> float:
    return -math.fsum(x * math.log(x) for x in p if x > 0.0)


@given(rows)
def test_one_pass_gives_the_textbook_entropy_and_varentropy(logits: list[float]) -> None:
    p = softmax(logits)
    entropy = entropy_of(p)
    variance = math.fsum(x * (math.log(x) + entropy) ** 2 for x in p if x > 0.0)
    measured = measure(logits)
    assert measured.entropy_nats == pytest.approx(entropy, abs=1e-9)
    assert measured.varentropy == pytest.approx(variance, abs=1e-7)
    assert measured.log_sum_exp == pytest.approx(max(logits) - math.log(max(p)), abs=1e-9)


@given(rows, st.integers(1, 50))
def test_tiles_merge_to_the_whole_row(logits: list[float], tile: int) -> None:
    whole = measure(logits)
    merged = merge_all(measure(logits[i : i + tile]) for i in range(0, len(logits), tile))
    assert merged.shift == whole.shift
    assert merged.entropy_nats == pytest.approx(whole.entropy_nats, abs=1e-9)
    assert merged.varentropy == pytest.approx(whole.varentropy, abs=1e-7)


@given(rows, rows)
def test_merging_does_not_care_which_part_comes_first(a: list[float], b: list[float]) -> None:
    assert merge(measure(a), measure(b)) == merge(measure(b), measure(a))


def test_an_empty_part_changes_nothing() -> None:
    part = measure([1.0, 2.0, -3.0])
    assert merge(part, Partial()) == part


@given(rows, st.integers(0, 5))
def test_forbidden_tokens_count_for_nothing(logits: list[float], count: int) -> None:
    assert measure(logits + [-math.inf] * count).entropy_nats == measure(logits).entropy_nats


def test_a_certain_row_has_no_entropy() -> None:
    row = measure([-math.inf, 3.0, -math.inf])
    assert (row.entropy_nats, row.varentropy, row.log_sum_exp) == (0.0, 0.0, 3.0)


def test_a_row_of_equals_has_the_entropy_of_its_size() -> None:
    row = measure([0.25] * 100)
    assert row.entropy_nats == pytest.approx(math.log(100))
    assert row.varentropy == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_nan_or_infinity_is_unknown_not_certain(bad: float) -> None:
    row = merge(measure([0.0, bad, 1.0]), measure([2.0]))
    assert row.num_nonfinite == 1
    assert math.isnan(row.entropy_nats)
    assert math.isnan(row.varentropy)
    assert math.isnan(row.log_sum_exp)


def test_a_row_of_nothing_but_forbidden_tokens_is_unknown() -> None:
    row = measure([-math.inf, -math.inf])
    assert math.isnan(row.entropy_nats)
    assert row.log_sum_exp == -math.inf


@given(rows, st.integers(1, 200))
def test_the_bounds_hold_the_entropy_between_them(logits: list[float], k: int) -> None:
    measured = measure(logits)
    top = sorted(logits, reverse=True)[:k]
    bounds = entropy_bounds(top, measured.log_sum_exp, len(logits))
    slack = 1e-9
    assert bounds.lower - slack <= measured.entropy_nats <= bounds.upper + slack
    assert abs(bounds.mid - measured.entropy_nats) <= (bounds.upper - bounds.lower) / 2 + slack


@given(rows)
def test_the_bounds_meet_when_every_token_is_known(logits: list[float]) -> None:
    measured = measure(logits)
    bounds = entropy_bounds(logits, measured.log_sum_exp, len(logits))
    assert bounds.upper - bounds.lower < 1e-9
    assert bounds.mid == pytest.approx(measured.entropy_nats, abs=1e-9)


def test_an_even_tail_reaches_the_upper_bound() -> None:
    logits = [3.0] + [0.0] * 1000
    measured = measure(logits)
    bounds = entropy_bounds([3.0], measured.log_sum_exp, len(logits))
    assert bounds.upper == pytest.approx(measured.entropy_nats)
    assert bounds.lower < measured.entropy_nats - 1.0


def test_renormalising_the_top_is_biased_low_where_the_tail_is_heavy() -> None:
    logits = [1.0] * 20 + [0.0] * 50_000
    assert measure(logits).entropy_nats - topk_renorm_entropy(logits[:20]) > 5.0


@pytest.mark.parametrize("count", [0, 4])
def test_bounds_refuse_an_impossible_number_of_top_tokens(count: int) -> None:
    with pytest.raises(ValueError, match="top logits"):
        entropy_bounds([0.0] * count, 1.0, 3)


@given(rows, st.integers(1, 64))
def test_an_estimate_takes_the_top_for_the_row_where_it_has_room_left(logits: list[float], k: int) -> None:
    measured = measure(logits)
    top = sorted(logits, reverse=True)[:k]
    padded = top + [-math.inf] * (k - len(top))
    bounds = entropy_bounds(top, measured.log_sum_exp, len(logits))
    assert estimate_entropy("mid", padded, measured.log_sum_exp, len(logits)) == pytest.approx(bounds.mid, abs=1e-9)
    renormalised = estimate_entropy("topk_renorm", padded, measured.log_sum_exp, len(logits))
    assert renormalised == topk_renorm_entropy(top)
    if len(top) == len(logits):
        assert renormalised == pytest.approx(measured.entropy_nats, abs=1e-9)


def test_an_unknown_row_has_no_estimate_and_the_exact_one_is_none() -> None:
    assert math.isnan(estimate_entropy("mid", [1.0, 0.0], math.nan, 9))
    assert math.isnan(estimate_entropy("topk_renorm", [-math.inf], -math.inf, 9))
    with pytest.raises(ValueError, match="whole row"):
        estimate_entropy("exact", [1.0], 1.0, 1)
