"""The sampler against the distribution that it says it draws from."""

import math

import numpy as np
import pytest
import torch

from etserve.kernels.cuda import CudaKernels
from etserve.kernels.reference_rows import reference_sample, truncated
from tests.kernels.test_sample import GRID, is_on_an_edge, random_rows

Values = tuple[float, int, float, float]


def draw(kernels: CudaKernels, logits: torch.Tensor, values: Values, uniform: list[float]) -> tuple[torch.Tensor, ...]:
    """The same values for every row."""
    rows, device = len(logits), kernels.device_type
    types = (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = [torch.full((rows,), v, dtype=t, device=device) for v, t in zip(values, types, strict=True)]
    given = torch.tensor(uniform, dtype=torch.float64, device=device)
    return tuple(t.cpu() for t in kernels.sample(logits.to(device), *columns, given))


@pytest.mark.parametrize(("vocab", "every"), [(1, 17), (111, 7), (4097, 29)])
def test_draws_match_the_reference_away_from_rounding_edges(kernels: CudaKernels, vocab: int, every: int) -> None:
    z, grid = random_rows(vocab), GRID[::every]
    uniforms = np.random.default_rng(vocab).random((len(grid), len(z)))
    num_compared = 0
    for values, uniform in zip(grid, uniforms, strict=True):
        tokens, entropy = draw(kernels, z, values, uniform.tolist())
        types = (np.float32, np.int32, np.float32, np.float32)
        expected = reference_sample(z, *(np.full(len(z), v, t) for v, t in zip(values, types, strict=True)), uniform)
        same = (tokens.numpy() == expected.token_ids) & (np.abs(entropy.numpy() - expected.sampled_entropy) < 1e-4)
        for r in np.flatnonzero(~same):
            assert is_on_an_edge(z[r], values, uniform[r]), (values, r)
        num_compared += int(same.sum())
    assert num_compared > 0.95 * len(grid) * len(z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [(1.0, 0, 0.9, 0.0), (0.7, 200, 0.95, 0.0), (1.3, 0, 1.0, 0.02)])
def test_draws_come_with_the_shares_of_the_truncated_distribution(
    kernels: CudaKernels, values: Values, dtype: torch.dtype
) -> None:
    row = (torch.randn(9_011, generator=torch.Generator().manual_seed(3)) * 6).to(dtype)
    count = 8
    uniform = (np.arange(count) + 0.5) / count
    tokens, _ = draw(kernels, row.expand(count, -1).contiguous(), values, uniform.tolist())
    expected = truncated(row.float(), *values)
    edges, drawn = expected.cumsum(0).numpy(), tokens.numpy()
    below = np.where(drawn > 0, edges[drawn - 1], 0.0)
    assert np.all((below - 1e-5 <= uniform) & (uniform <= edges[drawn] + 1e-5))
    assert np.all(expected.numpy()[drawn] > 0)


def test_the_largest_vocabularies_are_drawn_from(emulator: CudaKernels) -> None:
    row = torch.randn(262_144, generator=torch.Generator().manual_seed(1)) * 2
    tokens, entropy = draw(emulator, row[None], (1.0, 5000, 0.8, 0.0), [0.37])
    p = truncated(row, 1.0, 5000, 0.8, 0.0)
    edges = p.cumsum(0)
    token = int(tokens[0])
    assert edges[token - 1] - 1e-5 <= 0.37 <= edges[token] + 1e-5
    assert entropy[0].item() == pytest.approx(-float(torch.xlogy(p, p).sum()), abs=1e-4)


def kept_ids(
    kernels: CudaKernels, row: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    uniform = np.linspace(0, 0.999999, 23)
    tokens, _ = draw(kernels, row.expand(len(uniform), -1).contiguous(), (1.0, top_k, top_p, min_p), uniform.tolist())
    return sorted(set(tokens.tolist()))


def test_of_tokens_tied_at_the_cut_the_lowest_ids_stay(kernels: CudaKernels) -> None:
    assert kept_ids(kernels, torch.tensor([0.0, 1.0, -0.0, 0.0, 1.0, 0.0]), top_k=4) == [0, 1, 2, 4]
    assert kept_ids(kernels, torch.zeros(10), top_p=0.3) == [0, 1, 2]
    assert kept_ids(kernels, torch.zeros(10), top_k=5, top_p=0.61) == [0, 1, 2, 3]


def test_top_p_zero_and_min_p_one_leave_the_likeliest(kernels: CudaKernels) -> None:
    row = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert kept_ids(kernels, row, top_p=0.0) == kept_ids(kernels, row, min_p=1.0) == [int(row.argmax())]


def test_a_forbidden_token_is_never_drawn(kernels: CudaKernels) -> None:
    row = torch.full((1, 100), -math.inf)
    row[0, [20, 70]] = 0.0
    for uniform, token in ((0.0, 20), (0.49, 20), (0.51, 70), (1 - 1e-16, 70)):
        for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.999)):
            assert draw(kernels, row, (2.0, top_k, top_p, 0.0), [uniform])[0].tolist() == [token]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_draws_nothing_and_harms_nobody(kernels: CudaKernels, bad: float) -> None:
    z = torch.zeros(3, 50)
    z[0, 49] = bad
    z[1] = -math.inf
    tokens, entropy = draw(kernels, z, (1.0, 5, 0.9, 0.0), [0.0] * 3)
    assert tokens.tolist() == [-1, -1, 0]
    assert entropy.isnan().tolist() == [True, True, False]


def test_a_draw_does_not_depend_on_its_neighbours_nor_on_the_order_of_execution(emulator: CudaKernels) -> None:
    z, uniform = random_rows(4097), np.random.default_rng(0).random(5).tolist()
    values = (1.3, 900, 0.7, 0.01)
    for seed in range(3):
        emulator.set_emulation_seed(seed)
        together = draw(emulator, z, values, uniform)
        for r in range(5):
            alone = draw(emulator, z[r : r + 1], values, uniform[r : r + 1])
            assert [t[r].item() for t in together] == [t.item() for t in alone]
