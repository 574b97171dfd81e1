"""Stop strings: exact across borders, held back only as far as needed, the same however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etserve.tokenizer import StopMatcher


def run(stops: list[str], parts: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out, found = "", None
    for part in parts:
        match = matcher.push(part)
        out += match.text
        found = found or match.stop
    return out + matcher.flush(), found


def reference(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Read one character at a time; stop as soon as what was read ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def test_a_stop_string_across_three_pieces_is_found_and_cut() -> None:
    assert run(["###"], ["a#", "#", "#b"]) == ("a", "###")
    assert run(["###"], ["a#", "#", "#b"], include=True) == ("a###", "###")


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("text <").text == "text "
    assert matcher.push("/e").text == ""
    assert matcher.push("x").text == "</ex"
    assert matcher.push("</end").text == ""
    assert matcher.flush() == "</end"


def test_the_first_complete_one_wins_and_of_several_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_nothing_goes_out_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("ab").stop == "b"
    assert matcher.push("more").text == ""
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopMatcher([]).push("abc").text == "abc"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


@given(
    st.lists(st.text(alphabet="aäb🎉", min_size=1, max_size=5), max_size=4),
    st.lists(st.text(alphabet="aäb🎉", max_size=6), max_size=12),
    st.booleans(),
)
def test_a_stream_is_the_whole_however_the_text_is_cut(stops: list[str], parts: list[str], include: bool) -> None:
    assert run(stops, parts, include) == reference(stops, "".join(parts), include)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text(alphabet="abc", max_size=30),
)
def test_no_more_is_held_than_may_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    match = matcher.push(text)
    held = matcher.flush()
    if match.stop is None and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)
