"""Who is let in, and what those who are not are told. Plain numbers; no clock of its own, no engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etserve.config import EngineConfig
from etserve.errors import OverloadedError, PromptTooLongError, RequestError
from etserve.outputs import GenerateRequest, ModelInfo, StepStats
from etserve.sampling_params import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 64  # what one row pass can return
_SMOOTHING = 0.05  # weight of one step in the running means
_MAX_RETRY_SECONDS = 60.0


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Raise RequestError or PromptTooLongError for what the model cannot serve, whatever the load."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    check_length(len(prompt), params, info)
    named_ids = {
        "prompt": prompt,
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named_ids.items():
        if ids and (min(ids) < 0 or max(ids) >= info.vocab_size):
            raise RequestError(f"Token ids must be in [0, {info.vocab_size}).", param=name)
    _check_params(params)


def check_length(num_prompt_tokens: int, params: SamplingParams, info: ModelInfo) -> None:
    """Raise PromptTooLongError unless the prompt and the tokens asked for fit into the context."""
    num_tokens = num_prompt_tokens + (1 if params.max_tokens is None else params.max_tokens)
    if num_tokens > info.max_model_len:
        raise PromptTooLongError(num_tokens, info.max_model_len)


def _check_params(params: SamplingParams) -> None:
    """The bounds within which the engine is sure to live; the edge has its own, narrower and before anything else."""
    bounds: dict[str, tuple[float | None, float, float]] = {
        "temperature": (params.temperature, 0.0, 100.0),
        "top_p": (params.top_p, 0.0, 1.0),
        "top_k": (params.top_k, 0, 2**31 - 1),
        "min_p": (params.min_p, 0.0, 1.0),
        "n": (params.n, 1, MAX_CHOICES),
        "max_tokens": (params.max_tokens, 0, 2**31 - 1),
        "min_tokens": (params.min_tokens, 0, 2**31 - 1),
        "presence_penalty": (params.presence_penalty, -100.0, 100.0),
        "frequency_penalty": (params.frequency_penalty, -100.0, 100.0),
        "repetition_penalty": (params.repetition_penalty, 1e-3, 1e3),
        "logprobs": (params.logprobs, 0, MAX_LOGPROBS),
        "prompt_logprobs": (params.prompt_logprobs, 0, MAX_LOGPROBS),
        "logit_bias": (max(map(abs, params.logit_bias.values()), default=0.0), 0.0, 1e4),
    }
    for name, (value, low, high) in bounds.items():
        if value is not None and not low <= value <= high:  # NaN is within no bounds
            raise RequestError(f"{name} must be in [{low}, {high}].", param=name)
    if "" in params.stop:
        raise RequestError("A stop string must not be empty.", param="stop")


@dataclass(frozen=True, slots=True)
class Rates:
    """Running means of what the engine does per second of stepping; zeros until it has stepped."""

    tokens_per_second: float = 0.0
    tau_nats_per_second: float = 0.0
    output_tokens: float = 0.0  # per finished choice
    uncounted_seconds: float = 0.0  # of the latest steps, which computed nothing that counts (guesses to be verified)

    def after_step(self, stats: StepStats) -> "Rates":
        if stats.step_seconds <= 0.0:
            return self
        num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens
        seconds = self.uncounted_seconds + stats.step_seconds
        if num_tokens == 0:
            return replace(self, uncounted_seconds=seconds)
        return replace(
            self,
            tokens_per_second=_mean(self.tokens_per_second, num_tokens / seconds),
            tau_nats_per_second=_mean(self.tau_nats_per_second, stats.tau_nats / seconds),
            uncounted_seconds=0.0,
        )

    def after_finish(self, num_output_tokens: int) -> "Rates":
        return replace(self, output_tokens=_mean(self.output_tokens, num_output_tokens))

    def seconds_for(self, num_prompt_tokens: int, num_choices: int) -> float:
        """How long so much work takes at the measured rate; 0 if nothing has been measured."""
        if self.tokens_per_second <= 0.0:
            return 0.0
        return (num_prompt_tokens + num_choices * self.output_tokens) / self.tokens_per_second


def _mean(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _SMOOTHING * (value - mean)


@dataclass(frozen=True, slots=True)
class Queue:
    """What stands between a new request and the engine's attention, in choices and known tokens."""

    num_waiting: int  # in the engine, and on the way to it
    num_waiting_tokens: int
    num_free_seats: int  # of max_num_seqs


def check_queue(queue: Queue, requests: Sequence[GenerateRequest], config: EngineConfig, rates: Rates) -> None:
    """Raise OverloadedError, with the measured time after which there is room, if the queue cannot take all of them."""
    num_choices = sum(request.params.n for request in requests)
    num_waiting = queue.num_waiting - queue.num_free_seats
    if num_waiting < 0:
        return
    num_new_tokens = sum(request.params.n * len(request.prompt_token_ids) for request in requests)
    num_tokens = queue.num_waiting_tokens + num_new_tokens
    if num_waiting + num_choices > config.max_waiting_requests:
        reason = "Too many requests are waiting."
    elif queue.num_waiting > 0 and num_tokens > config.max_waiting_tokens:
        reason = "Too many prompt tokens are waiting."
    else:
        return
    seconds = rates.seconds_for(queue.num_waiting_tokens, max(1, queue.num_waiting))
    raise OverloadedError(reason, min(max(seconds, 1.0), _MAX_RETRY_SECONDS))
