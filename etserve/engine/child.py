"""One engine process and our end of its socket pair. Knows nothing of requests."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import etserve
from etserve.engine.frames import (
    Configure,
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
_EXIT_POLL_SECONDS = 0.01


class EngineLostError(Exception):
    """The process ended, or said something that is no message."""


class EngineProcess:
    """One engine process and this end of its socket pair. It can be started before there is an event loop."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        self._process = process
        self._socket = sock
        self._buffer = FrameBuffer()

    @classmethod
    def spawn(cls, first: Configure) -> "EngineProcess":
        """Start a process that loads what `first` says, without waiting for it. It ends when our end closes."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        with theirs:
            process = subprocess.Popen(
                (sys.executable, "-P", "-m", "etserve.engine.worker", "--fd", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_child_environment(),
            )
        with contextlib.suppress(OSError):  # it may be dead already: whoever receives is told
            ours.sendall(encode(first))  # far below what the socket buffers
        return cls(process, ours)

    async def connect(self) -> None:
        """Give our end to this event loop; once, before anything is received or sent."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_READ_BYTES)

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
        """Idempotent; the process object never signals a process that it has reaped."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, patience_seconds: float) -> int:
        """Wait for the process, then kill it; return its exit code. No zombie is left."""
        try:
            await asyncio.wait_for(self._exit_code(), patience_seconds)
        except TimeoutError:
            self.kill()
        code = await self._exit_code()
        self._writer.close()
        return code

    async def _exit_code(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_EXIT_POLL_SECONDS)
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
