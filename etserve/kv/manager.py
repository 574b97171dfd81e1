"""Which blocks each sequence holds, and which content is shared. Knows nothing of budgets and order."""

from collections.abc import Collection

from etserve.config import BLOCK_SIZE
from etserve.control.eviction import may_be_prefix_source
from etserve.kv.block_pool import NULL_BLOCK, AuditError, BlockPool
from etserve.kv.hashing import BlockChain
from etserve.kv.holding import Holding, audit
from etserve.sequence import Sequence


def count_blocks(num_tokens: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // BLOCK_SIZE)


class KVCacheManager:
    """Block tables by sequence; prefixes found by content among live and cached blocks.

    A failed call changes nothing. Sequences are known from their first mention to `free`.
    """

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        """`num_blocks` counts the null block, as the cache tensors do. Raises ValueError if it is below 2."""
        self.prefix_caching = prefix_caching
        self._pool = BlockPool(num_blocks)
        self._holdings: dict[int, Holding] = {}
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
        self._reclaim(holding)
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

    def num_prefix_blocks(self, seq: Sequence) -> int:
        """Return how many of its leading blocks are in the prefix cache, perhaps shared; those behind are its own."""
        return self._holdings[seq.seq_id].num_committed

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

    def _commit(self, seq: Sequence, holding: Holding) -> None:
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
        num_foreign = holding.num_committed if seq.may_be_evicted else None
        self._commit_whole(seq, holding)
        self._give_back(seq, holding)
        self._holdings[seq.seq_id] = Holding(holding.chain, num_foreign=num_foreign)

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
        audit(self._pool, self._holdings)

    def _holding(self, seq: Sequence) -> Holding:
        holding = self._holdings.get(seq.seq_id)
        if holding is None:
            holding = self._holdings[seq.seq_id] = Holding(BlockChain(seq.cache_salt))
        return holding

    def _count_reusable(self, seq: Sequence) -> int:
        """Return how many leading blocks may come from the cache: a token whose logits are wanted is computed."""
        if not self.prefix_caching or seq.params.prompt_logprobs is not None:
            return 0
        first_wanted = seq.num_tokens - 1
        if seq.clock.count < seq.num_forced_tokens:  # the entropies of replayed tokens are measured again
            first_wanted = seq.num_prompt_tokens - 1 + seq.clock.count
        return first_wanted // BLOCK_SIZE

    def _find_prefix_blocks(self, seq: Sequence, holding: Holding) -> list[int]:
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

    def _commit_whole(self, seq: Sequence, holding: Holding) -> None:
        """At its end, or before it is recomputed: share what an evicting sequence computed while it was whole."""
        if seq.may_be_evicted and may_be_prefix_source(seq.num_evicted_blocks) and holding.table:
            self._commit(seq, holding)

    def _reclaim(self, holding: Holding) -> None:
        """Take back what a sequence that may be evicted from left behind when it was preempted, and nobody shares now.

        As findable prefixes these blocks could never be evicted.
        """
        if holding.num_foreign is None:
            return
        while holding.num_committed > holding.num_foreign:
            block = holding.table[holding.num_committed - 1]
            if self._pool.num_refs(block) != 1:
                return
            self._pool.forget(block)
            holding.num_committed -= 1

    def _announce(self, seq: Sequence, holding: Holding) -> None:
        if self.prefix_caching and not seq.may_be_evicted:
            keys = holding.chain.extend(seq.token_ids, seq.num_tokens)
            holding.num_announced = len(keys)
            for key in keys[holding.num_committed :]:
                self._announced.setdefault(key, seq)

    def _withdraw(self, seq: Sequence, key: bytes) -> None:
        if self._announced.get(key) is seq:
            del self._announced[key]

    def _give_back(self, seq: Sequence, holding: Holding) -> None:
        for key in holding.chain.keys[holding.num_committed : holding.num_announced]:
            self._withdraw(seq, key)
        for block in reversed(holding.table):  # the tail is reused first, so that prefixes survive longest
            if block != NULL_BLOCK:  # an evicted position
                self._pool.release(block)
