"""The front half of an engine, wherever the engine runs: admission, routing of outputs, health. Torch-free."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from etserve.config import EngineConfig
from etserve.engine.admission import Queue, Rates, check_queue, check_request
from etserve.engine.client import EngineHealth, EngineLoad, EngineState
from etserve.engine.frames import AbortRequest, AddRequest, StepDone, ToEngine, Watch
from etserve.engine.open_requests import OpenRequest, OutputIterator
from etserve.engine.steering import check_steering
from etserve.errors import EngineUnavailableError, RequestError
from etserve.log import get_logger, log_facts
from etserve.outputs import FinishReason, GenerateRequest, ModelInfo, SequenceOutput, StepStats
from etserve.runner.grammar import validate_grammar

HUNG_SECONDS = 5.0
StepListener = Callable[[StepStats, list[SequenceOutput]], None]
_log = get_logger(__name__)


class EngineFront:
    """Everything of `AsyncEngine` save starting and stopping. Subclasses carry messages to the engine and back."""

    def __init__(
        self, config: EngineConfig, hung_seconds: float = HUNG_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`hung_seconds`: without a step while there is work, the engine counts as not ready."""
        self._config = config
        self._hung_seconds = hung_seconds
        self._now = now
        self._state: EngineState = "starting"
        self._detail = ""
        self._info: ModelInfo | None = None
        self._open: dict[str, OpenRequest] = {}
        self._sent: deque[tuple[int, int]] = deque()  # (choices, tokens) on their way to the engine
        self._num_taken = 0  # requests that the engine has taken from the border
        self._stats: StepStats | None = None
        self._last_step_at = now()
        self._rates = Rates()
        self._listeners: list[StepListener] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed = asyncio.Event()
        self._num_restarts = 0
        self._is_watched = False

    # --- for subclasses to provide

    def _post(self, message: ToEngine) -> None:
        """Send to the engine without waiting."""
        raise NotImplementedError

    @property
    def _can_post(self) -> bool:
        """Whether there is an engine to send to."""
        raise NotImplementedError

    @property
    def _engine_pid(self) -> int | None:
        raise NotImplementedError

    # --- AsyncEngine

    def generate(self, request: GenerateRequest) -> OutputIterator:
        """See AsyncEngine.generate."""
        return self.generate_all([request])[0]

    def generate_all(self, requests: Sequence[GenerateRequest]) -> list[OutputIterator]:
        """See AsyncEngine.generate_all."""
        for request in requests:
            self._check(request)
        check_queue(self._queue(), requests, self._config, self._rates)
        return [self._take(request) for request in requests]

    def _take(self, request: GenerateRequest) -> OutputIterator:
        if request.params.seed is None:  # drawn here, so that a restarted engine draws the same tokens
            params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, params=params)
        open_request = OpenRequest(request)
        if not self._engine_has_work:
            self._last_step_at = self._now()
        self._open[request.request_id] = open_request
        self._idle.clear()
        self._submit(request)
        return OutputIterator(open_request, self._abandon)

    def abort(self, request_id: str) -> None:
        """See AsyncEngine.abort."""
        open_request = self._open.get(request_id)
        if open_request is None:
            return
        if self._can_post:
            open_request.is_aborted = True
            self._post(AbortRequest(request_id))
        else:
            self._end([open_request], "abort", None)

    def health(self) -> EngineHealth:
        """See AsyncEngine.health."""
        seconds = self._seconds_without_step()
        return EngineHealth(
            state=self._state,
            is_ready=self._state == "ready" and seconds < self._hung_seconds,
            seconds_since_step=seconds,
            engine_pid=self._engine_pid,
            num_restarts=self._num_restarts,
            detail=self._detail,
        )

    def load(self) -> EngineLoad:
        """See AsyncEngine.load."""
        stats, queue = self._stats, self._queue()
        active = stats.kv_blocks_active if stats else 0
        total = active + stats.kv_blocks_cached + stats.kv_blocks_free if stats else 0
        return EngineLoad(
            num_running=stats.num_running if stats else 0,
            num_waiting=queue.num_waiting,
            num_waiting_tokens=queue.num_waiting_tokens,
            kv_usage_ratio=active / total if total else 0.0,
            estimated_wait_seconds=self._rates.seconds_for(
                queue.num_waiting_tokens, max(0, queue.num_waiting - queue.num_free_seats)
            ),
            tau_nats_per_second=self._rates.tau_nats_per_second if self._open else 0.0,
        )

    def add_step_listener(self, listener: StepListener) -> None:
        """See AsyncEngine.add_step_listener. A report with step_seconds 0 is no step: the front end itself ended
        requests because the engine was lost.
        """
        self._listeners.append(listener)

    def watch(self, is_watched: bool) -> None:
        """See AsyncEngine.watch."""
        self._is_watched = is_watched
        if self._can_post:
            self._post(Watch(is_watched))

    async def drain(self, timeout_seconds: float) -> bool:
        """See AsyncEngine.drain."""
        if self._state != "failed":
            self._state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    async def wait_failed(self) -> str:
        """Return why the engine cannot come back; wait for as long as it can."""
        await self._failed.wait()
        return self._detail

    # --- for subclasses to call

    def _become_ready(self, info: ModelInfo) -> None:
        self._info = info
        self._stats = None
        self._sent.clear()
        self._num_taken = 0
        self._last_step_at = self._now()
        if self._state != "draining":
            self._state = "ready"
        if self._is_watched:
            self._post(Watch(True))

    def _become_failed(self, detail: str, error_code: str) -> None:
        self._state, self._detail = "failed", detail
        log_facts(_log, logging.ERROR, "engine failed for good", reason=detail, num_open=len(self._open))
        self._end(list(self._open.values()), "error", error_code)
        self._failed.set()

    def _submit(self, request: GenerateRequest) -> None:
        num_tokens = request.params.n * len(request.prompt_token_ids)
        self._sent.append((request.params.n, num_tokens))
        self._post(AddRequest(request))

    def _on_step(self, message: StepDone) -> None:
        self._last_step_at = self._now()
        self._stats = message.stats
        self._rates = self._rates.after_step(message.stats)
        while self._sent and self._num_taken < message.num_accepted:
            self._sent.popleft()
            self._num_taken += 1
        for output in message.outputs:
            self._route(output)
        self._tell_listeners(message.stats, message.outputs)

    def _end(self, requests: list[OpenRequest], reason: FinishReason, error_code: str | None) -> None:
        """Finish requests without the engine: it is gone, or not there yet."""
        outputs = [output for request in requests for output in request.ending(reason, error_code)]
        for output in outputs:
            self._route(output)
        if outputs:
            self._tell_listeners(_empty_stats(self._stats), outputs)

    def _seconds_without_step(self) -> float:
        """How long there has been work but no step."""
        return self._now() - self._last_step_at if self._engine_has_work else 0.0

    # --- own parts

    @property
    def _engine_has_work(self) -> bool:
        """Also what its readers gave up before the engine took it: else their leaving would hide that it hangs."""
        return bool(self._open or self._sent)

    def _check(self, request: GenerateRequest) -> None:
        if self._state != "ready" or self._info is None:
            raise EngineUnavailableError(f"The engine is {self._state}.")
        if request.request_id in self._open:
            raise RequestError("The request id is in use.")
        check_request(request, self._info)
        check_steering(request.params, self._config.control, self._info.pruning_sketch_bits, self._info.can_evict)
        if request.params.grammar is not None:
            validate_grammar(request.params.grammar)

    def _queue(self) -> Queue:
        stats = self._stats
        num_running = stats.num_running if stats and self._open else 0
        return Queue(
            num_waiting=(stats.num_waiting if stats and self._open else 0) + sum(n for n, _ in self._sent),
            num_waiting_tokens=(stats.num_waiting_tokens if stats and self._open else 0)
            + sum(tokens for _, tokens in self._sent),
            num_free_seats=max(0, self._config.max_num_seqs - num_running),
        )

    def _route(self, output: SequenceOutput) -> None:
        open_request = self._open.get(output.request_id)
        if open_request is None or output.choice in open_request.finished:
            return  # abandoned by its reader
        open_request.put(output)
        if output.finish_reason is not None:
            self._rates = self._rates.after_finish(len(open_request.delivered[output.choice]))
        if open_request.is_finished:
            self._close(output.request_id)

    def _abandon(self, open_request: OpenRequest) -> None:
        """The reader is gone."""
        request_id = open_request.request.request_id
        if self._open.get(request_id) is open_request:
            self.abort(request_id)
            self._close(request_id)

    def _close(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        if not self._open:
            self._idle.set()

    def _tell_listeners(self, stats: StepStats, outputs: list[SequenceOutput]) -> None:
        for listener in self._listeners:
            try:
                listener(stats, outputs)
            except Exception:  # a listener's bug must not stop the engine's outputs
                _log.exception("step listener failed")


def _empty_stats(last: StepStats | None) -> StepStats:
    """A report that nothing runs."""
    num_blocks = last.kv_blocks_active + last.kv_blocks_cached + last.kv_blocks_free if last else 0
    return StepStats(
        step=last.step if last else 0,
        step_seconds=0.0,
        schedule_seconds=0.0,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        num_cached_tokens=0,
        num_prompt_tokens=0,
        num_preempted=0,
        num_nonfinite_rows=0,
        flops=0.0,
        bytes_read=0.0,
        num_running=0,
        num_waiting=0,
        num_waiting_tokens=0,
        kv_blocks_active=0,
        kv_blocks_cached=0,
        kv_blocks_free=num_blocks,
    )
