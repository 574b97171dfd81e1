"""Orders in which sequences get the step. A rank sorts: the smallest is served first and preempted last."""

from collections.abc import Callable

from etserve.sequence import Sequence

Rank = tuple[float, ...]
RankFunction = Callable[[Sequence], Rank]


def fcfs(seq: Sequence) -> Rank:
    """First come, first served, within a priority. Never changes while the sequence lives."""
    return (seq.priority, seq.arrival_seconds, seq.seq_id)
