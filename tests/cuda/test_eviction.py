"""Eviction on the device against the law in plain Python."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from etserve.control.eviction import Block, EvictionConfig, MassAverage, choose_evictions
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda_eviction import BlockMemory, HeldBlocks, evict, fold_mass

MAX_BLOCKS, POOL = 700, 2000
CONFIG = EvictionConfig(min_kept_blocks=5)


def make_held(held: list[int], lengths: list[int], seed: int) -> tuple[HeldBlocks, BlockMemory]:
    """Sequences that have lost blocks already; some blocks tied, protected, shared, cached or without a score."""
    random = np.random.default_rng(seed)
    rows = (len(held), MAX_BLOCKS)
    ids = random.permutation(POOL)[: sum(held)].astype(np.int32)
    tables, index = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for b, own in enumerate(np.split(ids, np.cumsum(held)[:-1])):
        tables[b, : held[b]] = own
        index[b, : held[b]] = np.sort(random.permutation(lengths[b])[: held[b]])
    weight = np.where(random.random(rows) < 0.05, 0.0, 0.5).astype(np.float32)
    weighted = (random.integers(1, 40, rows) / 64).astype(np.float32) * weight  # few values: ties
    surprisal = np.where(random.random(rows) < 0.05, math.nan, random.integers(1, 4, rows)).astype(np.float32)
    protected = (random.random(rows) < 0.1).astype(np.uint8)
    counts = [np.array(x, np.int32) for x in (held, lengths)]
    arrays = (tables, index, weighted, weight, surprisal, protected, *counts)
    refs, cached = 1 + (random.random(POOL) < 0.1).astype(np.int32), (random.random(POOL) < 0.1).astype(np.uint8)
    memory = (refs.astype(np.int32), cached, np.full(POOL, -1, np.int32), np.array([3], np.int32))
    return HeldBlocks(*map(torch.from_numpy, arrays)), BlockMemory(*map(torch.from_numpy, memory))


def blocks_of(held: HeldBlocks, memory: BlockMemory, b: int) -> list[Block]:
    return [
        Block(
            int(held.block_index[b, i]),
            MassAverage(float(held.mass_weighted[b, i]), float(held.mass_weight[b, i])),
            float(held.surprisal[b, i]),
            bool(held.is_protected[b, i]),
            int(memory.num_refs[held.block_tables[b, i]]),
            bool(memory.is_cached[held.block_tables[b, i]]),
        )
        for i in range(int(held.num_held[b]))
    ]


def moved(values: HeldBlocks | BlockMemory, device: str) -> list[torch.Tensor]:
    return [getattr(values, field.name).clone().to(device) for field in fields(values)]


@pytest.mark.parametrize("seed", range(3))
def test_the_law_chooses_what_goes_and_the_rest_moves_up(kernels: CudaKernels, seed: int) -> None:
    held, memory = make_held([1, 40, 257, 600], [1, 60, 300, 700], seed)
    wanted = [1, 4, 1000, 37]
    on_device, pool = HeldBlocks(*moved(held, kernels.device_type)), BlockMemory(*moved(memory, kernels.device_type))
    unknown = torch.full((4, MAX_BLOCKS), math.nan, device=kernels.device_type)
    given = torch.tensor(wanted, dtype=torch.int32, device=kernels.device_type)
    evicted, counts = evict(kernels, CONFIG, unknown, on_device, pool, given)
    freed: list[int] = []
    for b in range(4):
        blocks, length = blocks_of(held, memory, b), int(held.num_sequence_blocks[b])
        gone = choose_evictions(blocks, length, wanted[b], CONFIG)
        place = {block.index: i for i, block in enumerate(blocks)}
        ids = [int(held.block_tables[b, place[index]]) for index in gone]
        assert evicted[b, : int(counts[b])].tolist() == ids
        freed += ids
        stays = [i for i, block in enumerate(blocks) if block.index not in set(gone)]
        assert int(on_device.num_held[b]) == len(stays)
        for field in fields(held)[:6]:
            before, after = getattr(held, field.name)[b], getattr(on_device, field.name)[b].cpu()
            torch.testing.assert_close(after[: len(stays)], before[stays], rtol=0, atol=0, equal_nan=True)
            assert not after[len(stays) : len(blocks)].any()
    assert len(freed) > 40
    assert pool.free_list[3 : 3 + len(freed)].tolist() == freed
    assert pool.num_free.item() == 3 + len(freed)


def test_masses_are_averaged_and_nothing_goes_where_nothing_is_wanted(kernels: CudaKernels) -> None:
    held, memory = make_held([30, 7], [30, 9], 1)
    step = torch.rand(2, MAX_BLOCKS, generator=torch.Generator().manual_seed(0))
    step[0, 3], step[1, 2] = math.nan, math.inf
    on_device, pool = HeldBlocks(*moved(held, kernels.device_type)), BlockMemory(*moved(memory, kernels.device_type))
    given, none = step.clone().to(kernels.device_type), torch.zeros(2, dtype=torch.int32, device=kernels.device_type)
    _, counts = evict(kernels, CONFIG, given, on_device, pool, none)
    assert counts.tolist() == [0, 0]
    assert pool.num_free.item() == 3
    assert torch.equal(on_device.block_tables.cpu(), held.block_tables)
    for b in range(2):
        for i, block in enumerate(blocks_of(held, memory, b)):
            expected = block.mass.observe(float(step[b, i]), CONFIG.mass_decay)
            assert on_device.mass_weighted[b, i].item() == pytest.approx(expected.weighted, rel=1e-6)
            assert on_device.mass_weight[b, i].item() == pytest.approx(expected.weight, rel=1e-6)
        assert not given[b, : int(held.num_held[b])].any()


def test_the_largest_mass_over_heads_and_layers_is_kept_and_unknown_stays_unknown(kernels: CudaKernels) -> None:
    layers = torch.rand(3, 2, 5, 301, generator=torch.Generator().manual_seed(2))
    layers[1, 0, 2, 7] = math.nan
    step = torch.zeros(2, 301, device=kernels.device_type)
    for layer in layers:
        fold_mass(kernels, layer.clone().to(kernels.device_type), step)
    torch.testing.assert_close(step.cpu(), layers.amax((0, 2)), rtol=0, atol=0, equal_nan=True)


def test_arrays_of_other_shapes_are_refused(emulator: CudaKernels) -> None:
    held, memory = make_held([4], [4], 0)
    with pytest.raises(ValueError, match="step_mass"):
        evict(emulator, CONFIG, torch.zeros(1, 3), held, memory, torch.zeros(1, dtype=torch.int32))
