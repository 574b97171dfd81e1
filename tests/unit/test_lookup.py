"""Prompt lookup finds what a scan of the newest tokens finds, and takes long prompts in over several steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.scheduler import lookup as prompt_lookup
from etserve.scheduler.lookup import (
    MAX_CANDIDATES,
    MAX_INDEXED,
    MAX_INDEXED_PER_STEP,
    MAX_MATCH,
    PairIndex,
    PromptLookup,
)
from tests.unit.planning_helpers import make_sequence

texts = st.lists(st.integers(0, 3), max_size=60)


def scanned(text: list[int], max_tokens: int, window: int = 10_000) -> list[int]:
    """Slow oracle: compare the ending with every place among the newest `window` of the text."""
    places = [p for p in range(max(2, len(text) - window), len(text)) if text[p - 2 : p] == text[-2:]]
    best, longest = 0, 0
    for place in sorted(places, reverse=True)[:MAX_CANDIDATES]:
        length = 0
        while length < MAX_MATCH and length < place and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    if not best:
        return []
    repeated = list(text)
    for _ in range(max_tokens):
        repeated.append(repeated[best + len(repeated) - len(text)])
    return repeated[len(text) :]


@given(texts, st.lists(texts, max_size=4), st.integers(1, 12))
def test_a_growing_text_is_continued_as_a_scan_of_it_says(text: list[int], more: list[list[int]], length: int) -> None:
    index = PairIndex()
    for piece in [[], *more]:
        text = text + piece
        index.extend(text)
        assert index.has_all(text)
        assert index.continuation(text, length) == scanned(text, length)


@given(texts, st.lists(texts, max_size=8), st.integers(1, 40), st.integers(1, 9))
def test_of_a_text_that_outgrows_it_an_index_knows_the_newest_tokens_and_keeps_no_others(
    text: list[int], more: list[list[int]], capacity: int, piece_tokens: int
) -> None:
    index = PairIndex(capacity)
    for piece in [[], *more]:
        text = text + piece
        while not index.has_all(text):
            assert 0 < index.extend(text, piece_tokens) <= piece_tokens
            assert max(len(index._before), len(index._latest)) <= capacity
        assert index.continuation(text, 5) == scanned(text, 5, capacity)


def test_tokens_of_any_vocabulary_make_different_pairs() -> None:
    big = 2**32 - 1
    text = [big, 0, 1, 0, big, 2, 1, 0, 3, big, 0]
    index = PairIndex()
    index.extend(text)
    assert index.continuation(text, 1) == [1]


def test_a_longer_match_wins_over_a_newer_one() -> None:
    text = [9, 1, 2, 3, 40, 8, 2, 3, 50, 9, 1, 2, 3]
    index = PairIndex()
    index.extend(text)
    assert index.continuation(text, 2) == [40, 8]
    assert index.continuation([*text[:-4], 7, 7, 2, 3], 2) != [40, 8]


def test_a_run_is_taken_to_go_on() -> None:
    index = PairIndex()
    index.extend([5, 6, 7, 6, 7])
    assert index.continuation([5, 6, 7, 6, 7], 5) == [6, 7, 6, 7, 6]


def test_a_long_prompt_is_taken_in_by_pieces_and_guesses_nothing_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "MAX_INDEXED_PER_STEP", 10)
    lookup, seq = PromptLookup(), make_sequence(1, token_ids=[*range(25), 3, 4])
    found = []
    for _ in range(3):
        lookup.begin_step()
        found.append(lookup.propose(seq, 3))
    assert found == [[], [], [5, 6, 7]]


def test_all_sequences_of_a_step_share_one_allowance_of_tokens_to_take_in() -> None:
    lookup = PromptLookup()
    length = MAX_INDEXED_PER_STEP * 3 // 4
    seqs = [make_sequence(seq_id, num_tokens=length) for seq_id in range(8)]
    num_steps, taken = 0, 0
    while taken < 8 * (length - 2):
        lookup.begin_step()
        for seq in seqs:
            lookup.propose(seq, 1)
        before, taken = taken, sum(len(index._before) for index in lookup._indices.values())
        assert 0 < taken - before <= MAX_INDEXED_PER_STEP
        num_steps += 1
    assert num_steps == 6  # as many as the tokens of all fill
    assert all(lookup.propose(seq, 1) for seq in seqs)


def test_what_a_sequence_of_any_length_costs_is_bounded() -> None:
    lookup, seq = PromptLookup(), make_sequence(1, num_tokens=5 * MAX_INDEXED + 7)
    while not lookup.propose(seq, 1):
        lookup.begin_step()
    index = lookup._indices[1]
    assert max(len(index._before), len(index._latest)) <= MAX_INDEXED


def test_each_sequence_is_guessed_from_its_own_tokens_and_forgotten_with_it() -> None:
    lookup = PromptLookup()
    first, second = make_sequence(1, token_ids=[1, 2, 3, 1, 2]), make_sequence(2, token_ids=[1, 2, 4, 1, 2])
    assert lookup.propose(first, 1) == [3]
    assert lookup.propose(second, 1) == [4]
    assert lookup.propose(make_sequence(3, token_ids=[1]), 4) == []
    lookup.forget(first)
    lookup.forget(first)
    assert set(lookup._indices) == {2, 3}
