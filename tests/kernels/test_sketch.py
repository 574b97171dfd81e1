"""Key sketches against their reference and the law, and that they depend on nothing but the keys."""

import numpy as np
import pytest
import torch

from etserve.control.sketch import LEVELS as LAW_LEVELS
from etserve.control.sketch import estimate_scores, exact_scores, rotation_signs, sketch_block
from etserve.kernels.reference_selection import estimated_log_masses, rounded_group_masses
from etserve.kernels.reference_sketch import LEVELS, ROTATION_SEED, estimated_scores, rotation, sketch_keys
from etserve.kernels.sketch import allocate_sketches, sketch_bytes, write_sketches
from tests.kernels.isas import isa, num_threads
from tests.kernels.paged import make_paged
from tests.kernels.sketched import NUM_KV_HEADS, make_sketched, uniform

__all__ = ["isa", "num_threads"]
DTYPES = [torch.float32, torch.bfloat16]


def test_the_kernels_levels_are_the_laws_ones_to_a_thousandth() -> None:
    for bits, levels in LEVELS.items():
        assert levels == pytest.approx(LAW_LEVELS[bits], abs=1e-3)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("head_dim", [32, 48, 80])
def test_the_reference_follows_the_law(bits: int, head_dim: int) -> None:
    random = torch.Generator().manual_seed(bits)
    keys = torch.randn(16, head_dim, generator=random).bfloat16().double()
    keys = keys - keys.mean(0) + 1.5  # a mean that bf16 holds: the law keeps it whole
    q = torch.randn(head_dim, generator=random)
    signs = rotation_signs(head_dim, ROTATION_SEED)
    law = estimate_scores(q.tolist(), sketch_block(keys.tolist(), signs, 2 if bits == 2 else 1), signs)
    found = estimated_scores(q[None], sketch_keys(keys[None, :, None, :], bits), head_dim**-0.5)[0]
    torch.testing.assert_close(found, torch.tensor(law, dtype=torch.float64), rtol=0, atol=0.03)  # bytes, bf16, levels


def test_the_rotation_is_orthonormal() -> None:
    for head_dim in (16, 18, 64, 80):
        turned = rotation(head_dim)
        torch.testing.assert_close(turned @ turned.T, torch.eye(head_dim, dtype=torch.float64))


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("head_dim", [18, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_estimated_masses_match_the_reference(isa: str, dtype: torch.dtype, head_dim: int, bits: int) -> None:
    sketched = make_sketched([512, 530], dtype, head_dim=head_dim, bits=bits)
    result = sketched.run(uniform(0.1, 2))
    for b in range(2):
        logs = estimated_log_masses(sketched.q[b], sketched.keys(b)[0], sketched.paged.scale, bits)
        expected = torch.tensor(rounded_group_masses(logs, NUM_KV_HEADS))
        found = result.estimated_mass[b, :, : expected.shape[1]]
        # A coordinate at a threshold may fall to either side: one code of thousands.
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-6)
        assert ((found - expected).abs() / expected).mean() < 2e-3


@pytest.mark.parametrize("bits", [1, 2])
def test_estimates_are_near_the_true_scores(bits: int) -> None:
    keys = torch.randn(40, 16, 1, 64, generator=torch.Generator().manual_seed(0)) + 2.0
    q = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    found = estimated_scores(q, sketch_keys(keys, bits), 0.125)[0]
    true = torch.tensor(exact_scores(q[0].tolist(), keys.view(-1, 64).tolist()), dtype=torch.float64)
    # Lloyd-Max leaves 0.363 of the variance with 1 bit, 0.1175 with 2; unit differences make scores of unit variance.
    assert (found - true).square().mean() == pytest.approx({1: 0.363, 2: 0.1175}[bits], rel=0.25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sketch_has_the_same_bits_whichever_blocks_are_written_with_it(
    isa: str, num_threads: int, dtype: torch.dtype
) -> None:
    paged = make_paged([160, 90], dtype)
    blocks = np.concatenate([paged.tables[0, :10], paged.tables[1, :5]])
    together = allocate_sketches(len(paged.cache), 2, 64, 2)
    apart = allocate_sketches(len(paged.cache), 2, 64, 2)
    write_sketches(paged.cache, together, blocks)
    for block in blocks[::-1]:
        write_sketches(paged.cache, apart, np.array([block], np.int32))
    assert torch.equal(together.memory, apart.memory)
    assert not together.memory[paged.tables[1, 5]].any()  # not full, not asked for
    assert together.memory[blocks].flatten(1).any(1).all()


def test_sizes_are_those_of_the_law() -> None:
    assert sketch_bytes(64, 2) == 448  # 16 x 16 of codes, 128 of the mean, 32 of scales, to whole cache lines
    assert sketch_bytes(64, 1) == 320
    with pytest.raises(ValueError, match="1 or 2 bits"):
        sketch_bytes(64, 3)


def test_blocks_out_of_range_or_twice_are_refused() -> None:
    paged = make_paged([32], torch.float32)
    sketches = allocate_sketches(len(paged.cache), 2, 64, 2)
    for blocks in ([len(paged.cache)], [-1], [1, 1]):
        with pytest.raises(ValueError, match="different and in"):
            write_sketches(paged.cache, sketches, np.array(blocks, np.int32))
    with pytest.raises(ValueError, match="shape"):
        write_sketches(
            paged.cache, allocate_sketches(len(paged.cache), 2, 64, 1).__class__(sketches.memory, 1), blocks_of(1)
        )


def blocks_of(*ids: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(ids, np.int32)
