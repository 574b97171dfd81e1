"""Drafts by prompt lookup: what followed the last time that the text ended like this. Knows no model.

Prompt lookup decoding (A. Saxena, 2023), with the chains of LZ77 instead of a scan: one dictionary entry per distinct
pair of tokens, and per token a link to the pair's occurrence before.
"""

from array import array
from collections.abc import Iterator

from etserve.sequence import Sequence

MAX_MATCH = 8  # tokens of the ending that are compared: longer ones do not guess better
MAX_CANDIDATES = 16  # occurrences of the last pair that are looked at, newest first
MAX_INDEXED_PER_STEP = 4096  # of one sequence: about 2 ms; a long prompt is taken in over several steps


class PairIndex:
    """Where each pair of neighbouring tokens has occurred in one growing text."""

    __slots__ = ("_before", "_latest")

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # pair -> position of the token after its newest occurrence
        self._before = array("i", [0, 0])  # by position: the same for the occurrence before; 0: none

    def extend(self, token_ids: list[int], max_tokens: int = MAX_INDEXED_PER_STEP) -> bool:
        """Take in tokens not seen yet, at most so many; True when none are left. They may grow, never change."""
        first = len(self._before)
        last = min(len(token_ids), first + max_tokens)
        for position in range(first, last):
            pair = token_ids[position - 2], token_ids[position - 1]
            self._before.append(self._latest.get(pair, 0))
            self._latest[pair] = position
        return last >= len(token_ids)

    def continuation(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return what followed the longest ending that has occurred before (of equal ones the newest), or [].

        Where that runs into the end of the text it goes on with itself: the text is taken to repeat.
        """
        best, best_length = 0, 0
        for position in self._occurrences(token_ids):
            length = _common_ending(token_ids, position)
            if length > best_length:
                best, best_length = position, length
            if length == MAX_MATCH:
                break
        if best == 0:
            return []
        found = token_ids[best : best + max_tokens]
        period = len(token_ids) - best
        while len(found) < max_tokens:
            found.append(found[len(found) - period])
        return found

    def _occurrences(self, token_ids: list[int]) -> Iterator[int]:
        """Positions after earlier occurrences of the last pair, newest first."""
        if len(token_ids) < 2:
            return
        position = self._latest.get((token_ids[-2], token_ids[-1]), 0)
        for _ in range(MAX_CANDIDATES):
            if position == 0:
                return
            yield position
            position = self._before[position]


def _common_ending(token_ids: list[int], position: int) -> int:
    """How many tokens before `position` are those at the end of the text, at most MAX_MATCH."""
    length = 0
    while length < min(MAX_MATCH, position) and token_ids[position - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


class PromptLookup:
    """Guesses each sequence's next tokens from its own prompt and output. Implements Drafter."""

    def __init__(self) -> None:
        self._indices: dict[int, PairIndex] = {}  # by seq_id

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        """See Drafter."""
        index = self._indices.setdefault(seq.seq_id, PairIndex())
        return index.continuation(seq.token_ids, max_tokens) if index.extend(seq.token_ids) else []

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._indices.pop(seq.seq_id, None)
