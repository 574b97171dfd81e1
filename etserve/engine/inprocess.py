"""The engine in a thread of this process, behind the same seam: for tests and notebooks. A crash is not survived."""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from etserve.config import EngineConfig
from etserve.engine.frames import Shutdown, StepDone, ToEngine
from etserve.engine.front import HUNG_SECONDS, EngineFront
from etserve.log import get_logger
from etserve.outputs import ModelInfo

if TYPE_CHECKING:
    from etserve.engine.llm_engine import LLMEngine

_log = get_logger(__name__)


class InProcessEngine(EngineFront):
    """`AsyncEngine` with the engine in a daemon thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        build: "Callable[[EngineConfig], LLMEngine] | None" = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`build` makes the engine, in its thread; None: engine.building.build_engine."""
        super().__init__(config, HUNG_SECONDS, now)
        self._build = build
        self._messages: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_running = False

    async def start(self) -> ModelInfo:
        """See AsyncEngine.start."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(self._loop, ready), name="etserve-engine", daemon=True)
        self._thread.start()
        try:
            info = await ready
        except Exception as error:
            self._state, self._detail = "failed", str(error)
            self._failed.set()
            raise
        self._is_running = True
        self._become_ready(info)
        return info

    async def stop(self) -> None:
        """See AsyncEngine.stop. Idempotent."""
        if self._state != "failed":
            self._state = "draining"
        self._is_running = False
        self._messages.put(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._end(list(self._open.values()), "abort", None)

    def _post(self, message: ToEngine) -> None:
        self._messages.put(message)

    @property
    def _engine_pid(self) -> int | None:
        return os.getpid() if self._is_running else None

    @property
    def _can_post(self) -> bool:
        return self._is_running

    # --- in the thread

    def _run(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[ModelInfo]) -> None:
        try:
            engine = self._make_engine()
        except Exception as error:  # start() raises it
            loop.call_soon_threadsafe(ready.set_exception, error)
            return
        loop.call_soon_threadsafe(ready.set_result, engine.info)
        from etserve.engine.loop import run_engine

        def send(report: StepDone) -> None:
            loop.call_soon_threadsafe(self._on_step, report)

        try:
            run_engine(engine, self._receive, send)
        except Exception as error:  # the step's bug: every open request learns of it
            _log.exception("engine thread died")
            loop.call_soon_threadsafe(self._on_death, type(error).__name__)

    def _make_engine(self) -> "LLMEngine":
        if self._build is not None:
            return self._build(self._config)
        from etserve.engine.building import build_engine

        return build_engine(self._config)

    def _receive(self, wait: bool) -> Sequence[ToEngine]:
        messages = [self._messages.get()] if wait else []
        while True:
            try:
                messages.append(self._messages.get_nowait())
            except queue.Empty:
                return messages

    def _on_death(self, reason: str) -> None:
        self._is_running = False
        self._become_failed(f"the engine thread died: {reason}", "engine_failed")
