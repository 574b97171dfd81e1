"""Large zeroed memory in huge pages: streaming weights through 4 KiB pages costs a tenth of the bandwidth or more."""

import mmap

import torch

ALIGNMENT = 64  # bytes, a cache line
_HUGE_PAGE = 2 << 20


def zeros(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes, uint8 [num_bytes], aligned to a cache line; pages come into being when they are touched."""
    if num_bytes < _HUGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]


class Arena:
    """Memory for many matrices, taken piece by piece; each piece keeps all of it alive."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = zeros(num_bytes)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next zeroed piece, uint8 [num_bytes]. Raises ValueError when the arena is used up."""
        start = aligned(self._used)
        if start + num_bytes > len(self._memory):
            raise ValueError(f"the arena has {len(self._memory) - start} bytes left, not {num_bytes}")
        self._used = start + num_bytes
        return self._memory[start : self._used]


def aligned(num_bytes: int) -> int:
    """Rounded up to whole cache lines: what a piece of an arena uses up."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
