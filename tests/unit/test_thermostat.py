"""The thermostat: its bounds on any input, its freezes, and its behaviour on families of softmax distributions."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.thermostat import (
    SAMPLING_ORDER,
    Mode,
    Thermostat,
    ThermostatConfig,
    control_step,
    deadzone,
    edt_log_offset,
    observe,
    start,
    target_entropy_nats,
    temperature,
)

MODES: list[Mode] = ["off", "cool", "two_sided", "edt", "mirostat", "fixed"]
anything = st.floats(allow_nan=True, allow_infinity=True)
tokens = st.lists(
    st.tuples(st.floats(0.0, 12.0) | anything, st.floats(0.0, 9.0) | anything, st.booleans()), max_size=80
)
user_temperatures = st.floats(0.05, 2.0)


def measure(logits: list[float], at: float) -> tuple[float, float]:
    """Entropy and varentropy of softmax(logits / at)."""
    scaled = [z / at for z in logits]
    top = max(scaled)
    weights = [math.exp(z - top) for z in scaled]
    total = math.fsum(weights)
    logs = [z - top - math.log(total) for z in scaled]
    entropy = -math.fsum(w / total * lp for w, lp in zip(weights, logs, strict=True))
    return entropy, math.fsum(w / total * (lp + entropy) ** 2 for w, lp in zip(weights, logs, strict=True))


def zipf(exponent: float, size: int) -> list[float]:
    return [-exponent * math.log(rank) for rank in range(1, size + 1)]


def simulate(
    config: ThermostatConfig, family: list[list[float]], num_tokens: int, user_temperature: float = 1.0
) -> tuple[Thermostat, list[float], list[float]]:
    """Run the loop over the family in turn; return the state and each token's temperature and entropy."""
    state = start(config, user_temperature)
    used, entropies = [], []
    for t in range(num_tokens):
        used.append(temperature(config, state))
        entropy, varentropy = measure(family[t % len(family)], used[-1])
        entropies.append(entropy)
        state = observe(config, state, entropy, varentropy)
    return state, used, entropies


def settled(config: ThermostatConfig, state: Thermostat, entropies: list[float]) -> tuple[float, float]:
    """Mean entropy of the last quarter's distance to H*, and how far the leak lets it rest outside the deadzone."""
    tail = entropies[-len(entropies) // 4 :]
    leak_rest = config.leak * abs(state.log_offset) * max(state.varentropy, config.min_varentropy) / config.gain
    return abs(sum(tail) / len(tail) - config.target_nats), config.deadzone_nats + leak_rest


@given(st.sampled_from(MODES), user_temperatures, tokens)
def test_temperature_stays_within_its_mode_s_bounds_on_any_input(
    mode: Mode, user: float, stream: list[tuple[float, float, bool]]
) -> None:
    config = ThermostatConfig(mode=mode, fixed_temperature=0.8)
    bounds = {
        "off": (1.0, 1.0),
        "mirostat": (1.0, 1.0),
        "cool": (0.5, 1.0),
        "two_sided": (0.5, 1.5),
        "edt": (0.05, 1.0),
        "fixed": (0.8 / user, 0.8 / user),
    }
    low, high = bounds[mode]
    state = start(config, user)
    for entropy, varentropy, is_forced in stream:
        state = observe(config, state, entropy, varentropy, is_forced=is_forced, surprisal_nats=entropy)
        assert user * low * (1.0 - 1e-12) <= temperature(config, state) <= user * high * (1.0 + 1e-12)
        assert not math.isnan(state.max_surprisal_nats)


@given(user_temperatures, tokens)
def test_cool_never_exceeds_the_client_s_temperature_by_even_one_ulp(
    user: float, stream: list[tuple[float, float, bool]]
) -> None:
    config = ThermostatConfig(mode="cool")
    state = start(config, user)
    for entropy, varentropy, is_forced in stream:
        state = observe(config, state, entropy, varentropy, is_forced=is_forced)
        assert temperature(config, state) <= user


@given(user_temperatures, tokens)
def test_off_is_exactly_the_client_s_temperature(user: float, stream: list[tuple[float, float, bool]]) -> None:
    config = ThermostatConfig()
    state = start(config, user)
    for entropy, varentropy, _ in stream:
        state = observe(config, state, entropy, varentropy)
        assert temperature(config, state) == user


@given(st.sampled_from(MODES), st.sampled_from([(0.0, 0), (0.7, 1)]), tokens)
def test_greedy_is_bypassed_in_every_mode_and_still_measured(
    mode: Mode, greedy: tuple[float, int], stream: list[tuple[float, float, bool]]
) -> None:
    config = ThermostatConfig(mode=mode)
    state = start(config, *greedy)
    for entropy, varentropy, _ in stream:
        state = observe(config, state, entropy, varentropy, surprisal_nats=1.0)
        assert temperature(config, state) == greedy[0]
        assert state.max_surprisal_nats == math.inf
        assert (state.log_offset, state.saturated) == (0.0, "none")
    assert observe(config, state, 2.0, 1.0).entropy_nats >= 0.0


@given(st.floats(-20.0, 20.0), st.floats(0.0, 2.0))
def test_the_deadzone_is_continuous_and_never_amplifies(error: float, width: float) -> None:
    inside = deadzone(error, width)
    assert abs(inside) == pytest.approx(max(0.0, abs(error) - width))
    assert inside * error >= 0.0


@given(st.floats(0.0, 12.0), st.floats(0.0, 20.0))
def test_one_step_is_clipped_and_points_to_the_target(entropy: float, varentropy: float) -> None:
    config = ThermostatConfig(target_nats=2.0)
    step = control_step(config, entropy, varentropy)
    assert abs(step) <= 0.1
    assert step * (2.0 - entropy) >= 0.0
    if abs(2.0 - entropy) <= 0.1:
        assert step == 0.0


@pytest.mark.parametrize(
    ("entropy", "varentropy", "step"),
    [(1.5, 4.0, 0.02), (2.5, 4.0, -0.02), (1.9, 4.0, 0.0), (1.88, 0.1, 0.016), (0.0, 0.5, 0.1), (9.0, 1.0, -0.1)],
)
def test_one_step_at_known_points(entropy: float, varentropy: float, step: float) -> None:
    assert control_step(ThermostatConfig(target_nats=2.0), entropy, varentropy) == pytest.approx(step, abs=1e-9)


def test_entropy_changes_with_log_temperature_at_the_rate_of_varentropy() -> None:
    rng = random.Random(4)
    for size in (2, 17, 300):
        logits = [rng.gauss(0.0, 2.0) for _ in range(size)]
        for at in (0.5, 1.0, 1.7):
            h = 1e-5
            slope = (measure(logits, at * math.exp(h))[0] - measure(logits, at * math.exp(-h))[0]) / (2 * h)
            assert slope == pytest.approx(measure(logits, at)[1], abs=1e-6)


def test_without_varentropy_in_the_divisor_the_gain_would_have_to_be_tiny() -> None:
    """u <- u + k (H* - H) contracts while k V < 2; V is largest for one likely token over a flat rest."""

    def varentropy(p: float, vocab: int) -> float:
        return p * (1.0 - p) * math.log(p * (vocab - 1) / (1.0 - p)) ** 2

    largest = max(varentropy(i / 1000, 152_000) for i in range(1, 1000))
    assert 2.0 / largest == pytest.approx(0.055, rel=0.05)
    rest = math.log(0.5 / 999)
    assert measure([math.log(0.5)] + [rest] * 999, 1.0)[1] == pytest.approx(varentropy(0.5, 1000))
    # The normalised step stays within the bound on every distribution: its gain is kappa / V.
    assert max(ThermostatConfig().gain / max(v, 0.25) * v for v in (0.01, 0.25, 1.0, largest)) < 2.0


@pytest.mark.parametrize("size", [50, 2000])
@pytest.mark.parametrize("share", [0.85, 1.0, 1.1])
def test_a_reachable_target_is_reached_up_to_deadzone_and_leak(size: int, share: float) -> None:
    logits = zipf(1.2, size)
    config = ThermostatConfig(mode="two_sided", target_nats=share * measure(logits, 1.0)[0])
    state, _, entropies = simulate(config, [logits], 600)
    distance, allowed = settled(config, state, entropies)
    assert distance <= allowed + 0.01
    assert state.saturated == "none"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_mean_entropy_of_a_mixed_text_settles_at_the_target(seed: int) -> None:
    rng = random.Random(seed)
    family = [zipf(rng.choice([0.9, 1.3, 1.8, 3.0]), 400) for _ in range(37)]
    natural = sum(measure(logits, 1.0)[0] for logits in family) / len(family)
    config = ThermostatConfig(mode="two_sided", target_nats=0.85 * natural)
    state, _, entropies = simulate(config, family, 1500)
    distance, allowed = settled(config, state, entropies)
    assert distance <= allowed + 0.1  # the average over 16 tokens wanders as the text does


def test_an_unreachable_target_saturates_says_so_and_comes_back_at_once() -> None:
    logits = zipf(1.2, 500)
    config = ThermostatConfig(mode="two_sided", target_nats=50.0)
    state, used, _ = simulate(config, [logits], 300)
    assert state.saturated == "high"
    assert used[-1] == pytest.approx(1.5)
    # Nothing was wound up while clamped: the first error inwards moves the temperature.
    reachable = ThermostatConfig(mode="two_sided", target_nats=0.0)
    assert temperature(reachable, observe(reachable, state, *measure(logits, 1.5))) < used[-1] - 0.01
    low, used_low, _ = simulate(ThermostatConfig(mode="two_sided", target_nats=0.0), [logits], 300)
    assert low.saturated == "low"
    assert used_low[-1] == pytest.approx(0.5)


def test_cool_leaves_a_text_below_its_target_alone_and_cools_one_above() -> None:
    logits = zipf(1.2, 500)
    natural = measure(logits, 1.0)[0]
    state, used, _ = simulate(ThermostatConfig(mode="cool", target_nats=natural + 1.0), [logits], 200, 0.9)
    assert set(used) == {0.9}
    assert state.saturated == "high"
    config = ThermostatConfig(mode="cool", target_nats=0.9 * natural)
    state, used, entropies = simulate(config, [logits], 600)
    distance, allowed = settled(config, state, entropies)
    assert used[-1] < 1.0
    assert distance <= allowed + 0.01


def test_the_leak_brings_the_client_s_temperature_back_within_the_deadzone() -> None:
    config = ThermostatConfig(mode="two_sided", target_nats=2.0)
    state = Thermostat(1.0, False, log_offset=0.3, entropy_nats=2.0, varentropy=1.0, num_tokens=10)
    for _ in range(500):
        state = observe(config, state, 2.0, 1.0)
    assert abs(state.log_offset) < 0.003


RUNNING = Thermostat(1.0, False, log_offset=0.2, entropy_nats=5.0, varentropy=1.0, num_tokens=10)
STEER = ThermostatConfig(mode="two_sided", target_nats=2.0)


@pytest.mark.parametrize(
    ("state", "entropy", "varentropy", "is_forced"),
    [
        (Thermostat(1.0, False, log_offset=0.2, entropy_nats=5.0, varentropy=0.01, num_tokens=10), 5.0, 0.01, False),
        (RUNNING, 0.0, 0.0, True),
        (RUNNING, math.nan, 1.0, False),
        (RUNNING, 5.0, math.nan, False),
        (RUNNING, math.inf, 1.0, False),
        (Thermostat(1.0, False, log_offset=0.2, entropy_nats=5.0, varentropy=1.0, num_tokens=3), 5.0, 1.0, False),
        (
            Thermostat(1.0, False, log_offset=math.log(0.5), entropy_nats=5.0, varentropy=1.0, num_tokens=9),
            5.0,
            1.0,
            False,
        ),
    ],
    ids=[
        "no varentropy",
        "one token possible",
        "unknown H",
        "unknown V",
        "infinite H",
        "first four",
        "clamped outward",
    ],
)
def test_the_temperature_freezes(state: Thermostat, entropy: float, varentropy: float, is_forced: bool) -> None:
    after = observe(STEER, state, entropy, varentropy, is_forced=is_forced)
    assert after.log_offset == state.log_offset
    assert after.num_tokens == state.num_tokens + 1


def test_without_a_reason_to_freeze_it_moves() -> None:
    assert observe(STEER, RUNNING, 5.0, 1.0).log_offset < RUNNING.log_offset


def test_the_first_four_tokens_are_drawn_at_the_client_s_temperature_and_the_fifth_too() -> None:
    state = start(STEER, 0.8)
    seen = []
    for _ in range(6):
        seen.append(temperature(STEER, state))
        state = observe(STEER, state, 6.0, 1.0)
    assert seen[:5] == [0.8] * 5
    assert seen[5] < 0.8


def test_forced_and_unknown_tokens_leave_the_averages_alone() -> None:
    for after in (observe(STEER, RUNNING, 0.0, 0.0, is_forced=True), observe(STEER, RUNNING, math.nan, math.nan)):
        assert (after.entropy_nats, after.varentropy) == (RUNNING.entropy_nats, RUNNING.varentropy)


def test_choices_do_not_share_state() -> None:
    first = start(STEER, 1.0)
    hot = first
    for _ in range(20):
        hot = observe(STEER, hot, 8.0, 1.0)
    assert first == start(STEER, 1.0)
    assert temperature(STEER, hot) < temperature(STEER, first)


def test_edt_follows_its_formula_and_stays_above_zero() -> None:
    config = ThermostatConfig(mode="edt", edt_theta=1.5)
    state = observe(config, start(config, 0.9), 2.0, 1.0)
    assert temperature(config, state) == pytest.approx(0.9 * 0.8 ** (1.5 / 2.0))
    assert temperature(config, observe(config, state, 0.0, 0.0)) == pytest.approx(0.9 * 0.05)
    assert math.exp(edt_log_offset(ThermostatConfig(edt_theta=0.0), 0.0)) == 1.0


def test_mirostat_holds_the_surprise_of_what_is_drawn() -> None:
    config = ThermostatConfig(mode="mirostat", target_nats=1.5)
    rng = random.Random(11)
    logits = zipf(0.9, 400)
    entropy, varentropy = measure(logits, 1.0)
    weights = [math.exp(z) for z in logits]
    surprisals = [-math.log(w / sum(weights)) for w in weights]
    state = start(config, 1.0)
    assert state.max_surprisal_nats == 3.0
    drawn = []
    for _ in range(4000):
        kept = [i for i, s in enumerate(surprisals) if s <= state.max_surprisal_nats] or [0]
        token = rng.choices(kept, [weights[i] for i in kept])[0]
        mass = sum(weights[i] for i in kept)
        drawn.append(-math.log(weights[token] / mass))
        state = observe(config, state, entropy, varentropy, surprisal_nats=drawn[-1])
    assert sum(drawn[1000:]) / 3000 == pytest.approx(1.5, abs=0.05)
    assert observe(config, state, 1.0, 1.0).max_surprisal_nats == state.max_surprisal_nats  # surprise unknown


def test_the_fixed_arm_gets_the_steered_arm_s_mean_temperature() -> None:
    logits = zipf(1.2, 300)
    steered = ThermostatConfig(mode="cool", target_nats=0.8 * measure(logits, 1.0)[0])
    state, used, _ = simulate(steered, [logits], 100)
    assert state.mean_temperature == pytest.approx(sum(used) / 100)
    control = ThermostatConfig(mode="fixed", fixed_temperature=state.mean_temperature)
    _, used_fixed, _ = simulate(control, [logits], 10)
    assert set(used_fixed) == {state.mean_temperature}
    assert start(control, 0.6).mean_temperature == 0.6


def test_the_target_is_the_request_s_else_nine_tenths_of_the_model_s_mean() -> None:
    assert target_entropy_nats(1.2, 3.0) == 1.2
    assert target_entropy_nats(None, 3.0) == pytest.approx(2.7)
    assert target_entropy_nats(None, None) is None
    assert target_entropy_nats(math.nan, 3.0) == pytest.approx(2.7)


def test_the_order_of_sampling_puts_temperature_between_mask_and_truncation() -> None:
    assert SAMPLING_ORDER == ("penalties", "mask", "temperature", "top_k", "top_p", "min_p")


@pytest.mark.parametrize(
    "fields",
    [
        {"target_nats": math.nan},
        {"gain": -0.1},
        {"smoothing": 0.0},
        {"leak": 2.0},
        {"lowest_share": 0.0},
        {"highest_share": 0.9},
        {"min_varentropy": 0.0},
        {"fixed_temperature": 0.0},
        {"edt_base": 1.0},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        ThermostatConfig(**fields)  # type: ignore[arg-type]
