"""How much a step may skip: the steering law, each guard, the watchdog, and the selection rule."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from etserve.control.pruning import (
    PruningConfig,
    PruningState,
    allowed_epsilon,
    disable,
    epsilon,
    group_masses,
    is_check_due,
    is_dense_layer,
    minimum_kept,
    observe,
    observe_check,
    protected_blocks,
    select_blocks,
    skip_divergence_nats,
    skip_output_bound,
    steered_epsilon,
)

LONG = 4096  # tokens of context
CONFIG = PruningConfig()
swings = st.floats(-1.0, 1.0)
entropies = st.floats(0.0, 12.0)
anything = st.floats(allow_nan=True, allow_infinity=True)


def after(config: PruningConfig, stream: list[float], state: PruningState | None = None) -> PruningState:
    state = state or PruningState()
    for h in stream:
        state = observe(config, state, h)
    return state


@given(swings, st.lists(entropies, min_size=1, max_size=40))
def test_epsilon_stays_within_its_swing(swing: float, stream: list[float]) -> None:
    config = PruningConfig(swing=swing)
    state = after(config, stream)
    allowed = steered_epsilon(config, state)
    assert allowed <= 0.1 * (1.0 + abs(swing)) + 1e-12
    assert allowed >= min(0.05, 0.1 * (1.0 - abs(swing))) - 1e-12


@given(entropies, entropies, st.floats(0.0, 1.0))
def test_a_sure_model_may_skip_more_and_the_reversed_placebo_less(a: float, b: float, swing: float) -> None:
    sure, lost = (PruningState(entropy_nats=h) for h in sorted((a, b)))
    forward, placebo = PruningConfig(swing=swing), PruningConfig(swing=-swing)
    assert steered_epsilon(forward, sure) >= steered_epsilon(forward, lost)
    assert steered_epsilon(placebo, sure) <= steered_epsilon(placebo, lost)


@pytest.mark.parametrize(
    ("entropy", "swing", "expected"),
    [
        (2.45, 0.2, 0.1),
        (1.3, 0.2, 0.12),
        (3.6, 0.2, 0.08),
        (0.5, 0.2, 0.12),
        (9.0, 1.0, 0.0),
        (1.3, 1.0, 0.2),
        (1.3, -1.0, 0.0),
        (5.0, 0.0, 0.1),
    ],
)
def test_the_law_at_known_points(entropy: float, swing: float, expected: float) -> None:
    state = PruningState(entropy_nats=entropy)
    assert steered_epsilon(PruningConfig(swing=swing), state) == pytest.approx(expected, abs=1e-12)


def test_epsilon_zero_is_dense_always() -> None:
    config = PruningConfig(epsilon=0.0)
    assert epsilon(config, after(config, [2.0] * 20), LONG) == 0.0


def test_nothing_is_skipped_before_the_first_entropy_or_on_a_short_context() -> None:
    assert epsilon(CONFIG, PruningState(), LONG) == 0.0
    state = after(CONFIG, [2.0])
    assert epsilon(CONFIG, state, 511) == 0.0
    assert epsilon(CONFIG, state, 512) > 0.0


def test_a_jump_of_entropy_makes_the_next_eight_steps_dense() -> None:
    state = after(CONFIG, [2.0] * 5 + [5.0])
    seen = []
    for _ in range(10):
        seen.append(epsilon(CONFIG, state, LONG))
        state = observe(CONFIG, state, 2.2)
    assert seen[:8] == [0.0] * 8
    assert min(seen[8:]) > 0.0
    assert epsilon(CONFIG, after(CONFIG, [2.0] * 5 + [4.99]), LONG) > 0.0
    assert epsilon(CONFIG, after(CONFIG, [9.0]), LONG) > 0.0  # the first token has nothing to jump from


@given(st.lists(entropies, max_size=40))
def test_for_eight_steps_after_every_jump_nothing_is_skipped(stream: list[float]) -> None:
    state, quiet_until = PruningState(), -1
    for t, h in enumerate(stream):
        if t <= quiet_until:
            assert epsilon(CONFIG, state, LONG) == 0.0
        if h - state.entropy_nats >= CONFIG.jump_nats:
            quiet_until = t + 8
        state = observe(CONFIG, state, h)


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_an_unknown_entropy_makes_the_next_step_dense_and_moves_no_average(unknown: float) -> None:
    state = after(CONFIG, [2.0] * 5)
    lost = observe(CONFIG, state, unknown)
    assert lost.entropy_nats == state.entropy_nats
    assert epsilon(CONFIG, lost, LONG) == 0.0
    assert epsilon(CONFIG, observe(CONFIG, lost, 2.0), LONG) > 0.0


def test_sixteen_over_confident_steps_are_unknown_and_not_safe() -> None:
    config = PruningConfig(check_interval=1000)
    state = after(config, [0.01] * 15)
    assert epsilon(config, state, LONG) == pytest.approx(0.12)
    state = observe(config, state, 0.01)
    assert epsilon(config, state, LONG) == 0.05
    state = after(config, [0.01] * 50, state)
    assert epsilon(config, state, LONG) == 0.05
    assert epsilon(config, after(config, [0.9], state), LONG) == pytest.approx(0.12)  # it rose


def test_the_floor_never_loosens_a_tighter_law() -> None:
    config = PruningConfig(epsilon=0.01)
    assert steered_epsilon(config, after(config, [0.0] * 20)) == pytest.approx(0.012)


def test_every_sixty_fourth_step_is_dense_and_checked() -> None:
    state, checked = PruningState(), []
    for step in range(200):
        if is_check_due(CONFIG, state, LONG):
            checked.append(step)
            assert epsilon(CONFIG, state, LONG) == 0.0
            assert allowed_epsilon(CONFIG, state, LONG) > 0.0
            state = observe_check(CONFIG, state, 0.001)
        state = observe(CONFIG, state, 2.0)
    assert checked == [64, 128, 192]


@given(st.lists(entropies | anything, max_size=250), st.lists(st.floats(0.0, 0.1) | anything, max_size=250))
def test_never_more_than_64_steps_skip_between_two_checks(stream: list[float], divergences: list[float]) -> None:
    state, skipping = PruningState(), 0
    verdicts = iter(divergences)
    for h in stream:
        if is_check_due(CONFIG, state, LONG):
            state, skipping = observe_check(CONFIG, state, next(verdicts, 0.0)), 0
        elif epsilon(CONFIG, state, LONG) > 0.0:
            skipping += 1
            assert skipping <= 64
        state = observe(CONFIG, state, h)


def test_a_check_waits_for_a_step_that_would_skip() -> None:
    state = after(CONFIG, [2.0] * 63 + [5.0])
    assert not is_check_due(CONFIG, state, LONG)
    assert not is_check_due(CONFIG, after(CONFIG, [2.0] * 70), 100)
    assert is_check_due(CONFIG, after(CONFIG, [2.0] * 70), LONG)


def test_two_failed_checks_running_turn_skipping_off_for_good() -> None:
    state = after(CONFIG, [2.0] * 64)
    once = observe_check(CONFIG, state, 0.06)
    assert once.disabled_reason is None
    assert observe_check(CONFIG, observe_check(CONFIG, once, 0.05), 0.06).disabled_reason is None
    twice = observe_check(CONFIG, once, 0.06)
    assert twice.disabled_reason == "watchdog"
    for _ in range(200):
        twice = observe(CONFIG, twice, 2.0)
        assert epsilon(CONFIG, twice, LONG) == 0.0
        assert not is_check_due(CONFIG, twice, LONG)
    assert observe_check(CONFIG, twice, 0.0).disabled_reason == "watchdog"


def test_an_unknown_divergence_counts_as_damage() -> None:
    state = after(CONFIG, [2.0] * 64)
    assert observe_check(CONFIG, observe_check(CONFIG, state, math.nan), math.inf).disabled_reason == "watchdog"


def test_the_first_reason_for_turning_off_stays() -> None:
    state = disable(disable(PruningState(entropy_nats=2.0), "request"), "watchdog")
    assert state.disabled_reason == "request"
    assert epsilon(CONFIG, state, LONG) == 0.0


def test_the_first_two_layers_are_dense() -> None:
    assert [is_dense_layer(CONFIG, layer) for layer in range(4)] == [True, True, False, False]


@given(st.integers(0, 400), st.lists(st.tuples(st.integers(0, 7000), st.integers(0, 7000)), max_size=4))
def test_sinks_recent_blocks_and_protected_spans_are_always_read(num_blocks: int, spans: list[tuple[int, int]]) -> None:
    kept = protected_blocks(CONFIG, num_blocks, spans)
    assert kept <= set(range(num_blocks))
    if num_blocks:
        assert {0, *range(max(0, num_blocks - 4), num_blocks)} <= kept
    for start, end in spans:
        assert {token // 16 for token in range(start, min(end, 16 * num_blocks))} <= kept
    assert not spans or len(protected_blocks(CONFIG, num_blocks)) <= len(kept)
    assert len(protected_blocks(CONFIG, num_blocks)) == min(num_blocks, 5)


@pytest.mark.parametrize(("blocks", "least"), [(0, 0), (5, 5), (8, 8), (100, 8), (267, 9), (1000, 30)])
def test_at_least_eight_blocks_or_three_percent_are_read(blocks: int, least: int) -> None:
    assert minimum_kept(CONFIG, blocks) == least


masses_and_guards = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60).flatmap(
    lambda masses: st.tuples(
        st.just(masses), st.sets(st.integers(0, len(masses) - 1), max_size=6), st.integers(0, len(masses) + 2)
    )
)


@given(masses_and_guards, st.floats(0.0, 1.0))
def test_selection_keeps_every_guard_and_misses_at_most_epsilon(
    case: tuple[list[float], set[int], int], limit: float
) -> None:
    masses, protected, minimum = case
    kept = select_blocks(masses, limit, protected, minimum)
    skipped = set(range(len(masses))) - set(kept)
    assert list(kept) == sorted(set(kept))
    assert protected <= set(kept)
    assert len(kept) >= min(minimum, len(masses))
    assert math.fsum(masses[b] for b in skipped) <= limit + 1e-9
    # As much as possible: the next smallest would break a guard or the limit.
    free = sorted(masses[b] for b in kept if b not in protected)
    if limit > 0.0 and free and len(kept) > minimum:
        assert math.fsum(masses[b] for b in skipped) + free[0] > limit - 1e-9
    # Nothing unprotected that stays is lighter than what goes.
    if skipped and free:
        assert max(masses[b] for b in skipped) <= free[0]


@given(masses_and_guards, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_larger_epsilon_keeps_a_subset(case: tuple[list[float], set[int], int], a: float, b: float) -> None:
    masses, protected, minimum = case
    tight, loose = sorted((a, b))
    assert set(select_blocks(masses, loose, protected, minimum)) <= set(
        select_blocks(masses, tight, protected, minimum)
    )


@given(masses_and_guards)
def test_epsilon_zero_or_unknown_masses_read_everything(case: tuple[list[float], set[int], int]) -> None:
    masses, protected, minimum = case
    everything = tuple(range(len(masses)))
    assert select_blocks([0.0] * len(masses), 0.0, protected, minimum) == everything
    assert select_blocks(masses, math.nan, protected, minimum) == everything
    assert select_blocks([*masses[:-1], math.nan], 0.5, protected, minimum) == everything


def test_selection_by_hand() -> None:
    masses = [0.3, 0.04, 0.02, 0.5, 0.04, 0.1]
    assert select_blocks(masses, 0.1, {0}, 0) == (0, 3, 5)
    assert select_blocks(masses, 0.06, {0}, 0) == (0, 3, 4, 5)  # of equals the older goes
    assert select_blocks(masses, 0.1, {0, 2}, 0) == (0, 2, 3, 5)
    assert select_blocks(masses, 0.9, set(), 4) == (0, 3, 4, 5)


@given(
    st.integers(1, 7),
    st.integers(1, 30),
    st.integers(0, 2**32),
    st.floats(0.01, 0.9),
)
def test_within_a_group_no_head_misses_more_than_epsilon(heads: int, blocks: int, seed: int, limit: float) -> None:
    rng = random.Random(seed)
    log_masses = [[rng.gauss(0.0, 3.0) for _ in range(blocks)] for _ in range(heads)]
    kept = set(select_blocks(group_masses(log_masses), limit, {0}, 1))
    for row in log_masses:
        total = math.fsum(math.exp(x) for x in row)
        missing = math.fsum(math.exp(row[b]) for b in range(blocks) if b not in kept) / total
        assert missing <= limit + 1e-9


def test_one_unknown_head_makes_the_group_dense() -> None:
    masses = group_masses([[0.0, 1.0], [math.nan, 0.0]])
    assert all(math.isnan(m) for m in masses)
    assert select_blocks(masses, 0.5, set(), 0) == (0, 1)
    assert group_masses([[0.0, -math.inf]]) == [1.0, 0.0]


def attend(scores: list[float], values: list[list[float]], kept: set[int]) -> tuple[list[float], list[float]]:
    """Softmax over the kept positions and the output; skipped ones have probability 0."""
    weights = [math.exp(s) if i in kept else 0.0 for i, s in enumerate(scores)]
    shares = [w / math.fsum(weights) for w in weights]
    return shares, [math.fsum(p * v[d] for p, v in zip(shares, values, strict=True)) for d in range(len(values[0]))]


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_the_cost_of_skipping_obeys_its_identities(num_positions: int, seed: int) -> None:
    rng = random.Random(seed)
    scores = [rng.gauss(0.0, 2.0) for _ in range(num_positions)]
    values = [[rng.gauss(0.0, 1.0) for _ in range(5)] for _ in range(num_positions)]
    kept = {i for i in range(num_positions) if rng.random() < 0.6} | {0}
    dense, output = attend(scores, values, set(range(num_positions)))
    sparse, moved = attend(scores, values, kept)
    missing = math.fsum(p for i, p in enumerate(dense) if i not in kept)
    assume(missing < 1.0)
    # KL from the renormalised to the dense distribution.
    divergence = math.fsum(q * math.log(q / p) for q, p in zip(sparse, dense, strict=True) if q > 0.0)
    assert divergence == pytest.approx(skip_divergence_nats(missing), abs=1e-9)
    largest = max(math.hypot(*v) for v in values)
    assert math.dist(output, moved) <= skip_output_bound(missing, largest) + 1e-9


def test_missing_everything_diverges() -> None:
    assert skip_divergence_nats(0.0) == 0.0
    assert skip_divergence_nats(1.0) == math.inf


@pytest.mark.parametrize(
    "fields",
    [
        {"swing": 1.1},
        {"epsilon": -0.1},
        {"epsilon": 0.9},
        {"epsilon": math.nan},
        {"entropy_low_nats": 4.0},
        {"smoothing": 0.0},
        {"recent_blocks": -1},
        {"check_interval": 0},
        {"max_strikes": 0},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|epsilon"):
        PruningConfig(**fields)  # type: ignore[arg-type]
