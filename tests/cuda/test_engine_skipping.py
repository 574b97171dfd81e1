"""Skipped blocks and block masses of the CUDA decoder, emulated, beside the native decoder's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from etserve.attention.batch import StepBatch
from etserve.config import ControlConfig
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.models.types import Decoder
from tests.cuda.emulated import emulated_engine, load_emulated
from tests.engine.helpers import load_unit, make_engine, run
from tests.engine.test_skipping import kept, long_request


def settings(**control: Any) -> dict[str, Any]:
    law = ControlConfig(**{"pruning": "on", "epsilon": 0.3, "epsilon_swing": 0.0, "watchdog_steps": 5, **control})
    return {"control": law, "pruning_sketch_bits": 2, "max_model_len": 1600}


@pytest.mark.parametrize("control", [{}, {"prune_selector": "random", "prune_share": 0.5}], ids=str)
def test_the_engine_skips_as_on_the_cpu(emulator: CudaKernels, control: dict[str, Any]) -> None:
    wanted = [long_request(max_tokens=12), long_request("b", "The man was ", max_tokens=12, seed=5)]
    expected = run(make_engine(**settings(**control)), wanted)
    found = run(emulated_engine(emulator, **settings(**control)), wanted)
    for key, output in expected.items():
        assert found[key].token_ids == output.token_ids
        assert kept(found[key]) == pytest.approx(kept(output), abs=0.03)
    assert min(kept(found["a", 0])) < 0.9


def mixed_batch(lengths: list[int], counts: list[int], width: int) -> StepBatch:
    """Each sequence's last tokens, over blocks of its own."""
    tables = np.arange(1, len(lengths) * width + 1, dtype=np.int32).reshape(len(lengths), width)
    start = np.cumsum([0, *counts]).astype(np.int32)
    positions = np.concatenate([np.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)]).astype(np.int32)
    tokens = (positions * 7 + 3) % 250
    return StepBatch(tokens.astype(np.int32), positions, start, np.array(lengths, np.int32), tables, start[1:] - 1)


def run_steps(decoder: Decoder, batches: list[StepBatch]) -> torch.Tensor:
    cache = decoder.allocate_cache(1 + max(int(batch.block_tables.max()) for batch in batches))
    for batch in batches:
        hidden = decoder.forward(batch, cache)
    return hidden


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_masses_and_counts_of_a_mixed_step_are_those_of_the_native_decoder(
    emulator: CudaKernels, epsilon: float
) -> None:
    prompts = mixed_batch([560, 30, 40], [560, 30, 40], 36)
    rule = SelectionRule(min_kept_blocks=4, min_context_tokens=32)
    last = replace(
        mixed_batch([561, 38, 41], [1, 8, 1], 36),
        selection=BlockSelection(np.full(3, epsilon, np.float32), rule=rule),
        wants_block_mass=True,
    )
    native, device = load_unit("native", sketch_bits=2).decoder, load_emulated(emulator, sketch_bits=2).decoder
    expected, found = run_steps(native, [prompts, last]), run_steps(device, [prompts, last])
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-2 if epsilon else 2e-3)
    mine, theirs = device.attention_counts, native.attention_counts
    assert mine is not None
    assert theirs is not None
    assert mine.total_blocks.tolist() == theirs.total_blocks.tolist()
    assert mine.read_blocks.tolist() == pytest.approx(theirs.read_blocks.tolist(), abs=4)
    assert mine.missing_mass == pytest.approx(theirs.missing_mass, abs=5e-3)
    assert mine.block_mass == pytest.approx(theirs.block_mass, abs=1e-2)
    assert (mine.read_blocks < mine.total_blocks).tolist() == [epsilon > 0.0, False, False]


def test_a_block_keeps_its_sketch_when_it_is_shared(emulator: CudaKernels) -> None:
    """Bytes of a block: keys, values and sketch of every layer and KV head."""
    plain, sketched = load_emulated(emulator).decoder, load_emulated(emulator, sketch_bits=2).decoder
    spec = sketched.spec
    size = 16 * 8 + 2 * 32 + 2 * 16  # codes, mean and scales of 32 dimensions
    assert sketched.kv_bytes_per_block() - plain.kv_bytes_per_block() == spec.num_layers * spec.num_kv_heads * size
    assert sketched.allocate_cache(3).num_bytes == 3 * sketched.kv_bytes_per_block()
