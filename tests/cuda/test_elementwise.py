"""RMSNorm, SiLU * mul and the rotary embedding with its cache write against their references."""

from itertools import product

import pytest
import torch

from etserve.config import BLOCK_SIZE
from etserve.kernels import reference_elementwise as reference
from etserve.kernels.cuda import CudaKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), expected.to(got.dtype), rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@pytest.mark.parametrize(("dtype", "shape"), product(DTYPES, [(1, 1), (3, 111), (5, 576)]))
def test_rms_norm_matches_its_reference(kernels: CudaKernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], seed=1, dtype=dtype)
    got = kernels.rms_norm(x.to(kernels.device_type), weight.to(kernels.device_type), 1e-5)
    assert_close(got, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("dtype", "shape"), product(DTYPES, [(1, 1), (3, 111), (2, 1536)]))
def test_silu_mul_matches_its_reference(kernels: CudaKernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate, up = random(*shape, dtype=dtype) * 5, random(*shape, seed=1, dtype=dtype)
    assert_close(
        kernels.silu_mul(gate.to(kernels.device_type), up.to(kernels.device_type)), reference.silu_mul(gate, up)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_takes_the_halves_of_one_product(kernels: CudaKernels, dtype: torch.dtype) -> None:
    gate, up = random(3, 74, dtype=dtype).to(kernels.device_type).chunk(2, dim=-1)
    assert torch.equal(kernels.silu_mul(gate, up), kernels.silu_mul(gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "rotary"), [(9, 3, 64, 64), (4, 4, 80, 32), (7, 1, 128, 128)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rotates_and_writes_each_token_to_its_slot(
    kernels: CudaKernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int, rotary: int, has_norms: bool
) -> None:
    tokens, num_blocks, device = 5, 4, kernels.device_type
    qkv = random(tokens, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([3, 0, 40, 7, 8], dtype=torch.int32)
    slots = torch.tensor([17, 63, -1, 30, 16])
    angles = torch.rand(41, rotary // 2, generator=torch.Generator().manual_seed(5)) * 6
    tables = angles.cos(), angles.sin()
    norms = (random(dim, seed=2, dtype=dtype), random(dim, seed=3, dtype=dtype)) if has_norms else None
    cache = random(num_blocks, 2, num_kv_heads, BLOCK_SIZE, dim, seed=4, dtype=dtype)
    expected_q, k, v = reference.rope(qkv, positions, tables, num_heads, num_kv_heads, norms, 1e-6)
    expected_cache = cache.clone()
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_cache[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE] = torch.stack((k[t], v[t])).to(dtype)
    moved = [t.to(device) for t in (qkv, positions, slots, *tables)]
    kv = cache.to(device)
    on_device = tuple(n.to(device) for n in norms) if norms else None
    q = kernels.rope_and_write(*moved[:3], (moved[3], moved[4]), kv, num_heads, on_device, 1e-6)
    assert_close(q, expected_q)
    assert_close(kv, expected_cache)
    untouched = torch.ones(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    untouched.view(-1)[slots[slots >= 0]] = False
    assert torch.equal(kv.cpu().permute(0, 3, 1, 2, 4)[untouched], cache.permute(0, 3, 1, 2, 4)[untouched])


def test_tensors_of_other_shapes_and_types_are_refused(emulator: CudaKernels) -> None:
    with pytest.raises(ValueError, match="weight"):
        emulator.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match="up"):
        emulator.silu_mul(torch.zeros(2, 8), torch.zeros(2, 8).half())
    with pytest.raises(ValueError, match="float64"):
        emulator.silu_mul(torch.zeros(2, 8).double(), torch.zeros(2, 8).double())
    tables, cache = (torch.zeros(4, 40), torch.zeros(4, 40)), torch.zeros(1, 2, 1, BLOCK_SIZE, 64)
    with pytest.raises(ValueError, match="rotated"):
        emulator.rope_and_write(torch.zeros(1, 192), torch.zeros(1).int(), torch.zeros(1).long(), tables, cache, 1)
