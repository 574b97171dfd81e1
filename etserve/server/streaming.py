"""Answers that take long: server-sent events, and whole replies that stop when the client goes away."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from etserve.metrics.recorder import Metrics
from etserve.outputs import SequenceOutput
from etserve.server.edge import log_failure
from etserve.server.faults import Fault, HttpError, fault_of, fault_of_output
from etserve.server.generation import Generation

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; nobody is there to read it
_encode = msgspec.json.Encoder().encode


class Reply(Protocol):
    """ChatReply or CompletionReply."""

    def add(self, prompt_index: int, output: SequenceOutput) -> None: ...
    def shape(self) -> dict[str, Any]: ...
    def opening(self) -> list[dict[str, Any]]: ...
    def chunks(self, prompt_index: int, output: SequenceOutput) -> list[dict[str, Any]]: ...
    def usage_chunk(self) -> dict[str, Any]: ...


class WholeReply(Response):
    """Wait for every choice, then answer. A client that leaves meanwhile ends the generation within a step."""

    def __init__(self, generation: Generation, reply: Reply) -> None:
        super().__init__()
        self._generation = generation
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gathering = asyncio.create_task(self._gather())
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
                return
            body = gathering.result()
        finally:
            for task in (gathering, leaving):
                task.cancel()
            await asyncio.gather(gathering, leaving, return_exceptions=True)
            await self._generation.close()
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _gather(self) -> bytes:
        async for index, output in self._generation.outputs():
            fault = fault_of_output(output)
            if fault is not None:
                raise HttpError(fault)
            self._reply.add(index, output)
        return _encode(self._reply.shape())


class EventStream(Response):
    """Send chunks as they come, a comment when nothing came for a while, and stop when the client goes away.

    A client that reads slowly holds up `send`, so at most one output is under way here; the protocol drops the
    connection of one that does not read at all.
    """

    def __init__(
        self,
        generation: Generation,
        reply: Reply,
        metrics: Metrics,
        *,
        include_usage: bool,
        comment_seconds: float,
        request_id: str,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._reply = reply
        self._metrics = metrics
        self._include_usage = include_usage
        self._comment_seconds = comment_seconds
        self._request_id = request_id
        self._last_sent = 0.0
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope  # HEAD never comes here, and nothing else in it matters any more
        sending = asyncio.create_task(self._send_all(send))
        others = [asyncio.create_task(wait_for_disconnect(receive)), asyncio.create_task(self._comment(send))]
        try:
            await asyncio.wait({sending, *others}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, *others):
                task.cancel()
            await asyncio.gather(sending, *others, return_exceptions=True)
            await self._generation.close()

    async def _send_all(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        async with self._lock:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                await self._write(send, event)
        async with self._lock:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        if opening := self._reply.opening():
            yield _spell(opening)
        try:
            async for index, output in self._generation.outputs():
                fault = fault_of_output(output)
                if fault is not None:
                    yield self._fault(fault)
                    return
                if chunks := self._reply.chunks(index, output):
                    yield _spell(chunks)
        except Exception as error:  # the funnel, in a stream: the status line is gone already
            fault = fault_of(error)
            if fault.reason == "internal":
                log_failure(error, self._request_id)
            yield self._fault(fault)
            return
        if self._include_usage:
            yield _spell([self._reply.usage_chunk()])
        yield DONE

    def _fault(self, fault: Fault) -> bytes:
        self._metrics.rejected(fault.reason)
        return b"data: " + fault.body() + b"\n\n"

    async def _write(self, send: Send, body: bytes) -> None:
        async with self._lock:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._last_sent = time.monotonic()

    async def _comment(self, send: Send) -> None:
        """Keep proxies and clients from taking a silent stream for a dead one."""
        if self._comment_seconds <= 0:
            await asyncio.Event().wait()
        self._last_sent = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, self._last_sent + self._comment_seconds - time.monotonic()))
            if time.monotonic() - self._last_sent >= self._comment_seconds:
                await self._write(send, COMMENT)


def _spell(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue
