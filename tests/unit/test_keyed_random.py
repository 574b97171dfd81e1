"""Keyed draws: the same everywhere, uniform, independent in every coordinate."""

import math
from itertools import pairwise

import pytest

from etserve.control.keyed_random import uniform


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((0, 0, 0), 0.7351311279273794),
        ((1, 0, 0), 0.20778087136783574),
        ((0, 1, 0), 0.23577506442305363),
        ((0, 0, 1), 0.6591288085410879),
        ((2**63 - 1, 4095, 15), 0.3818969458152265),
        ((-1, 7, 0), 0.6823089074868929),
    ],
)
def test_a_draw_never_changes_between_platforms_and_releases(key: tuple[int, int, int], expected: float) -> None:
    assert uniform(*key) == expected


def test_a_draw_has_53_bits_and_is_below_one() -> None:
    draws = [uniform(3, position, 0) for position in range(2000)]
    assert all(0.0 <= u < 1.0 for u in draws)
    assert all((u * 2.0**53).is_integer() for u in draws)
    assert any((u * 2.0**53) % 2 == 1 for u in draws)  # the last bit is used
    assert len(set(draws)) == len(draws)


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_draws_along_each_coordinate_are_uniform(axis: int) -> None:
    count, bins = 20_000, 64
    keys = [tuple(i if a == axis else 11 for a in range(3)) for i in range(count)]
    histogram = [0] * bins
    for key in keys:
        histogram[int(uniform(*key) * bins)] += 1
    chi2 = sum((h - count / bins) ** 2 / (count / bins) for h in histogram)
    # mean bins - 1, standard deviation sqrt(2 (bins - 1)); the draws are fixed, so this cannot flake
    assert abs(chi2 - (bins - 1)) < 4 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_along_each_coordinate_do_not_correlate(axis: int) -> None:
    count = 20_000
    draws = [uniform(*(i if a == axis else 5 for a in range(3))) - 0.5 for i in range(count)]
    correlation = sum(a * b for a, b in pairwise(draws)) / (count - 1) * 12.0
    assert abs(correlation) < 4 / math.sqrt(count)


def test_choices_of_one_request_do_not_correlate() -> None:
    count = 20_000
    products = [(uniform(9, i, 0) - 0.5) * (uniform(9, i, 1) - 0.5) for i in range(count)]
    assert abs(sum(products) / count * 12.0) < 4 / math.sqrt(count)
