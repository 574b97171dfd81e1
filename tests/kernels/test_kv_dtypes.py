"""float16 and int8 KV caches: write, attention, sketches and selection against their references."""

import numpy as np
import pytest
import torch

from etserve.attention.backend import AttentionShape
from etserve.attention.native import NativeAttention
from etserve.attention.reference import ReferenceAttention
from etserve.kernels.attention import paged_attention
from etserve.kernels.elementwise import rope_and_write
from etserve.kernels.reference_attention import (
    BLOCK_SIZE,
    gather_kv,
    head_dim_of,
    kv_head_bytes,
    kv_head_size,
    round_to_bytes,
    slot_mapping,
    write_kv,
)
from etserve.kernels.selection import SelectionRule
from etserve.models.decoder import TorchDecoder
from etserve.models.native import NativeDecoder
from tests.kernels.decoders import BASE, RandomWeights, make_batch, prompt, tables
from tests.kernels.isas import isa, num_threads
from tests.kernels.paged import make_paged
from tests.kernels.sketched import NUM_KV_HEADS, make_sketched, uniform

__all__ = ["isa", "num_threads"]
LENGTHS = [1, 15, 17, 513, 700]
PARTS = [(b, n - new, n) for b, (n, new) in enumerate(zip(LENGTHS, [1, 3, 1, 70, 1], strict=True))]
DTYPES = [torch.float16, torch.int8]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_block_masses_match_the_reference(isa: str, dtype: torch.dtype, group: int, window: int) -> None:
    paged = make_paged(LENGTHS, dtype, group=group, window=window)
    out, masses = paged.native_with_masses(PARTS)
    expected, expected_masses = paged.reference(PARTS)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(masses, expected_masses, rtol=0, atol=2e-6)


@pytest.mark.parametrize("head_dim", [16, 20, 80, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_matches_the_reference(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    paged = make_paged(LENGTHS[:4], dtype, head_dim=head_dim)
    expected, _ = paged.reference(PARTS[:4])
    torch.testing.assert_close(paged.native(PARTS[:4]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(isa: str, num_threads: int, dtype: torch.dtype) -> None:
    paged = make_paged(LENGTHS, dtype)
    together = paged.native(PARTS)
    start = 0
    for b, begin, end in PARTS:
        alone = torch.cat([paged.native([(b, i, i + 1)]) for i in range(begin, end)][-3:])
        start += end - begin
        assert torch.equal(alone, together[start - len(alone) : start])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_the_native_write_stores_the_bits_of_the_reference(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    random = torch.Generator().manual_seed(3)
    qkv = torch.randn(37, 6 * head_dim, generator=random) * torch.logspace(-6, 2, 37)[:, None]
    qkv[5] = 0.0
    slots = torch.randperm(48, generator=random)[:37]
    ones, nothing = torch.ones(64, head_dim // 2), torch.zeros(64, head_dim // 2)
    cache = torch.zeros(3, 2, 2, kv_head_size(head_dim, dtype), dtype=dtype)
    expected = cache.clone()
    rope_and_write(qkv, torch.arange(37, dtype=torch.int32), slots, (ones, nothing), cache, num_heads=2)
    _, keys, values = qkv.view(37, 3, 2, head_dim).unbind(1)
    write_kv(expected, keys, values, slots.numpy())
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_a_float16_entry_that_is_finite_stays_finite(isa: str) -> None:
    """Natively and in the reference, to the bit; what is infinite is not hidden."""
    edges = torch.tensor([65504.0, 65519.0, -65520.0, 7e4, -1e6, 3e38, -3e38, 1.0])
    qkv = edges.repeat(3, 12)  # two heads each of 16
    qkv[1, 5 * 16] = float("inf")  # of a value: a key would be turned
    cache = torch.zeros(1, 2, 2, kv_head_size(16, torch.float16), dtype=torch.float16)
    expected = cache.clone()
    rotation = torch.ones(3, 8), torch.zeros(3, 8)
    rope_and_write(qkv, torch.arange(3, dtype=torch.int32), torch.arange(3), rotation, cache, num_heads=2)
    _, keys, values = qkv.view(3, 3, 2, 16).unbind(1)
    write_kv(expected, keys, values, np.arange(3))
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
    found = torch.stack(gather_kv(cache, np.array([0], np.int32), 3))
    assert (~found.isfinite()).nonzero().tolist() == [[1, 1, 1, 0]]
    assert found[0, 0, 0, :8].tolist() == [65504.0, 65504.0, -65504.0, 65504.0, -65504.0, 65504.0, -65504.0, 1.0]


def test_what_a_rejected_draft_would_have_written_does_not_reach_the_rows_before_it(isa: str) -> None:
    """It is behind them in the same step: hidden, but 0 * inf would be NaN."""

    def first_row(value: float, dtype: torch.dtype) -> torch.Tensor:
        qkv = torch.ones(2, 3 * 16)
        qkv[1, 2 * 16 + 3] = value
        cache = torch.zeros(1, 2, 1, kv_head_size(16, dtype), dtype=dtype)
        rotation = torch.ones(2, 8), torch.zeros(2, 8)
        q = rope_and_write(qkv, torch.arange(2, dtype=torch.int32), torch.arange(2), rotation, cache, 1)
        starts, two = np.array([0, 2], np.int32), np.array([2], np.int32)
        return paged_attention(q, cache, starts, two, np.zeros((1, 1), np.int32), scale=0.25)[0][0]

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8):
        assert torch.equal(first_row(1e6, dtype), first_row(1.0, dtype))


def test_the_slow_oracle_stores_float16_as_the_cache_does() -> None:
    oracle = ReferenceAttention(AttentionShape(1, 1, 1, 2, 1.0), torch.float16)
    stored = oracle._stored(torch.tensor([[[1e6, -7e4]], [[float("inf"), 2.0]]]))
    assert stored.tolist() == [[[65504.0, -65504.0]], [[float("inf"), 2.0]]]


def test_int8_entries_are_within_half_a_step_and_what_is_not_finite_stays_visible() -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = round_to_bytes(x)
    assert bool(((codes * scales - x).abs() <= scales * 0.501).all())
    assert codes.abs().amax().item() == 127
    x[0, 0, 7], x[1, 1, 3] = float("inf"), float("nan")
    is_nan = round_to_bytes(x)[1].isnan()[..., 0]
    assert is_nan.nonzero().tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_native_int8_entry_that_is_not_finite_gives_nan_not_a_number(isa: str, bad: float) -> None:
    qkv = torch.ones(1, 3 * 16)
    qkv[0, 2 * 16 + 3] = bad  # of the value
    cache = torch.zeros(1, 2, 1, kv_head_size(16, torch.int8), dtype=torch.int8)
    tables_of_one = torch.ones(1, 8), torch.zeros(1, 8)
    q = rope_and_write(
        qkv, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), tables_of_one, cache, 1
    )
    starts, one = np.array([0, 1], np.int32), np.array([1], np.int32)
    out, _ = paged_attention(q, cache, starts, one, np.zeros((1, 1), np.int32), scale=0.25)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_reads_what_the_reference_reads(isa: str, dtype: torch.dtype) -> None:
    lengths = [513, 700, 1300]
    sketched = make_sketched(lengths, dtype)
    selection = uniform(0.1, len(lengths), SelectionRule(min_kept_blocks=4, recent_blocks=1))
    result = sketched.run(selection)
    for b, length in enumerate(lengths):
        for head in range(NUM_KV_HEADS):
            assert result.missing[b, head] == pytest.approx(sketched.choice(selection, b).missing[head], abs=2e-3)
        num_blocks = -(-length // BLOCK_SIZE)
        group = result.block_mass.shape[1] // NUM_KV_HEADS
        kept = tuple(
            tuple(
                (result.block_mass[b, head * group : (head + 1) * group, :num_blocks].amax(0) > 0)
                .nonzero()[:, 0]
                .tolist()
            )
            for head in range(NUM_KV_HEADS)
        )
        assert sum(map(len, kept)) < NUM_KV_HEADS * num_blocks
        out, _ = sketched.attend(b, kept)
        torch.testing.assert_close(result.output[b], out, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.int8, 0.1)])
def test_decoders_with_narrow_caches_agree_with_each_other_and_with_a_wide_one(
    isa: str, dtype: torch.dtype, tolerance: float
) -> None:
    batch = make_batch([(prompt(40), 0, [1, 2, 3]), (prompt(5, seed=1), 0, [4])])

    def run(kind: type[NativeDecoder] | type[TorchDecoder], kv_dtype: torch.dtype) -> torch.Tensor:
        decoder = kind(BASE, RandomWeights(BASE), torch.float32, kv_dtype, tables(BASE))
        return decoder.logits(decoder.forward(batch, decoder.allocate_cache(5)))

    native, torched, wide = run(NativeDecoder, dtype), run(TorchDecoder, dtype), run(NativeDecoder, torch.float32)
    torch.testing.assert_close(native, torched, rtol=0, atol=tolerance / 2)
    assert 0.0 < (native - wide).abs().max().item() < tolerance * wide.abs().max().item()


def test_caches_take_what_their_layout_says() -> None:
    decoder = NativeDecoder(BASE, RandomWeights(BASE), torch.float32, torch.int8, tables(BASE), sketch_bits=2)
    plain = NativeDecoder(BASE, RandomWeights(BASE), torch.float32, torch.float16, tables(BASE))
    heads = BASE.num_layers * BASE.num_kv_heads
    assert plain.kv_bytes_per_block() == heads * 2 * 16 * 32 * 2
    assert decoder.kv_bytes_per_block() == heads * (2 * 16 * (32 + 4) + 256)
    assert decoder.allocate_cache(5).num_bytes == 5 * decoder.kv_bytes_per_block()
    assert kv_head_bytes(64, torch.int8) == 1088
    backend = NativeAttention(AttentionShape(2, 6, 2, 32, 1.0), torch.int8)
    assert backend.bytes_per_block() == heads * 2 * 16 * (32 + 4)
    assert sum(layer.nbytes for layer in backend.allocate(3).layers) == 3 * backend.bytes_per_block()


def test_int8_needs_a_head_dim_of_whole_groups() -> None:
    cache = torch.zeros(2, 2, 1, kv_head_size(18, torch.int8), dtype=torch.int8)
    starts, one = np.array([0, 1], np.int32), np.array([1], np.int32)
    with pytest.raises(ValueError, match="kv must be"):
        paged_attention(torch.zeros(1, 1, 18), cache, starts, one, np.ones((1, 1), np.int32), scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_what_is_gathered(dtype: torch.dtype) -> None:
    cache = torch.zeros(4, 2, 3, kv_head_size(20, dtype), dtype=dtype)
    keys, values = torch.randn(2, 35, 3, 20, generator=torch.Generator().manual_seed(1)).unbind(0)
    table = np.array([3, 1, 2], np.int32)
    write_kv(cache, keys, values, slot_mapping(np.array([0, 35], np.int32), np.array([35], np.int32), table[None]))
    found_keys, found_values = gather_kv(cache, table, 35)
    assert head_dim_of(cache) == 20
    tolerance = 2e-3 if dtype == torch.float16 else 0.02
    torch.testing.assert_close(found_keys.float(), keys, rtol=0, atol=tolerance)
    torch.testing.assert_close(found_values.float(), values, rtol=0, atol=tolerance)
