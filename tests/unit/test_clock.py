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
