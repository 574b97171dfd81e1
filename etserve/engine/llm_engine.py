"""One engine: a model, its KV pool and the requests in flight. Synchronous; one thread calls it."""

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from etserve.config import EngineConfig
from etserve.engine.admission import check_request
from etserve.engine.costs import CostMeter
from etserve.engine.kv_map import sequence_blocks
from etserve.engine.rendering import ChoiceRenderer, join
from etserve.engine.steering import check_steering, drafts_ahead, start_control
from etserve.engine.step_stats import StepMeter
from etserve.engine.streams import merge
from etserve.errors import RequestError
from etserve.log import get_logger, log_facts
from etserve.outputs import FinishReason, GenerateRequest, ModelInfo, SequenceOutput, StepStats
from etserve.plan import ModelRunnerOutput, Sampled, ScheduledSequence, SchedulerOutput
from etserve.runner.model_runner import ModelRunner
from etserve.runner.sampler import Sampler
from etserve.sampling_params import SamplingParams
from etserve.scheduler.scheduler import Scheduler
from etserve.sequence import Sequence, Status
from etserve.tokenizer.tokenizer import Tokenizer

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of; see engine/building.py."""

    config: EngineConfig
    info: ModelInfo
    tokenizer: Tokenizer
    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    costs: CostMeter
    now: Callable[[], float] = time.monotonic


class LLMEngine:
    """Requests in, outputs out, one step at a time. Every choice of an accepted request ends in exactly one output."""

    def __init__(self, parts: EngineParts) -> None:
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._sampler = parts.sampler
        self._costs = parts.costs
        self._control = parts.config.control
        self._now = parts.now
        self._eos_token_ids = frozenset(parts.info.eos_token_ids)
        self._seq_ids = itertools.count()
        self._renderers: dict[int, ChoiceRenderer] = {}  # by seq_id, of the choices that have not ended
        self._requests: dict[str, list[Sequence]] = {}  # their sequences by request_id
        self._pending: list[SequenceOutput] = []  # written outside a step
        self.is_watched = False  # steps tell of each sequence's blocks

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._pending)

    @property
    def num_open_choices(self) -> int:
        return len(self._renderers)

    def add_request(self, request: GenerateRequest) -> None:
        """Queue one sequence per choice. Raises RequestError (nothing is queued then)."""
        check_request(request, self.info)
        check_steering(request.params, self._control, self.info.pruning_sketch_bits, self.info.can_evict)
        sequences = [
            self._make_sequence(request, choice)
            for choice in range(request.params.n)
            if choice not in request.finished_choices
        ]
        admitted: list[Sequence] = []
        try:
            for seq in sequences:
                self._sampler.admit(seq)
                admitted.append(seq)
                self._scheduler.add(seq)
        except RequestError:
            for seq in admitted:
                self._scheduler.finish(seq, "error")
                self._sampler.forget(seq)
            raise
        for seq in sequences:
            self._renderers[seq.seq_id] = ChoiceRenderer(
                seq, self.tokenizer, self._eos_token_ids, self.info.entropy_estimator
            )
        self._requests[request.request_id] = sequences

    def refuse(self, request: GenerateRequest, error_code: str) -> None:
        """Answer a request that add_request did not take: every open choice ends with an error in the next step."""
        self._pending += [
            SequenceOutput(request_id=request.request_id, choice=choice, finish_reason="error", error_code=error_code)
            for choice in range(request.params.n)
            if choice not in request.finished_choices
        ]

    def abort(self, request_id: str) -> None:
        """End the request's open choices, in whatever state; their last output comes with the next step. Idempotent."""
        for seq in list(self._requests.get(request_id, ())):
            self._pending.append(self._end(seq, "abort"))

    def step(self) -> tuple[list[SequenceOutput], StepStats]:
        """Compute one plan; return what it added to each choice, and what it measured."""
        meter = StepMeter(self._now)
        plan = self._scheduler.schedule()
        meter.is_planned()
        result = self._runner.execute(plan)
        self._replay_clocks(result)
        self._scheduler.update(plan, result)
        outputs, self._pending = self._pending, []
        outputs += self._render(plan, result, meter)
        stats = meter.stats(plan, result, self._scheduler, self._costs)
        if self.is_watched:
            stats = msgspec.structs.replace(stats, kv_map=sequence_blocks(plan, result))
        return outputs, stats

    # --- parts of a step

    def _render(self, plan: SchedulerOutput, result: ModelRunnerOutput, meter: StepMeter) -> list[SequenceOutput]:
        outputs = []
        for item in plan.scheduled:
            renderer = self._renderers.get(item.seq.seq_id)
            if renderer is None or item.ahead_of is not None:
                continue
            try:
                output = self._render_item(item, renderer, result, meter)
            except Exception:  # one request's bug: it fails alone, the engine goes on
                _log.exception("rendering failed", extra={"facts": {"request_id": item.seq.request_id}})
                self._release(item.seq, "error")
                output = _broken(item.seq)
            if output is not None:
                outputs.append(output)
        return outputs

    def _render_item(
        self, item: ScheduledSequence, renderer: ChoiceRenderer, result: ModelRunnerOutput, meter: StepMeter
    ) -> SequenceOutput | None:
        seq = item.seq
        if seq.seq_id in result.failed:
            return self._end(seq, "error", result.failed[seq.seq_id])
        if logprobs := result.prompt_logprobs.get(seq.seq_id):
            renderer.add_prompt_logprobs(item.start, logprobs)
        sampled = result.sampled.get(seq.seq_id)
        if sampled is None:
            return self._end(seq, "length") if seq.status is Status.FINISHED else None
        parts = [self._tell(sampled, renderer, meter)]
        reason = self._finish_reason(renderer)
        for follower in result.followers.get(seq.seq_id, ()):
            if reason is not None:
                break
            self._scheduler.accept(seq, follower)
            parts.append(self._tell(follower, renderer, meter, is_accepted=True))
            reason = self._finish_reason(renderer)
        output = merge(parts)
        return output if reason is None else join(output, self._end(seq, reason))

    @staticmethod
    def _tell(
        sampled: Sampled, renderer: ChoiceRenderer, meter: StepMeter, *, is_accepted: bool = False
    ) -> SequenceOutput:
        """What the token that the sequence has just got adds to its output, and to the statistics."""
        meter.observe(sampled, renderer.measure_advance(), renderer.seq.control, is_accepted=is_accepted)
        return renderer.render(sampled)

    def _finish_reason(self, renderer: ChoiceRenderer) -> FinishReason | None:
        """Why the sequence ends at its latest token: a stop string, its grammar, or what the scheduler found."""
        seq = renderer.seq
        if isinstance(renderer.stop_reason, str):
            return "stop"
        if seq.status is Status.FINISHED:
            return seq.finish_reason
        return "stop" if self._sampler.is_complete(seq) else None

    def _end(self, seq: Sequence, reason: FinishReason, error_code: str | None = None) -> SequenceOutput:
        """Free everything the sequence holds and write its last output."""
        renderer = self._renderers[seq.seq_id]
        self._release(seq, reason)
        if reason == "error":
            log_facts(_log, logging.WARNING, "request failed", request_id=seq.request_id, code=error_code)
        return renderer.ending(reason, error_code, self._now())

    def _release(self, seq: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(seq, reason)
        self._sampler.forget(seq)
        if self._renderers.pop(seq.seq_id, None) is None:
            return
        siblings = self._requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request_id]

    def _replay_clocks(self, result: ModelRunnerOutput) -> None:
        """Move the clocks of resumed sequences over the tokens that were drawn before the engine was restarted."""
        for seq_id, measured in result.forced_entropies.items():
            renderer = self._renderers[seq_id]
            for entropy_nats, surprisal_nats in measured:
                renderer.seq.clock = renderer.seq.clock.observe(entropy_nats, surprisal_nats)
            renderer.measure_advance()  # counted in the statistics when they were drawn

    def _make_sequence(self, request: GenerateRequest, choice: int) -> Sequence:
        params, prompt = request.params, request.prompt_token_ids
        forced = request.forced_output[choice] if request.forced_output else []
        room = self.info.max_model_len - len(prompt)
        return Sequence(
            seq_id=next(self._seq_ids),
            request_id=request.request_id,
            choice=choice,
            params=_params_of_choice(request, choice),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            token_ids=[*prompt, *forced],
            num_prompt_tokens=len(prompt),
            max_output_tokens=room if params.max_tokens is None else params.max_tokens,
            arrival_seconds=self._now(),
            priority=request.priority,
            cache_salt=request.cache_salt,
            num_forced_tokens=len(forced),
            control=start_control(self._control, params),
            drafts_ahead=drafts_ahead(self._control, params),
        )


def _params_of_choice(request: GenerateRequest, choice: int) -> SamplingParams:
    """The prompt is scored once, for the first choice that runs."""
    is_first = choice == min(set(range(request.params.n)) - set(request.finished_choices))
    if is_first or request.params.prompt_logprobs is None:
        return request.params
    return msgspec.structs.replace(request.params, prompt_logprobs=None)


def _broken(seq: Sequence) -> SequenceOutput:
    """The last output of a sequence whose renderer cannot be trusted any more."""
    return SequenceOutput(
        request_id=seq.request_id,
        choice=seq.choice,
        finish_reason="error",
        error_code="internal",
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output_tokens,
    )
