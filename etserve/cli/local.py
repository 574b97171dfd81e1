"""A model in an engine process, for a command that waits for text: the event loop runs in a thread beside it."""

import asyncio
import queue
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console

from etserve.config import EngineConfig
from etserve.engine.client import AsyncEngine
from etserve.errors import EngineUnavailableError, EtserveError, RequestError
from etserve.outputs import GenerateRequest, ModelInfo, SequenceOutput
from etserve.sampling_params import SamplingParams
from etserve.tokenizer import Tokenizer

T = TypeVar("T")


class LocalModel:
    """Start the engine on entering, end it on leaving. `stream` may be interrupted: the request is then aborted."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.info: ModelInfo | None = None
        self._engine = engine
        self._num_requests = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etserve-engine-loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.info = self._wait(self._engine.start())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def stream(self, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[SequenceOutput]:
        """Yield outputs as they come. Raises what the engine raises at the call, EtserveError when it fails midway."""
        self._num_requests += 1
        request = GenerateRequest(
            request_id=f"cli-{self._num_requests}", prompt_token_ids=prompt_token_ids, params=params
        )
        arrived: queue.Queue[SequenceOutput | BaseException | None] = queue.Queue()

        async def forward() -> None:
            try:
                async for output in self._engine.generate(request):
                    arrived.put(output)
                arrived.put(None)
            except (EtserveError, asyncio.CancelledError) as fault:
                arrived.put(fault)

        running = asyncio.run_coroutine_threadsafe(forward(), self._loop)
        try:
            while (output := arrived.get()) is not None:
                if isinstance(output, BaseException):
                    raise output
                if output.finish_reason == "error":
                    raise EngineUnavailableError(f"the engine gave up: {output.error_code}")
                yield output
            running.result()
        finally:
            if not running.done():
                self._loop.call_soon_threadsafe(self._engine.abort, request.request_id)
                running.cancel()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _close(self) -> None:
        self._wait(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def open_model(config: EngineConfig, console: Console) -> Iterator[LocalModel]:
    """Load a model with a word on what is going on. Raises ConfigError, ModelError."""
    from etserve.engine.process import ProcessEngine
    from etserve.models.files import resolve_model
    from etserve.tokenizer import load_tokenizer

    files = resolve_model(config.model)
    with loading(console, f"loading {files.name}"):
        model = LocalModel(ProcessEngine(config, log_level="error"), load_tokenizer(files))
        model.__enter__()
    try:
        yield model
    finally:
        model.__exit__(None, None, None)


@contextmanager
def loading(console: Console, what: str) -> Iterator[None]:
    """A spinner on a terminal, one plain line elsewhere."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"etserve: {what}", highlight=False)
        yield


def read_prompt(argument: str) -> str:
    """The prompt itself, or standard input for "-". Raises RequestError when it is empty."""
    text = sys.stdin.read() if argument == "-" else argument
    if not text:
        raise RequestError("The prompt is empty.", param="prompt")
    return text
