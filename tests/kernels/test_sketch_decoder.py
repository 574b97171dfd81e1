"""Skipping inside whole decoders: off is the plain engine, on it follows the torch decoder; sketches follow blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from etserve.attention.batch import StepBatch
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.models.decoder import TorchDecoder
from etserve.models.native import NativeDecoder, NativeKV
from etserve.models.types import KVCache
from tests.kernels.decoders import BASE, RandomWeights, make_batch, prompt, tables
from tests.kernels.isas import isa, num_threads

__all__ = ["isa", "num_threads"]
F32, BF16 = torch.float32, torch.bfloat16
SPEC = replace(BASE, num_layers=3, max_position=1024)
RULE = SelectionRule(dense_layers=1, min_context_tokens=256)
LENGTH = 330
BLOCKS = list(range(40, 40 - 21, -1))


def make_native(kv_dtype: torch.dtype = F32, bits: int = 2) -> NativeDecoder:
    return NativeDecoder(SPEC, RandomWeights(SPEC), kv_dtype, kv_dtype, tables(SPEC), sketch_bits=bits)


def filled(decoder: NativeDecoder | TorchDecoder, cuts: tuple[int, ...] = ()) -> KVCache:
    """A cache with LENGTH tokens, written in chunks that end at the cuts."""
    cache, tokens = decoder.allocate_cache(48), prompt(LENGTH)
    for begin, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        decoder.forward(make_batch([(tokens[begin:end], begin, BLOCKS)], []), cache)
    return cache


def step(selection: BlockSelection | None = None, **fields: object) -> StepBatch:
    """One more token of the sequence, and a mate of one block."""
    batch = make_batch([([5], LENGTH, BLOCKS), (prompt(3, 9), 0, [45])])
    return replace(batch, selection=selection, **fields)  # type: ignore[arg-type]


def selection(epsilon: float, rule: SelectionRule = RULE) -> BlockSelection:
    return BlockSelection(np.full(2, epsilon, np.float32), rule=rule)


def logits(decoder: NativeDecoder | TorchDecoder, batch: StepBatch, cache: KVCache) -> torch.Tensor:
    return decoder.logits(decoder.forward(batch, cache)).clone()


@pytest.mark.parametrize("kv_dtype", [F32, BF16])
def test_without_skipping_sketches_change_no_bit(isa: str, kv_dtype: torch.dtype) -> None:
    plain, sketching = make_native(kv_dtype, 0), make_native(kv_dtype, 2)
    expected = logits(plain, step(), filled(plain))
    assert torch.equal(logits(sketching, step(), filled(sketching)), expected)
    assert sketching.attention_counts is None
    assert torch.equal(logits(sketching, step(selection(0.0)), filled(sketching)), expected)
    assert sketching.attention_counts is not None
    assert (sketching.attention_counts.read_blocks == sketching.attention_counts.total_blocks).all()
    assert not sketching.attention_counts.missing_mass.any()


def test_without_sketches_none_are_kept_and_none_can_be_used() -> None:
    decoder = make_native(bits=0)
    cache = filled(decoder)
    assert isinstance(cache, NativeKV)
    assert cache.sketches is None
    with pytest.raises(ValueError, match="without sketches"):
        decoder.forward(step(selection(0.1)), cache)
    oracle = TorchDecoder(SPEC, RandomWeights(SPEC), F32, F32, tables(SPEC))
    with pytest.raises(ValueError, match="without sketches"):
        oracle.forward(step(selection(0.1)), filled(oracle))


def test_blocks_cost_their_sketches() -> None:
    plain, sketching = make_native(bits=0), make_native(bits=2)
    heads = SPEC.num_layers * SPEC.num_kv_heads
    assert sketching.kv_bytes_per_block() - plain.kv_bytes_per_block() == heads * 256  # 128 + 64 + 32, to cache lines
    cache = sketching.allocate_cache(5)
    assert isinstance(cache, NativeKV)
    assert cache.sketches is not None
    assert cache.tensor.nbytes + cache.sketches.nbytes == cache.num_bytes == 5 * sketching.kv_bytes_per_block()


@pytest.mark.parametrize("kv_dtype", [F32, BF16])
def test_sketches_are_the_same_however_the_prompt_was_cut(isa: str, num_threads: int, kv_dtype: torch.dtype) -> None:
    decoder = make_native(kv_dtype)
    whole, cut = filled(decoder), filled(decoder, (1, 15, 17, 32, 300, 319))
    assert isinstance(whole, NativeKV)
    assert isinstance(cut, NativeKV)
    assert whole.sketches is not None
    assert cut.sketches is not None
    assert torch.equal(whole.sketches, cut.sketches)
    assert whole.sketches[:, BLOCKS[:20]].flatten(2).any(2).all()
    assert not whole.sketches[:, BLOCKS[20]].any()  # not full


@pytest.mark.parametrize("bits", [1, 2])
def test_a_skipping_step_follows_the_torch_decoder(isa: str, num_threads: int, bits: int) -> None:
    decoder = make_native(bits=bits)
    oracle = TorchDecoder(SPEC, RandomWeights(SPEC), F32, F32, tables(SPEC), sketch_bits=bits)
    batch = step(selection(0.3), wants_block_mass=True)
    cache, oracle_cache = filled(decoder), filled(oracle)
    found, expected = logits(decoder, batch, cache), logits(oracle, batch, oracle_cache)
    counts, truth = decoder.attention_counts, oracle.attention_counts
    assert counts is not None
    assert truth is not None
    assert counts.total_blocks.tolist() == truth.total_blocks.tolist() == [21 * 6, 6]
    assert counts.read_blocks[1] == 6
    assert counts.read_blocks[0] < 21 * 6 - 8
    assert abs(int(counts.read_blocks[0] - truth.read_blocks[0])) <= 2  # a mass at the cut may fall to either side
    np.testing.assert_allclose(counts.missing_mass, truth.missing_mass, atol=0.02)
    assert 0.05 < counts.missing_mass[0] <= 0.3
    assert counts.block_mass is not None
    np.testing.assert_allclose(counts.block_mass, truth.block_mass, atol=0.02)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.15)
    assert not torch.equal(found[0], logits(decoder, step(), cache)[0])
    if counts.read_blocks[0] == truth.read_blocks[0]:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_skipping_sequence_is_the_same_alone_and_among_others(isa: str, num_threads: int) -> None:
    decoder = make_native(BF16)
    cache = filled(decoder)
    together = logits(decoder, step(selection(0.2)), cache)
    alone = replace(
        make_batch([([5], LENGTH, BLOCKS)]), selection=BlockSelection(np.full(1, 0.2, np.float32), rule=RULE)
    )
    assert torch.equal(logits(decoder, alone, cache)[0], together[0])


def test_placebos_skip_without_sketches_as_the_torch_decoder_does(isa: str) -> None:
    decoder = make_native(bits=0)
    oracle = TorchDecoder(SPEC, RandomWeights(SPEC), F32, F32, tables(SPEC))
    for selector in ("random", "recency"):
        rule = replace(RULE, selector=selector, share=0.5, seed=3)
        batch = step(selection(0.1, rule))
        torch.testing.assert_close(
            logits(decoder, batch, filled(decoder)), logits(oracle, batch, filled(oracle)), rtol=1e-4, atol=1e-4
        )
        counts = decoder.attention_counts
        assert counts is not None
        assert counts.read_blocks.tolist() == [2 * 21 + 4 * 11, 6]
        assert np.isnan(counts.missing_mass[0])


def test_exact_masses_come_without_a_selection_too() -> None:
    decoder = make_native(bits=0)
    logits(decoder, step(wants_block_mass=True), filled(decoder))
    counts = decoder.attention_counts
    assert counts is not None
    assert counts.block_mass is not None
    assert (counts.block_mass[0] > 0).all()
    assert counts.block_mass[1].tolist() == [pytest.approx(1.0), *[0.0] * 20]


def test_a_selection_that_does_not_fit_is_refused() -> None:
    decoder = make_native()
    with pytest.raises(ValueError, match="epsilon must be"):
        decoder.forward(step(BlockSelection(np.full(3, 0.1, np.float32))), filled(decoder))
    spec = replace(SPEC, sliding_window=20)
    sliding = NativeDecoder(spec, RandomWeights(spec), F32, F32, tables(spec), sketch_bits=2)
    with pytest.raises(ValueError, match="sliding window"):
        sliding.forward(step(selection(0.1)), sliding.allocate_cache(48))
