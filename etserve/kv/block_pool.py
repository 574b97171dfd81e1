"""Every KV block, by number: who counts on it, what it holds, which one is reused next. Knows no sequences.

A block other than the null block is in exactly one state:
  active  refs > 0                       may have a key
  cached  refs = 0, has a key            still usable as a prefix; reused last, least recently released first
  blank   refs = 0, no key               reused first
"""

from collections import Counter, OrderedDict

NULL_BLOCK = 0  # stands for "no block" in tables and padding; never handed out


class AuditError(AssertionError):
    """The bookkeeping contradicts itself: a bug of ours."""


class BlockPool:
    """Reference counts, content keys and the order of reuse. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of blocks 1 .. num_blocks - 1. Raises ValueError without at least one of them."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self.num_blocks = num_blocks  # the null block counts
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_by_key: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_allocatable(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_active(self) -> int:
        return self.num_usable - self.num_allocatable

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    def num_refs(self, block: int) -> int:
        return self._refs[block]

    def key_of(self, block: int) -> bytes | None:
        return self._keys[block]

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` blocks with one reference each, or None (and change nothing) if fewer can be had."""
        if count > self.num_allocatable:
            return None
        return [self._take() for _ in range(count)]

    def find(self, key: bytes) -> int | None:
        """Return the block that holds this content, active or cached."""
        return self._block_by_key.get(key)

    def share(self, block: int) -> None:
        """Add a reference to a block that `find` returned."""
        if self._refs[block] == 0:
            self._cached.pop(block)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Take one reference back. Raises AuditError if there is none."""
        refs = self._refs[block] - 1
        if block == NULL_BLOCK or refs < 0:
            raise AuditError(f"block {block} released without a reference")
        self._refs[block] = refs
        if refs == 0:
            self._retire(block)

    def register(self, block: int, key: bytes) -> bool:
        """Say that an active block now holds this content; False (and nothing changes) if another block is known to."""
        if self._refs[block] == 0 or self._keys[block] not in (None, key):
            raise AuditError(f"block {block} cannot take a key: {self._refs[block]} references")
        if self._block_by_key.setdefault(key, block) != block:
            return False
        self._keys[block] = key
        return True

    def forget(self, block: int) -> None:
        """Drop an active block's key: its content is not to be found any more."""
        key = self._keys[block]
        if self._refs[block] == 0:
            raise AuditError(f"block {block} is not active")
        if key is not None:
            self._keys[block] = None
            del self._block_by_key[key]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._keys[block]
            if key is None:
                raise AuditError(f"cached block {block} has no key")
            self._keys[block] = None
            del self._block_by_key[key]
        self._refs[block] = 1
        return block

    def _retire(self, block: int) -> None:
        if self._keys[block] is None:
            self._blank.append(block)
        else:
            self._cached[block] = None

    def audit(self) -> None:
        """Check that states, counts and keys agree. O(N). Raises AuditError."""
        blank, cached = Counter(self._blank), self._cached
        active = [block for block in range(self.num_blocks) if self._refs[block] > 0]
        _check(not blank or max(blank.values()) == 1, "a block is blank twice")
        _check(
            sorted([*blank, *cached, *active]) == list(range(1, self.num_blocks)), "a block is lost or in two states"
        )
        _check(min(self._refs) >= 0, "a reference count is negative")
        _check(self._refs[NULL_BLOCK] == 0 and self._keys[NULL_BLOCK] is None, "the null block was handed out")
        _check(all(self._keys[block] is None for block in blank), "a blank block has a key")
        _check(all(self._keys[block] is not None for block in cached), "a cached block has no key")
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        _check(keyed == self._block_by_key, "keys and blocks are not one to one")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AuditError(message)
