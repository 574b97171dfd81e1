"""Stop strings in streamed text. Knows neither tokens nor how the text was cut into pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What one piece of text led to."""

    text: str  # may go to the client now
    stop: str | None = None  # the stop string that ended the output


class StopMatcher:
    """Finds the stop string that is complete first (of several at once the longest); after it nothing goes out.

    Holds back just the longest end of the text that may still become a stop string, so the result does not depend on
    how the text was cut.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if "" in stop:
            raise ValueError("a stop string cannot be empty")
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""
        self._is_done = False

    def push(self, text: str) -> StopMatch:
        """Add text; after a match, text is dropped."""
        if self._is_done:
            return StopMatch("")
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            end, start = match
            self._held, self._is_done = "", True
            return StopMatch(pending[: end if self._include else start], pending[start:end])
        keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return StopMatch(pending[:cut])

    def flush(self) -> str:
        """End of the output without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """(end, start) of the match with the least end, then the least start."""
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found, default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
