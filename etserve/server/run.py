"""Runs the server: binds, loads, serves, drains, and says with its exit code how it ended."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from etserve.config import Config, ServerConfig
from etserve.engine.client import AsyncEngine
from etserve.models.files import resolve_model
from etserve.server.app import create_app, state_of
from etserve.server.edge import Edge
from etserve.server.http_protocol import MAX_HEADER_BYTES, timed_protocol
from etserve.server.listening import open_listener
from etserve.tokenizer import load_tokenizer
from etserve.tokenizer.tokenizer import Tokenizer

EXIT_OK = 0
EXIT_FORCED = 1  # a second signal cut the drain short
EXIT_ENGINE_FAILED = 70
# Longer than HTTP clients keep an idle connection (httpx: 5 s), so that we are not the side that closes it under them.
KEEP_ALIVE_SECONDS = 65
FAILURE_POLL_SECONDS = 0.25
LAST_WORDS_SECONDS = 1.0  # for the error events of streams that a drain or a failure cuts

Say = Callable[[str], None]


def serve(config: Config, engine: AsyncEngine, say: Say | None = None, listener: socket.socket | None = None) -> int:
    """Serve until a signal or until the engine has failed for good; return the exit code.

    `say` gets the one line that tells of readiness (default: standard output). `listener` is what `open_listener` gave,
    where the caller has it already; it is closed in the end. The port answers /health/live while the model loads.
    Raises ConfigError (address, keys, port) before anything is started, and what the engine's start raises
    (ModelError, ConfigError, EngineStartError).
    """
    with listener or open_listener(config.server) as opened:
        return asyncio.run(Service(config, engine, opened, say or _print).run())


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: draining is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Edge, config: ServerConfig) -> uvicorn.Server:
    """A uvicorn server with this project's limits."""
    return _Server(
        uvicorn.Config(
            app,
            http=timed_protocol(config.header_timeout_seconds, config.write_timeout_seconds),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ws="none",
            lifespan="off",
            interface="asgi3",
            loop="asyncio",
            log_config=None,
            # Its lines are plain text, one for each malformed request, and a traceback's message may quote a client.
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
    )


@dataclass
class Service:
    """One run of the server, start to exit."""

    config: Config
    engine: AsyncEngine
    listener: socket.socket
    say: Say
    _signals: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _forced: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Return the exit code; raise what the engine's start raised."""
        began = time.monotonic()
        self._app = create_app(self.config.server, self.engine)
        self._server = make_server(self._app, self.config.server)
        self._catch_signals()
        serving = asyncio.create_task(self._server.serve(sockets=[self.listener]))
        try:
            if not await self._load(began):
                return EXIT_OK
            return await self._until_the_end()
        finally:
            self._release_signals()
            await self._shut_down(serving)

    async def _load(self, began: float) -> bool:
        """Start the engine; False when a signal came first."""
        loading = asyncio.create_task(self._start_engine())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return False
            name = loading.result()
        finally:
            for task in (loading, stopping):
                task.cancel()
            await asyncio.gather(loading, stopping, return_exceptions=True)
        seconds = time.monotonic() - began
        self.say(f"etserve is ready: {self._url()} serves {name} ({seconds:.1f} s to start)")
        return True

    async def _start_engine(self) -> str:
        starting = asyncio.create_task(self.engine.start())
        try:
            tokenizer = await asyncio.to_thread(self._load_tokenizer)
            info = await starting
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        state_of(self._app).set_model(info, tokenizer)
        return info.model_name

    def _load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(resolve_model(self.config.engine.model), check_chat_template=True)

    def _url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _until_the_end(self) -> int:
        failing = asyncio.create_task(self._until_failed())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            failing.cancel()
        if not self._stopping.is_set():
            await asyncio.sleep(LAST_WORDS_SECONDS)
            return EXIT_ENGINE_FAILED
        return await self._drain()

    async def _until_failed(self) -> None:
        while self.engine.health().state != "failed":
            await asyncio.sleep(FAILURE_POLL_SECONDS)

    async def _drain(self) -> int:
        """Not ready at once; refuse new requests after the delay; wait for the running ones."""
        state, config = state_of(self._app), self.config.server
        state.is_draining = True
        draining = asyncio.create_task(self._finish(config.drain_delay_seconds, config.drain_timeout_seconds))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, forced):
            task.cancel()
        return EXIT_FORCED if self._forced.is_set() else EXIT_OK

    async def _finish(self, delay: float, timeout: float) -> None:
        await asyncio.sleep(delay)
        state_of(self._app).is_refusing = True
        await self.engine.drain(timeout)
        state_of(self._app).live.close()
        # The engine is done; what it said last may still be on its way to slow readers.
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._server.server_state.tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _shut_down(self, serving: "asyncio.Task[None]") -> None:
        if self._forced.is_set():
            self._server.force_exit = True
        state_of(self._app).live.close()
        await self.engine.stop()
        if (model := state_of(self._app).model) is not None:
            model.encoder.close()
        await asyncio.sleep(0)  # streams that the stop has ended write their error event
        self._server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await self._app.close()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # in a thread other than the main one there are none
                loop.add_signal_handler(number, self.stop)

    def _release_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """What a signal does: the first drains, the second ends at once."""
        self._signals += 1
        (self._stopping if self._signals == 1 else self._forced).set()


def _print(line: str) -> None:
    print(line, flush=True)
