"""Sketches, the choice of blocks and attention over what is left, against the same references as the CPU kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from etserve.config import BLOCK_SIZE
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.cuda_attention import DecodeOutput, decode_attention
from etserve.kernels.cuda_selection import (
    DeviceSelection,
    DeviceSketches,
    SelectedBlocks,
    allocate_sketches,
    select_blocks,
    sketch_bytes,
    write_sketches,
)
from etserve.kernels.reference_attention import masked_attention
from etserve.kernels.reference_selection import (
    RowChoice,
    choose_blocks,
    choose_for_row,
    estimated_log_masses,
    placebo_blocks,
    rounded_group_masses,
    set_aside,
)
from etserve.kernels.selection import BlockSelection, SelectionRule
from tests.cuda.test_attention import TOLERANCE, Paged, make_paged

NUM_KV_HEADS = 2
LENGTHS = [511, 512, 700, 1023]
RULE = SelectionRule()


@dataclass(frozen=True)
class Sketched:
    """Decode rows whose queries are sharp enough that some blocks hardly matter."""

    kernels: CudaKernels
    paged: Paged  # on the kernels' device
    sketches: DeviceSketches
    bits: int

    @property
    def scale(self) -> float:
        return float(self.paged.q.shape[2] ** -0.5)

    def keys(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        length, tables = int(self.paged.lengths[sequence]), self.paged.tables[sequence].long()
        blocks = self.paged.cache[tables[: -(-length // BLOCK_SIZE)]]
        keys, values = (blocks[:, i].transpose(1, 2).flatten(0, 1)[:length].cpu() for i in (0, 1))
        return keys, values

    def select(self, epsilon: Sequence[float], rule: SelectionRule = RULE, protected: Sequence[int] = ()) -> "Result":
        device = self.paged.q.device
        marks = torch.zeros(self.paged.tables.shape, dtype=torch.uint8, device=device)
        marks[:, list(protected)] = 1
        wanted = DeviceSelection(torch.tensor(epsilon, device=device), marks if protected else None, rule)
        batch = (self.kernels, self.paged.q, self.paged.cache, self.paged.tables, self.paged.lengths)
        selected = select_blocks(
            *batch,
            scale=self.scale,
            sketches=self.sketches if rule.selector == "sketch" else None,
            selection=wanted,
            seed=rule.seed,
            want_estimates=True,
        )
        return Result(selected, decode_attention(*batch, scale=self.scale, selected=selected, want_block_mass=True))


@dataclass(frozen=True)
class Result:
    """What was chosen, and the attention over it."""

    selected: SelectedBlocks
    decoded: DecodeOutput

    def kept(self, sequence: int, head: int) -> tuple[int, ...]:
        count = int(self.selected.num_kept[sequence, head])
        return tuple(self.selected.kept[sequence, head, :count].tolist())

    def masses(self, sequence: int, num_blocks: int) -> list[list[float]]:
        assert self.selected.estimated_mass is not None
        found: list[list[float]] = self.selected.estimated_mass[sequence, :, :num_blocks].double().tolist()
        return found


def make_sketched(
    kernels: CudaKernels,
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    dim: int = 64,
    group: int = 3,
    bits: int = 2,
    sharpness: float = 1.5,
) -> Sketched:
    paged, device = make_paged(lengths, group, NUM_KV_HEADS, dim, dtype), kernels.device_type
    moved = [t.to(device) for t in (paged.q * sharpness, paged.cache, paged.tables, paged.lengths)]
    sketches = allocate_sketches(kernels, len(paged.cache), NUM_KV_HEADS, dim, bits)
    ends = [paged.tables[b, : n // BLOCK_SIZE].long() * BLOCK_SIZE + BLOCK_SIZE - 1 for b, n in enumerate(lengths)]
    slots = torch.cat([*ends, torch.tensor([-1, BLOCK_SIZE + 3])])  # two that fill nothing
    write_sketches(kernels, moved[1], slots.to(device), sketches)
    return Sketched(kernels, Paged(*moved), sketches, bits)


def attend_to(sketched: Sketched, b: int, kept: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [H, D] and masses [H, N] of reading only the kept blocks of each KV head, by the reference."""
    keys, values = sketched.keys(b)
    row = sketched.paged.q[b, None].cpu().double()
    skipped = RowChoice(kept, ()).skipped(len(keys))
    out, weights = masked_attention(row, keys.double(), values.double(), sketched.scale, skipped=skipped)
    padded = torch.nn.functional.pad(weights[0], (0, -len(keys) % BLOCK_SIZE))
    return out[0], padded.view(len(padded), -1, BLOCK_SIZE).sum(-1)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize(("dim", "group"), [(24, 3), (32, 1), (72, 9), (64, 3), (128, 5), (256, 2)])
def test_estimated_masses_match_the_reference(kernels: CudaKernels, dim: int, group: int, bits: int) -> None:
    sketched = make_sketched(kernels, [512, 530], dim=dim, group=group, bits=bits)
    result = sketched.select([0.1, 0.1])
    for b in range(2):
        logs = estimated_log_masses(sketched.paged.q[b].cpu(), sketched.keys(b)[0], sketched.scale, bits)
        expected = torch.tensor(rounded_group_masses(logs, NUM_KV_HEADS))
        found = torch.tensor(result.masses(b, expected.shape[1]), dtype=torch.float32)
        # A coordinate at a threshold may fall to either side: one code of thousands.
        torch.testing.assert_close(found, expected, rtol=4e-2, atol=2e-6)
        assert ((found - expected).abs() / expected.clamp_min(1e-6)).mean() < 4e-3


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_what_is_kept_is_what_the_law_keeps_and_attention_reads_that(kernels: CudaKernels, dtype: torch.dtype) -> None:
    sketched, skipping = make_sketched(kernels, LENGTHS, dtype), 0
    result = sketched.select([0.1, 0.05, 0.2, 0.3])
    for b, (length, epsilon) in enumerate(zip(LENGTHS, (0.1, 0.05, 0.2, 0.3), strict=True)):
        num_blocks = -(-length // BLOCK_SIZE)
        kept = tuple(result.kept(b, head) for head in range(NUM_KV_HEADS))
        if length < RULE.min_context_tokens:
            assert kept == (tuple(range(num_blocks)),) * NUM_KV_HEADS
            continue
        for head, masses in enumerate(result.masses(b, num_blocks)):
            assert kept[head] == choose_blocks(RULE, masses, float(np.float32(epsilon)), [])
            missing = sum(set_aside(masses, kept[head]))
            assert float(result.selected.missing[b, head]) == pytest.approx(missing, abs=1e-6)
        out, exact = attend_to(sketched, b, kept)
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(result.decoded.out[b].cpu().double(), out, rtol=bound, atol=bound)
        assert result.decoded.block_mass is not None
        torch.testing.assert_close(
            result.decoded.block_mass[b, :, :num_blocks].cpu().double(), exact, rtol=1e-4, atol=2e-6
        )
        assert not result.decoded.block_mass[b, :, num_blocks:].any()
        skipping += sum(num_blocks - len(blocks) for blocks in kept)
    assert skipping > 20


@pytest.mark.parametrize("bits", [1, 2])
def test_the_choice_is_the_references_up_to_masses_at_the_cut(kernels: CudaKernels, bits: int) -> None:
    sketched = make_sketched(kernels, [1299], torch.float32, bits=bits)
    selection = BlockSelection(np.full(1, 0.1, np.float32))
    result = sketched.select([0.1])
    choice = choose_for_row(selection, 0, sketched.paged.q[0].cpu(), sketched.keys(0)[0], sketched.scale, sketched.bits)
    for head in range(NUM_KV_HEADS):
        assert len(set(result.kept(0, head)) ^ set(choice.kept[head])) <= 2
        assert float(result.selected.missing[0, head]) == pytest.approx(choice.missing[head], abs=2e-3)


def test_epsilon_zero_has_the_bits_of_plain_attention(kernels: CudaKernels) -> None:
    sketched = make_sketched(kernels, LENGTHS)
    plain = sketched.paged.attend(kernels)
    result = sketched.select([0.0] * len(LENGTHS))
    assert torch.equal(result.decoded.out, plain.out)
    assert plain.block_mass is not None
    assert result.decoded.block_mass is not None
    assert torch.equal(result.decoded.block_mass, plain.block_mass)
    assert not result.selected.missing.any()
    assert np.isnan(result.masses(2, 10)).all()


def test_a_row_chooses_the_same_alone_and_among_others(emulator: CudaKernels) -> None:
    sketched = make_sketched(emulator, LENGTHS)
    together = sketched.select([0.1] * len(LENGTHS))
    for seed, b in enumerate(range(len(LENGTHS))):
        emulator.set_emulation_seed(seed)
        own = slice(b, b + 1)
        paged = Paged(*(t[own] if i != 1 else t for i, t in enumerate(vars(sketched.paged).values())))
        alone = replace(sketched, paged=paged).select([0.1])
        assert torch.equal(alone.decoded.out[0], together.decoded.out[b])
        assert torch.equal(alone.selected.num_kept[0], together.selected.num_kept[b])
        assert torch.equal(alone.selected.missing[0], together.selected.missing[b])


@pytest.mark.parametrize("selector", ["sketch", "random", "recency"])
def test_guards_hold_whatever_the_selector(kernels: CudaKernels, selector: str) -> None:
    sketched = make_sketched(kernels, [1300], sharpness=4.0)
    rule = replace(RULE, selector=selector, share=0.0, sink_blocks=2, recent_blocks=3, min_kept_blocks=5)
    result = sketched.select([0.9], rule, protected=[17, 40])
    for head in range(NUM_KV_HEADS):
        assert {0, 1, 17, 40, 79, 80, 81} <= set(result.kept(0, head))
        assert len(result.kept(0, head)) < 30
    for guard, count in (
        ({"min_kept_blocks": 60}, 60),
        ({"min_kept_share": 0.5}, 41),
        ({"min_context_tokens": 1301}, 82),
    ):
        assert sketched.select([0.9], replace(rule, **guard)).selected.num_kept.tolist() == [[count, count]]


@pytest.mark.parametrize("selector", ["random", "recency"])
def test_placebos_keep_their_share(kernels: CudaKernels, selector: str) -> None:
    sketched = make_sketched(kernels, [1299, 600])
    rule = replace(RULE, selector=selector, share=0.25, seed=7)
    result = sketched.select([0.1, 0.1], rule)
    for b, length in enumerate((1299, 600)):
        for head in range(NUM_KV_HEADS):
            assert result.kept(b, head) == placebo_blocks(rule, length, head, [])
    assert result.selected.missing.isnan().all()


def test_of_equal_masses_the_older_is_skipped_first(kernels: CudaKernels) -> None:
    sketched = make_sketched(kernels, [640], torch.float32)
    sketched.paged.cache[:, 0] = 1.0  # all keys the same: 40 masses of 1/40
    ends = sketched.paged.tables[0, :40].long() * BLOCK_SIZE + BLOCK_SIZE - 1
    write_sketches(kernels, sketched.paged.cache, ends, sketched.sketches)
    result = sketched.select([0.26])
    assert result.kept(0, 0) == (0, *range(11, 40))  # ten of 0.025 are gone


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_unknown_mass_is_read_densely_and_harms_no_neighbour(kernels: CudaKernels, value: float) -> None:
    sketched = make_sketched(kernels, [700, 800])
    healthy = sketched.select([0.2, 0.2])
    sketched.paged.q[0, 2, 5] = value  # a head of the first KV head
    result = sketched.select([0.2, 0.2])
    assert len(result.kept(0, 0)) == 44
    assert len(result.kept(0, 1)) < 44
    assert torch.equal(result.decoded.out[1], healthy.decoded.out[1])


def test_only_blocks_that_are_full_are_sketched_and_alike_in_any_company(kernels: CudaKernels) -> None:
    sketched = make_sketched(kernels, [40, 70])
    again = allocate_sketches(kernels, len(sketched.paged.cache), NUM_KV_HEADS, 64, 2)
    for block in (int(sketched.paged.tables[0, 1]), int(sketched.paged.tables[1, 3])):
        slot = torch.tensor([block * BLOCK_SIZE + BLOCK_SIZE - 1], device=kernels.device_type)
        write_sketches(kernels, sketched.paged.cache, slot, again)
        assert torch.equal(again.memory[block], sketched.sketches.memory[block])
    assert not sketched.sketches.memory[int(sketched.paged.tables[0, 2])].any()


def test_what_does_not_fit_is_refused(emulator: CudaKernels) -> None:
    assert sketch_bytes(emulator, 64, 2) == 16 * 16 + 2 * 64 + 2 * 16
    with pytest.raises(ValueError, match="1 or 2 bits"):
        sketch_bytes(emulator, 64, 3)
    sketched = make_sketched(emulator, [600])
    with pytest.raises(ValueError, match="epsilon"):
        sketched.select([0.1, 0.1])
    batch = (sketched.paged.q, sketched.paged.cache, sketched.paged.tables, sketched.paged.lengths)
    nothing = DeviceSelection(torch.zeros(1), None, RULE)
    with pytest.raises(ValueError, match="without sketches"):
        select_blocks(emulator, *batch, scale=1.0, sketches=None, selection=nothing, seed=0)
