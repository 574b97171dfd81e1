"""One choice of one request in flight: the mutable state that scheduler, runner and engine share. Knows no blocks."""

from dataclasses import dataclass, field
from enum import Enum, auto

from etserve.control.choice import ChoiceControl
from etserve.control.clock import EntropyClock
from etserve.control.draft import DraftRecord, DraftRun
from etserve.outputs import FinishReason
from etserve.sampling_params import SamplingParams


class Status(Enum):
    WAITING = auto()  # never scheduled, or preempted: holds no block
    RUNNING = auto()  # holds blocks
    FINISHED = auto()  # holds no block, will never be scheduled again


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known and computed so far.

    [0, num_computed_tokens)           KV entries are written
    [num_computed_tokens, num_tokens)  to be computed; the logits of the last one give the next token
    """

    seq_id: int  # unique within the engine
    request_id: str
    choice: int
    params: SamplingParams
    seed: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    max_output_tokens: int  # already clipped to the context
    arrival_seconds: float  # engine's monotonic clock
    priority: int = 0
    cache_salt: bytes = b""
    num_forced_tokens: int = 0  # output tokens replayed after a restart: known from the start, never emitted again
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, spared by the prefix cache at first admission
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    first_scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_scheduled_step: int = -1
    last_served_seconds: float | None = None  # end of its latest step, or when it was preempted
    num_dense_tokens: int | None = None  # KV entries from here on were computed with blocks skipped; None: none were
    num_evicted_blocks: int = 0  # of those computed: null blocks in its table
    total_evicted_blocks: int = 0  # ever, those that a preemption has restored included
    flops: float = 0.0
    bytes_read: float = 0.0  # its KV, and its share of the weights of each step it took part in
    clock: EntropyClock = field(default_factory=EntropyClock)
    control: ChoiceControl = field(default_factory=ChoiceControl)
    drafts_ahead: bool = False  # tokens to come may be guessed, and computed with the latest one
    run: DraftRun = field(default_factory=DraftRun)  # drawn with blocks skipped, and not verified
    is_refreshing: bool = False  # its next step renews keys and values that were computed with blocks skipped
    drafted: DraftRecord = field(default_factory=DraftRecord)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def temperature(self) -> float:
        """In force for the next token."""
        return self.control.temperature if self.control.steers_temperature else self.params.temperature

    @property
    def mean_temperature(self) -> float:
        """Over the output tokens so far."""
        return self.control.thermostat.mean_temperature if self.control.steers_temperature else self.params.temperature

    @property
    def may_be_evicted(self) -> bool:
        """Whether blocks of it may be given back while it runs: it shares none before its end."""
        return self.control.laws.eviction is not None

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens
