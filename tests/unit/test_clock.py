"""Entropic time: downward variation, and the identity that ties it to its companions."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.clock import EntropyClock

ENTROPIES = st.lists(st.floats(min_value=0.0, max_value=12.5), min_size=1, max_size=200)


def observe_all(entropies: list[float]) -> EntropyClock:
    clock = EntropyClock()
    for entropy in entropies:
        clock = clock.observe(entropy)
    return clock


def test_the_prompt_earns_no_credit() -> None:
    clock = EntropyClock().observe(3.0)
    assert (clock.tau_nats, clock.tau_up_nats, clock.count) == (0.0, 0.0, 1)


def test_only_drops_advance_the_clock() -> None:
    clock = observe_all([3.0, 1.0, 2.5, 2.0])
    assert clock.tau_nats == pytest.approx(2.5)
    assert clock.tau_up_nats == pytest.approx(1.5)
    assert clock.nats_resolved == pytest.approx(8.5)
    assert clock.mean_entropy_nats == pytest.approx(2.125)


def test_without_a_token_the_mean_is_zero() -> None:
    assert EntropyClock().mean_entropy_nats == 0.0


@given(ENTROPIES)
def test_the_clock_equals_the_sum_written_out(entropies: list[float]) -> None:
    clock = observe_all(entropies)
    drops = [a - b for a, b in pairwise(entropies)]
    assert clock.tau_nats == pytest.approx(math.fsum(max(0.0, d) for d in drops), abs=1e-9)
    assert clock.nats_resolved == pytest.approx(math.fsum(entropies), abs=1e-9)


@given(ENTROPIES)
def test_down_minus_up_is_what_was_lost_from_first_to_last(entropies: list[float]) -> None:
    clock = observe_all(entropies)
    assert abs(clock.tau_nats - clock.tau_up_nats - (entropies[0] - entropies[-1])) < 1e-9


@given(ENTROPIES, st.floats(min_value=0.0, max_value=12.5))
def test_the_clock_never_runs_backwards_and_old_states_stay(entropies: list[float], entropy: float) -> None:
    before = observe_all(entropies)
    tau = before.tau_nats
    after = before.observe(entropy)
    assert after.tau_nats >= tau == before.tau_nats


def test_small_changes_do_not_move_the_deadband_clock() -> None:
    clock = observe_all([2.0, 1.97, 2.03, 1.99, 1.96])
    assert clock.tau_deadband_nats == 0.0 < clock.tau_nats
    assert observe_all([2.0, 1.0, 0.97, 1.5]).tau_deadband_nats == pytest.approx(1.0)


def test_a_slow_fall_in_small_steps_is_counted_all_the_same() -> None:
    clock = observe_all([3.0 - 0.04 * step for step in range(51)])
    assert clock.tau_nats == pytest.approx(2.0)
    assert 2.0 - 0.05 <= clock.tau_deadband_nats <= 2.0 + 1e-9


def test_the_ratchet_counts_no_fall_twice() -> None:
    swinging = observe_all([4.0, *[1.0, 4.0] * 50])
    assert swinging.tau_nats == pytest.approx(150.0)
    assert swinging.tau_ratchet_nats < 3.0
    settled = observe_all([4.0, *[1.0] * 60])
    assert settled.tau_ratchet_nats == pytest.approx(3.0, abs=1e-6)


@given(ENTROPIES)
def test_no_companion_outruns_the_clock(entropies: list[float]) -> None:
    clock = observe_all(entropies)
    assert 0.0 <= clock.tau_deadband_nats <= clock.tau_nats + 1e-9
    assert 0.0 <= clock.tau_ratchet_nats <= min(clock.tau_nats, entropies[0] - min(entropies)) + 1e-9


@given(ENTROPIES, st.floats(min_value=0.0, max_value=12.5))
def test_the_companions_never_run_backwards(entropies: list[float], entropy: float) -> None:
    before = observe_all(entropies)
    after = before.observe(entropy, 0.5)
    assert after.tau_deadband_nats >= before.tau_deadband_nats
    assert after.tau_ratchet_nats >= before.tau_ratchet_nats
    assert after.surprisal_nats == before.surprisal_nats + 0.5


@given(ENTROPIES)
def test_the_deadband_level_stays_within_its_band(entropies: list[float]) -> None:
    clock = observe_all(entropies)
    assert abs(clock.level_nats - entropies[-1]) <= 0.05


@given(ENTROPIES)
def test_the_ratchet_is_the_lowest_average_written_out(entropies: list[float]) -> None:
    averages = [entropies[0]]
    for entropy in entropies[1:]:
        averages.append(0.75 * averages[-1] + 0.25 * entropy)
    clock = observe_all(entropies)
    assert clock.tau_ratchet_nats == pytest.approx(entropies[0] - min(averages), abs=1e-9)
