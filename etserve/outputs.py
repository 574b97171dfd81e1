"""Frozen messages between floors. Structs cross the process border as msgpack; dataclasses stay in the engine."""

from typing import Literal

import msgspec

from etserve.control.entropy import Estimator
from etserve.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request, from the front end to the engine."""

    request_id: str  # ours, unique; never the client's
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower is served earlier among the waiting
    cache_salt: bytes = b""  # mixed into the first prefix-cache hash: requests share blocks only under one salt
    forced_output: list[list[int]] = []  # per choice: tokens already sent to the client before an engine restart
    finished_choices: list[int] = []  # choices that had ended before an engine restart: not run again


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-softmax (fp32, temperature 1, before penalties) of one position."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenEntropy(msgspec.Struct, frozen=True, array_like=True):
    """What was measured when one output token was drawn."""

    entropy_nats: float  # H of softmax(raw logits)
    varentropy: float  # nats^2
    temperature: float  # in force for this draw
    kept_fraction: float  # share of KV blocks that attention read; 1.0: all
    tau_nats: float  # the sequence's entropic time after this token


class EntropySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The entropic record of one finished choice (units: nats unless said otherwise)."""

    tau_nats: float
    tau_up_nats: float
    nats_resolved: float
    mean_entropy_nats: float
    final_entropy_nats: float
    tau_per_gflop: float
    mean_temperature: float
    kept_fraction_mean: float
    blocks_evicted: int
    tau_per_gb: float = 0.0  # of keys and values, and its share of the weights of each step it took part in
    tau_per_second: float = 0.0  # from its first step to its end
    tau_deadband_nats: float = 0.0  # as tau, but blind to changes of up to 0.05 nats
    tau_ratchet_nats: float = 0.0  # fall of the running minimum of the averaged entropy
    surprisal_nats: float = 0.0  # sum of -ln p of the drawn tokens, raw logits
    entropy_estimator: Estimator = "exact"  # what the entropies were read by


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one choice of one request. Exactly one of them per choice carries a finish reason."""

    request_id: str
    choice: int = 0
    token_ids: list[int] = []  # drawn in this step
    text: str = ""  # the text that became certain; may lag behind token_ids
    logprobs: list[TokenLogprobs] = []  # one per token_id when asked for
    entropies: list[TokenEntropy] = []  # one per token_id when params.trace is "tokens"
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, when asked for; first is None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error_code: str | None = None  # with "error": model_numerics, grammar, request_poisoned, engine_restarted
    num_prompt_tokens: int = 0  # these three are filled in the last output
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache spared
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0  # computed on a guess; with num_accepted_tokens in the last output
    num_accepted_tokens: int = 0  # of them, in the output
    entropy_summary: EntropySummary | None = None  # in the last output, when params.trace is not "none"
    timings: "RequestTimings | None" = None  # in the last output


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a choice's time went, in seconds of the engine's monotonic clock."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


class SequenceBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The KV blocks of one running sequence after a step."""

    request_id: str
    choice: int
    num_blocks: int  # of its context, evicted ones included
    num_evicted: int  # given back for good
    kept_fraction: float  # of those it holds, the share that the step's attention read


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step did and measured. Counts are of this step, gauges are after it."""

    step: int
    step_seconds: float
    schedule_seconds: float
    num_prefill_tokens: int  # computed in this step, of prompts, or again after a preemption
    num_decode_tokens: int  # drafted ones count where they were accepted
    num_cached_tokens: int  # prompt tokens found in the prefix cache by sequences admitted in this step
    num_prompt_tokens: int  # prompt tokens of sequences admitted in this step, cached ones included
    num_preempted: int
    num_nonfinite_rows: int
    flops: float  # of the model, by the cost formula (see control/cost.py)
    bytes_read: float  # weights once, KV per sequence
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_blocks_active: int
    kv_blocks_cached: int  # free, but still usable as a prefix
    kv_blocks_free: int
    num_verifications: int = 0  # sequences whose tokens drawn with blocks skipped were computed again
    num_drafted_tokens: int = 0  # computed on a guess
    num_accepted_tokens: int = 0  # of them, told: steps that their sequences are spared
    entropies: list[float] = []  # H_raw of every token drawn in this step
    varentropies: list[float] = []
    temperatures: list[float] = []
    tau_nats: float = 0.0  # sums over the tokens of this step
    tau_up_nats: float = 0.0
    nats_resolved: float = 0.0
    # per token whose step was allowed to skip blocks
    kept_fractions: list[float] = []
    skipped_masses: list[float] = []  # estimated
    num_blocks_skipped: int = 0  # block reads spared, over layers and KV heads
    num_blocks_evicted: int = 0  # taken from running sequences for good
    num_sequences_evicted: int = 0  # that lost their first block
    kv_map: list[SequenceBlocks] = []  # of the sequences computed, while somebody watches
    prune_fallbacks: dict[str, int] = {}  # why skipping stepped back -> how often (control/choice.py FALLBACKS)
    num_saturated_low: int = 0  # tokens at which the thermostat was clamped, by side
    num_saturated_high: int = 0
    schedule_ages_seconds: list[float] = []  # per sequence computed, not guessed at: since last served, or arrival
    num_forced: int = 0  # sequences served because they were overdue
    cost_r_squared: dict[str, float] = {}  # step kind -> how much of the step times the cost model explains


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it is ready."""

    model_name: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    dtype: str
    quantization: str | None
    kv_dtype: str
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_step_tokens: int
    eos_token_ids: list[int]
    backend: str  # "native-cpu/avx512_bf16", "torch/cpu", ...
    startup_seconds: dict[str, float]  # phase -> seconds
    weight_bytes: int
    kv_cache_bytes: int
    pruning_sketch_bits: int = 0  # 0: attention cannot skip blocks
    speculation: str = "off"  # what guesses tokens
    can_evict: bool = False  # attention can do without blocks of a sequence
    # what a request gets that says nothing of it
    pruning: str = "off"
    eviction: str = "off"
    kv_protect: bool = False
    entropy_estimator: Estimator = "exact"  # what entropies are read by
