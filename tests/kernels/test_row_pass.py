"""The row pass against its reference and against the plain-Python law."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from etserve.control.entropy import measure
from etserve.kernels import native
from etserve.kernels.reference_rows import MAX_TOP, RowStats, reference_row_pass
from etserve.kernels.rows import row_pass
from tests.kernels.isas import isa, num_threads

__all__ = ["isa", "num_threads"]
VOCABS = [1, 111, 4096, 4097, 49_152]
EXACT = ("argmax", "nonfinite", "top_values", "top_ids")


def random_rows(vocab: int) -> torch.Tensor:
    """Plain, tied, masked, certain and shifted rows, and three that are broken."""
    random = torch.Generator().manual_seed(vocab)
    z = torch.randn(8, vocab, generator=random) * 4
    z[1] = torch.randint(-3, 3, (vocab,), generator=random).float()
    z[2, 1::3] = -math.inf
    z[3] = -math.inf
    z[3, vocab // 2] = 1.5
    z[4] += 1000
    z[5, vocab // 3] = math.nan
    z[6, vocab // 2] = math.inf
    z[7] = -math.inf
    return z


@cache
def expected_stats(vocab: int) -> RowStats:
    return reference_row_pass(random_rows(vocab), MAX_TOP)


def assert_same(got: RowStats, expected: RowStats) -> None:
    for name in RowStats.__slots__:
        a, b = getattr(got, name), getattr(expected, name)
        if name in EXACT:
            assert np.array_equal(a, b), name
        else:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("vocab", VOCABS)
def test_row_pass_matches_the_reference(isa: str, num_threads: int, vocab: int) -> None:
    z = random_rows(vocab)
    expected = expected_stats(vocab)
    for k in (0, 1, 5, MAX_TOP):
        narrow = RowStats(
            *(
                getattr(expected, name)[:, :k] if name in EXACT[2:] else getattr(expected, name)
                for name in RowStats.__slots__
            )
        )
        assert_same(row_pass(z, k), narrow)


def test_row_pass_agrees_with_the_law_in_plain_python() -> None:
    z = random_rows(4097)
    stats = row_pass(z, 0)
    for r, row in enumerate(z.tolist()):
        law = measure(row)
        assert stats.entropy[r] == pytest.approx(law.entropy_nats, abs=2e-5, nan_ok=True)
        assert stats.varentropy[r] == pytest.approx(law.varentropy, abs=5e-5, nan_ok=True)
        assert stats.nonfinite[r] == law.num_nonfinite


def test_one_possible_token_has_exactly_no_entropy(isa: str) -> None:
    z = torch.full((1, 5000), -math.inf)
    z[0, 4321] = -7.0
    stats = row_pass(z, 2)
    assert (stats.entropy[0], stats.varentropy[0], stats.log_sum_exp[0]) == (0.0, 0.0, -7.0)
    assert stats.top_ids.tolist() == [[4321, -1]]


def test_equal_values_come_in_order_of_their_ids(isa: str, num_threads: int) -> None:
    z = torch.zeros(1, 20_000)
    z[0, 19_000] = 1.0
    stats = row_pass(z, 4)
    assert stats.top_ids.tolist() == [[19_000, 0, 1, 2]]
    assert stats.argmax.tolist() == [19_000]


def test_a_row_measures_the_same_bits_alone_and_among_others_on_any_number_of_threads(isa: str) -> None:
    z = random_rows(49_152)[:5]
    native.set_num_threads(1)
    expected = row_pass(z, 20)
    for count in (2, 3):
        native.set_num_threads(count)
        for part in (row_pass(z, 20), row_pass(z[2:3], 20)):
            rows = slice(2, 3) if len(part.entropy) == 1 else slice(None)
            for name in RowStats.__slots__:
                assert np.array_equal(getattr(part, name), getattr(expected, name)[rows], equal_nan=True), name
    native.set_num_threads(1)


def test_rows_may_lie_apart_in_memory(isa: str) -> None:
    z = random_rows(500)
    assert_same(row_pass(z[:, 100:400], 5), reference_row_pass(z[:, 100:400].contiguous(), 5))


def test_no_rows_give_no_results() -> None:
    stats = row_pass(torch.zeros(0, 10), 3)
    assert stats.entropy.shape == (0,)
    assert stats.top_ids.shape == (0, 3)


@pytest.mark.parametrize("logits", [torch.zeros(3), torch.zeros(2, 3).double(), torch.zeros(3, 2).T, torch.zeros(2, 0)])
def test_wrong_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="logits"):
        row_pass(logits, 0)


@pytest.mark.parametrize("k", [-1, MAX_TOP + 1])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="k must"):
        row_pass(torch.zeros(1, 100), k)
