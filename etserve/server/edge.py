"""The outermost ASGI layer: who may ask, how large and how slow a request may be, and one shape for every refusal."""

import asyncio
import logging
import re
import time
import traceback
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etserve.config import ServerConfig
from etserve.log import get_logger, log_facts
from etserve.metrics.recorder import Metrics
from etserve.server.access_log import log_request
from etserve.server.auth import ApiKeys, HostRule, presented_key
from etserve.server.faults import Fault, HttpError, fault_of, http_error
from etserve.server.http_protocol import MAX_HEADER_BYTES
from etserve.server.record import GenerationRecord
from etserve.server.static_page import PAGE_FILES

if TYPE_CHECKING:
    from etserve.server.rate_limits import Charge
    from etserve.server.tracing import Tracer

OPEN_PATHS = frozenset({"/health/live", "/health/ready", *PAGE_FILES})  # all that needs no key
LINGER_SECONDS = 1.0  # how long a refused client may go on sending before the connection is closed under it
_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
_log = get_logger(__name__)


@dataclass(slots=True)
class RequestContext:
    """What the edge learnt about a request; the routes find it at scope["etserve"]."""

    request_id: str  # ours; the client's own is only echoed in a header
    echoed_id: str | None  # the client's own, if it is a decent one
    arrival_seconds: float = field(default_factory=time.monotonic)
    key_digest: bytes | None = None
    status: int = 0  # of the answer once it has started
    body_complete: bool = False
    body_bytes: int = 0
    record: GenerationRecord | None = None  # of a completion that was admitted
    charge: "Charge | None" = None  # what the rate limits took for it, if any are set

    def settle(self) -> None:
        """Let the rate limits know what the request came to. Idempotent."""
        if self.charge is not None:
            self.charge.settle(self.record)


class Edge:
    """Wrap an ASGI app. Refusals leave as OpenAI error objects, also those of the app itself that nobody caught."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, keys: ApiKeys, metrics: Metrics, tracer: "Tracer | None" = None
    ) -> None:
        self.app = app
        self._tracer = tracer
        self._config = config
        self._keys = keys
        self._hosts = HostRule(config, has_keys=bool(keys))
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        context = RequestContext(uuid.uuid4().hex, _echoed_id(scope), body_complete=not _announces_body(scope))
        scope["etserve"] = context
        bounded = self._bounded_receive(context, receive)
        answering = self._answering_send(scope, context, bounded, send)
        try:
            self._check(scope, context)
            await self.app(scope, bounded, answering)
        except Exception as error:  # the funnel: whatever it is, the client gets one of our own sentences
            await self._refuse(fault_of(error), error, context, answering)
        finally:
            context.settle()
            self._report(scope, context)

    def _report(self, scope: Scope, context: RequestContext) -> None:
        route: str | None = getattr(scope.get("route"), "path", None)
        method, status = scope["method"], context.status
        seconds = time.monotonic() - context.arrival_seconds
        if status:
            self._metrics.answered(route, method, status)
        log_request(
            request_id=context.request_id,
            client_id=context.echoed_id,
            method=method,
            route=route,
            status=status,
            seconds=seconds,
            record=context.record,
        )
        if self._tracer is not None and context.record is not None:
            self._tracer.request_ended(scope["headers"], method, route or "", status, seconds, context.record)

    async def close(self) -> None:
        """Send the last traces. After the last request."""
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _check(self, scope: Scope, context: RequestContext) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if scope["http_version"] not in ("1.0", "1.1"):
            raise http_error(400, "This server speaks HTTP/1.0 and HTTP/1.1.")
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADER_BYTES:
            raise http_error(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.")
        if not self._hosts.allows([value for name, value in headers if name == b"host"]):
            raise http_error(400, "The Host header is not one that this server answers to.", code="invalid_host")
        if self._keys and scope["path"] not in OPEN_PATHS:
            context.key_digest = self._keys.match(presented_key(headers) or "")
            if context.key_digest is None:
                raise http_error(
                    401, "A valid API key is required.", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
                )
        self._check_body_headers(headers)

    def _check_body_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            # A proxy in front may have believed the one that we do not: where this request ends is in doubt.
            raise http_error(400, "Content-Length and Transfer-Encoding exclude each other.", code="invalid_http")
        for name, value in headers:
            if name == b"content-length" and int(value[:18]) > self._config.max_body_bytes:
                raise self._too_large()
            if name == b"content-encoding" and value.lower() != b"identity":
                raise http_error(415, "Compressed request bodies are not taken.")

    def _too_large(self) -> HttpError:
        return http_error(413, f"The request body is larger than {self._config.max_body_bytes} bytes.")

    def _bounded_receive(self, context: RequestContext, receive: Receive) -> Receive:
        deadline = asyncio.get_running_loop().time() + self._config.body_timeout_seconds
        finished = False

        async def bounded() -> Message:
            nonlocal finished
            if finished:
                return await receive()  # only the disconnect is still to come
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise http_error(408, "The request body took too long.") from None
            if message["type"] == "http.request":
                context.body_bytes += len(message.get("body", b""))
                if context.body_bytes > self._config.max_body_bytes:
                    raise self._too_large()
                finished = context.body_complete = not message.get("more_body", False)
            return message

        return bounded

    def _answering_send(self, scope: Scope, context: RequestContext, receive: Receive, send: Send) -> Send:
        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = [
                    *message.get("headers", []),
                    (b"x-request-id", (context.echoed_id or context.request_id).encode()),
                ]
                headers.append((b"x-content-type-options", b"nosniff"))
                if context.charge is not None:
                    headers += [(name.encode(), value.encode()) for name, value in context.charge.headers().items()]
                if not context.body_complete:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            elif not context.body_complete and not message.get("more_body", False):
                # The answer goes out before the body has come in. Closing at once would reset the connection and lose
                # the answer, so the client may talk on for a moment; nothing of it is kept.
                await send({**message, "more_body": True})
                await self._linger(scope, context, receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return answering

    async def _linger(self, scope: Scope, context: RequestContext, receive: Receive) -> None:
        if any(name == b"expect" for name, _ in scope["headers"]):
            return
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while not context.body_complete and (await receive())["type"] == "http.request":
                    continue
        except (TimeoutError, HttpError):
            return

    async def _refuse(self, fault: Fault, error: Exception, context: RequestContext, send: Send) -> None:
        context.settle()  # before the answer, which says how the client stands
        self._metrics.rejected(fault.reason)
        if fault.reason == "internal" and not isinstance(error, HttpError):
            log_failure(error, context.request_id)
        if not context.status:
            await send_fault(fault, send)


async def send_fault(fault: Fault, send: Send) -> None:
    """Answer with a fault."""
    body = fault.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in fault.headers.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def log_failure(error: BaseException, request_id: str) -> None:
    """Log where an error came from, without its message: that may quote a prompt or a key."""
    frames = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]
    log_facts(_log, logging.ERROR, "request failed", request=request_id, error=type(error).__name__, frames=frames)


def _announces_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _echoed_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if _REQUEST_ID.fullmatch(text) else None
    return None
