"""Paged attention against its reference, and its promise that a row's bits depend on nothing but the row."""

import numpy as np
import pytest
import torch

from etserve.attention.backend import AttentionShape
from etserve.attention.batch import StepBatch
from etserve.attention.native import NativeAttention
from etserve.attention.reference import ReferenceAttention
from etserve.kernels import native
from etserve.kernels.attention import check_batch, paged_attention
from etserve.kernels.reference_attention import gather_kv, slot_mapping, write_kv
from tests.kernels.isas import isa, num_threads
from tests.kernels.paged import make_paged

__all__ = ["isa", "num_threads"]
LENGTHS = [1, 15, 16, 17, 511, 512, 513, 1300]
# New tokens of each: decode, small chunks, chunks that cross tiles and partitions.
PARTS = [(b, n - new, n) for b, (n, new) in enumerate(zip(LENGTHS, [1, 3, 16, 1, 1, 70, 13, 1], strict=True))]
DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2  # bf16: the weights are rounded too


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_block_masses_match_the_reference(isa: str, dtype: torch.dtype, group: int, window: int) -> None:
    paged = make_paged(LENGTHS, dtype, group=group, window=window)
    out, masses = paged.native_with_masses(PARTS)
    expected, expected_masses = paged.reference(PARTS)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance(dtype))
    torch.testing.assert_close(masses, expected_masses, rtol=0, atol=2e-6)
    torch.testing.assert_close(masses.sum(-1), torch.ones(masses.shape[:2]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 18, 32, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_dim_matches_the_reference(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    paged = make_paged(LENGTHS[:6], dtype, head_dim=head_dim)
    expected, _ = paged.reference(PARTS[:6])
    torch.testing.assert_close(paged.native(PARTS[:6]), expected, rtol=0, atol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_wider_than_a_tile_of_rows_matches_the_reference(isa: str, dtype: torch.dtype) -> None:
    paged = make_paged([40, 600], dtype, group=50, num_kv_heads=1, head_dim=32)
    parts = [(0, 30, 40), (1, 597, 600)]
    out, masses = paged.native_with_masses(parts)
    expected, expected_masses = paged.reference(parts)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance(dtype))
    torch.testing.assert_close(masses, expected_masses, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_in_a_chunk_in_the_whole_prompt_and_in_a_batch(
    isa: str, num_threads: int, dtype: torch.dtype, window: int
) -> None:
    paged = make_paged([1300, 600, 33], dtype, window=window)
    whole = paged.native([(0, 0, 1300)])
    positions = [0, 1, 15, 16, 127, 128, 511, 512, 513, 639, 1024, 1299]
    for position in positions:
        alone = paged.native([(0, position, position + 1)])
        assert torch.equal(alone[0], whole[position]), position
    chunks = torch.cat([paged.native([(0, begin, min(begin + 7, 1300))]) for begin in range(0, 1300, 7)])
    assert torch.equal(chunks, whole)
    batched = paged.native([(1, 590, 600), (2, 0, 33), (0, 1290, 1300), (0, 500, 520)])
    assert torch.equal(batched[43:53], whole[1290:])
    assert torch.equal(batched[53:], whole[500:520])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    paged = make_paged(LENGTHS, dtype)
    results = []
    for count in (1, 2, 3):
        native.set_num_threads(count)
        results.append(paged.native_with_masses(PARTS))
    native.set_num_threads(1)
    for out, masses in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(masses, results[0][1])


def test_what_lies_behind_the_context_does_not_leak_in(isa: str) -> None:
    paged = make_paged([37], torch.bfloat16)
    assert torch.isnan(paged.cache[paged.tables[0, 2]]).any()
    assert torch.isfinite(paged.native([(0, 36, 37)])).all()


def test_a_broken_sequence_does_not_touch_its_batch_mates(isa: str, num_threads: int) -> None:
    paged = make_paged([600, 600], torch.bfloat16)
    paged.queries[0][599] = float("nan")
    out = paged.native([(0, 599, 600), (1, 599, 600)])
    assert torch.isnan(out[0]).all()
    assert torch.equal(out[1:], paged.native([(1, 599, 600)]))


def test_scores_far_apart_do_not_overflow(isa: str) -> None:
    paged = make_paged([700], torch.float32)
    paged.queries[0].mul_(1000.0)
    expected, _ = paged.reference([(0, 690, 700)])
    torch.testing.assert_close(paged.native([(0, 690, 700)]), expected, rtol=0, atol=1e-3)


def test_output_can_be_bf16(isa: str) -> None:
    paged = make_paged([100], torch.bfloat16)
    q, *rest = paged.batch([(0, 90, 100)])
    out, _ = paged_attention(q, paged.cache, *rest, scale=paged.scale, out_dtype=torch.bfloat16)
    assert torch.equal(out, paged.native([(0, 90, 100)]).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_gathered_again(dtype: torch.dtype) -> None:
    tables = np.array([[3, 1, 2]], np.int32)
    cache = torch.zeros(4, 2, 2, 16 * 32, dtype=dtype)
    keys, values = torch.randn(2, 40, 2, 32)
    write_kv(cache, keys, values, slot_mapping(np.array([0, 40], np.int32), np.array([40], np.int32), tables))
    got_keys, got_values = gather_kv(cache, tables[0], 40)
    assert torch.equal(got_keys, keys.to(dtype))
    assert torch.equal(got_values, values.to(dtype))
    assert not cache[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_native_backend_agrees_with_the_reference_backend(dtype: torch.dtype) -> None:
    shape = AttentionShape(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32, scale=32**-0.5, window=20)
    none = np.zeros(0, np.int32)
    outputs = []
    for backend in (NativeAttention(shape, dtype), ReferenceAttention(shape, dtype)):
        cache = backend.allocate(6)
        assert cache.num_bytes == sum(layer.nbytes for layer in cache.layers)
        random = torch.Generator().manual_seed(0)
        for start, end in ((0, 30), (30, 31), (31, 48)):
            n = end - start
            batch = StepBatch(
                token_ids=none,
                positions=np.arange(start, end, dtype=np.int32),
                query_start=np.array([0, n], np.int32),
                context_lens=np.array([end], np.int32),
                block_tables=np.array([[5, 2, 4]], np.int32),
                logit_rows=none,
            )
            keys, values = (torch.randn(n, 2, 32, generator=random) for _ in range(2))
            q = torch.randn(n, 6, 32, generator=random)
            backend.write(cache, 1, keys, values, batch)
            outputs.append(backend.attend(cache, 1, q, batch))
    for native_out, reference_out in zip(outputs[:3], outputs[3:], strict=True):
        torch.testing.assert_close(native_out, reference_out, rtol=0, atol=tolerance(dtype) * 2)


def arrays(**changes: list[object]) -> dict[str, np.ndarray]:
    good: dict[str, list[object]] = {"query_start": [0, 2], "context_lens": [20], "block_tables": [[1, 2]]}
    return {name: np.array(value, np.int32) for name, value in (good | changes).items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"query_start": [0, 3]},
        {"query_start": [1, 2]},
        {"query_start": [0, 2, 2]},
        {"context_lens": [1]},
        {"context_lens": [33]},
        {"block_tables": [[1, 4]]},
        {"block_tables": [[-1, 1]]},
        {"block_tables": [[[1, 2]]]},
    ],
)
def test_a_batch_that_would_read_out_of_range_is_refused(changes: dict[str, list[object]]) -> None:
    check_batch(**arrays(), num_tokens=2, num_blocks=4)
    with pytest.raises(ValueError, match=r"."):
        check_batch(**arrays(**changes), num_tokens=2, num_blocks=4)


@pytest.mark.parametrize(
    ("q", "kv", "named"),
    [
        (torch.zeros(2, 6, 64, dtype=torch.bfloat16), torch.zeros(4, 2, 2, 1024), "q must"),
        (torch.zeros(2, 6, 64), torch.zeros(4, 2, 2, 1024, dtype=torch.float64), "kv must"),
        (torch.zeros(2, 6, 64), torch.zeros(4, 2, 2, 512), "kv must"),
        (torch.zeros(2, 6, 64), torch.zeros(4, 2, 4, 1024), "divide"),
        (torch.zeros(2, 6, 63), torch.zeros(4, 2, 2, 16 * 63), "head_dim"),
        (torch.zeros(2, 64, 6).transpose(1, 2), torch.zeros(4, 2, 2, 1024), "q must"),
    ],
)
def test_wrong_tensors_are_refused(q: torch.Tensor, kv: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        paged_attention(q, kv, *arrays().values(), scale=1.0)
