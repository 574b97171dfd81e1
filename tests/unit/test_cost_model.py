"""The online cost model against least squares on the whole history, and its refusals."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etserve.control.cost_model import CostFit, CostModel, StepTimes, StepWork

C0, ALPHA, BETA = 2e-3, 2e-12, 5e-11
flops = st.floats(1e8, 1e12)
num_bytes = st.floats(1e8, 5e9)


def true_seconds(work: StepWork) -> float:
    return C0 + ALPHA * work.flops + BETA * work.bytes_read


def learn(history: list[tuple[StepWork, float]], forgetting: float = 0.99) -> StepTimes:
    times = StepTimes(forgetting)
    for work, seconds in history:
        times = times.observe(work, seconds)
    return times


def varied_work(rng: random.Random, count: int) -> list[StepWork]:
    return [StepWork(rng.uniform(1e9, 5e11), rng.uniform(2e8, 3e9)) for _ in range(count)]


def weighted_residual(history: list[tuple[StepWork, float]], fit: CostFit, forgetting: float) -> float:
    newest = len(history) - 1
    return math.fsum(
        forgetting ** (newest - i) * (seconds - fit.predict_seconds(work)) ** 2
        for i, (work, seconds) in enumerate(history)
    )


def test_exact_step_times_give_the_coefficients_back() -> None:
    history = [(work, true_seconds(work)) for work in varied_work(random.Random(1), 60)]
    fit = learn(history).fit()
    assert fit.fixed_seconds == pytest.approx(C0, rel=1e-4)
    assert fit.seconds_per_flop == pytest.approx(ALPHA, rel=1e-4)
    assert fit.seconds_per_byte == pytest.approx(BETA, rel=1e-4)
    assert fit.r_squared > 0.999999
    assert fit.is_usable


@settings(max_examples=60)
@given(st.lists(st.tuples(flops, num_bytes, st.floats(1e-4, 10.0)), min_size=1, max_size=40))
def test_no_coefficient_is_ever_negative_and_no_small_change_of_one_does_better(
    steps: list[tuple[float, float, float]],
) -> None:
    history = [(StepWork(f, b), seconds) for f, b, seconds in steps]
    fit = learn(history).fit()
    coefficients = (fit.fixed_seconds, fit.seconds_per_flop, fit.seconds_per_byte)
    assert all(math.isfinite(c) and c >= 0.0 for c in coefficients)
    lowest = weighted_residual(history, fit, 0.99)
    scale = math.fsum(seconds * seconds for _, seconds in history)
    typical = (1.0, 1e-12, 1e-9)
    for i in range(3):
        for change in (-0.1, -1e-3, 1e-3, 0.1):
            moved = list(coefficients)
            moved[i] = max(0.0, moved[i] + change * max(moved[i], typical[i] * 1e-3))
            assert weighted_residual(history, CostFit(*moved), 0.99) >= lowest - 1e-7 * scale


def test_the_recursion_equals_weighted_least_squares_over_the_whole_history() -> None:
    numpy = pytest.importorskip("numpy")
    optimize = pytest.importorskip("scipy.optimize")
    rng = random.Random(3)
    for beta in (BETA, -BETA / 3):  # the second makes the unconstrained answer negative
        works = varied_work(rng, 80)
        history = [(w, max(1e-4, 5e-2 + ALPHA * w.flops + beta * w.bytes_read + rng.gauss(0, 1e-3))) for w in works]
        root = numpy.array([math.sqrt(0.95 ** (79 - i)) for i in range(80)])
        design = numpy.array([[1.0, w.flops * 1e-9, w.bytes_read * 1e-9] for w in works]) * root[:, None]
        expected, norm = optimize.nnls(design, numpy.array([s for _, s in history]) * root)
        fit = learn(history, forgetting=0.95).fit()
        got = (fit.fixed_seconds, fit.seconds_per_flop * 1e9, fit.seconds_per_byte * 1e9)
        assert got == pytest.approx(tuple(expected), rel=1e-4, abs=1e-9)
        assert weighted_residual(history, fit, 0.95) == pytest.approx(norm**2, rel=1e-4)


def test_old_steps_are_forgotten_when_the_machine_changes() -> None:
    works = varied_work(random.Random(5), 1500)
    slower = [(w, 3.0 * true_seconds(w)) for w in works[700:]]
    fit = learn([(w, true_seconds(w)) for w in works[:700]] + slower).fit()
    assert fit.seconds_per_byte == pytest.approx(3.0 * BETA, rel=0.02)
    assert fit.effective_steps == pytest.approx(100.0, rel=0.01)


def test_times_that_work_does_not_explain_are_not_used() -> None:
    rng = random.Random(7)
    fit = learn([(work, rng.uniform(0.01, 0.1)) for work in varied_work(rng, 300)]).fit()
    assert fit.r_squared < 0.5
    assert not fit.is_usable


def test_constant_times_and_a_handful_of_steps_are_not_used() -> None:
    same = learn([(StepWork(1e9, 2e8), 0.01)] * 200).fit()
    assert same.predict_seconds(StepWork(1e9, 2e8)) == pytest.approx(0.01)
    assert (same.r_squared, same.is_usable) == (0.0, False)
    few = learn([(work, true_seconds(work)) for work in varied_work(random.Random(2), 5)]).fit()
    assert few.r_squared > 0.99
    assert not few.is_usable


@pytest.mark.parametrize("r_squared", [0.5, 0.49, -3.0, math.nan])
def test_r_squared_below_a_half_is_the_border(r_squared: float) -> None:
    assert CostFit(r_squared=r_squared, effective_steps=100.0).is_usable is (r_squared == 0.5)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (StepWork(1e9, 1e8), math.nan),
        (StepWork(1e9, 1e8), 0.0),
        (StepWork(1e9, 1e8), -1.0),
        (StepWork(math.inf, 1e8), 0.1),
        (StepWork(-1.0, 1e8), 0.1),
    ],
)
def test_an_impossible_measurement_changes_nothing(work: StepWork, seconds: float) -> None:
    before = learn([(StepWork(1e9, 1e8), 0.01)])
    assert before.observe(work, seconds) == before


def test_collinear_columns_still_predict() -> None:
    works = [StepWork(1e9 * i, 1e8 * i) for i in range(1, 60)]  # decode of one length: bytes follow FLOPs
    fit = learn([(work, true_seconds(work)) for work in works]).fit()
    for work in works:
        assert fit.predict_seconds(work) == pytest.approx(true_seconds(work), rel=1e-6)


def test_prefill_and_decode_are_learnt_apart() -> None:
    model = CostModel()
    for work in varied_work(random.Random(9), 50):
        model = model.observe("prefill", work, true_seconds(work))
        model = model.observe("decode", work, 2.0 * true_seconds(work))
    assert model.fit("prefill").seconds_per_flop == pytest.approx(ALPHA, rel=1e-3)
    assert model.fit("decode").seconds_per_flop == pytest.approx(2.0 * ALPHA, rel=1e-3)


def test_marginal_cost_leaves_the_fixed_part_out() -> None:
    fit = CostFit(fixed_seconds=1.0, seconds_per_flop=2.0, seconds_per_byte=3.0)
    assert fit.marginal_seconds(5.0, 7.0) == 31.0
    assert fit.predict_seconds(StepWork(5.0, 7.0)) == 32.0


def test_before_any_step_nothing_is_predicted_and_nothing_used() -> None:
    fit = StepTimes().fit()
    assert fit == CostFit()
    assert not fit.is_usable


@pytest.mark.parametrize("forgetting", [0.0, 1.5, math.nan])
def test_a_wrong_forgetting_factor_is_refused(forgetting: float) -> None:
    with pytest.raises(ValueError, match="forgetting"):
        StepTimes(forgetting)
