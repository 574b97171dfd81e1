"""The fused entropy estimation against its reference, and its independence of everything but the row."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from etserve.kernels.cuda import CudaKernels, DeviceRowStats
from etserve.kernels.reference_rows import MAX_TOP, reference_row_pass
from tests.kernels.test_row_pass import random_rows

EXACT = ("argmax", "nonfinite", "top_values", "top_ids")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_matches_reference(kernels: CudaKernels, logits: torch.Tensor, k: int) -> DeviceRowStats:
    got, expected = kernels.row_pass(logits.to(kernels.device_type), k), reference_row_pass(logits.float(), k)
    for field in fields(got):
        measured, wanted = getattr(got, field.name).cpu().numpy(), getattr(expected, field.name)
        if field.name in EXACT:
            np.testing.assert_array_equal(measured, wanted, err_msg=field.name)
        else:
            np.testing.assert_allclose(measured, wanted, rtol=3e-5, atol=3e-5, err_msg=field.name)
    return got


@pytest.mark.parametrize("vocab", [1, 7, 111, 4097, 16_385])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_measure_matches_the_reference(kernels: CudaKernels, dtype: torch.dtype, vocab: int) -> None:
    logits = random_rows(vocab).to(dtype)
    for k in (0, 1, 5, MAX_TOP):
        assert_matches_reference(kernels, logits, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_vocabularies_are_measured(kernels: CudaKernels, dtype: torch.dtype) -> None:
    logits = torch.randn(1, 262_144, generator=torch.Generator().manual_seed(0)) * 3
    assert_matches_reference(kernels, logits.to(dtype), 20)


def test_a_row_of_equal_logits_has_the_entropy_of_the_vocabulary(kernels: CudaKernels) -> None:
    got = assert_matches_reference(kernels, torch.full((1, 40_000), 2.5), MAX_TOP)
    assert got.entropy.item() == pytest.approx(math.log(40_000), rel=1e-6)
    assert got.top_ids[0].tolist() == list(range(MAX_TOP))


def test_zeros_of_both_signs_are_equal(kernels: CudaKernels) -> None:
    logits = torch.zeros(1, 300)
    logits[0, ::2] = -0.0
    assert_matches_reference(kernels, logits, 9)


def test_a_row_measures_the_same_bits_alone_among_others_and_off_alignment(kernels: CudaKernels) -> None:
    logits = random_rows(20_001)[:5].to(torch.bfloat16).to(kernels.device_type)  # odd rows: each starts elsewhere
    together = kernels.row_pass(logits, 8)
    for r in range(5):
        alone = kernels.row_pass(logits[r : r + 1].clone(), 8)
        for field in fields(together):
            assert torch.equal(getattr(together, field.name)[r : r + 1], getattr(alone, field.name)), field.name


def test_rows_may_lie_apart(kernels: CudaKernels) -> None:
    wide = random_rows(700)[:5].to(kernels.device_type)
    got, expected = kernels.row_pass(wide[:, 3:500], 4), reference_row_pass(wide[:, 3:500].cpu(), 4)
    np.testing.assert_array_equal(got.top_ids.cpu().numpy(), expected.top_ids)
    np.testing.assert_allclose(got.entropy.cpu().numpy(), expected.entropy, atol=3e-5)


def test_no_rows_give_no_results(kernels: CudaKernels) -> None:
    assert kernels.row_pass(torch.zeros(0, 10, device=kernels.device_type), 3).top_ids.shape == (0, 3)


@pytest.mark.parametrize("logits", [torch.zeros(3), torch.zeros(2, 3).double(), torch.zeros(3, 2).T, torch.zeros(2, 0)])
def test_wrong_logits_are_refused(emulator: CudaKernels, logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="logits"):
        emulator.row_pass(logits, 0)


@pytest.mark.parametrize("k", [-1, MAX_TOP + 1])
def test_k_out_of_range_is_refused(emulator: CudaKernels, k: int) -> None:
    with pytest.raises(ValueError, match="k must"):
        emulator.row_pass(torch.zeros(1, 100), k)
