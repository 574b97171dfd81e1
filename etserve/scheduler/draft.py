"""A step's plan while it is made, and the queues it is made from."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import replace

from etserve.plan import ScheduledSequence, SchedulerOutput
from etserve.scheduler.policy import RankFunction, StepPolicy
from etserve.sequence import Sequence


class RankedQueue:
    """Sequences in the order of a rank that is unique and changes only before `resort`."""

    def __init__(self, rank: RankFunction) -> None:
        self._rank = rank
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        """Go through a snapshot, best first: the queue may change meanwhile."""
        return iter(self._items.copy())

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items.copy())

    def __contains__(self, seq: Sequence) -> bool:
        index = bisect_left(self._items, self._rank(seq), key=self._rank)
        return index < len(self._items) and self._items[index] is seq

    def resort(self) -> None:
        """Take the ranks anew: they have changed."""
        self._items.sort(key=self._rank)

    def add(self, seq: Sequence) -> None:
        insort(self._items, seq, key=self._rank)

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError if the sequence is not in here."""
        index = bisect_left(self._items, self._rank(seq), key=self._rank)
        if index == len(self._items) or self._items[index] is not seq:
            raise ValueError(f"sequence {seq.seq_id} is not queued")
        del self._items[index]


class StepDraft:
    """What has been planned so far; tokens given out never exceed the budget."""

    def __init__(self, step: int, budget: int, now: float, policy: StepPolicy | None = None) -> None:
        self.step = step
        self.now = now
        self.budget = budget  # tokens left
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.num_verifications = 0
        self.is_short = False  # someone's blocks were evicted because the pool had none left
        self.is_exhausted = False  # nobody has a block left that may be evicted, until the step ends
        self._num_blocks_evicted = 0
        self._num_sequences_evicted = 0
        self._policy = policy
        self._decodes: list[ScheduledSequence] = []
        self._prefills: list[ScheduledSequence] = []

    def add(self, seq: Sequence, num_tokens: int, block_table: list[int], is_decode: bool) -> None:
        end = seq.num_computed_tokens + num_tokens
        served = seq.arrival_seconds if seq.last_served_seconds is None else seq.last_served_seconds
        item = ScheduledSequence(
            seq,
            seq.num_computed_tokens,
            num_tokens,
            block_table,
            is_decode,
            epsilon=seq.control.epsilon(end) if is_decode else 0.0,
            check_epsilon=seq.control.check_epsilon(end) if is_decode else 0.0,
            age_seconds=max(0.0, self.now - served),
            is_forced=self._policy is not None and self._policy.is_forced(seq),
            num_evicted_blocks=seq.num_evicted_blocks,
            is_refresh=seq.is_refreshing,
        )
        (self._decodes if is_decode else self._prefills).append(item)
        if seq.is_refreshing and end >= seq.num_tokens - 1:  # one that is left is a decode like any
            self.num_verifications += 1
            seq.is_refreshing = False
        self.budget -= num_tokens
        seq.last_scheduled_step = self.step

    def add_ahead(self, ahead: Sequence, seq: Sequence, block_table: list[int], epsilon: float) -> None:
        """Let `ahead`, a guess at what `seq` will be, compute its latest token."""
        item = ScheduledSequence(
            ahead, ahead.num_computed_tokens, 1, block_table, is_decode=True, epsilon=epsilon, ahead_of=seq
        )
        self._decodes.append(item)
        self.budget -= 1
        seq.last_scheduled_step = self.step

    def evicted(self, seq: Sequence, num_blocks: int) -> None:
        """So many blocks have just been evicted from a sequence that is not in the plan yet."""
        self._num_blocks_evicted += num_blocks
        self._num_sequences_evicted += 0 < num_blocks == seq.num_evicted_blocks

    @property
    def decodes(self) -> list[ScheduledSequence]:
        """Those planned so far."""
        return self._decodes.copy()

    def lengthen(self, index: int, draft: tuple[int, ...]) -> None:
        """Let one of the decodes compute drafted tokens as well; its table covers them."""
        item = self._decodes[index]
        self._decodes[index] = replace(item, num_tokens=item.num_tokens + len(draft), draft=draft)
        self.budget -= len(draft)

    def freeze(self) -> SchedulerOutput:
        return SchedulerOutput(
            step=self.step,
            scheduled=(*self._decodes, *self._prefills),
            preempted=tuple(self.preempted),
            admitted=tuple(self.admitted),
            num_verifications=self.num_verifications,
            num_blocks_evicted=self._num_blocks_evicted,
            num_sequences_evicted=self._num_sequences_evicted,
        )
