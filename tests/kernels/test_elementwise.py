import pytest
import torch

from etserve.kernels import elementwise, native, reference_elementwise
from tests.kernels.isas import isa, num_threads

__all__ = ["isa", "num_threads"]
FLOATS = [torch.float32, torch.bfloat16]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 8e-3, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 2e-6}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 576, 1000])
def test_rms_norm_matches_the_reference(isa: str, dtype: torch.dtype, size: int) -> None:
    x, weight = randn(5, size) * 3, randn(size, seed=1)
    x[2] = 0.0
    expected = reference_elementwise.rms_norm(x, weight, 1e-5, dtype)
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 1e-5, dtype), expected, **tolerance(dtype))


def test_rms_norm_of_a_row_does_not_depend_on_its_batch(isa: str, num_threads: int) -> None:
    x, weight = randn(9, 100), randn(100, seed=1)
    together = elementwise.rms_norm(x, weight, 1e-5)
    assert all(torch.equal(together[i], elementwise.rms_norm(x[i : i + 1], weight, 1e-5)[0]) for i in range(9))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 16, 37])
def test_silu_mul_matches_the_reference(isa: str, dtype: torch.dtype, size: int) -> None:
    gate, up = randn(7, size) * 8, randn(7, size, seed=1)
    expected = reference_elementwise.silu_mul(gate, up, dtype)
    torch.testing.assert_close(elementwise.silu_mul(gate, up, dtype), expected, **tolerance(dtype))


def test_silu_holds_at_the_ends(isa: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30, float("inf"), float("nan")]])
    result = elementwise.silu_mul(gate, torch.ones_like(gate))[0]
    expected = torch.nn.functional.silu(gate.double())[0].float()
    torch.testing.assert_close(result[:1], torch.tensor([0.0]), rtol=0, atol=1e-6)
    torch.testing.assert_close(result[1:], expected[1:], rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", FLOATS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(9, 3, 64, 64), (2, 2, 16, 16), (4, 1, 80, 80), (6, 2, 96, 48), (1, 1, 18, 18), (2, 1, 256, 256)],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_rotates_and_writes_the_cache_as_the_reference_does(
    isa: str, kv_dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, has_norms: bool
) -> None:
    tokens, num_blocks = 21, 4
    qkv = randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    angles = randn(50, rotary_dim // 2, seed=1)
    tables = angles.cos(), angles.sin()
    positions = torch.arange(3, 3 + tokens, dtype=torch.int32)
    slots = torch.randperm(num_blocks * 16, generator=torch.Generator().manual_seed(2))[:tokens]
    norms = (randn(head_dim, seed=3), randn(head_dim, seed=4)) if has_norms else None
    kv = randn(num_blocks, 2, num_kv_heads, 16 * head_dim, seed=5).to(kv_dtype)
    expected_kv = kv.clone()
    q = elementwise.rope_and_write(qkv, positions, slots, tables, kv, num_heads, norms, 1e-5)
    expected_q, k, v = reference_elementwise.rope(qkv, positions, tables, num_heads, num_kv_heads, norms, 1e-5)
    reference_elementwise.write_kv(expected_kv, slots, k, v)
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv, expected_kv, rtol=8e-3 if kv_dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_threads_that_write_neighbouring_tokens_lose_nothing(isa: str, num_threads: int) -> None:
    qkv, positions, slots = randn(64, 3 * 32), torch.arange(64, dtype=torch.int32), torch.arange(16, 80)
    tables = torch.ones(64, 16), torch.zeros(64, 16)
    caches = []
    for count in (num_threads, 1):
        native.set_num_threads(count)
        kv = torch.zeros(5, 2, 1, 16 * 32, dtype=torch.bfloat16)
        elementwise.rope_and_write(qkv, positions, slots, tables, kv, 1)
        caches.append(kv)
    assert torch.equal(*caches)


def test_rope_refuses_what_points_outside() -> None:
    qkv, tables = randn(2, 3 * 16), (torch.ones(8, 8), torch.zeros(8, 8))
    kv = torch.zeros(3, 2, 1, 16 * 16)
    positions, slots = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([16, 47])
    elementwise.rope_and_write(qkv, positions, slots, tables, kv, 1)
    with pytest.raises(ValueError, match="positions"):
        elementwise.rope_and_write(qkv, positions + 1, slots, tables, kv, 1)
    with pytest.raises(ValueError, match="slots"):
        elementwise.rope_and_write(qkv, positions, slots + 1, tables, kv, 1)
    with pytest.raises(ValueError, match="slots"):
        elementwise.rope_and_write(qkv, positions, slots - 17, tables, kv, 1)
    with pytest.raises(ValueError, match="no kernel"):
        elementwise.rope_and_write(randn(2, 3 * 8), positions, slots, tables, torch.zeros(3, 2, 1, 16 * 8), 1)
    with pytest.raises(TypeError, match="kv"):
        elementwise.rope_and_write(qkv, positions, slots, tables, kv.double(), 1)
