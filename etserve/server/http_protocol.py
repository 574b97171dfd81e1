"""uvicorn's h11 protocol with what it lacks: timers for slow headers and slow readers, and JSON for refused bytes."""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from etserve.server.faults import Fault

MAX_HEADER_BYTES = 64 * 1024


def timed_protocol(header_timeout: float, write_timeout: float) -> type[H11Protocol]:
    """Make the protocol class for these limits, in seconds."""

    class TimedProtocol(H11Protocol):
        """Closes a connection whose request line and headers take too long, and one whose client stops reading."""

        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._header_timer = self.loop.call_later(header_timeout, self._headers_too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_write_timer()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            # h11 is idle while no whole header has come. The timer is not renewed by single bytes; an idle connection
            # between two requests is uvicorn's keep-alive timer's business.
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
                if self._header_timer is None:
                    self._header_timer = self.loop.call_later(header_timeout, self._headers_too_slow)
            elif self.conn.their_state is not h11.IDLE:
                self._stop_header_timer()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._write_timer is None:
                self._write_timer = self.loop.call_later(write_timeout, self._reader_too_slow)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_write_timer()

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's sentence, ours is in JSON
            error = sys.exc_info()[1]
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            if status == 431:
                self._refuse(Fault(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes."))
            else:
                self._refuse(Fault(400, "This is no valid HTTP request.", code="invalid_http"))

        def _refuse(self, fault: Fault) -> None:
            body = fault.body()
            headers: list[tuple[bytes, bytes]] = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            events: list[Any] = [
                h11.Response(status_code=fault.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                for event in events:
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _headers_too_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self._refuse(Fault(408, "The request's headers took too long."))

        def _reader_too_slow(self) -> None:
            # close() would wait for the buffer that the client does not read; connection_lost then ends the request.
            self._write_timer = None
            self.transport.abort()

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

    return TimedProtocol
