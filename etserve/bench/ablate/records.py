"""What one round of one arm went through. Plain data, one JSON file each."""

from typing import Any

import msgspec


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The produced text, read again by the plain engine at temperature 1: no arm marks its own homework."""

    tau_nats: float
    nats_resolved: float
    entropies: list[float] = []  # H_raw of the distribution that each output token was drawn from


class PromptRun(msgspec.Struct, frozen=True, kw_only=True):
    """Reading the round's prompts, done once for all arms where they share what they read."""

    seconds: float
    flops: float
    bytes_read: float


class RequestRun(msgspec.Struct, frozen=True, kw_only=True):
    """One request; seconds since the round began. Lists hold one value per output token."""

    index: int
    due_seconds: float
    token_seconds: list[float]
    end_seconds: float
    num_prompt_tokens: int
    token_ids: list[int]
    text: str
    entropies: list[float]  # H_raw, nats
    temperatures: list[float]
    kept_fractions: list[float]
    tau_nats: list[float]  # the online clock
    replay: Replay | None = None
    error: str | None = None

    @property
    def end_to_end(self) -> float:
        return self.end_seconds - self.due_seconds

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        gaps = len(self.token_seconds) - 1
        return (self.token_seconds[-1] - self.token_seconds[0]) / gaps if gaps > 0 else None


class StepRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Every step of the round, one value each."""

    end_seconds: list[float]
    step_seconds: list[float]
    num_prefill_tokens: list[int]
    num_decode_tokens: list[int]
    flops: list[float]
    bytes_read: list[float]
    num_blocks_skipped: list[int]
    num_preempted: list[int]
    num_forced: list[int]
    num_blocks_evicted: list[int] = []
    num_drafted_tokens: list[int] = []


class RoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of one arm over one workload."""

    arm: str
    workload: str
    round: int
    seed: int
    settings: dict[str, Any]  # of the control loop, as far as they are not the default
    num_kv_blocks: int
    weight_bytes: int
    cpu_foreign: float | None = None  # share of all cores that went to other processes
    prompts: PromptRun | None = None  # None: the arm read them itself, within the round
    phases: dict[str, float] = {}  # seconds in the decoder's calls (bench/phases.py), where it can tell
    requests: list[RequestRun]
    steps: StepRuns


class QualityRun(msgspec.Struct, frozen=True, kw_only=True):
    """Teacher-forced, decode-style scores of one arm. Lists hold one value per document or item."""

    arm: str
    settings: dict[str, Any]
    nll_nats: list[list[float]]  # of each scored token of each document
    entropies: list[list[float]]
    kept_fractions: list[list[float]]
    cloze_nll: list[float]  # of the whole name
    cloze_hits: list[bool]  # every token of the name was the likeliest
    needle_nll: list[float]
    needle_hits: list[bool]
