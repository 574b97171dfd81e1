"""One sequence's blocks, and what must hold of all of them between two calls of the manager."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from etserve.kv.block_pool import NULL_BLOCK, AuditError, BlockPool
from etserve.kv.hashing import BlockChain


@dataclass(slots=True)
class Holding:
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
    # of one that may be evicted from and was preempted: so many leading blocks were found, those behind it computed
    num_foreign: int | None = None


def audit(pool: BlockPool, holdings: Mapping[int, Holding]) -> None:
    """Check every invariant between tables (by seq_id), references and contents. O(N). Raises AuditError."""
    pool.audit()
    named = Counter(block for holding in holdings.values() for block in holding.table if block != NULL_BLOCK)
    for block in range(1, pool.num_blocks):
        if pool.num_refs(block) != named[block]:
            raise AuditError(f"block {block}: {pool.num_refs(block)} references, {named[block]} in tables")
    for seq_id, holding in holdings.items():
        _audit_one(pool, seq_id, holding)


def _audit_one(pool: BlockPool, seq_id: int, holding: Holding) -> None:
    for index, block in enumerate(holding.table):
        if block == NULL_BLOCK:
            continue
        key = pool.key_of(block)
        if index >= holding.num_committed and (key is not None or pool.num_refs(block) != 1):
            raise AuditError(f"sequence {seq_id}: block {block} is to be written, but has a key or is shared")
        if index < holding.num_committed and key not in (None, holding.chain.keys[index]):
            raise AuditError(f"sequence {seq_id}: block {block} holds something else")
