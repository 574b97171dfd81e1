"""One step's plan and what it measured: the scheduler hands it to the runner and gets it back. No torch."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from etserve.config import BLOCK_SIZE
from etserve.control.choice import NOT_MEASURED, TokenMeasure
from etserve.outputs import TokenLogprobs
from etserve.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens [start, start + num_tokens) of one sequence in this step."""

    seq: Sequence
    start: int
    num_tokens: int
    block_table: list[int]  # covers every token up to start + num_tokens; the manager's own list: read only
    is_decode: bool  # at most one token, all before it computed, at least one output token known
    epsilon: float = 0.0  # attention mass that the step may miss; 0: dense
    check_epsilon: float = 0.0  # > 0: the step is dense, and compared with one that may miss so much
    age_seconds: float = 0.0  # since it was last served, or arrived
    is_forced: bool = False  # overdue: it came before others whatever they resolve
    num_evicted_blocks: int = 0  # null blocks in the table: attention does without their tokens
    ahead_of: Sequence | None = None  # `seq` is a guess at what this one will be, and is told to nobody
    draft: tuple[int, ...] = ()  # guesses at the tokens to come, computed with it: the last of `num_tokens`
    is_refresh: bool = False  # computes densely, once more, what was computed with blocks skipped

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def context(self) -> int:
        """Tokens that attention can read, those of this step included."""
        return self.end - self.num_evicted_blocks * BLOCK_SIZE

    @property
    def known_end(self) -> int:
        """Where the tokens end that are no guesses."""
        return self.end - len(self.draft)

    @property
    def samples(self) -> bool:
        """The last known token is computed here, so its logits give the next token."""
        return self.known_end == self.seq.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan. Decodes come first."""

    step: int
    scheduled: tuple[ScheduledSequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()  # first time scheduled, in this step
    num_verifications: int = 0  # sequences whose tokens drawn with blocks skipped are computed again
    num_blocks_evicted: int = 0
    num_sequences_evicted: int = 0  # evicted from for the first time since they were computed

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one sequence's last row gave."""

    token_id: int
    entropy_nats: float  # of softmax(raw logits), before anything the client asked for
    varentropy: float
    temperature: float  # in force for this draw
    surprisal_nats: float = 0.0  # -ln p of the token under softmax(raw logits)
    logprobs: TokenLogprobs | None = None  # when params.logprobs is set
    measured: TokenMeasure = NOT_MEASURED  # for the control loop


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one forward pass measured, by seq_id."""

    sampled: dict[int, Sampled]  # one entry per scheduled sequence that samples, save the failed ones
    # seq_id -> the tokens drawn after that one: one for each drafted token that was drawn just so
    followers: dict[int, list[Sampled]] = field(default_factory=dict)
    # of tokens start+1 .. end, as far as they are the prompt's
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # seq_id -> error code (non-finite logits, dead grammar)
    # (entropy, surprisal) in nats of the output tokens that this step replayed
    forced_entropies: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    num_nonfinite_rows: int = 0
    flops: dict[int, float] = field(default_factory=dict)  # seq_id -> this step's share
    # seq_id -> keys and values read and written, and an equal share of the weights
    seq_bytes: dict[int, float] = field(default_factory=dict)
    bytes_read: float = 0.0  # weights once, and all keys and values
    num_blocks_skipped: int = 0  # block reads spared, over layers and KV heads
    # of sequences that may be evicted from and sample in this step, by kept block: the largest share of a head's
    # attention that the last row gave it, f32
    block_masses: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # of sequences that may be evicted from, position -> -ln p under softmax(raw logits), nats, of tokens that no draw
    # measures: some of the prompt's, and those that are replayed
    given_surprisals: dict[int, dict[int, float]] = field(default_factory=dict)
