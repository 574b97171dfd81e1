"""The choice by true masses, the oracle of every sketch: the masses are attention's own, and no choice skips more."""

from itertools import combinations

import pytest
import torch

from etserve.control.pruning import group_masses
from etserve.kernels.reference_selection import choose_for_row, estimated_log_masses, exact_log_masses
from etserve.kernels.reference_sketch import EXACT_BITS
from etserve.kernels.selection import SelectionRule
from tests.kernels.sketched import NUM_KV_HEADS, make_sketched, uniform

LOOSE = SelectionRule(sink_blocks=1, recent_blocks=1, min_kept_blocks=1, min_kept_share=0.0, min_context_tokens=0)
GROUP = 3


@pytest.mark.parametrize("length", [9, 37, 160, 203])
def test_true_masses_are_attentions_own(length: int) -> None:
    sketched = make_sketched([length], torch.float32, group=GROUP)
    keys, _ = sketched.keys(0)
    everything = tuple(range(-(-length // 16)))
    _, weights = sketched.attend(0, (everything,) * NUM_KV_HEADS)
    found = exact_log_masses(sketched.q[0], keys, sketched.paged.scale).softmax(-1)
    torch.testing.assert_close(found.float(), weights, rtol=0, atol=1e-6)


def test_sketches_estimate_the_true_masses_and_more_bits_do_better() -> None:
    sketched = make_sketched([1300], torch.float32, group=GROUP)
    keys, _ = sketched.keys(0)
    true = exact_log_masses(sketched.q[0], keys, sketched.paged.scale)
    errors = {}
    for bits in (1, 2):
        estimate = estimated_log_masses(sketched.q[0], keys, sketched.paged.scale, bits)
        torch.testing.assert_close(estimate[:, -1], true[:, -1])  # a block that is not full has no sketch
        errors[bits] = (estimate - true).square().mean()
    assert 0.0 < errors[2] < errors[1]


@pytest.mark.parametrize("epsilon", [0.05, 0.3])
def test_no_choice_within_epsilon_skips_more_than_the_oracle(epsilon: float) -> None:
    """By brute force over the sets of one block more."""
    length = 203
    sketched = make_sketched([length], torch.float32, group=GROUP, sharpness=3.0)
    keys, _ = sketched.keys(0)
    row = (sketched.q[0], keys, sketched.paged.scale)
    choice = choose_for_row(uniform(epsilon, 1, LOOSE), 0, *row, EXACT_BITS)
    log_masses = exact_log_masses(*row).view(NUM_KV_HEADS, GROUP, -1)
    num_skipped = 0
    for head, kept in enumerate(choice.kept):
        last = log_masses.shape[-1] - 1
        skipped = sorted(set(range(last + 1)) - set(kept))
        assert not {0, last} & set(skipped)
        shares = log_masses[head].softmax(-1)
        assert (shares[:, skipped].sum(-1) <= epsilon + 1e-6).all()
        masses = group_masses(log_masses[head].tolist())
        assert choice.missing[head] == pytest.approx(sum(masses[block] for block in skipped), abs=1e-6)
        larger = combinations(range(1, last), len(skipped) + 1)
        assert all(sum(masses[block] for block in blocks) > epsilon - 1e-6 for blocks in larger)
        num_skipped += len(skipped)
    assert num_skipped > 0
