"""Block tables, prefixes by content, and what is left behind."""

import subprocess
import sys

import pytest

from etserve.control.eviction import EvictionConfig
from etserve.kv.block_pool import AuditError
from etserve.kv.hashing import BlockChain
from etserve.kv.manager import KVCacheManager, count_blocks
from etserve.sampling_params import SamplingParams
from etserve.sequence import Sequence
from tests.unit.planning_helpers import make_sequence


def compute(kv: KVCacheManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """Pretend that a step has computed the first `num_tokens` (all, by default)."""
    seq.num_computed_tokens = seq.num_tokens if num_tokens is None else num_tokens
    kv.commit(seq)


def admit_and_compute(kv: KVCacheManager, seq: Sequence) -> int:
    num_cached = kv.admit(seq)
    assert num_cached is not None
    compute(kv, seq)
    kv.audit()
    return num_cached


def test_the_planning_floors_do_not_import_torch() -> None:
    modules = "etserve.scheduler.scheduler, etserve.control.cost, etserve.control.keyed_random"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_are_counted_up(num_tokens: int, expected: int) -> None:
    assert count_blocks(num_tokens) == expected


def test_keys_name_the_whole_prefix_and_the_salt() -> None:
    tokens = list(range(48))
    plain = BlockChain(b"").extend(tokens, 48)
    assert len(set(plain)) == 3
    assert BlockChain(b"").extend([99, *tokens[1:]], 48)[2] != plain[2]
    assert set(BlockChain(b"salt").extend(tokens, 48)).isdisjoint(plain)
    assert set(BlockChain(b"").extend(tokens[16:], 32)).isdisjoint(plain)


@pytest.mark.parametrize("cuts", [[48], [15, 16, 17, 48], [31, 47], [0, 1, 48]])
def test_keys_do_not_depend_on_when_they_were_made(cuts: list[int]) -> None:
    tokens = list(range(100, 150))
    chain = BlockChain(b"x")
    for num_tokens in cuts:
        assert len(chain.extend(tokens, num_tokens)) == num_tokens // 16
    assert chain.extend(tokens, 50) == BlockChain(b"x").extend(tokens, 50)


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import etserve.kv.hashing as hashing

    class CountingStruct:
        calls = 0

        def pack(self, *tokens: int) -> bytes:
            self.calls += 1
            return repr(tokens).encode()

    counter = CountingStruct()
    monkeypatch.setattr(hashing, "_TOKENS", counter)
    kv, seq = KVCacheManager(20), make_sequence(num_tokens=100)
    for _ in range(5):
        kv.find_prefix(seq)
        kv.find_leader(seq)
    admit_and_compute(kv, seq)
    kv.preempt(seq)
    admit_and_compute(kv, seq)
    assert counter.calls == 6


def test_a_second_sequence_shares_whole_blocks_but_never_the_last_token() -> None:
    kv = KVCacheManager(20)
    prompt = list(range(48))
    first = make_sequence(1, token_ids=prompt)
    assert admit_and_compute(kv, first) == 0
    for seq_id, (num_tokens, cached) in enumerate([(49, 48), (48, 32), (47, 32), (33, 32), (32, 16), (16, 0)], 2):
        seq = make_sequence(seq_id, token_ids=[*prompt, 7][:num_tokens])
        assert kv.find_prefix(seq) == cached
        assert kv.admit(seq) == cached
        assert kv.block_table(seq)[: cached // 16] == kv.block_table(first)[: cached // 16]
        kv.free(seq)
    kv.audit()


def test_a_prefix_outlives_its_sequence_until_its_blocks_are_reused() -> None:
    kv = KVCacheManager(5)
    first = make_sequence(1, num_tokens=64)
    admit_and_compute(kv, first)
    kv.free(first)
    assert (kv.num_active_blocks, kv.num_cached_blocks, kv.num_free_blocks) == (0, 4, 0)
    assert kv.find_prefix(make_sequence(2, token_ids=[*first.token_ids, 1])) == 64
    admit_and_compute(kv, make_sequence(3, num_tokens=20))  # takes two blocks: the tail goes first
    assert kv.find_prefix(make_sequence(4, token_ids=[*first.token_ids, 1])) == 32


def test_only_full_computed_blocks_are_found() -> None:
    kv = KVCacheManager(20)
    first = make_sequence(1, num_tokens=60)
    kv.admit(first)
    other = make_sequence(2, token_ids=first.token_ids)
    assert kv.find_prefix(other) == 0
    compute(kv, first, 31)
    assert kv.find_prefix(other) == 16
    compute(kv, first, 60)
    assert kv.find_prefix(other) == 48


def test_output_is_shared_too_for_the_next_turn() -> None:
    kv = KVCacheManager(20)
    first = make_sequence(1, num_tokens=20)
    kv.admit(first)
    first.token_ids += range(30)
    assert kv.reserve(first, 50)
    compute(kv, first)
    kv.free(first)
    assert kv.find_prefix(make_sequence(2, token_ids=[*first.token_ids, 5, 6])) == 48


def test_salts_do_not_share() -> None:
    kv = KVCacheManager(20)
    first = make_sequence(1, num_tokens=40, salt=b"a")
    admit_and_compute(kv, first)
    assert kv.find_prefix(make_sequence(2, token_ids=first.token_ids, salt=b"b")) == 0
    assert kv.find_prefix(make_sequence(3, token_ids=first.token_ids, salt=b"a")) == 32


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole() -> None:
    kv = KVCacheManager(20)
    first = make_sequence(1, num_tokens=40)
    admit_and_compute(kv, first)
    scored = make_sequence(2, token_ids=first.token_ids, params=SamplingParams(prompt_logprobs=0))
    assert kv.find_prefix(scored) == 0
    assert kv.find_leader(scored) is None
    assert admit_and_compute(kv, scored) == 0


def test_replayed_tokens_are_computed_until_their_entropies_are_measured_again() -> None:
    kv = KVCacheManager(20)
    first = make_sequence(1, num_tokens=20, forced=range(60))
    admit_and_compute(kv, first)
    replay = make_sequence(2, token_ids=first.token_ids[:20], forced=range(60))
    assert kv.find_prefix(replay) == 16  # the logits of token 19 give the first output token
    for _ in range(30):
        replay.clock = replay.clock.observe(1.0)
    assert kv.find_prefix(replay) == 48  # 30 of them are measured: from token 49 on
    for _ in range(30):
        replay.clock = replay.clock.observe(1.0)
    assert kv.find_prefix(replay) == 64


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    kv = KVCacheManager(20, prefix_caching=False)
    first = make_sequence(1, num_tokens=40)
    kv.admit(first)
    other = make_sequence(2, token_ids=first.token_ids)
    assert kv.find_leader(other) is None
    compute(kv, first)
    assert kv.find_prefix(other) == 0
    kv.free(first)
    assert kv.num_cached_blocks == 0
    kv.audit()


def test_content_of_a_failed_sequence_is_never_found() -> None:
    kv = KVCacheManager(20)
    first = make_sequence(1, num_tokens=40)
    admit_and_compute(kv, first)
    kv.free(first, keep_content=False)
    assert kv.find_prefix(make_sequence(2, token_ids=first.token_ids)) == 0
    assert kv.num_cached_blocks == 0
    kv.audit()


def test_a_failed_admission_changes_nothing() -> None:
    kv = KVCacheManager(6)
    first = make_sequence(1, num_tokens=32)
    admit_and_compute(kv, first)
    kv.free(first)
    wanting = make_sequence(2, token_ids=[*first.token_ids, *range(80)])
    before = (kv.num_active_blocks, kv.num_cached_blocks, kv.num_free_blocks)
    assert kv.admit(wanting) is None  # 7 blocks, of 5
    assert (kv.num_active_blocks, kv.num_cached_blocks, kv.num_free_blocks) == before
    assert kv.block_table(wanting) == []
    assert kv.find_leader(make_sequence(3, token_ids=wanting.token_ids)) is None
    kv.audit()


def test_cached_blocks_that_a_prefix_revives_count_against_the_room() -> None:
    kv = KVCacheManager(6)
    first = make_sequence(1, num_tokens=32)
    admit_and_compute(kv, first)
    kv.free(first)
    longer = make_sequence(2, token_ids=[*first.token_ids, *range(40)])  # 2 revived + 3 fresh = 5
    assert kv.admit(longer, headroom=1) is None
    assert kv.admit(longer, headroom=0) == 32
    kv.audit()


def test_a_failed_reservation_changes_nothing_and_a_good_one_covers_all() -> None:
    kv = KVCacheManager(5)
    seq = make_sequence(1, num_tokens=20)
    kv.admit(seq)
    assert not kv.reserve(seq, 65)
    assert (len(kv.block_table(seq)), kv.num_free_blocks) == (2, 2)
    assert kv.reserve(seq, 32)
    assert len(kv.block_table(seq)) == 2
    assert kv.reserve(seq, 64)
    assert len(kv.block_table(seq)) == 4


def test_a_table_grows_in_place_and_a_freed_one_stays_as_it_was_for_who_holds_it() -> None:
    kv = KVCacheManager(9)
    seq = make_sequence(1, num_tokens=20)
    kv.admit(seq)
    table = kv.block_table(seq)
    kv.reserve(seq, 40)
    assert len(table) == 3
    kv.free(seq)
    assert len(table) == 3
    assert kv.block_table(seq) == []


def test_freeing_twice_or_unknown_is_harmless_and_admitting_twice_is_a_bug() -> None:
    kv = KVCacheManager(9)
    seq = make_sequence(1, num_tokens=20)
    kv.free(seq)
    kv.admit(seq)
    with pytest.raises(AuditError):
        kv.admit(seq)
    kv.free(seq)
    kv.free(seq)
    assert kv.num_active_blocks == 0
    kv.audit()


def test_the_leader_is_who_computes_the_first_missing_block() -> None:
    kv = KVCacheManager(50)
    prompt = list(range(64))
    leader = make_sequence(1, token_ids=prompt)
    kv.admit(leader)
    same = make_sequence(2, token_ids=prompt)
    assert kv.find_leader(same) is leader
    assert kv.find_leader(make_sequence(3, token_ids=prompt, salt=b"x")) is None
    assert kv.find_leader(make_sequence(4, token_ids=[9, *prompt])) is None
    fork = make_sequence(5, token_ids=prompt[:32] + [5] * 32)
    assert kv.find_leader(fork) is leader
    compute(kv, leader, 32)
    assert kv.find_leader(fork) is None  # what it shares is there
    assert kv.find_leader(same) is leader
    compute(kv, leader, 64)
    assert kv.find_leader(same) is None
    assert kv.find_prefix(same) == 48


@pytest.mark.parametrize("end", ["free", "preempt"])
def test_a_leader_that_leaves_leads_no_more(end: str) -> None:
    kv = KVCacheManager(50)
    leader = make_sequence(1, num_tokens=64)
    kv.admit(leader)
    compute(kv, leader, 16)
    follower = make_sequence(2, token_ids=leader.token_ids)
    assert kv.find_leader(follower) is leader
    getattr(kv, end)(leader)
    assert kv.find_leader(follower) is None
    assert kv.find_prefix(follower) == 16
    kv.audit()


def test_the_manager_audit_notices_wrong_counts_and_wrong_content() -> None:
    kv = KVCacheManager(20)
    seq = make_sequence(1, num_tokens=40)
    admit_and_compute(kv, seq)
    kv._pool.share(kv.block_table(seq)[0])
    with pytest.raises(AuditError, match="references"):
        kv.audit()
    kv._pool.release(kv.block_table(seq)[0])
    kv.audit()
    kv.block_table(seq)[:2] = reversed(kv.block_table(seq)[:2])
    with pytest.raises(AuditError, match="something else"):
        kv.audit()


def preempt_and_return(kv: KVCacheManager, seq: Sequence) -> int:
    """Return how many tokens were found."""
    kv.preempt(seq)
    seq.num_computed_tokens = 0
    return admit_and_compute(kv, seq)


def test_what_an_evicting_sequence_finds_of_itself_after_a_preemption_may_be_evicted_again() -> None:
    kv = KVCacheManager(20)
    seq = make_sequence(1, num_tokens=70, eviction=EvictionConfig())
    assert admit_and_compute(kv, seq) == 0
    for _ in range(2):
        assert preempt_and_return(kv, seq) == 64
        assert kv.num_prefix_blocks(seq) == 0
        assert kv.find_prefix(make_sequence(2, token_ids=seq.token_ids)) == 0  # shared at its end, not before
    kv.evict(seq, [1, 3])
    seq.num_evicted_blocks = 2
    kv.audit()
    kv.free(seq)
    assert kv.find_prefix(make_sequence(3, token_ids=seq.token_ids)) == 0  # what followed an eviction


def test_an_evicting_sequence_that_was_preempted_and_stayed_whole_is_shared_at_its_end() -> None:
    kv = KVCacheManager(20)
    seq = make_sequence(1, num_tokens=70, eviction=EvictionConfig())
    admit_and_compute(kv, seq)
    assert preempt_and_return(kv, seq) == 64
    kv.free(seq)
    assert kv.find_prefix(make_sequence(2, token_ids=seq.token_ids)) == 64
    kv.audit()


def test_what_others_had_computed_or_share_by_now_stays_guarded_after_a_preemption() -> None:
    kv = KVCacheManager(40)
    before = make_sequence(1, num_tokens=33)
    admit_and_compute(kv, before)
    kv.free(before)
    seq = make_sequence(2, token_ids=[*before.token_ids, *range(50)], eviction=EvictionConfig())
    assert admit_and_compute(kv, seq) == 32
    assert preempt_and_return(kv, seq) == 80
    assert kv.num_prefix_blocks(seq) == 2
    with pytest.raises(AuditError):
        kv.evict(seq, [1])
    kv.evict(seq, [2])
    whole = make_sequence(3, num_tokens=90, eviction=EvictionConfig())
    admit_and_compute(kv, whole)
    kv.preempt(whole)
    sharing = make_sequence(4, token_ids=whole.token_ids[:50])
    assert admit_and_compute(kv, sharing) == 48
    whole.num_computed_tokens = 0
    assert admit_and_compute(kv, whole) == 80
    assert kv.num_prefix_blocks(whole) == 3
    with pytest.raises(AuditError):
        kv.evict(whole, [2])
    kv.evict(whole, [3, 4])
    kv.audit()
