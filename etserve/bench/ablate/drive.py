"""Run one round in this process: requests come when they are due by the real clock, and nothing but the engine runs."""

import time
from collections.abc import Callable

from etserve.bench.ablate.records import RequestRun, StepRuns
from etserve.bench.ablate.workloads import Arrival
from etserve.engine.llm_engine import LLMEngine
from etserve.engine.streams import merge
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from etserve.sampling_params import SamplingParams

_STEP_COLUMNS = tuple(name for name in StepRuns.__struct_fields__ if name != "end_seconds")


class Driver:
    """One round. `concurrency`: so many requests are open at once, whatever is due; None: all that are due."""

    def __init__(
        self,
        engine: LLMEngine,
        arrivals: list[Arrival],
        concurrency: int | None,
        temperature: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._waiting = sorted(arrivals, key=lambda a: (a.due_seconds, a.index))
        self._concurrency = concurrency
        self._temperature = temperature
        self._now, self._sleep = now, sleep
        self._begin = 0.0
        self._due: dict[str, float] = {}  # open and ended requests: when they were due
        self._open: set[str] = set()
        self._parts: dict[str, list[SequenceOutput]] = {}
        self._seconds: dict[str, list[float]] = {}
        self._steps: list[tuple[float, StepStats]] = []

    def run(self) -> tuple[list[RequestRun], StepRuns]:
        """Requests by index, and every step. A request that fails says so; the others go on."""
        self._begin = self._now()
        while self._waiting or self._engine.has_work:
            self._release()
            if self._engine.has_work:
                self._step()
            elif self._waiting:
                self._sleep(max(0.0, self._waiting[0].due_seconds - self._elapsed()))
        runs = [self._request_run(request_id) for request_id in self._parts]
        return sorted(runs, key=lambda run: run.index), _columns(self._steps)

    def _elapsed(self) -> float:
        return self._now() - self._begin

    def _release(self) -> None:
        while self._waiting and self._waiting[0].due_seconds <= self._elapsed():
            if self._concurrency is not None and len(self._open) >= self._concurrency:
                return
            arrival = self._waiting.pop(0)
            # In a closed loop a request is due when its place is free.
            due = arrival.due_seconds if self._concurrency is None else self._elapsed()
            request_id = str(arrival.index)
            self._due[request_id] = due
            self._open.add(request_id)
            self._engine.add_request(_request(request_id, arrival, self._temperature))

    def _step(self) -> None:
        outputs, stats = self._engine.step()
        at = self._elapsed()
        self._steps.append((at, stats))
        for output in outputs:
            request_id = output.request_id
            self._parts.setdefault(request_id, []).append(output)
            self._seconds.setdefault(request_id, []).extend([at] * len(output.token_ids))
            if output.finish_reason is not None:
                self._open.discard(request_id)
                self._seconds[request_id + "/end"] = [at]

    def _request_run(self, request_id: str) -> RequestRun:
        whole = merge(self._parts[request_id])
        return RequestRun(
            index=int(request_id),
            due_seconds=self._due[request_id],
            token_seconds=self._seconds[request_id],
            end_seconds=self._seconds[request_id + "/end"][0],
            num_prompt_tokens=whole.num_prompt_tokens,
            token_ids=whole.token_ids,
            text=whole.text,
            entropies=[entry.entropy_nats for entry in whole.entropies],
            temperatures=[entry.temperature for entry in whole.entropies],
            kept_fractions=[entry.kept_fraction for entry in whole.entropies],
            tau_nats=[entry.tau_nats for entry in whole.entropies],
            error=whole.error_code,
        )


def _request(request_id: str, arrival: Arrival, temperature: float) -> GenerateRequest:
    params = SamplingParams(
        temperature=temperature,
        max_tokens=arrival.num_output_tokens,
        ignore_eos=True,
        seed=arrival.seed,
        trace="tokens",
    )
    return GenerateRequest(request_id=request_id, prompt_token_ids=arrival.prompt_token_ids, params=params)


def _columns(steps: list[tuple[float, StepStats]]) -> StepRuns:
    columns = {name: [getattr(stats, name) for _, stats in steps] for name in _STEP_COLUMNS}
    return StepRuns(end_seconds=[at for at, _ in steps], **columns)
