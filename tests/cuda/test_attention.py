"""Paged decode attention against its reference; slots that no token fills hold NaN."""

import math
from dataclasses import dataclass

import pytest
import torch

from etserve.config import BLOCK_SIZE
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda_attention import DecodeOutput, decode_attention
from etserve.kernels.reference_attention import masked_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Paged:
    """Decode rows of sequences over shuffled blocks."""

    q: torch.Tensor  # [B, H, D]
    cache: torch.Tensor  # [num_blocks, 2, Hkv, 16, D]
    tables: torch.Tensor
    lengths: torch.Tensor

    def attend(self, kernels: CudaKernels, rows: slice = slice(None), window: int = 0) -> DecodeOutput:
        device = kernels.device_type
        parts = (self.q[rows], self.cache, self.tables[rows], self.lengths[rows])
        scale = self.q.shape[2] ** -0.5
        moved = (part.contiguous().to(device) for part in parts)
        return decode_attention(kernels, *moved, scale=scale, window=window, want_block_mass=True)


def make_paged(lengths: list[int], group: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Paged:
    random = torch.Generator().manual_seed(sum(lengths) + dim)
    counts = [-(-n // BLOCK_SIZE) for n in lengths]
    order = torch.randperm(sum(counts), generator=random).int() + 1
    tables = torch.zeros(len(lengths), max(counts) + 3, dtype=torch.int32)
    cache = torch.full((sum(counts) + 1, 2, num_kv_heads, BLOCK_SIZE, dim), math.nan, dtype=dtype)
    for b, (n, blocks) in enumerate(zip(lengths, order.split(counts), strict=True)):
        tables[b, : len(blocks)] = blocks
        for i, block in enumerate(blocks.tolist()):
            filled = min(BLOCK_SIZE, n - i * BLOCK_SIZE)
            cache[block, :, :, :filled] = torch.randn(2, num_kv_heads, filled, dim, generator=random).to(dtype)
    q = (torch.randn(len(lengths), group * num_kv_heads, dim, generator=random) * 1.5).to(dtype)
    return Paged(q, cache, tables, torch.tensor(lengths, dtype=torch.int32))


def assert_matches_reference(paged: Paged, got: DecodeOutput, window: int = 0) -> None:
    num_heads, dim = paged.q.shape[1:]
    for b, n in enumerate(paged.lengths.tolist()):
        blocks = paged.tables[b, : -(-n // BLOCK_SIZE)].long()
        keys, values = (
            paged.cache[blocks, i].transpose(1, 2).reshape(-1, paged.cache.shape[2], dim)[:n].double() for i in (0, 1)
        )
        out, weights = masked_attention(paged.q[b : b + 1].double(), keys, values, dim**-0.5, window)
        bound = TOLERANCE[paged.q.dtype]
        torch.testing.assert_close(got.out[b].cpu().double(), out[0], rtol=bound, atol=bound)
        padded = torch.zeros(num_heads, paged.tables.shape[1] * BLOCK_SIZE, dtype=torch.float64)
        padded[:, :n] = weights[0]
        expected = padded.view(num_heads, -1, BLOCK_SIZE).sum(-1)
        assert got.block_mass is not None
        torch.testing.assert_close(got.block_mass[b].cpu().double(), expected, rtol=1e-4, atol=1e-6)
        repeated = keys[max(0, n - window) if window else 0 :].repeat_interleave(num_heads // keys.shape[1], 1)
        scores = torch.einsum("hd,lhd->hl", paged.q[b].double(), repeated) * dim**-0.5
        torch.testing.assert_close(got.log_sum_exp[b].cpu().double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "dim"),
    [(3, 1, 32), (1, 2, 64), (3, 1, 64), (7, 1, 128), (4, 2, 80), (8, 1, 256), (11, 1, 96), (2, 1, 192)],
)
def test_output_masses_and_log_sums_match_the_reference(
    kernels: CudaKernels, group: int, num_kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    paged = make_paged([1, 17, 527], group, num_kv_heads, dim, dtype)
    assert_matches_reference(paged, paged.attend(kernels))


@pytest.mark.parametrize("window", [1, 16, 33, 600, 5000])
def test_a_window_hides_what_lies_before_it(kernels: CudaKernels, window: int) -> None:
    paged = make_paged([5, 1100], 3, 1, 64, torch.bfloat16)
    assert_matches_reference(paged, paged.attend(kernels, window=window), window)


def test_a_sequence_attends_to_the_same_bits_alone_and_among_others(emulator: CudaKernels) -> None:
    paged = make_paged([700, 3, 1300], 4, 2, 64, torch.bfloat16)
    for seed in range(3):
        emulator.set_emulation_seed(seed)
        together = paged.attend(emulator)
        for b in range(3):
            alone = paged.attend(emulator, slice(b, b + 1))
            assert torch.equal(together.out[b], alone.out[0])
            assert torch.equal(together.log_sum_exp[b], alone.log_sum_exp[0])


def test_a_padding_row_gets_zeros_and_harms_nobody(kernels: CudaKernels) -> None:
    paged = make_paged([40, 20], 2, 1, 64, torch.bfloat16)
    expected = paged.attend(kernels)
    paged.lengths[1] = 0
    got = paged.attend(kernels)
    assert torch.equal(got.out[0], expected.out[0])
    assert not got.out[1].any()
    assert got.block_mass is not None
    assert not got.block_mass[1].any()


def test_large_scores_do_not_overflow(kernels: CudaKernels) -> None:
    paged = make_paged([100], 2, 1, 64, torch.bfloat16)
    paged.q.mul_(40)
    assert_matches_reference(paged, paged.attend(kernels))


@pytest.mark.parametrize(("dim", "dtype"), [(264, torch.bfloat16), (68, torch.bfloat16), (64, torch.float64)])
def test_heads_without_a_kernel_are_refused(emulator: CudaKernels, dim: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        make_paged([5], 1, 1, dim, dtype).attend(emulator)
