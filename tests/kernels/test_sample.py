"""The sampler against the distribution that it says it draws from."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from etserve.kernels import native
from etserve.kernels.reference_rows import reference_sample, truncated
from etserve.kernels.rows import sample
from tests.kernels.isas import isa, num_threads

__all__ = ["isa", "num_threads"]
GRID = list(product([0.2, 1.0, 1.7], [0, 1, 3, 50, 1000], [1.0, 0.9, 0.3, 0.0, 0.999], [0.0, 0.05, 1.0]))


def random_rows(vocab: int) -> torch.Tensor:
    """Plain, tied, masked, certain and shifted rows."""
    random = torch.Generator().manual_seed(vocab)
    z = torch.randn(5, vocab, generator=random) * 4
    z[1] = torch.randint(-3, 3, (vocab,), generator=random).float()
    z[2, 1::3] = -math.inf
    z[3] = -math.inf
    z[3, vocab // 2] = 1.5
    z[4] += 1000
    return z


def is_on_an_edge(row: torch.Tensor, values: tuple[float, int, float, float], uniform: float) -> bool:
    """Whether rounding alone may decide what is kept or drawn."""
    temperature, top_k, top_p, min_p = values
    kept = [
        truncated(row, temperature, top_k, top_p * (1 + d) if top_p < 1 else 1.0, min_p * (1 + d)) > 0
        for d in ((-1e-5, 1e-5) if min_p < 1 else (0.0,))
    ]
    p = truncated(row, temperature, top_k, top_p, min_p)
    return not torch.equal(kept[0], kept[-1]) or bool(((p.cumsum(0) - uniform).abs() < 1e-5).any())


@pytest.mark.parametrize("vocab", [1, 111, 4097])
def test_draws_match_the_reference_away_from_rounding_edges(isa: str, vocab: int) -> None:
    z = random_rows(vocab)
    grid = GRID if vocab < 1000 else GRID[::7]
    uniforms = np.random.default_rng(vocab).random((len(grid), len(z)))
    num_compared = 0
    for values, uniform in zip(grid, uniforms, strict=True):
        columns = [
            np.full(len(z), v, t) for v, t in zip(values, (np.float32, np.int32, np.float32, np.float32), strict=True)
        ]
        got, expected = sample(z, *values, uniform), reference_sample(z, *columns, uniform)
        for r in np.flatnonzero(got.token_ids != expected.token_ids):
            assert is_on_an_edge(z[r], values, uniform[r]), (values, r)
        same = [r for r in range(len(z)) if abs(got.sampled_entropy[r] - expected.sampled_entropy[r]) < 1e-4]
        for r in set(range(len(z))) - set(same):
            assert is_on_an_edge(z[r], values, uniform[r]), (values, r)
        num_compared += len(same)
    assert num_compared > 0.95 * len(grid) * len(z)


@pytest.mark.parametrize(("vocab", "values"), [(49_152, (1.0, 0, 0.9, 0.0)), (49_152, (0.7, 200, 0.95, 0.0))])
def test_exactly_the_tokens_of_the_truncated_distribution_are_drawn_with_their_shares(
    isa: str, num_threads: int, vocab: int, values: tuple[float, int, float, float]
) -> None:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 6
    expected = truncated(row, *values)
    count = 400
    uniform = (np.arange(count) + 0.5) / count
    drawn = sample(row.expand(count, vocab).contiguous(), *values, uniform).token_ids
    assert np.all(np.diff(drawn) >= 0)  # the inverse of the distribution rises with the uniform
    edges = expected.cumsum(0).numpy()
    below = np.where(drawn > 0, edges[drawn - 1], 0.0)
    assert np.all((below - 1e-5 <= uniform) & (uniform <= edges[drawn] + 1e-5))
    assert np.all(expected.numpy()[drawn] > 0)


def kept_ids(row: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    uniform = np.linspace(0, 0.999999, 997)
    drawn = sample(row.expand(len(uniform), -1).contiguous(), 1.0, top_k, top_p, min_p, uniform)
    return sorted(set(drawn.token_ids.tolist()))


def test_of_tokens_tied_at_the_cut_the_lowest_ids_stay(isa: str) -> None:
    row = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    assert kept_ids(row, top_k=4) == [0, 1, 2, 4]
    assert kept_ids(torch.zeros(10), top_p=0.3) == [0, 1, 2]
    assert kept_ids(torch.zeros(10), top_k=5, top_p=0.61) == [0, 1, 2, 3]


def test_top_p_measures_mass_within_top_k(isa: str) -> None:
    row = torch.tensor([math.log(p) for p in (0.3, 0.25, 0.15, 0.15, 0.15)])
    assert kept_ids(row, top_p=0.5) == [0, 1]
    assert kept_ids(row, top_k=2, top_p=0.5) == [0]  # 0.3 of 0.55


def test_top_p_zero_and_min_p_one_leave_the_likeliest(isa: str) -> None:
    row = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert kept_ids(row, top_p=0.0) == kept_ids(row, min_p=1.0) == [int(row.argmax())]


def test_min_p_is_relative_to_the_likeliest(isa: str) -> None:
    row = torch.tensor([math.log(p) for p in (0.5, 0.3, 0.12, 0.08)])
    assert kept_ids(row, min_p=0.2) == [0, 1, 2]


def test_a_tiny_temperature_is_greedy(isa: str) -> None:
    row = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    assert sample(row, 1e-30, 0, 1.0, 0.0, 0.9).token_ids.tolist() == [int(row.argmax())]


def test_a_forbidden_token_is_never_drawn(isa: str) -> None:
    row = torch.full((1, 100), -math.inf)
    row[0, [20, 70]] = 0.0
    for uniform, token in ((0.0, 20), (0.49, 20), (0.51, 70), (1 - 1e-16, 70)):
        for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.999)):
            assert sample(row, 2.0, top_k, top_p, 0.0, uniform).token_ids.tolist() == [token]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_draws_nothing_and_harms_nobody(isa: str, bad: float) -> None:
    z = torch.zeros(3, 50)
    z[0, 49] = bad
    z[1] = -math.inf
    drawn = sample(z, 1.0, [0, 5, 5], [0.9, 1.0, 0.9], 0.0, 0.0)
    assert drawn.token_ids.tolist() == [-1, -1, 0]
    assert np.isnan(drawn.sampled_entropy).tolist() == [True, True, False]


def test_a_draw_does_not_depend_on_its_neighbours_nor_on_threads(isa: str) -> None:
    z = random_rows(4097)
    top_k, top_p = [0, 3, 50, 0, 900], [0.9, 1.0, 0.7, 1.0, 1.0]
    uniform = np.random.default_rng(0).random(5)
    native.set_num_threads(1)
    alone = [sample(z[r : r + 1], 1.3, top_k[r], top_p[r], 0.01, uniform[r]) for r in range(5)]
    for count in (1, 3):
        native.set_num_threads(count)
        together = sample(z, 1.3, top_k, top_p, 0.01, uniform)
        assert together.token_ids.tolist() == [int(a.token_ids[0]) for a in alone]
        assert together.sampled_entropy.tolist() == [float(a.sampled_entropy[0]) for a in alone]
    native.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", v) for v in (0.0, -1.0, math.nan, math.inf)),
        *(("top_k", v) for v in (-1,)),
        *(("top_p", v) for v in (-0.1, 1.1, math.nan)),
        *(("min_p", v) for v in (-0.1, 1.1)),
        *(("uniform", v) for v in (-0.1, 1.0)),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5} | {name: value}
    with pytest.raises(ValueError, match=name):
        sample(torch.zeros(2, 5), **values)
