"""The engine in a process of its own, started again when it dies: streams go on where they stood."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine

from etserve.config import EngineConfig
from etserve.engine.child import EngineLostError, EngineProcess, describe_exit
from etserve.engine.frames import Configure, Ready, Shutdown, StartFailed, StepDone, ToEngine
from etserve.engine.front import HUNG_SECONDS, EngineFront
from etserve.errors import ConfigError, EngineStartError, ModelError
from etserve.log import get_logger, log_facts
from etserve.outputs import ModelInfo

START_TIMEOUT_SECONDS = 600.0  # a large checkpoint on a cold disk takes minutes
KILL_AFTER_SECONDS = 20.0  # without a step while there is work
MAX_RESTARTS = 5  # in RESTART_WINDOW_SECONDS
RESTART_WINDOW_SECONDS = 300.0
FIRST_BACKOFF_SECONDS = 0.5
MAX_DEATHS_PER_REQUEST = 2
_STOP_SECONDS = 5.0
_log = get_logger(__name__)


class ProcessEngine(EngineFront):
    """`AsyncEngine` with the engine in a child process."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str = "info",
        started: EngineProcess | None = None,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
        hung_seconds: float = HUNG_SECONDS,
        kill_after_seconds: float = KILL_AFTER_SECONDS,
        first_backoff_seconds: float = FIRST_BACKOFF_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`started`: a process that loads `config` already; the first start takes it instead of one of its own."""
        super().__init__(config, hung_seconds, now)
        self._log_level = log_level
        self._kill_after_seconds = kill_after_seconds
        self._first_backoff_seconds = first_backoff_seconds
        self._started = started
        self._start_timeout_seconds = start_timeout_seconds
        self._process: EngineProcess | None = None
        self._is_connected = False
        self._tasks: list[asyncio.Task[None]] = []
        self._restart_times: deque[float] = deque()
        self._restart_patience_seconds = 60.0

    async def start(self) -> ModelInfo:
        """See AsyncEngine.start. A stopped engine may be started again."""
        self._state = "starting"
        begin = self._now()
        try:
            info = await self._launch_in_time()
        except (ConfigError, EngineStartError, ModelError) as error:
            self._state, self._detail = "failed", str(error)
            self._failed.set()
            raise
        self._restart_patience_seconds = 60.0 + 5.0 * (self._now() - begin)
        self._tasks = [asyncio.create_task(self._guard(work)) for work in (self._supervise, self._watch)]
        return info

    async def stop(self) -> None:
        """See AsyncEngine.stop. Idempotent."""
        self._state = "draining" if self._state != "failed" else "failed"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._process is not None:
            self._process.send(Shutdown())
            await self._process.end(_STOP_SECONDS)
            self._lose_process()
        self._end(list(self._open.values()), "abort", None)

    # --- EngineFront

    def _post(self, message: ToEngine) -> None:
        if self._process is not None and self._is_connected:
            self._process.send(message)

    @property
    def _engine_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def _can_post(self) -> bool:
        return self._is_connected

    # --- life of the process

    async def _launch_in_time(self) -> ModelInfo:
        try:
            return await asyncio.wait_for(self._launch(), self._start_timeout_seconds)
        except TimeoutError:
            raise EngineStartError(
                f"the engine was not ready within {self._start_timeout_seconds:g} s (engine_start_timeout_seconds)"
            ) from None

    async def _launch(self) -> ModelInfo:
        """Start a process and return when its model is ready. Raises ConfigError or ModelError, leaving no process."""
        process, self._started = self._started, None
        self._process = process = process or EngineProcess.spawn(Configure(self._config, self._log_level))
        try:
            await process.connect()
            message = (await process.receive())[0]
        except EngineLostError:
            code = await process.end(_STOP_SECONDS)
            self._lose_process()
            raise ModelError(f"the engine process ended while it loaded the model ({describe_exit(code)})") from None
        except asyncio.CancelledError:
            process.kill()
            await process.end(0.0)
            self._lose_process()
            raise
        if isinstance(message, Ready):
            self._is_connected = True
            self._become_ready(message.info)
            return message.info
        await process.end(_STOP_SECONDS)
        self._lose_process()
        if isinstance(message, StartFailed):
            raise (ConfigError if message.kind == "config" else ModelError)(message.message)
        raise ModelError("the engine process did not speak as expected")

    def _lose_process(self) -> None:
        self._process, self._is_connected = None, False

    async def _guard(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Our own bug must not leave readers waiting for an engine that nobody listens to."""
        try:
            await work()
        except Exception as error:
            _log.exception("engine supervision failed")
            self._is_connected = False
            self._become_failed(f"the engine's supervision failed: {type(error).__name__}", "engine_restarted")

    async def _supervise(self) -> None:
        """Route what the engine says; when it dies, start another, until that is hopeless."""
        while self._process is not None:
            try:
                await self._pump(self._process)
            except EngineLostError as error:
                reason = str(error)
            self._is_connected = False
            self._process.kill()
            code = await self._process.end(0.0)
            self._lose_process()
            log_facts(
                _log, logging.ERROR, "engine died", exit=describe_exit(code), reason=reason, num_open=len(self._open)
            )
            self._note_death()
            await self._restart(describe_exit(code))

    async def _pump(self, process: EngineProcess) -> None:
        while True:
            for message in await process.receive():
                if not isinstance(message, StepDone):
                    raise EngineLostError("unexpected message")
                self._on_step(message)

    async def _watch(self) -> None:
        """Kill an engine that has work but makes no step: it hangs."""
        num_strikes = 0  # two in a row: after a stall of this very loop, its reports must be read first
        while True:
            await asyncio.sleep(min(0.5, self._kill_after_seconds / 4))
            hangs = self._is_connected and self._seconds_without_step() > self._kill_after_seconds
            num_strikes = num_strikes + 1 if hangs else 0
            if num_strikes >= 2 and self._process is not None:
                log_facts(_log, logging.ERROR, "engine hangs", seconds=round(self._seconds_without_step(), 1))
                self._process.kill()
                num_strikes = 0

    def _note_death(self) -> None:
        """Give up the requests that were there too often when an engine died: one of them may be the cause."""
        if self._state != "draining":
            self._state = "restarting"
        self._end([request for request in self._open.values() if request.is_aborted], "abort", None)
        for request in self._open.values():
            request.num_deaths += 1
        poisoned = [r for r in self._open.values() if r.num_deaths >= MAX_DEATHS_PER_REQUEST]
        self._end(poisoned, "error", "request_poisoned")

    async def _restart(self, exit_text: str) -> None:
        while True:
            now = self._now()
            while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_SECONDS:
                self._restart_times.popleft()
            if len(self._restart_times) >= MAX_RESTARTS:
                self._become_failed(f"the engine died {MAX_RESTARTS + 1} times ({exit_text})", "engine_restarted")
                return
            await asyncio.sleep(self._first_backoff_seconds * 2 ** len(self._restart_times))
            self._restart_times.append(now)
            try:
                await asyncio.wait_for(self._launch(), self._restart_patience_seconds)
            except (ConfigError, ModelError, TimeoutError) as error:
                exit_text = str(error) or "it did not get ready"
                continue
            self._num_restarts += 1
            for request in self._open.values():
                self._submit(request.resumed())
            return
