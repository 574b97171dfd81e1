import pytest
import torch

from etserve.kernels import matrix, native, reference_matrix
from tests.kernels.isas import isa, num_threads

__all__ = ["isa", "num_threads"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (15, 2), (16, 33), (17, 64), (100, 7), (333, 576)]


def make(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5).to(dtype)


def rows(m: int, k: int) -> torch.Tensor:
    return make(m, k, torch.float32, seed=m) * k**0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_matches_the_reference(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias = make(n, k, dtype), make(1, n, torch.float32)[0].contiguous()
    for packed, shift in ((matrix.pack(weight), None), (matrix.pack(weight, bias=bias), bias)):
        for m in (1, 3, 13, 30):
            x = rows(m, k)
            expected = reference_matrix.linear(x, weight, shift)
            torch.testing.assert_close(matrix.linear(x, packed), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_adds_into_the_residual(isa: str, dtype: torch.dtype) -> None:
    weight, x, residual = make(33, 50, dtype), rows(5, 50), rows(5, 33)
    expected = residual + reference_matrix.linear(x, weight)
    returned = matrix.linear_add_(residual, x, matrix.pack(weight))
    assert returned is residual
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 33), (17, 64), (100, 7), (333, 200)])
def test_gate_and_up_give_silu_of_one_times_the_other(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    gate, up, bias = make(n, k, dtype) * 4, make(n, k, dtype, seed=1), make(2, n, torch.float32)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # of the rounded output
    for m in (1, 2, 14):
        x = rows(m, k)
        for shift in (None, bias):
            expected = reference_matrix.linear_silu_mul(x, gate, up, shift)
            result = matrix.linear_silu_mul(x, matrix.pack(gate, up, shift))
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(17, 33), (160, 576)])
def test_a_row_alone_equals_the_row_in_any_batch_bit_for_bit(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    packed, paired = matrix.pack(make(n, k, dtype)), matrix.pack(make(n, k, dtype), make(n, k, dtype, seed=1))
    x = rows(200, k)
    alone = torch.cat([matrix.linear(x[i : i + 1], packed) for i in range(200)])
    alone_paired = torch.cat([matrix.linear_silu_mul(x[i : i + 1], paired) for i in range(200)])
    for m in (1, 2, 3, 4, 6, 7, 8, 11, 12, 13, 31, 200):
        assert torch.equal(matrix.linear(x[:m], packed), alone[:m])
        assert torch.equal(matrix.linear_silu_mul(x[:m], paired), alone_paired[:m])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(isa: str, num_threads: int, dtype: torch.dtype) -> None:
    weight, x = make(161, 70, dtype), rows(9, 70)
    result = matrix.linear(x, matrix.pack(weight))
    native.set_num_threads(1)
    assert torch.equal(result, matrix.linear(x, matrix.pack(weight)))


def test_matrices_packed_below_each_other_equal_their_concatenation(isa: str) -> None:
    parts = [make(n, 20, torch.bfloat16, seed=n) for n in (24, 8, 9)]
    stacked = matrix.PackedMatrix(41, 20, torch.bfloat16)
    first = 0
    for part in parts:
        stacked.pack(part, first=first)
        first += len(part)
    x = rows(4, 20)
    assert torch.equal(matrix.linear(x, stacked), matrix.linear(x, matrix.pack(torch.cat(parts))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_can_be_read_back_exactly(dtype: torch.dtype) -> None:
    weight = make(35, 21, dtype)
    weight[3, 0], weight[3, 1], weight[3, 2] = 1e-7, float("inf"), -0.0  # a subnormal f16
    packed = matrix.pack(weight)
    for index in (0, 3, 16, 34):
        assert torch.equal(packed.row(index), weight[index].float())
    with pytest.raises(ValueError, match="row"):
        packed.row(35)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_reaches_its_own_row_only(isa: str, dtype: torch.dtype) -> None:
    gate, up = make(20, 32, dtype), make(20, 32, dtype, seed=1)
    x = rows(14, 32)
    x[5, 7] = float("nan")
    for result in (matrix.linear(x, matrix.pack(gate)), matrix.linear_silu_mul(x, matrix.pack(gate, up))):
        is_nan = result.isnan()
        assert is_nan[5].all()
        assert is_nan.sum() == 20


def test_wrong_arguments_are_refused_before_any_memory_is_touched() -> None:
    packed, paired = matrix.pack(make(8, 6, torch.bfloat16)), matrix.pack(make(8, 6, torch.float32), rows(8, 6))
    with pytest.raises(TypeError, match=r"x must be torch.float32"):
        matrix.linear(rows(2, 6).double(), packed)
    with pytest.raises(ValueError, match="shape"):
        matrix.linear(rows(2, 7), packed)
    with pytest.raises(ValueError, match="contiguous"):
        matrix.linear(rows(6, 2).T, packed)
    with pytest.raises(ValueError, match="paired"):
        matrix.linear(rows(2, 6), paired)
    with pytest.raises(ValueError, match="paired"):
        matrix.linear_silu_mul(rows(2, 6), packed)
    with pytest.raises(ValueError, match="outside"):
        packed.pack(make(3, 6, torch.bfloat16), first=6)
    with pytest.raises(TypeError, match="weight"):
        packed.pack(make(3, 6, torch.float32))
    with pytest.raises(ValueError, match="equal shapes"):
        matrix.pack(rows(8, 6), rows(9, 6))
    with pytest.raises(ValueError, match="memory"):
        matrix.PackedMatrix(8, 6, torch.float32, memory=torch.zeros(10, dtype=torch.uint8))


def test_no_rows_give_no_rows() -> None:
    assert matrix.linear(torch.empty(0, 6), matrix.pack(make(8, 6, torch.bfloat16))).shape == (0, 8)
