"""What crosses the border to the engine process: msgpack in frames of a 4-byte big-endian length. No pickle."""

import socket
import struct
from typing import Literal

import msgspec

from etserve.config import EngineConfig
from etserve.errors import EtserveError
from etserve.outputs import GenerateRequest, ModelInfo, SequenceOutput, StepStats

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_RECEIVE_BYTES = 1 << 18


class FrameError(EtserveError):
    """The other side sent something that is no message of ours."""


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first message to the engine process."""

    config: EngineConfig
    log_level: str = "info"


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Whether somebody looks at the engine: its reports then hold StepStats.kv_map."""

    is_on: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End after this message; open requests are dropped."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: ModelInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The model or a setting is wrong; the process ends after this message."""

    kind: Literal["config", "model"]
    message: str  # one line


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """One engine step. `num_accepted` counts the requests taken from the border since the start."""

    outputs: list[SequenceOutput]
    stats: StepStats
    num_accepted: int


ToEngine = Configure | AddRequest | AbortRequest | Watch | Shutdown
FromEngine = Ready | StartFailed | StepDone

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame, length included. Raises FrameError if it is over the cap."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. Raises FrameError on a length over the cap."""
        self._bytes += data
        bodies: list[bytes] = []
        position = 0
        while len(self._bytes) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, position)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = position + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[position + _LENGTH.size : end]))
            position = end
        del self._bytes[:position]
        return bodies


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises FrameError on anything but a message to the engine."""
    try:
        return _to_engine.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a message to the engine: {type(error).__name__}") from None


def decode_from_engine(body: bytes) -> FromEngine:
    """Raises FrameError on anything but a message from the engine."""
    try:
        return _from_engine.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a message from the engine: {type(error).__name__}") from None


class EngineChannel:
    """The engine's end: blocking sends, receives that wait only when asked to."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = FrameBuffer()

    def send(self, message: FromEngine) -> None:
        """Blocks while the front end is slow to read. Raises OSError when it is gone."""
        self._socket.setblocking(True)
        self._socket.sendall(encode(message))

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """All messages that are there; at least one if `wait`. Raises EOFError when the front end is gone."""
        self._socket.setblocking(wait)
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the front end is gone")
            messages.extend(decode_to_engine(body) for body in self._buffer.feed(data))
            if wait and messages:
                return messages
            if len(data) < _RECEIVE_BYTES and not wait:
                return messages
