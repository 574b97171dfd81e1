"""Drafts by prompt lookup: what followed the last time that the text ended like this. Knows no model.

Prompt lookup decoding (A. Saxena, 2023), with the chains of LZ77 instead of a scan: one dictionary entry per distinct
pair of tokens, and per token a link to the pair's occurrence before, within a window of the newest tokens.
"""

from array import array
from collections.abc import Iterator

from etserve.sequence import Sequence

MAX_MATCH = 8  # tokens of the ending that are compared: longer ones do not guess better
MAX_CANDIDATES = 16  # occurrences of the last pair that are looked at, newest first
MAX_INDEXED_PER_STEP = 4096  # of all sequences: about 2 ms; a long prompt is taken in over several steps
MAX_INDEXED = 16_384  # of one sequence, the newest: 3 MB at most


class PairIndex:
    """Where each pair of neighbouring tokens has occurred among the newest tokens of one growing text."""

    __slots__ = ("_before", "_capacity", "_end", "_first", "_latest")

    def __init__(self, capacity: int = MAX_INDEXED) -> None:
        """`capacity`: how many positions it knows at most."""
        self._capacity = capacity
        self._latest: dict[int, int] = {}  # pair -> position of the token after its newest occurrence
        self._before = array("i")  # ring by position: the same for the occurrence before; 0: none
        self._first = self._end = 2  # positions taken in since the ring was empty: [first, end)

    def extend(self, token_ids: list[int], max_tokens: int = MAX_INDEXED_PER_STEP) -> int:
        """Take in tokens not seen yet, at most so many; return how many it were. They may grow, never change."""
        if len(token_ids) - self._end > self._capacity:  # what lies between would be forgotten at once
            self._latest, self._before = {}, array("i")
            self._first = self._end = len(token_ids) - self._capacity
        begin, end = self._end, min(len(token_ids), self._end + max_tokens)
        for position in range(begin, end):
            pair = _pair(token_ids, position)
            slot = (position - self._first) % self._capacity
            if slot == len(self._before):
                self._before.append(self._latest.get(pair, 0))
            else:
                self._forget(token_ids, position - self._capacity)
                self._before[slot] = self._latest.get(pair, 0)
            self._latest[pair] = position
        self._end = max(begin, end)
        return self._end - begin

    def has_all(self, token_ids: list[int]) -> bool:
        """Whether the end of the text is taken in, and with it all that it remembers."""
        return self._end >= len(token_ids)

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
        oldest = max(self._first, self._end - self._capacity)
        position = self._latest.get(_pair(token_ids, len(token_ids)), 0)
        for _ in range(MAX_CANDIDATES):
            if position < oldest:  # 0, or out of the ring by now
                return
            yield position
            position = self._before[(position - self._first) % self._capacity]

    def _forget(self, token_ids: list[int], position: int) -> None:
        """The oldest position gives way to a new one; links to it are known by its age."""
        pair = _pair(token_ids, position)
        if self._latest[pair] == position:
            del self._latest[pair]


def _pair(token_ids: list[int], position: int) -> int:
    """The two tokens before `position`, each below 2^32, as one number."""
    return token_ids[position - 2] << 32 | token_ids[position - 1]


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
        self._allowance = MAX_INDEXED_PER_STEP  # tokens that may still be taken in before the next step

    def begin_step(self) -> None:
        """See Drafter."""
        self._allowance = MAX_INDEXED_PER_STEP

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        """See Drafter."""
        index = self._indices.setdefault(seq.seq_id, PairIndex())
        self._allowance -= index.extend(seq.token_ids, self._allowance)
        return index.continuation(seq.token_ids, max_tokens) if index.has_all(seq.token_ids) else []

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._indices.pop(seq.seq_id, None)
