"""One engine process and our end of its socket pair. Knows nothing of requests."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import etserve
from etserve.engine.frames import (
    FrameBuffer,
    FrameError,
    Ready,
    StartFailed,
    StepDone,
    ToEngine,
    decode_from_engine,
    encode,
)

_READ_BYTES = 1 << 20
_SOCKET_BYTES = 1 << 22


class EngineLostError(Exception):
    """The process ended, or said something that is no message."""


class EngineProcess:
    """One engine process and this end of its socket pair."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._buffer = FrameBuffer()

    @classmethod
    async def spawn(cls) -> "EngineProcess":
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "etserve.engine.worker", "--fd", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=_child_environment(),
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Never waits: admission bounds what can be on its way. Nothing happens if the process is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> list[Ready | StartFailed | StepDone]:
        """At least one message. Raises EngineLostError."""
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
                messages = [decode_from_engine(body) for body in self._buffer.feed(data)]
            except (OSError, FrameError) as error:
                raise EngineLostError(type(error).__name__) from None
            if not data:
                raise EngineLostError("the process closed its socket")
            if messages:
                return messages

    def kill(self) -> None:
        # Not by the process object: it polls first, which may take the exit code away from the event loop's watcher.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def end(self, patience_seconds: float) -> int:
        """Wait for the process, then kill it; return its exit code. No zombie is left."""
        try:
            await asyncio.wait_for(self._process.wait(), patience_seconds)
        except TimeoutError:
            self.kill()
        code = await self._process.wait()
        self._writer.close()
        return code


def describe_exit(code: int) -> str:
    """A process's exit code, in words."""
    if code == -9:
        return "killed by signal 9: by an operator, or by the system for want of memory"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _child_environment() -> dict[str, str]:
    """Ours, with this very package found first: the child runs with -P, without the working directory on its path."""
    environment = dict(os.environ)
    root = str(Path(etserve.__file__).resolve().parent.parent)
    paths = [root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment
