from dataclasses import replace

import numpy as np
import pytest
import torch

from etserve.attention.batch import StepBatch
from etserve.models.decoder import TorchDecoder
from etserve.models.native import NativeDecoder, NativeKV
from etserve.models.types import DecoderSpec
from tests.kernels.decoders import BASE, RandomWeights, chunked_among_others, make_batch, prompt, tables
from tests.kernels.isas import isa, num_threads

__all__ = ["isa", "num_threads"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SPECS = {
    "tied head": replace(BASE, tied_head=True),
    "one layer": replace(BASE, num_layers=1),
    "biases": replace(BASE, attention_bias=True, output_bias=True, mlp_bias=True),
    "q and k norms": replace(BASE, qk_norm=True),
    "sliding window": replace(BASE, sliding_window=11),
    "group of 7": replace(BASE, num_heads=7, num_kv_heads=1),
    "no groups": replace(BASE, num_heads=3, num_kv_heads=3),
    "head_dim 64": replace(BASE, head_dim=64),
    "head_dim 80": replace(BASE, head_dim=80),
    "head_dim 96": replace(BASE, head_dim=96),
    "head_dim 128": replace(BASE, head_dim=128),
    "head_dim 256": replace(BASE, head_dim=256, num_heads=2, num_kv_heads=1),
    "odd sizes": replace(BASE, hidden_size=45, intermediate_size=53, vocab_size=33),
    "sizes of 16": replace(BASE, hidden_size=64, intermediate_size=128, vocab_size=96),
}


def make_native(spec: DecoderSpec, dtype: torch.dtype = F32, kv_dtype: torch.dtype = F32) -> NativeDecoder:
    return NativeDecoder(spec, RandomWeights(spec), dtype, kv_dtype, tables(spec))


def prefill(decoder: NativeDecoder | TorchDecoder, batch: StepBatch, num_blocks: int = 12) -> torch.Tensor:
    return decoder.logits(decoder.forward(batch, decoder.allocate_cache(num_blocks))).clone()


@pytest.mark.parametrize("name", SPECS)
def test_logits_match_the_torch_decoder_in_f32(isa: str, name: str) -> None:
    spec = SPECS[name]
    oracle = TorchDecoder(spec, RandomWeights(spec), F32, F32, tables(spec))
    batch = make_batch([(prompt(37, 1, spec.vocab_size), 0, [3, 1, 7]), (prompt(5, 2, spec.vocab_size), 0, [2])])
    torch.testing.assert_close(prefill(make_native(spec), batch), prefill(oracle, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "kv_dtype", "tolerance"), [(BF16, BF16, 0.15), (F16, F32, 0.02), (BF16, F32, 0.15)])
def test_logits_of_narrow_weights_stay_near_the_f32_ones(
    isa: str, dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float
) -> None:
    batch = make_batch([(prompt(37, 1), 0, [3, 1, 7])])
    result, expected = prefill(make_native(BASE, dtype, kv_dtype), batch), prefill(make_native(BASE), batch)
    assert (result - expected).abs().max() < tolerance
    assert not torch.equal(result, expected)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F32, F32), (BF16, BF16), (F16, BF16)])
@pytest.mark.parametrize("name", ["tied head", "sliding window", "odd sizes"])
def test_a_token_is_the_same_alone_in_chunks_and_among_others(
    isa: str, num_threads: int, name: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    spec = SPECS[name]
    tokens, other = prompt(50, 1, spec.vocab_size), prompt(20, 2, spec.vocab_size)
    decoder = make_native(spec, dtype, kv_dtype)
    whole = prefill(decoder, make_batch([(tokens, 0, [1, 2, 3, 4])]))
    assert torch.equal(chunked_among_others(decoder, tokens, other), whole)


def test_only_the_rows_asked_for_come_back_and_unchanged(isa: str, num_threads: int) -> None:
    decoder, part = make_native(BASE, BF16, BF16), (prompt(30, 1), 0, [1, 2])
    whole = prefill(decoder, make_batch([part]))
    for rows in ([29], [0, 3, 17], []):
        some = prefill(decoder, make_batch([part], rows))
        assert torch.equal(some, whole[rows])


def test_a_step_without_logits_still_writes_its_entries(isa: str) -> None:
    decoder = make_native(BASE)
    silent, loud = decoder.allocate_cache(4), decoder.allocate_cache(4)
    decoder.forward(make_batch([(prompt(20), 0, [1, 2])], []), silent)
    decoder.forward(make_batch([(prompt(20), 0, [1, 2])]), loud)
    assert isinstance(silent, NativeKV)
    assert isinstance(loud, NativeKV)
    assert torch.equal(silent.tensor, loud.tensor)
    assert silent.tensor[:, 1].any()
    assert not silent.tensor[:, [0, 3]].any()


def test_memory_left_over_from_a_larger_step_changes_nothing(isa: str) -> None:
    spec = SPECS["odd sizes"]
    fresh, used = make_native(spec, BF16, BF16), make_native(spec, BF16, BF16)
    prefill(used, make_batch([(prompt(64, 3, spec.vocab_size), 0, [1, 2, 3, 4])]))
    batch = make_batch([(prompt(3, 4, spec.vocab_size), 0, [1])])
    assert torch.equal(prefill(used, batch), prefill(fresh, batch))


BAD = {
    "vocabulary": {"token_ids": np.array([1, 101], np.int32)},
    "position": {"positions": np.array([0, 2], np.int32)},
    "context length": {"context_lens": np.array([129], np.int32), "positions": np.array([127, 128], np.int32)},
    "block id": {"block_tables": np.array([[4]], np.int32)},
    "too short": {"context_lens": np.array([17], np.int32), "positions": np.array([15, 16], np.int32)},
    "query_start must run": {"query_start": np.array([0, 3], np.int32)},
    "logit_rows": {"logit_rows": np.array([1, 0], np.int32)},
    "fit together": {"context_lens": np.array([2, 2], np.int32)},
    "an empty step": {
        "token_ids": np.zeros(0, np.int32),
        "positions": np.zeros(0, np.int32),
        "query_start": np.zeros(1, np.int32),
        "context_lens": np.zeros(0, np.int32),
        "block_tables": np.zeros((0, 1), np.int32),
    },
}


@pytest.mark.parametrize("fault", BAD)
def test_a_step_that_points_out_of_range_is_refused_and_nothing_is_written(fault: str) -> None:
    decoder = make_native(BASE)
    cache = decoder.allocate_cache(4)
    batch = replace(make_batch([([1, 2], 0, [1])]), **BAD[fault])
    with pytest.raises(ValueError, match=fault):
        decoder.forward(batch, cache)
    assert isinstance(cache, NativeKV)
    assert not cache.tensor.any()


def test_arrays_of_another_type_are_refused() -> None:
    decoder = make_native(BASE)
    batch = make_batch([([1, 2], 0, [1])])
    with pytest.raises(TypeError):
        decoder.forward(replace(batch, token_ids=batch.token_ids.astype(np.int64)), decoder.allocate_cache(4))
    with pytest.raises(TypeError, match="another decoder"):
        decoder.forward(batch, TorchDecoder(BASE, RandomWeights(BASE), F32, F32, tables(BASE)).allocate_cache(4))


def test_the_decoder_counts_its_bytes() -> None:
    decoder = make_native(SPECS["tied head"], BF16, BF16)
    spec = decoder.spec
    cache = decoder.allocate_cache(5)
    assert decoder.kv_bytes_per_block() == spec.num_layers * 2 * 16 * spec.num_kv_heads * spec.head_dim * 2
    assert cache.num_bytes == 5 * decoder.kv_bytes_per_block()
    assert RandomWeights(spec).num_parameters * 2 <= decoder.weight_bytes < RandomWeights(spec).num_parameters * 2.4


@pytest.mark.parametrize(
    ("fault", "spec"),
    [("head_dim", replace(BASE, head_dim=8)), ("multiple", replace(BASE, num_heads=5))],
)
def test_shapes_without_a_kernel_are_refused_at_load(fault: str, spec: DecoderSpec) -> None:
    with pytest.raises(ValueError, match=fault):
        make_native(spec)


def test_evicted_blocks_are_left_out_and_positions_go_on(isa: str) -> None:
    """A table without blocks 1 and 2: the nine rows that follow see the rest where it stood."""
    tokens = prompt(70)
    decoders = (make_native(BASE), TorchDecoder(BASE, RandomWeights(BASE), F32, F32, tables(BASE)))
    rest = make_batch([(tokens[61:], 61 - 32, [7, 2, 5])])  # over the end of block 2
    holed = replace(rest, positions=rest.positions + 32)
    found = []
    for decoder in decoders:
        cache = decoder.allocate_cache(12)
        decoder.forward(make_batch([(tokens[:61], 0, [7, 3, 9, 2])]), cache)
        found.append(decoder.logits(decoder.forward(holed, cache)).clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    native = decoders[0]
    cache = native.allocate_cache(12)
    for shift in (-16, 8, 64 * 16):
        with pytest.raises(ValueError, match="does not fit its context"):
            native.forward(replace(rest, positions=(rest.positions + shift).astype(np.int32)), cache)
