from typing import get_args

import pytest
import torch

from etserve.kernels import native, quant, reference_quant
from etserve.kernels.quant import Format
from tests.kernels.isas import isa, num_threads

__all__ = ["isa", "num_threads"]
FORMATS = get_args(Format)
SHAPES = [(1, 32), (15, 64), (16, 96), (17, 320), (100, 32), (333, 576)]


def make(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5


def rows(m: int, k: int) -> torch.Tensor:
    return make(m, k, seed=m) * k**0.5


def stored(weight: torch.Tensor, kind: Format) -> torch.Tensor:
    """The values that the blocks stand for."""
    return reference_quant.dequantise(quant.quantise(weight, kind), kind)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_matches_the_reference(isa: str, kind: Format, n: int, k: int) -> None:
    weight, bias = make(n, k), make(1, n)[0].contiguous()
    for packed, shift in ((quant.pack(kind, weight), None), (quant.pack(kind, weight, bias=bias), bias)):
        for m in (1, 3, 5, 14, 31):
            x = rows(m, k)
            expected = reference_quant.linear(x, stored(weight, kind), shift)
            torch.testing.assert_close(quant.linear(x, packed), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_linear_adds_into_the_residual(isa: str, kind: Format) -> None:
    weight, x, residual = make(33, 96), rows(5, 96), rows(5, 33)
    expected = residual + reference_quant.linear(x, stored(weight, kind))
    returned = quant.linear_add_(residual, x, quant.pack(kind, weight))
    assert returned is residual
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 96), (17, 64), (333, 160)])
def test_gate_and_up_give_silu_of_one_times_the_other(isa: str, kind: Format, n: int, k: int) -> None:
    gate, up, bias = make(n, k) * 4, make(n, k, seed=1), make(2, n)
    for m in (1, 2, 14):
        x = rows(m, k)
        for shift in (None, bias):
            expected = reference_quant.linear_silu_mul(x, stored(gate, kind), stored(up, kind), shift)
            result = quant.linear_silu_mul(x, quant.pack(kind, gate, up, shift))
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(17, 32), (160, 576)])
def test_a_row_alone_equals_the_row_in_any_batch_bit_for_bit(isa: str, kind: Format, n: int, k: int) -> None:
    packed, paired = quant.pack(kind, make(n, k)), quant.pack(kind, make(n, k), make(n, k, seed=1))
    x = rows(200, k)
    alone = torch.cat([quant.linear(x[i : i + 1], packed) for i in range(200)])
    alone_paired = torch.cat([quant.linear_silu_mul(x[i : i + 1], paired) for i in range(200)])
    for m in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 31, 200):
        assert torch.equal(quant.linear(x[:m], packed), alone[:m])
        assert torch.equal(quant.linear_silu_mul(x[:m], paired), alone_paired[:m])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("m", [2, 9])
def test_the_number_of_threads_changes_no_bit(isa: str, num_threads: int, kind: Format, m: int) -> None:
    packed, x = quant.pack(kind, make(161, 96)), rows(m, 96)
    result = quant.linear(x, packed)
    native.set_num_threads(1)
    assert torch.equal(result, quant.linear(x, packed))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_byte_pattern_is_read_as_ggml_reads_it(isa: str, kind: Format) -> None:
    random = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (35, 3 * quant.BLOCK_BYTES[kind]), generator=random, dtype=torch.uint8)
    scales = blocks.view(35, 3, -1)[..., : 4 if kind == "q4_1" else 2]
    scales.copy_(torch.rand(35, 3, scales.shape[-1] // 2, generator=random).half().view(torch.uint8))
    packed = quant.QuantMatrix(35, 96, kind)
    packed.pack(blocks)
    expected = reference_quant.dequantise(blocks, kind)
    for index in (0, 3, 16, 34):
        torch.testing.assert_close(packed.row(index), expected[index], rtol=0, atol=0 if kind != "q4_1" else 1e-6)
    x = rows(7, 96)
    torch.testing.assert_close(quant.linear(x, packed), reference_quant.linear(x, expected), rtol=1e-5, atol=2e-2)
    with pytest.raises(ValueError, match="row"):
        packed.row(35)


@pytest.mark.parametrize("kind", FORMATS)
def test_extreme_rows_stay_exact(isa: str, kind: Format) -> None:
    weight = torch.full((16, 64), 1.0)
    weight[:8] = -1.0
    x = torch.full((4, 64), 127.0)
    x[1] = -127.0
    x[2, 32:] = 2.0**-120  # counts as zeros
    x[3] = 0.0
    expected = reference_quant.linear(x, stored(weight, kind))
    torch.testing.assert_close(quant.linear(x, quant.pack(kind, weight)), expected, rtol=1e-6, atol=0)
    assert not expected[3].any()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_its_own_row_only(isa: str, kind: Format, value: float) -> None:
    gate, up = make(20, 32), make(20, 32, seed=1)
    x = rows(14, 32)
    x[5, 7] = value
    for result in (quant.linear(x, quant.pack(kind, gate)), quant.linear_silu_mul(x, quant.pack(kind, gate, up))):
        is_nan = result.isnan()
        assert is_nan[5].all()
        assert is_nan.sum() == 20


@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_packed_below_each_other_equal_their_concatenation(isa: str, kind: Format) -> None:
    parts = [make(n, 64, seed=n) for n in (24, 8, 9)]
    stacked = quant.QuantMatrix(41, 64, kind)
    first = 0
    for part in parts:
        stacked.pack(quant.quantise(part, kind), first=first)
        first += len(part)
    x = rows(4, 64)
    assert torch.equal(quant.linear(x, stacked), quant.linear(x, quant.pack(kind, torch.cat(parts))))


def test_wrong_arguments_are_refused_before_any_memory_is_touched() -> None:
    packed, paired = quant.pack("q8_0", make(8, 64)), quant.pack("q4_0", make(8, 64), make(8, 64))
    with pytest.raises(TypeError, match=r"x must be torch.float32"):
        quant.linear(rows(2, 64).double(), packed)
    with pytest.raises(ValueError, match="shape"):
        quant.linear(rows(2, 32), packed)
    with pytest.raises(ValueError, match="paired"):
        quant.linear(rows(2, 64), paired)
    with pytest.raises(ValueError, match="paired"):
        quant.linear_silu_mul(rows(2, 64), packed)
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
    assert quant.linear(torch.empty(0, 64), quant.pack("q4_1", make(8, 64))).shape == (0, 8)
