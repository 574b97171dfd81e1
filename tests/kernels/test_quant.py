from typing import get_args

import pytest
import torch

from etserve.kernels import matrix, native, quant, reference_quant
from etserve.kernels.quant import Format, QuantMatrix, Rounded
from tests.kernels.isas import isa, num_threads
from tests.kernels.super_blocks import encode, width

__all__ = ["isa", "num_threads"]
FORMATS = get_args(Format)
ROUNDED = get_args(Rounded)
SHAPES = [(1, 32), (15, 64), (16, 96), (17, 320), (100, 32), (333, 576)]


def make(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5


def rows(m: int, k: int) -> torch.Tensor:
    return make(m, k, seed=m) * k**0.5


def stored(weight: torch.Tensor, kind: Format) -> torch.Tensor:
    """The values that the blocks stand for."""
    return reference_quant.dequantise(encode(weight, kind), kind)


def pack(
    kind: Format, weight: torch.Tensor, up: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> QuantMatrix:
    packed = QuantMatrix(len(weight), weight.shape[1], kind, paired=up is not None, bias=bias)
    packed.pack(encode(weight, kind))
    if up is not None:
        packed.pack(encode(up, kind), half=1)
    return packed


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_matches_the_reference(isa: str, kind: Format, n: int, k: int) -> None:
    k = width(kind, k)
    weight, bias = make(n, k), make(1, n)[0].contiguous()
    for packed, shift in ((pack(kind, weight), None), (pack(kind, weight, bias=bias), bias)):
        for m in (1, 3, 5, 14, 31):
            x = rows(m, k)
            expected = reference_quant.linear(x, stored(weight, kind), shift)
            torch.testing.assert_close(matrix.linear(x, packed), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_linear_adds_into_the_residual(isa: str, kind: Format) -> None:
    k = width(kind, 96)
    weight, x, residual = make(33, k), rows(5, k), rows(5, 33)
    expected = residual + reference_quant.linear(x, stored(weight, kind))
    returned = matrix.linear_add_(residual, x, pack(kind, weight))
    assert returned is residual
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 96), (17, 64), (333, 160)])
def test_gate_and_up_give_silu_of_one_times_the_other(isa: str, kind: Format, n: int, k: int) -> None:
    k = width(kind, k)
    gate, up, bias = make(n, k) * 4, make(n, k, seed=1), make(2, n)
    for m in (1, 2, 14):
        x = rows(m, k)
        for shift in (None, bias):
            expected = reference_quant.linear_silu_mul(x, stored(gate, kind), stored(up, kind), shift)
            result = matrix.linear_silu_mul(x, pack(kind, gate, up, shift))
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(17, 32), (160, 576)])
def test_a_row_alone_equals_the_row_in_any_batch_bit_for_bit(isa: str, kind: Format, n: int, k: int) -> None:
    k = width(kind, k)
    packed, paired = pack(kind, make(n, k)), pack(kind, make(n, k), make(n, k, seed=1))
    x = rows(200, k)
    alone = torch.cat([matrix.linear(x[i : i + 1], packed) for i in range(200)])
    alone_paired = torch.cat([matrix.linear_silu_mul(x[i : i + 1], paired) for i in range(200)])
    for m in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 31, 200):
        assert torch.equal(matrix.linear(x[:m], packed), alone[:m])
        assert torch.equal(matrix.linear_silu_mul(x[:m], paired), alone_paired[:m])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("m", [2, 9])
def test_the_number_of_threads_changes_no_bit(isa: str, num_threads: int, kind: Format, m: int) -> None:
    k = width(kind, 96)
    packed, x = pack(kind, make(161, k)), rows(m, k)
    result = matrix.linear(x, packed)
    native.set_num_threads(1)
    assert torch.equal(result, matrix.linear(x, packed))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_byte_pattern_is_read_as_ggml_reads_it(isa: str, kind: Format) -> None:
    random = torch.Generator().manual_seed(3)
    k = width(kind, 96)
    blocks = reference_quant.random_blocks(35, k, kind, random)
    packed = quant.QuantMatrix(35, k, kind)
    packed.pack(blocks)
    expected = reference_quant.dequantise(blocks, kind)
    has_min = kind in ("q4_1", "q4_k", "q5_k")
    for index in (0, 3, 16, 34):
        torch.testing.assert_close(packed.row(index), expected[index], rtol=0, atol=1e-6 if has_min else 0)
    x = rows(7, k)
    torch.testing.assert_close(matrix.linear(x, packed), reference_quant.linear(x, expected), rtol=1e-5, atol=2e-2)
    with pytest.raises(ValueError, match="row"):
        packed.row(35)


@pytest.mark.parametrize("kind", FORMATS)
def test_extreme_rows_stay_exact(isa: str, kind: Format) -> None:
    k = width(kind, 64)
    weight = torch.full((16, k), 1.0)
    weight[:8] = -1.0
    x = torch.full((4, k), 127.0)
    x[1] = -127.0
    x[2, 32:] = 2.0**-120  # counts as zeros
    x[3] = 0.0
    expected = reference_quant.linear(x, stored(weight, kind))
    torch.testing.assert_close(matrix.linear(x, pack(kind, weight)), expected, rtol=1e-6, atol=0)
    assert not expected[3].any()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_its_own_row_only(isa: str, kind: Format, value: float) -> None:
    k = width(kind, 32)
    gate, up = make(20, k), make(20, k, seed=1)
    x = rows(14, k)
    x[5, 7] = value
    for result in (matrix.linear(x, pack(kind, gate)), matrix.linear_silu_mul(x, pack(kind, gate, up))):
        is_nan = result.isnan()
        assert is_nan[5].all()
        assert is_nan.sum() == 20


@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_packed_below_each_other_equal_their_concatenation(isa: str, kind: Format) -> None:
    k = width(kind, 64)
    parts = [make(n, k, seed=n) for n in (24, 8, 9)]
    stacked = quant.QuantMatrix(41, k, kind)
    first = 0
    for part in parts:
        stacked.pack(encode(part, kind), first=first)
        first += len(part)
    x = rows(4, k)
    assert torch.equal(matrix.linear(x, stacked), matrix.linear(x, pack(kind, torch.cat(parts))))


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_gives_the_bits_of_the_gguf_package(kind: Rounded) -> None:
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 96, generator=random) * torch.logspace(-9, 4, 300)[:, None]
    weight[0], weight[1] = 0.0, 2.5
    weight[2, :32] = torch.arange(32) * 0.5  # many halves between two steps
    weight[3] = -weight[2]
    for given in (weight, weight.bfloat16(), weight.T.contiguous().T):
        assert torch.equal(quant.quantise(given, kind), reference_quant.quantise(given.contiguous(), kind))


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_of_what_is_not_finite_stays_within_its_block(kind: Rounded) -> None:
    weight = make(2, 96)
    clean = quant.quantise(weight, kind)
    weight[1, 40] = float("nan")
    size = quant.BLOCK_BYTES[kind]
    got = quant.quantise(weight, kind)
    got[1, size : 2 * size] = clean[1, size : 2 * size]
    assert torch.equal(got, clean)


def test_wrong_arguments_are_refused_before_any_memory_is_touched() -> None:
    packed, paired = quant.pack("q8_0", make(8, 64)), quant.pack("q4_0", make(8, 64), make(8, 64))
    with pytest.raises(TypeError, match=r"x must be torch.float32"):
        matrix.linear(rows(2, 64).double(), packed)
    with pytest.raises(ValueError, match="shape"):
        matrix.linear(rows(2, 32), packed)
    with pytest.raises(ValueError, match="paired"):
        matrix.linear(rows(2, 64), paired)
    with pytest.raises(ValueError, match="paired"):
        matrix.linear_silu_mul(rows(2, 64), packed)
    with pytest.raises(ValueError, match="outside"):
        packed.pack(quant.quantise(make(3, 64), "q8_0"), first=6)
    with pytest.raises(TypeError, match="blocks"):
        packed.pack(make(3, 64))
    with pytest.raises(ValueError, match="blocks of 32"):
        quant.quantise(make(3, 33), "q4_1")
    with pytest.raises(ValueError, match="blocks of 32"):
        quant.QuantMatrix(8, 48, "q4_0")
    with pytest.raises(ValueError, match="equal shapes"):
        quant.pack("q8_0", rows(8, 64), rows(9, 64))
    with pytest.raises(ValueError, match="memory"):
        quant.QuantMatrix(8, 64, "q8_0", memory=torch.zeros(10, dtype=torch.uint8))


def test_no_rows_give_no_rows() -> None:
    assert matrix.linear(torch.empty(0, 64), quant.pack("q4_1", make(8, 64))).shape == (0, 8)
