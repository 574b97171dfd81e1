"""The choice of blocks inside the attention call: the law's rule exactly, its guards, attention over what is left."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from etserve.control.pruning import select_blocks, skip_divergence_nats
from etserve.kernels import native
from etserve.kernels.attention import paged_attention
from etserve.kernels.reference_selection import always_read, minimum_kept, placebo_blocks, set_aside
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.kernels.selective_attention import SelectiveResult, selective_attention
from tests.kernels.isas import isa, num_threads
from tests.kernels.sketched import NUM_KV_HEADS, Sketched, make_sketched, read_blocks, uniform

__all__ = ["isa", "num_threads"]
LENGTHS = [511, 512, 700, 1023, 1300]
RULE = SelectionRule()


def kept_by_rule(
    sketched: Sketched, selection: BlockSelection, result: SelectiveResult, b: int
) -> tuple[tuple[int, ...], ...]:
    """What the law's own function keeps, given the masses that the kernel cut by."""
    num_blocks = -(-sketched.paged.lengths[b] // 16)
    masses = result.estimated_mass[b, :, :num_blocks].double().tolist()
    rule, protected = (
        selection.rule,
        [] if selection.protected is None else selection.protected[b].nonzero()[0].tolist(),
    )
    fixed, minimum = always_read(rule, num_blocks, protected), minimum_kept(rule, num_blocks)
    return tuple(select_blocks(row, float(selection.epsilon[b]), fixed, minimum) for row in masses)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (32, 1), (80, 7), (128, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rule_is_the_laws_exactly_and_attention_reads_what_it_keeps(
    isa: str, dtype: torch.dtype, head_dim: int, group: int
) -> None:
    sketched = make_sketched(LENGTHS, dtype, head_dim=head_dim, group=group)
    selection = uniform(0.15, len(LENGTHS))
    result = sketched.run(selection)
    skipping = 0
    for b, length in enumerate(LENGTHS):
        num_blocks = -(-length // 16)
        if length < 512:
            assert result.num_kept[b].tolist() == [num_blocks] * NUM_KV_HEADS
            continue
        kept = kept_by_rule(sketched, selection, result, b)
        assert result.num_kept[b].tolist() == [len(blocks) for blocks in kept]
        out, masses = sketched.attend(b, kept)
        torch.testing.assert_close(result.output[b], out, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)
        torch.testing.assert_close(result.block_mass[b, :, :num_blocks], masses, rtol=0, atol=2e-6)
        assert not result.block_mass[b, :, num_blocks:].any()
        for head, blocks in enumerate(kept):
            row = result.estimated_mass[b, head, :num_blocks].double().tolist()
            assert result.missing[b, head] == pytest.approx(sum(set_aside(row, blocks)), abs=1e-6)
            assert read_blocks(result, b, head * group) == list(blocks)
        skipping += sum(num_blocks - len(blocks) for blocks in kept)
    assert skipping > 20


@pytest.mark.parametrize("length", [1299, 3000])
@pytest.mark.parametrize("bits", [1, 2])
def test_the_choice_is_the_references_up_to_masses_at_the_cut(isa: str, bits: int, length: int) -> None:
    sketched = make_sketched([length], torch.float32, bits=bits)
    selection = uniform(0.1, 1)
    result, choice = sketched.run(selection), sketched.choice(selection, 0)
    for head in range(NUM_KV_HEADS):
        assert len(set(read_blocks(result, 0, head * 3)) ^ set(choice.kept[head])) <= 2
        assert result.missing[0, head] == pytest.approx(choice.missing[head], abs=2e-3)


def test_estimated_missing_mass_is_near_the_true_one_and_gives_the_divergence() -> None:
    sketched = make_sketched([1300], torch.float32)
    dense, result = sketched.run(uniform(0.0, 1)), sketched.run(uniform(0.2, 1))
    for head in range(6):
        kept = read_blocks(result, 0, head)
        missing = 1.0 - float(dense.block_mass[0, head, kept].double().sum())
        assert 0.0 < missing < 0.2 + 0.05  # the group's largest share bounds each head's, up to the estimate's error
        # Renormalised over what is kept, the head's distribution has moved by exactly -ln(1 - m).
        before, after = dense.block_mass[0, head, kept].double(), result.block_mass[0, head, kept].double()
        divergence = float((after * (after / before).log()).sum())
        assert divergence == pytest.approx(skip_divergence_nats(missing), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_epsilon_zero_has_the_bits_of_plain_attention(isa: str, num_threads: int, dtype: torch.dtype) -> None:
    sketched = make_sketched(LENGTHS, dtype)
    parts = [(b, n - 1, n) for b, n in enumerate(LENGTHS)]
    _, *rest = sketched.paged.batch(parts)
    plain, masses = paged_attention(
        sketched.q, sketched.paged.cache, *rest, scale=sketched.paged.scale, want_block_mass=True
    )
    result = sketched.run(uniform(0.0, len(LENGTHS)))
    assert torch.equal(result.output, plain)
    assert masses is not None
    assert torch.equal(result.block_mass, masses)
    assert not result.missing.any()
    assert result.estimated_mass.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_among_others(isa: str, num_threads: int, dtype: torch.dtype) -> None:
    lengths = [*LENGTHS, 4500]  # more than one span of a scan
    sketched = make_sketched(lengths, dtype)
    epsilon = np.array([0.1, 0.0, 0.2, 0.05, 0.1, 0.1], np.float32)
    together = sketched.run(BlockSelection(epsilon))
    for b in range(len(lengths)):
        alone = sketched.run(BlockSelection(epsilon[b : b + 1]), [b])
        assert torch.equal(alone.output[0], together.output[b])
        assert torch.equal(alone.block_mass[0], together.block_mass[b])
        assert (alone.num_kept[0] == together.num_kept[b]).all()
        assert alone.missing[0].tobytes() == together.missing[b].tobytes()


def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    sketched, results = make_sketched([700, 4500]), []
    for count in (1, 2, 3):
        native.set_num_threads(count)
        results.append(sketched.run(uniform(0.1, 2)))
    native.set_num_threads(1)
    for other in results[1:]:
        assert torch.equal(other.output, results[0].output)
        assert torch.equal(other.estimated_mass, results[0].estimated_mass)


@pytest.mark.parametrize("selector", ["sketch", "random", "recency"])
def test_guards_hold_whatever_the_selector(isa: str, selector: str) -> None:
    sketched = make_sketched([1300], sharpness=4.0)
    rule = replace(RULE, selector=selector, share=0.0, sink_blocks=2, recent_blocks=3, min_kept_blocks=5)
    protected = np.zeros((1, sketched.paged.tables.shape[1]), np.uint8)
    protected[0, [17, 40]] = 1
    result = sketched.run(BlockSelection(np.full(1, 0.9, np.float32), protected, rule))
    for head in range(NUM_KV_HEADS):
        assert {0, 1, 17, 40, 79, 80, 81} <= set(read_blocks(result, 0, head * 3))
        assert result.num_kept[0, head] < 30
    roomy = replace(rule, min_kept_blocks=60)
    result = sketched.run(BlockSelection(np.full(1, 0.9, np.float32), protected, roomy))
    assert result.num_kept.tolist() == [[60, 60]]
    shared = replace(rule, min_kept_share=0.5)
    assert sketched.run(BlockSelection(np.full(1, 0.9, np.float32), None, shared)).num_kept.tolist() == [[41, 41]]
    short = replace(rule, min_context_tokens=1301)
    assert sketched.run(BlockSelection(np.full(1, 0.9, np.float32), None, short)).num_kept.tolist() == [[82, 82]]


@pytest.mark.parametrize("selector", ["random", "recency"])
def test_placebos_keep_their_share(isa: str, selector: str) -> None:
    sketched = make_sketched([1299, 600])
    rule = replace(RULE, selector=selector, share=0.25, seed=7)
    selection = uniform(0.1, 2, rule)
    result = sketched.run(selection)
    for b, length in enumerate(sketched.paged.lengths):
        kept = tuple(placebo_blocks(rule, length, head, []) for head in range(NUM_KV_HEADS))
        assert [len(blocks) for blocks in kept] == result.num_kept[b].tolist() == [math.ceil(-(-length // 16) / 4)] * 2
        assert [read_blocks(result, b, head * 3) for head in range(NUM_KV_HEADS)] == [list(blocks) for blocks in kept]
        out, _ = sketched.attend(b, kept)
        torch.testing.assert_close(result.output[b], out, rtol=0, atol=1e-2)
    assert np.isnan(result.missing).all()
    assert (selector == "recency") == (read_blocks(result, 0, 0) == read_blocks(result, 0, 3))


def test_of_equal_masses_the_older_is_skipped_first(isa: str) -> None:
    sketched = make_sketched([640], torch.float32)
    sketched.paged.cache[:, 0] = 1.0  # all keys the same: 40 masses of 1/40
    same = make_equal(sketched)
    result = same.run(uniform(0.26, 1))
    assert result.estimated_mass[0, 0, :40].unique().numel() == 1
    assert result.num_kept.tolist() == [[30, 30]]  # ten of 0.025
    assert read_blocks(result, 0, 0) == [0, *range(11, 40)]


def make_equal(sketched: Sketched) -> Sketched:
    from etserve.kernels.sketch import write_sketches

    write_sketches(sketched.paged.cache, sketched.sketches, np.ascontiguousarray(sketched.paged.tables[0, :40]))
    return sketched


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_unknown_mass_is_read_densely_and_harms_no_neighbour(isa: str, value: float) -> None:
    sketched = make_sketched([700, 800])
    healthy = sketched.run(uniform(0.2, 1), [1])
    sketched.q[0, 2, 5] = value  # a head of the first KV head
    result = sketched.run(uniform(0.2, 2))
    assert result.num_kept[0, 0] == 44
    assert result.num_kept[0, 1] < 44
    assert torch.equal(result.output[1], healthy.output[0])


def test_several_new_tokens_are_read_densely(isa: str) -> None:
    sketched = make_sketched([700, 650])
    parts = [(0, 697, 700), (1, 649, 650)]
    q, *rest = sketched.paged.batch(parts)
    paged, scale = sketched.paged, sketched.paged.scale
    result = selective_attention(
        q, paged.cache, *rest, scale=scale, sketches=sketched.sketches, selection=uniform(0.3, 2)
    )
    plain, _ = paged_attention(q, paged.cache, *rest, scale=scale)
    assert result.num_kept[0].tolist() == [44, 44]
    assert (result.num_kept[1] < 41).all()
    assert torch.equal(result.output[:3], plain[:3])


def test_what_does_not_fit_is_refused() -> None:
    sketched = make_sketched([600])
    for epsilon, fault in ((np.full(2, 0.1, np.float32), "epsilon must be"), (np.array([1.0], np.float32), "in .0, 1")):
        with pytest.raises(ValueError, match=fault):
            sketched.run(BlockSelection(epsilon))
    with pytest.raises(ValueError, match="protected must be"):
        sketched.run(BlockSelection(np.full(1, 0.1, np.float32), np.zeros((1, 3), np.uint8)))
    with pytest.raises(ValueError, match="recent_blocks"):
        replace(RULE, recent_blocks=0)
    with pytest.raises(ValueError, match="selector"):
        replace(RULE, selector="best")
