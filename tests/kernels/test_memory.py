import gc

import pytest
import torch

from etserve.kernels.memory import ALIGNMENT, Arena, aligned, zeros


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 5 << 20])
def test_memory_comes_zeroed_and_aligned(num_bytes: int) -> None:
    memory = zeros(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.dtype == torch.uint8
    assert num_bytes == 0 or memory.data_ptr() % ALIGNMENT == 0
    assert not memory.any()


def test_pieces_of_an_arena_do_not_overlap_and_start_on_cache_lines() -> None:
    sizes = [1, 64, 100, 3 << 20]
    arena = Arena(sum(aligned(size) for size in sizes))
    pieces = [arena.take(size) for size in sizes]
    for value, piece in enumerate(pieces, start=1):
        piece.fill_(value)
    assert [len(piece) for piece in pieces] == sizes
    assert all((piece == value).all() for value, piece in enumerate(pieces, start=1))
    assert all((piece.data_ptr() - pieces[0].data_ptr()) % ALIGNMENT == 0 for piece in pieces)


def test_an_arena_that_is_used_up_says_so() -> None:
    arena = Arena(100)
    arena.take(64)
    with pytest.raises(ValueError, match="36 bytes left, not 37"):
        arena.take(37)


def test_a_piece_outlives_its_arena() -> None:
    piece = Arena(3 << 20).take(1 << 20)
    gc.collect()
    piece.fill_(7)
    assert (piece == 7).all()
