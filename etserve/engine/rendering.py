"""From drawn tokens to what a client reads: text, stop strings, the entropic record. Knows no scheduler."""

from dataclasses import dataclass

from etserve.control.entropy import Estimator
from etserve.outputs import (
    EntropySummary,
    FinishReason,
    RequestTimings,
    SequenceOutput,
    TokenEntropy,
    TokenLogprobs,
)
from etserve.plan import Sampled
from etserve.sequence import Sequence
from etserve.tokenizer.detokenizer import IncrementalDetokenizer
from etserve.tokenizer.stop import StopMatcher
from etserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ClockAdvance:
    """How far one token moved its sequence's entropic clock, in nats."""

    tau_nats: float = 0.0
    tau_up_nats: float = 0.0


class ChoiceRenderer:
    """What has been said of one sequence. A function of its tokens alone, however they came."""

    def __init__(
        self, seq: Sequence, tokenizer: Tokenizer, eos_token_ids: frozenset[int], estimator: Estimator = "exact"
    ) -> None:
        """`estimator`: what the sequence's entropies were read by."""
        params = seq.params
        self.seq = seq
        self._estimator = estimator
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._num_rendered = 0
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._is_prompt_told = params.prompt_logprobs is None
        self._tau_nats = 0.0
        self._tau_up_nats = 0.0
        self.stop_reason: str | int | None = None
        for token_id in seq.output_token_ids:  # forced: the client has their text already
            self._render_token(token_id)

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Keep those of tokens start+1 ..; a recomputation after preemption brings nothing new."""
        num_known = len(self._prompt_logprobs)
        self._prompt_logprobs += logprobs[max(0, num_known - (start + 1)) :]

    def measure_advance(self) -> ClockAdvance:
        """How far the clock has moved since the last call."""
        clock = self.seq.clock
        advance = ClockAdvance(clock.tau_nats - self._tau_nats, clock.tau_up_nats - self._tau_up_nats)
        self._tau_nats, self._tau_up_nats = clock.tau_nats, clock.tau_up_nats
        return advance

    def render(self, sampled: Sampled) -> SequenceOutput:
        """The token just appended to the sequence, without an end; a complete stop string sets `stop_reason`."""
        text = self._render_token(sampled.token_id)
        return SequenceOutput(
            request_id=self.seq.request_id,
            choice=self.seq.choice,
            token_ids=[sampled.token_id],
            text=text,
            logprobs=[sampled.logprobs] if sampled.logprobs is not None else [],
            entropies=[self._entropy_of(sampled)] if self.seq.params.trace == "tokens" else [],
            prompt_logprobs=self._tell_prompt(),
        )

    def ending(self, reason: FinishReason, error_code: str | None, now: float) -> SequenceOutput:
        """The last output, to be joined to the last token's if there is one in this step."""
        seq = self.seq
        is_stop_string = isinstance(self.stop_reason, str)
        return SequenceOutput(
            request_id=seq.request_id,
            choice=seq.choice,
            text="" if is_stop_string else self._flush(),
            prompt_logprobs=self._tell_prompt() if reason in ("length", "stop") else None,
            finish_reason=reason,
            stop_reason=self.stop_reason,
            error_code=error_code,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_output_tokens=seq.num_output_tokens,
            num_drafted_tokens=seq.drafted.num_drafted,
            num_accepted_tokens=seq.drafted.num_accepted,
            entropy_summary=None if seq.params.trace == "none" else _summary(seq, now, self._estimator),
            timings=_timings(seq, now),
        )

    def _render_token(self, token_id: int) -> str:
        self._num_rendered += 1
        min_tokens = self.seq.params.min_tokens
        if token_id in self._ends and self._num_rendered > min_tokens:
            if token_id in self.seq.params.stop_token_ids:
                self.stop_reason = token_id
            return ""  # the end itself is no text
        text = self._detokenizer.push([token_id])
        if self._matcher is None or self._num_rendered <= min_tokens:
            return text
        match = self._matcher.push(text)
        if match.stop is not None:
            self.stop_reason = match.stop
        return match.text

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        match = self._matcher.push(text)
        return match.text + self._matcher.flush()

    def _tell_prompt(self) -> list[TokenLogprobs | None] | None:
        if self._is_prompt_told:
            return None
        self._is_prompt_told = True
        return self._prompt_logprobs

    def _entropy_of(self, sampled: Sampled) -> TokenEntropy:
        return TokenEntropy(
            entropy_nats=sampled.entropy_nats,
            varentropy=sampled.varentropy,
            temperature=sampled.temperature,
            kept_fraction=sampled.measured.kept_fraction,
            tau_nats=self.seq.clock.tau_nats,
        )


def join(first: SequenceOutput, last: SequenceOutput) -> SequenceOutput:
    """A token's output and the ending of the same step, as one."""
    return SequenceOutput(
        request_id=last.request_id,
        choice=last.choice,
        token_ids=first.token_ids,
        text=first.text + last.text,
        logprobs=first.logprobs,
        entropies=first.entropies,
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error_code=last.error_code,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_output_tokens=last.num_output_tokens,
        num_drafted_tokens=last.num_drafted_tokens,
        num_accepted_tokens=last.num_accepted_tokens,
        entropy_summary=last.entropy_summary,
        timings=last.timings,
    )


def _summary(seq: Sequence, now: float, estimator: Estimator) -> EntropySummary:
    clock = seq.clock
    return EntropySummary(
        tau_nats=clock.tau_nats,
        tau_up_nats=clock.tau_up_nats,
        nats_resolved=clock.nats_resolved,
        mean_entropy_nats=clock.mean_entropy_nats,
        final_entropy_nats=clock.entropy_nats,
        tau_per_gflop=_ratio(clock.tau_nats, seq.flops * 1e-9),
        mean_temperature=seq.mean_temperature,
        kept_fraction_mean=seq.control.kept_fraction_mean,
        blocks_evicted=seq.total_evicted_blocks,
        tau_per_gb=_ratio(clock.tau_nats, seq.bytes_read * 1e-9),
        tau_per_second=_ratio(clock.tau_nats, _seconds_in_service(seq, now)),
        tau_deadband_nats=clock.tau_deadband_nats,
        tau_ratchet_nats=clock.tau_ratchet_nats,
        surprisal_nats=clock.surprisal_nats,
        entropy_estimator=estimator,
    )


def _ratio(nats: float, amount: float) -> float:
    return nats / amount if amount > 0.0 else 0.0


def _seconds_in_service(seq: Sequence, now: float) -> float:
    return 0.0 if seq.first_scheduled_seconds is None else now - seq.first_scheduled_seconds


def _timings(seq: Sequence, now: float) -> RequestTimings:
    scheduled = now if seq.first_scheduled_seconds is None else seq.first_scheduled_seconds
    first_token = now if seq.first_token_seconds is None else seq.first_token_seconds
    return RequestTimings(
        queue_seconds=scheduled - seq.arrival_seconds,
        prefill_seconds=max(0.0, first_token - scheduled),
        decode_seconds=now - first_token,
    )
