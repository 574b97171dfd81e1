"""Blocks: three states, exact counts, oldest content reused first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.kv.block_pool import NULL_BLOCK, AuditError, BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def cache_blocks(pool: BlockPool, count: int) -> list[int]:
    """Leave `count` blocks cached under keys 0, 1, ..., released in that order."""
    blocks = pool.allocate(count)
    assert blocks is not None
    for number, block in enumerate(blocks):
        assert pool.register(block, key(number))
        pool.release(block)
    return blocks


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(num_blocks)


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(9)
    blocks = pool.allocate(8)
    assert blocks is not None
    assert sorted(blocks) == list(range(1, 9))
    assert NULL_BLOCK not in blocks


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(5)
    cache_blocks(pool, 2)
    held = pool.allocate(1)
    before = (pool.num_active, pool.num_cached, pool.num_blank)
    assert pool.allocate(4) is None
    assert (pool.num_active, pool.num_cached, pool.num_blank) == before
    assert pool.find(key(0)) is not None
    assert held is not None
    pool.audit()


def test_nothing_is_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [1]
    assert pool.allocate(0) == []


def test_blank_blocks_go_before_cached_ones_and_those_oldest_first() -> None:
    pool = BlockPool(6)
    cached = cache_blocks(pool, 3)
    blocks = pool.allocate(4)
    assert blocks is not None
    assert set(blocks[:2]).isdisjoint(cached)
    assert blocks[2:] == cached[:2]
    assert pool.find(key(0)) is None
    assert pool.find(key(1)) is None
    assert pool.find(key(2)) == cached[2]


def test_a_shared_block_is_free_again_after_its_last_release() -> None:
    pool = BlockPool(4)
    (first, *_) = cache_blocks(pool, 1)
    pool.share(first)
    pool.share(first)
    assert (pool.num_refs(first), pool.num_cached, pool.num_active) == (2, 0, 1)
    pool.release(first)
    assert pool.num_active == 1
    pool.release(first)
    assert (pool.num_active, pool.num_cached) == (0, 1)


def test_use_makes_a_cached_block_young() -> None:
    pool = BlockPool(4)
    old, middle, young = cache_blocks(pool, 3)
    pool.share(old)
    pool.release(old)
    assert pool.allocate(3) == [middle, young, old]


def test_one_content_has_one_block() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2) or []
    assert pool.register(first, key(1))
    assert not pool.register(second, key(1))
    assert pool.find(key(1)) == first
    pool.release(second)
    assert pool.num_cached == 0  # the twin has no key: blank
    pool.audit()


def test_forgotten_content_is_not_found() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.register(block, key(1))
    pool.forget(block)
    assert pool.find(key(1)) is None
    pool.release(block)
    assert (pool.num_cached, pool.num_blank) == (0, 2)
    pool.audit()


def test_bugs_of_the_caller_are_noticed() -> None:
    pool = BlockPool(3)
    for block in (NULL_BLOCK, 1):
        with pytest.raises(AuditError):
            pool.release(block)
    with pytest.raises(AuditError):
        pool.register(1, key(1))
    with pytest.raises(AuditError):
        pool.forget(1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._refs.__setitem__(1, 0),
        lambda pool: pool._refs.__setitem__(3, -1),
        lambda pool: pool._blank.append(pool._blank[0]),
        lambda pool: pool._blank.pop(),
        lambda pool: pool._blank.append(NULL_BLOCK),
        lambda pool: pool._cached.popitem(),
        lambda pool: pool._keys.__setitem__(2, None),
        lambda pool: pool._block_by_key.clear(),
        lambda pool: pool._block_by_key.__setitem__(key(9), 3),
    ],
)
def test_the_audit_notices_every_kind_of_damage(damage: object) -> None:
    pool = BlockPool(8)
    assert pool.allocate(1) == [1]
    blocks = pool.allocate(1) or []
    pool.register(blocks[0], key(0))
    pool.release(blocks[0])
    pool.audit()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AuditError):
        pool.audit()


class SlowPool:
    """The same rules on plain lists: the oracle."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.released: list[int] = []  # with content, oldest first

    def allocatable(self) -> int:
        return self.num_blocks - 1 - len(self.refs)

    def reuse_order(self) -> list[int]:
        return [b for b in self.released if b not in self.refs and b in self.keys]


@given(st.data(), st.sampled_from([2, 3, 8, 40]))
def test_the_pool_behaves_like_its_slow_oracle(data: st.DataObject, num_blocks: int) -> None:
    pool, oracle = BlockPool(num_blocks), SlowPool(num_blocks)
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "share", "release", "register", "forget"]))
        live = sorted(oracle.refs)
        if action == "allocate":
            _allocate(pool, oracle, data.draw(st.integers(0, num_blocks)))
        elif action == "share" and oracle.keys:
            block = data.draw(st.sampled_from(sorted(oracle.keys)))
            assert pool.find(oracle.keys[block]) == block
            pool.share(block)
            oracle.refs[block] = oracle.refs.get(block, 0) + 1
        elif action == "release" and live:
            _release(pool, oracle, data.draw(st.sampled_from(live)))
        elif action == "register" and live:
            block, name = data.draw(st.sampled_from(live)), key(data.draw(st.integers(0, 9)))
            if block not in oracle.keys:
                assert pool.register(block, name) == (name not in oracle.keys.values())
                if name not in oracle.keys.values():
                    oracle.keys[block] = name
        elif action == "forget" and live:
            block = data.draw(st.sampled_from(live))
            pool.forget(block)
            oracle.keys.pop(block, None)
        pool.audit()
        assert pool.num_active == len(oracle.refs)
        assert pool.num_cached == len(oracle.reuse_order())


def _allocate(pool: BlockPool, oracle: SlowPool, count: int) -> None:
    order = oracle.reuse_order()
    num_blank = oracle.allocatable() - len(order)
    blocks = pool.allocate(count)
    assert (blocks is None) == (count > oracle.allocatable())
    for index, block in enumerate(blocks or []):
        assert block not in oracle.refs
        if index >= num_blank:
            assert block == order[index - num_blank]
        oracle.keys.pop(block, None)
        oracle.refs[block] = 1


def _release(pool: BlockPool, oracle: SlowPool, block: int) -> None:
    pool.release(block)
    oracle.refs[block] -= 1
    if oracle.refs[block] == 0:
        del oracle.refs[block]
        oracle.released = [b for b in oracle.released if b != block] + [block]
