"""Prompt lookup finds what a scan of the whole text finds, and takes long prompts in over several steps."""

from hypothesis import given
from hypothesis import strategies as st

from etserve.scheduler.lookup import MAX_CANDIDATES, MAX_MATCH, PairIndex, PromptLookup
from tests.unit.planning_helpers import make_sequence

texts = st.lists(st.integers(0, 3), max_size=60)


def scanned(text: list[int], max_tokens: int) -> list[int]:
    """Slow oracle: compare the ending with every place of the text."""
    places = [p for p in range(2, len(text)) if text[p - 2 : p] == text[-2:]]
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
        assert index.extend(text)
        assert index.continuation(text, length) == scanned(text, length)


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


def test_a_long_prompt_is_taken_in_by_pieces_and_guesses_nothing_until_then() -> None:
    index = PairIndex()
    text = [*range(25), 3, 4]
    assert not index.extend(text, max_tokens=10)
    assert not index.extend(text, max_tokens=10)
    assert index.extend(text, max_tokens=10)
    assert index.continuation(text, 3) == [5, 6, 7]


def test_each_sequence_is_guessed_from_its_own_tokens_and_forgotten_with_it() -> None:
    lookup = PromptLookup()
    first, second = make_sequence(1, token_ids=[1, 2, 3, 1, 2]), make_sequence(2, token_ids=[1, 2, 4, 1, 2])
    assert lookup.propose(first, 1) == [3]
    assert lookup.propose(second, 1) == [4]
    assert lookup.propose(make_sequence(3, token_ids=[1]), 4) == []
    lookup.forget(first)
    lookup.forget(first)
    assert set(lookup._indices) == {2, 3}
