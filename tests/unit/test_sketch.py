"""The key sketch's arithmetic: an orthonormal rotation, bounded errors, and what the bits and the rotation buy."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.control.sketch import (
    WORST_ERROR,
    Bits,
    estimate_scores,
    exact_scores,
    log_mass,
    quantise,
    reconstruct,
    rotate,
    rotation_signs,
    score_error_bound,
    sketch_block,
)

DIMS = [1, 2, 3, 48, 64, 80, 128]


def gaussian(rng: random.Random, dim: int, scale: float = 1.0) -> list[float]:
    return [rng.gauss(0.0, scale) for _ in range(dim)]


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def relative_error(vector: list[float], bits: Bits) -> float:
    """|x - code|^2 / |x|^2."""
    back = reconstruct(*quantise(vector, bits), bits)
    return math.dist(vector, back) ** 2 / math.fsum(v * v for v in vector)


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_keeps_inner_products(dim: int) -> None:
    rng = random.Random(dim)
    signs = rotation_signs(dim, seed=7)
    a, b = gaussian(rng, dim), gaussian(rng, dim)
    assert dot(rotate(a, signs), rotate(b, signs)) == pytest.approx(dot(a, b), abs=1e-9)
    assert math.hypot(*rotate(a, signs)) == pytest.approx(math.hypot(*a))


@pytest.mark.parametrize("dim", [4, 64])
def test_the_rotation_equals_signs_times_the_hadamard_matrix(dim: int) -> None:
    signs = rotation_signs(dim, seed=1)
    vector = gaussian(random.Random(2), dim)
    expected = [
        math.fsum((-1) ** (i & j).bit_count() * signs[j] * vector[j] for j in range(dim)) / math.sqrt(dim)
        for i in range(dim)
    ]
    assert rotate(vector, signs) == pytest.approx(expected)


def test_signs_are_keyed_by_the_seed_and_balanced() -> None:
    signs = rotation_signs(4096, seed=3)
    assert set(signs) == {1.0, -1.0}
    assert abs(sum(signs)) < 4096 * 0.06
    assert signs == rotation_signs(4096, seed=3)
    assert signs[:64] != rotation_signs(64, seed=4)
    assert signs[:64] == rotation_signs(64, seed=3)
    assert [int(s) for s in rotation_signs(8, seed=0)] == [1, 1, -1, -1, 1, 1, -1, 1]  # on every machine


@given(st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=40), st.sampled_from([1, 2]))
def test_each_number_gets_the_nearest_level(vector: list[float], bits: Bits) -> None:
    codes, scale = quantise(vector, bits)
    levels = reconstruct(list(range(2**bits)), scale, bits)
    for value, code in zip(vector, codes, strict=True):
        nearest = min(abs(value - level) for level in levels)
        assert abs(value - levels[code]) <= nearest + 1e-9 * (1.0 + scale)


@given(st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=64), st.sampled_from([1, 2]))
def test_the_error_of_any_vector_is_bounded_by_its_norm(vector: list[float], bits: Bits) -> None:
    back = reconstruct(*quantise(vector, bits), bits)
    assert math.dist(vector, back) <= WORST_ERROR[bits] * math.hypot(*vector) * (1.0 + 1e-9) + 1e-12


@given(st.sampled_from([1, 2]), st.sampled_from(DIMS), st.integers(1, 16), st.integers(0, 2**32))
def test_no_score_is_off_by_more_than_its_bound(bits: Bits, dim: int, tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    signs = rotation_signs(dim, seed=5)
    keys = [[v * rng.choice([0.1, 1.0, 8.0]) for v in gaussian(rng, dim)] for _ in range(tokens)]
    query = gaussian(rng, dim, 2.0)
    sketch = sketch_block(keys, signs, bits)
    estimated = estimate_scores(query, sketch, signs)
    for got, want, scale in zip(estimated, exact_scores(query, keys), sketch.scales, strict=True):
        assert abs(got - want) <= score_error_bound(query, scale, bits) + 1e-9


def test_equal_keys_are_sketched_exactly() -> None:
    signs = rotation_signs(64, seed=5)
    rng = random.Random(1)
    key, query = gaussian(rng, 64), gaussian(rng, 64)
    sketch = sketch_block([key] * 16, signs)
    assert max(sketch.scales) < 1e-12
    assert estimate_scores(query, sketch, signs) == pytest.approx(exact_scores(query, [key] * 16))


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175)])
def test_gaussian_vectors_lose_what_lloyd_max_says(bits: Bits, distortion: float) -> None:
    rng = random.Random(8)
    mean = sum(relative_error(gaussian(rng, 64), bits) for _ in range(400)) / 400
    assert mean == pytest.approx(distortion, rel=0.05)


def test_the_rotation_tames_outlier_dimensions() -> None:
    rng = random.Random(9)
    signs = rotation_signs(64, seed=5)
    plain, rotated = 0.0, 0.0
    for _ in range(200):
        vector = gaussian(rng, 64)
        vector[3] *= 30.0
        vector[40] *= 20.0
        plain += relative_error(vector, 2) / 200
        rotated += relative_error(rotate(vector, signs), 2) / 200
    assert rotated < 0.5 * plain


def spread(estimate: Callable[[list[float], list[list[float]]], list[float]]) -> float:
    """Root mean square error of estimated scores over random blocks."""
    rng = random.Random(10)
    total, count = 0.0, 0
    for _ in range(30):
        centre = gaussian(rng, 64)
        keys = [[c + v for c, v in zip(centre, gaussian(rng, 64), strict=True)] for _ in range(16)]
        query = gaussian(rng, 64)
        for got, want in zip(estimate(query, keys), exact_scores(query, keys), strict=True):
            total, count = total + (got - want) ** 2, count + 1
    return math.sqrt(total / count)


def test_two_bits_beat_one_and_one_beats_the_mean_key_alone() -> None:
    signs = rotation_signs(64, seed=5)

    def mean_alone(query: list[float], keys: list[list[float]]) -> list[float]:
        return [dot(query, list(sketch_block(keys, signs).mean)) / 8.0] * len(keys)

    one = spread(lambda query, keys: estimate_scores(query, sketch_block(keys, signs, 1), signs))
    two = spread(lambda query, keys: estimate_scores(query, sketch_block(keys, signs, 2), signs))
    assert two < 0.7 * one
    assert one < 0.7 * spread(mean_alone)


@given(st.lists(st.floats(-700.0, 700.0), min_size=1, max_size=16))
def test_log_mass_is_the_log_of_the_summed_weights(scores: list[float]) -> None:
    top = max(scores)
    assert top - 1e-9 <= log_mass(scores) <= top + math.log(len(scores)) + 1e-9
    assert log_mass([0.0, math.log(3.0)]) == pytest.approx(math.log(4.0))
    assert math.isnan(log_mass([0.0, math.nan]))
    assert log_mass([-math.inf, -math.inf]) == -math.inf
