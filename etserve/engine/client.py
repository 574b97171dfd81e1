"""The seam that the web floor sees: an engine, wherever it runs."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from etserve.outputs import GenerateRequest, ModelInfo, SequenceOutput, StepStats

EngineState = Literal["starting", "ready", "restarting", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot; taking it never touches the engine."""

    state: EngineState
    is_ready: bool  # ready to take requests, and stepped lately if it has work
    seconds_since_step: float
    engine_pid: int | None
    num_restarts: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a router wants to know."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_usage_ratio: float
    estimated_wait_seconds: float
    tau_nats_per_second: float


class AsyncEngine(Protocol):
    """Requests in, outputs out. All methods are called on one event loop."""

    async def start(self) -> ModelInfo:
        """Return once the model is loaded and warmed up. Raises ModelError or ConfigError as the engine found them."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[SequenceOutput]:
        """Yield every output of every choice; ends after each of the `n` choices has its finish reason.

        Raises at the call, before anything is queued: PromptTooLongError, RequestError, OverloadedError,
        EngineUnavailableError. Closing the iterator early aborts the request.
        """

    def generate_all(self, requests: Sequence[GenerateRequest]) -> Sequence[AsyncIterator[SequenceOutput]]:
        """As `generate` for each, all or none: when one cannot be taken, nothing of any was queued."""

    def abort(self, request_id: str) -> None:
        """Idempotent; unknown ids are ignored. The iterator then yields finish reason "abort" for open choices."""

    def health(self) -> EngineHealth: ...

    def load(self) -> EngineLoad: ...

    def add_step_listener(self, listener: Callable[[StepStats, list[SequenceOutput]], None]) -> None:
        """Call `listener` on the event loop with what each step reported (metrics, live page)."""

    def watch(self, is_watched: bool) -> None:
        """Say whether somebody looks: reports then tell of each sequence's blocks (StepStats.kv_map)."""

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests, wait for the running ones; True if all of them finished in time."""

    async def stop(self) -> None:
        """End the engine; open requests get finish reason "abort"."""
