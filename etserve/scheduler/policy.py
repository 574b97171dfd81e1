"""Orders in which sequences get the step. A rank sorts: the smallest is served first and preempted last."""

import math
from collections.abc import Callable
from typing import Protocol

from etserve.control import priority
from etserve.control.priority import Candidate, PriorityConfig
from etserve.sequence import Sequence

Rank = tuple[float, ...]
RankFunction = Callable[[Sequence], Rank]


def fcfs(seq: Sequence) -> Rank:
    """First come, first served, within a priority. Never changes while the sequence lives."""
    return (seq.priority, seq.arrival_seconds, seq.seq_id)


class StepPolicy(Protocol):
    """A rank that is made anew for each step, and stays the same within it."""

    def __call__(self, seq: Sequence) -> Rank: ...

    def begin_step(self, step: int, now: float, running: list[Sequence], waiting: list[Sequence], slots: int) -> None:
        """Rank all who could use the step; about `slots` of them can decode."""

    def is_forced(self, seq: Sequence) -> bool:
        """Whether the sequence is overdue in this step, so that it comes before others whatever they resolve."""


class LawPolicy:
    """The macro law of control/priority.py over real sequences. Implements StepPolicy.

    A client's priority orders the sequences that do not decode yet, as it does under fcfs, until they are overdue: the
    ageing bound is everybody's. Requests with a priority above 0 age in the class `batch`.
    """

    def __init__(self, config: PriorityConfig, cost: Callable[[Sequence], float]) -> None:
        """`cost` of a sequence's next token, > 0, in any unit as long as it is the same for all; NaN: unknown."""
        self._config = config
        self._cost = cost
        self._ranks: dict[int, Rank] = {}  # by seq_id
        self._forced: frozenset[int] = frozenset()

    def __call__(self, seq: Sequence) -> Rank:
        return self._ranks.get(seq.seq_id, (math.inf, seq.arrival_seconds, seq.seq_id))  # came during the step

    def is_forced(self, seq: Sequence) -> bool:
        """See StepPolicy."""
        return seq.seq_id in self._forced

    def begin_step(self, step: int, now: float, running: list[Sequence], waiting: list[Sequence], slots: int) -> None:
        """See StepPolicy."""
        decoding = [seq for seq in running if is_decoding(seq)]
        others = [*(seq for seq in running if not is_decoding(seq)), *waiting]
        candidates = [self._candidate(seq, now, "decode") for seq in decoding]
        candidates += [self._candidate(seq, now, "batch" if seq.priority > 0 else "waiting") for seq in others]
        self._forced = frozenset(c.arrival for c in candidates if priority.is_forced(c, self._config))
        order = [c.arrival for c in priority.rank(candidates, slots, step, self._config)]
        # Those that neither decode nor are overdue come last: a stable sort puts the client's priority above the law.
        client = {seq.seq_id: seq.priority for seq in others if seq.seq_id not in self._forced}
        first = len(order) - len(client)
        order[first:] = sorted(order[first:], key=client.__getitem__)
        self._ranks = {seq_id: (float(place),) for place, seq_id in enumerate(order)}

    def _candidate(self, seq: Sequence, now: float, service_class: priority.ServiceClass) -> Candidate:
        served = seq.arrival_seconds if seq.last_served_seconds is None else seq.last_served_seconds
        drops = seq.control.drops
        return Candidate(
            arrival=seq.seq_id,
            service_class=service_class,
            seconds_since_service=now - served,
            drop_per_cost=math.nan if math.isnan(drops.drop_nats) else drops.per_cost(self._cost(seq)),
            tokens_left=float(seq.max_output_tokens - seq.num_output_tokens),
            end_probability=seq.control.end_probability,
            entropy_nats=seq.control.drops.entropy_nats,
        )


def is_decode(seq: Sequence) -> bool:
    """Only the latest output token is to be computed."""
    return seq.num_uncomputed_tokens == 1 and seq.num_output_tokens > 0


def is_decoding(seq: Sequence) -> bool:
    """No prompt is to be computed: the latest output token, or once more what was computed with blocks skipped."""
    return is_decode(seq) or seq.is_refreshing
