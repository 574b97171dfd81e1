"""Which blocks each sequence holds, and which content is shared. Knows nothing of budgets and order."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from etserve.config import BLOCK_SIZE
from etserve.control.eviction import may_be_prefix_source
from etserve.kv.block_pool import NULL_BLOCK, AuditError, BlockPool
from etserve.kv.hashing import BlockChain
from etserve.sequence import Sequence


def count_blocks(num_tokens: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One block of a sequence, as eviction sees it."""

    index: int  # in the block table
    num_refs: int
    is_cached: bool  # findable as a prefix


@dataclass(slots=True)
class _Holding:
    """One sequence's blocks and the names of their contents.

    blocks [0, num_committed)                 computed and full: perhaps shared, never written
    blocks [num_committed, num_announced)     full once the known tokens are computed; ours
    blocks [num_committed, len(table))        ours, written by the steps to come
    An evicted block's place holds the null block. Sequences that may be evicted from commit at their end alone.
    """

    chain: BlockChain
    table: list[int] = field(default_factory=list)
    num_committed: int = 0
    num_announced: int = 0
    awaited: bytes | None = None  # while waiting: the missing block that some running sequence was about to compute


class KVCacheManager:
    """Block tables by sequence; prefixes found by content among live and cached blocks.

    A failed call changes nothing. Sequences are known from their first mention to `free`.
    """

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        """`num_blocks` counts the null block, as the cache tensors do. Raises ValueError if it is below 2."""
        self.prefix_caching = prefix_caching
        self._pool = BlockPool(num_blocks)
        self._holdings: dict[int, _Holding] = {}
        self._announced: dict[bytes, Sequence] = {}  # block content -> who is computing it

    @property
    def max_tokens(self) -> int:
        """The most tokens that one sequence alone can hold."""
        return self._pool.num_usable * BLOCK_SIZE

    @property
    def num_active_blocks(self) -> int:
        return self._pool.num_active

    @property
    def num_cached_blocks(self) -> int:
        """Free, but still usable as a prefix."""
        return self._pool.num_cached

    @property
    def num_free_blocks(self) -> int:
        """Free and without content."""
        return self._pool.num_blank

    @property
    def num_allocatable_blocks(self) -> int:
        return self._pool.num_allocatable

    @property
    def usage(self) -> float:
        """The share of blocks that live sequences hold."""
        return self._pool.num_active / self._pool.num_usable

    def block_table(self, seq: Sequence) -> list[int]:
        """Return the sequence's own list, empty if it holds nothing: it grows in place, read only for others."""
        holding = self._holdings.get(seq.seq_id)
        return holding.table if holding is not None else []

    def find_prefix(self, seq: Sequence) -> int:
        """Return how many leading tokens are cached: whole blocks, never a token whose logits are needed (the last)."""
        return len(self._find_prefix_blocks(seq, self._holding(seq))) * BLOCK_SIZE

    def find_leader(self, seq: Sequence) -> Sequence | None:
        """Return the running sequence that is about to compute the first block that this waiting one misses."""
        holding = self._holding(seq)
        if holding.awaited is None or holding.awaited not in self._announced:
            num_found = len(self._find_prefix_blocks(seq, holding))
            is_missing = num_found < self._count_reusable(seq)
            holding.awaited = holding.chain.keys[num_found] if is_missing else None
        return self._announced.get(holding.awaited) if holding.awaited is not None else None

    def admit(self, seq: Sequence, headroom: int = 0) -> int | None:
        """Give a sequence without blocks a table for all its known tokens; return how many of them are cached.

        None (and nothing changes) unless `headroom` blocks stay allocatable afterwards.
        """
        holding = self._holding(seq)
        if holding.table:
            raise AuditError(f"sequence {seq.seq_id} holds blocks already")
        found = self._find_prefix_blocks(seq, holding)
        num_fresh = count_blocks(seq.num_tokens) - len(found)
        num_revived = sum(1 for block in found if self._pool.num_refs(block) == 0)
        if num_revived + num_fresh + headroom > self._pool.num_allocatable:
            return None
        for block in found:
            self._pool.share(block)
        holding.table = found + (self._pool.allocate(num_fresh) or [])
        holding.num_committed = len(found)
        self._announce(seq, holding)
        return len(found) * BLOCK_SIZE

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the table cover the first `num_tokens` tokens, or change nothing and return False."""
        table = self._holdings[seq.seq_id].table
        if len(table) * BLOCK_SIZE >= num_tokens:
            return True
        fresh = self._pool.allocate(count_blocks(num_tokens) - len(table))
        if fresh is None:
            return False
        table.extend(fresh)
        return True

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens: they hold rejected drafts, which nobody reads."""
        table = self._holdings[seq.seq_id].table
        while len(table) > count_blocks(num_tokens):
            self._pool.release(table.pop())

    def commit(self, seq: Sequence) -> None:
        """Make the blocks that are full of computed tokens findable; called after each step.

        Entries computed with blocks skipped stay the sequence's own: others are promised what dense attention gives.
        A sequence that may be evicted from keeps all to itself until its end: what is shared or cached cannot go.
        """
        if not seq.may_be_evicted:
            self._commit(seq, self._holdings[seq.seq_id])

    def held_blocks(self, seq: Sequence) -> Iterator[HeldBlock]:
        """Go through the sequence's blocks that are not evicted, in its own order."""
        pool = self._pool
        for index, block in enumerate(self._holdings[seq.seq_id].table):
            if block != NULL_BLOCK:
                yield HeldBlock(index, pool.num_refs(block), pool.key_of(block) is not None)

    def evict(self, seq: Sequence, indices: Collection[int]) -> None:
        """Take blocks of a live sequence back for good, by their places in its table.

        Raises AuditError, and changes nothing, for one that is evicted already, shared, cached, or not full.
        """
        table = self._holdings[seq.seq_id].table
        for index in indices:
            block = table[index]
            is_ours = block != NULL_BLOCK and self._pool.num_refs(block) == 1 and self._pool.key_of(block) is None
            if not (seq.may_be_evicted and is_ours and (index + 1) * BLOCK_SIZE <= seq.num_computed_tokens):
                raise AuditError(f"sequence {seq.seq_id}: block {block} cannot be evicted")
        for index in indices:
            self._pool.release(table[index])
            table[index] = NULL_BLOCK

    def _commit(self, seq: Sequence, holding: _Holding) -> None:
        num_full = seq.num_computed_tokens // BLOCK_SIZE
        if seq.num_dense_tokens is not None:
            num_full = min(num_full, seq.num_dense_tokens // BLOCK_SIZE)
        if num_full <= holding.num_committed or not self.prefix_caching:
            return
        keys = holding.chain.extend(seq.token_ids, seq.num_computed_tokens)
        for index in range(holding.num_committed, num_full):
            self._pool.register(holding.table[index], keys[index])
            self._withdraw(seq, keys[index])
        holding.num_committed = num_full

    def preempt(self, seq: Sequence) -> None:
        """Take all blocks of a live sequence back. Its content stays findable until its blocks are reused."""
        holding = self._holdings[seq.seq_id]
        self._commit_whole(seq, holding)
        self._give_back(seq, holding)
        self._holdings[seq.seq_id] = _Holding(holding.chain)

    def free(self, seq: Sequence, keep_content: bool = True) -> None:
        """Take all blocks back and forget the sequence; nothing happens if it is unknown.

        Without `keep_content` nobody will find its blocks as a prefix: they may hold non-finite values.
        """
        holding = self._holdings.pop(seq.seq_id, None)
        if holding is None:
            return
        if keep_content:
            self._commit_whole(seq, holding)
        else:
            for block in holding.table:
                if block != NULL_BLOCK:
                    self._pool.forget(block)
        self._give_back(seq, holding)

    def audit(self) -> None:
        """Check every invariant between tables, references and contents. O(N). Raises AuditError."""
        self._pool.audit()
        tables = [holding.table for holding in self._holdings.values()]
        named = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        for block in range(1, self._pool.num_blocks):
            if self._pool.num_refs(block) != named[block]:
                raise AuditError(f"block {block}: {self._pool.num_refs(block)} references, {named[block]} in tables")
        for seq_id, holding in self._holdings.items():
            self._audit_holding(seq_id, holding)

    def _audit_holding(self, seq_id: int, holding: _Holding) -> None:
        for index, block in enumerate(holding.table):
            if block == NULL_BLOCK:
                continue
            key = self._pool.key_of(block)
            if index >= holding.num_committed and (key is not None or self._pool.num_refs(block) != 1):
                raise AuditError(f"sequence {seq_id}: block {block} is to be written, but has a key or is shared")
            if index < holding.num_committed and key not in (None, holding.chain.keys[index]):
                raise AuditError(f"sequence {seq_id}: block {block} holds something else")

    def _holding(self, seq: Sequence) -> _Holding:
        holding = self._holdings.get(seq.seq_id)
        if holding is None:
            holding = self._holdings[seq.seq_id] = _Holding(BlockChain(seq.cache_salt))
        return holding

    def _count_reusable(self, seq: Sequence) -> int:
        """Return how many leading blocks may come from the cache: a token whose logits are wanted is computed."""
        if not self.prefix_caching or seq.params.prompt_logprobs is not None:
            return 0
        first_wanted = seq.num_tokens - 1
        if seq.clock.count < seq.num_forced_tokens:  # the entropies of replayed tokens are measured again
            first_wanted = seq.num_prompt_tokens - 1 + seq.clock.count
        return first_wanted // BLOCK_SIZE

    def _find_prefix_blocks(self, seq: Sequence, holding: _Holding) -> list[int]:
        num_reusable = self._count_reusable(seq)
        if num_reusable == 0:
            return []
        found: list[int] = []
        keys = holding.chain.extend(seq.token_ids, seq.num_tokens)
        for key in keys[:num_reusable]:
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def _commit_whole(self, seq: Sequence, holding: _Holding) -> None:
        """At its end, or before it is recomputed: share what an evicting sequence computed while it was whole."""
        if seq.may_be_evicted and may_be_prefix_source(seq.num_evicted_blocks) and holding.table:
            self._commit(seq, holding)

    def _announce(self, seq: Sequence, holding: _Holding) -> None:
        if self.prefix_caching and not seq.may_be_evicted:
            keys = holding.chain.extend(seq.token_ids, seq.num_tokens)
            holding.num_announced = len(keys)
            for key in keys[holding.num_committed :]:
                self._announced.setdefault(key, seq)

    def _withdraw(self, seq: Sequence, key: bytes) -> None:
        if self._announced.get(key) is seq:
            del self._announced[key]

    def _give_back(self, seq: Sequence, holding: _Holding) -> None:
        for key in holding.chain.keys[holding.num_committed : holding.num_announced]:
            self._withdraw(seq, key)
        for block in reversed(holding.table):  # the tail is reused first, so that prefixes survive longest
            if block != NULL_BLOCK:  # an evicted position
                self._pool.release(block)
