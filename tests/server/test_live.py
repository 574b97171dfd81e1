"""A real server on a real socket: streams, clients that leave, clients that dawdle, bytes that are no HTTP."""

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.server.helpers import Live, events, live_server, read_all, wait_until

LONG = {"prompt": "hello", "max_tokens": 1900, "stream": True}
FAST_TIMERS = {"header_timeout_seconds": 0.3, "body_timeout_seconds": 0.3, "write_timeout_seconds": 0.3}
KEY = "key-of-anna-1234"


@pytest.fixture(scope="module")
def plain() -> Iterator[Live]:
    with live_server() as live:
        yield live


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    with live_server(api_keys=(KEY,)) as live:
        yield live


@pytest.fixture(scope="module")
def hasty() -> Iterator[Live]:
    with live_server(FakeEngine(step_seconds=0.005, text_per_step=20_000), **FAST_TIMERS) as live:
        yield live


def exchange(live: Live, data: bytes) -> bytes:
    with live.connect() as raw:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(data)
        return read_all(raw)


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def body_of(reply: bytes) -> Any:
    """The first answer's body, parsed."""
    head, rest = reply.split(b"\r\n\r\n", 1)
    length = re.search(rb"content-length: (\d+)", head.lower())
    return json.loads(rest[: int(length[1])] if length else rest)


def read_one(raw: socket.socket) -> bytes:
    """One small answer: a JSON object ends it."""
    reply = b""
    while not reply.endswith(b"}"):
        reply += raw.recv(65536)
    return reply


def reset(raw: socket.socket) -> None:
    """Close with RST instead of FIN."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def test_a_stream_comes_token_by_token_with_headers_for_proxies() -> None:
    with live_server(FakeEngine(step_seconds=0.02)) as live:
        body = {"prompt": "a", "max_tokens": 5, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.headers["x-accel-buffering"] == "no"
            assert reply.headers["cache-control"] == "no-cache"
            chunks = list(reply.iter_raw())
    assert len(chunks) >= 5
    assert events(b"".join(chunks).decode())[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("with_reset", [True, False])
@pytest.mark.parametrize("silent_seconds", [0.0, 30.0])
def test_a_client_that_leaves_ends_its_request_and_no_other(
    stream: bool, with_reset: bool, silent_seconds: float
) -> None:
    engine = FakeEngine(step_seconds=0.005, silent_seconds=silent_seconds)
    with live_server(engine) as live:
        leaving = live.connect()
        leaving.sendall(live.post({**LONG, "stream": stream, "n": 2}))
        wait_until(lambda: len(engine.running) == 1)
        staying = live.connect()
        staying.sendall(live.post(LONG))
        wait_until(lambda: len(engine.running) == 2)
        first = engine.seen[0].request_id
        if with_reset:
            reset(leaving)
        else:
            leaving.close()
        wait_until(lambda: first not in engine.running)
        assert engine.aborted == [first]
        assert list(engine.running) == [engine.seen[1].request_id]
        metrics = httpx.get(f"{live.url}/metrics").text
        assert 'etserve_requests_finished_total{finish_reason="abort"} 2.0' in metrics
        staying.close()
        wait_until(lambda: not engine.running)


def test_a_mass_abort_brings_every_gauge_back_to_zero() -> None:
    engine = FakeEngine(step_seconds=0.002)
    with live_server(engine) as live:
        clients = [live.connect() for _ in range(60)]
        for client in clients:
            client.sendall(live.post(LONG))
        wait_until(lambda: len(engine.seen) == 60)
        for index, client in enumerate(clients):
            if index % 2:
                reset(client)
            else:
                client.close()
        wait_until(lambda: not engine.running)
        metrics = httpx.get(f"{live.url}/metrics").text
        for line in (
            "etserve_requests_running 0.0",
            "etserve_requests_waiting 0.0",
            "etserve_kv_cache_usage_ratio 0.0",
            'etserve_kv_blocks{state="active"} 0.0',
            'etserve_requests_finished_total{finish_reason="abort"} 60.0',
        ):
            assert line in metrics


def test_a_silent_stream_carries_comments() -> None:
    with live_server(FakeEngine(silent_seconds=0.5), keep_alive_comment_seconds=0.1) as live:
        reply = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
    comments = [line for line in reply.text.split("\n") if line.startswith(":")]
    assert 2 <= len(comments) <= 6
    assert events(reply.text)[-1] == "[DONE]"


def test_a_client_that_does_not_read_is_dropped_and_others_go_on(hasty: Live) -> None:
    engine = hasty.engine
    already_seen = len(engine.seen)
    raw = hasty.connect(receive_buffer=1024)
    raw.sendall(hasty.post(LONG))
    wait_until(lambda: len(engine.seen) == already_seen + 1)
    idle = engine.seen[-1].request_id
    reply = httpx.post(f"{hasty.url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert reply.status_code == 200
    wait_until(lambda: idle not in engine.running)
    assert idle in engine.aborted
    raw.close()


def test_a_slow_reader_holds_up_its_own_stream_only() -> None:
    """Nothing is gathered for it beyond the transport's buffer: the engine's iterator is not read meanwhile."""
    engine = FakeEngine(text_per_step=50_000)
    with live_server(engine) as live:
        raw = live.connect(receive_buffer=1024)
        raw.sendall(live.post(LONG))
        wait_until(lambda: len(engine.running) == 1)
        time.sleep(0.3)
        drawn = next(iter(engine.running.values())).num_drawn
        time.sleep(0.3)
        assert next(iter(engine.running.values())).num_drawn == drawn
        assert drawn < 400
        reset(raw)
        wait_until(lambda: not engine.running)


def test_headers_that_dawdle_are_closed(hasty: Live) -> None:
    for start in (b"", b"GET ", b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nx-a: "):
        with hasty.connect() as raw:
            raw.sendall(start)
            stopped = threading.Event()

            def drip(raw: socket.socket = raw, stopped: threading.Event = stopped) -> None:
                with contextlib.suppress(OSError):
                    while not stopped.wait(0.05):
                        raw.sendall(b"x")

            dripping = threading.Thread(target=drip)
            if start:
                dripping.start()
            reply = read_all(raw)
            stopped.set()
            if start:
                dripping.join()
            assert reply == b"" or status_of(reply) in (400, 408)


def test_headers_that_dawdle_on_a_used_connection_are_closed(hasty: Live) -> None:
    with hasty.connect() as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert status_of(read_one(raw)) == 200
        raw.sendall(b"GET /version HTTP/1.1\r\nx-a: ")
        assert status_of(read_all(raw)) == 408


def test_an_idle_connection_between_requests_is_not_closed_by_the_header_timer(hasty: Live) -> None:
    with hasty.connect() as raw:
        for _ in range(2):
            raw.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert status_of(read_one(raw)) == 200
            time.sleep(0.5)


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 100\r\n", b"Transfer-Encoding: chunked\r\n"], ids=["length", "chunked"]
)
def test_a_body_that_dawdles_is_closed(hasty: Live, framing: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + framing + b"\r\n"
    part = b'{"prompt"' if b"Length" in framing else b'9\r\n{"prompt"\r\n'
    reply = exchange(hasty, head + part)
    assert status_of(reply) == 408
    assert b"connection: close" in reply.lower()
    assert body_of(reply)["error"]["type"] == "timeout_error"


def test_slow_clients_in_numbers_do_not_keep_others_out(hasty: Live) -> None:
    dawdlers = [hasty.connect() for _ in range(200)]
    for raw in dawdlers:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nx-")
    assert httpx.get(f"{hasty.url}/health/live").status_code == 200
    assert httpx.post(f"{hasty.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    for raw in dawdlers:
        read_all(raw)
        raw.close()


@pytest.mark.parametrize("size", [70_000, 1_000_000, 8_000_000])
def test_huge_headers_are_refused(plain: Live, size: int) -> None:
    reply = exchange(
        plain, b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nx-a: " + b"x" * size + b"\r\n\r\n"
    )
    assert reply == b"" or status_of(reply) in (400, 431)


def test_a_great_many_headers_are_refused(plain: Live) -> None:
    many = b"".join(b"x-%d: y\r\n" % i for i in range(20_000))
    reply = exchange(plain, b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" + many + b"\r\n")
    assert reply == b"" or status_of(reply) in (400, 431)


def test_an_endless_chunked_body_is_cut_off_and_answered(plain: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with plain.connect() as raw:
        raw.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 1 << 30:
                raw.sendall(chunk)
                sent += len(chunk)
        assert sent < 64 * 1024 * 1024
        reply = read_all(raw)
    assert reply == b"" or status_of(reply) == 413


def test_a_refusal_reaches_a_client_that_is_still_sending(plain: Live) -> None:
    reply = httpx.post(
        f"{plain.url}/v1/completions", content=b" " * 6_000_000, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 413
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_bytes_that_are_no_http_get_a_refusal_in_our_shape_or_none(hasty: Live, data: bytes) -> None:
    reply = exchange(hasty, data)
    assert reply == b"" or 400 <= status_of(reply) < 500 or status_of(reply) == 501
    if reply:
        assert body_of(reply)["error"]["message"]
    assert httpx.get(f"{hasty.url}/health/live").status_code == 200


@pytest.mark.parametrize(
    "target",
    ["//v1/models", "/v1/../health/live", "/health/live/../../v1/models", "/./health/live", "http://evil/health/live",
     "/v1/models#/health/live", "/v1/models?/health/live", "/v1/models;/health/live", "/health/live?x/../../v1/models"],
)  # fmt: skip
def test_no_spelling_of_a_path_opens_a_guarded_route(guarded: Live, target: str) -> None:
    reply = exchange(guarded, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    if target.startswith("/health/live?"):  # truly the open route, with a query
        assert body_of(reply) == {"status": "live"}
    else:
        assert status_of(reply) in (400, 401)
        assert b"max_model_len" not in reply


def test_a_websocket_is_not_opened(guarded: Live) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n"
    for path in (b"/v1/models", b"/health/live"):
        with guarded.connect() as raw:
            raw.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n" + upgrade + b"\r\n")
            assert not raw.recv(65536).startswith(b"HTTP/1.1 101")


def test_expect_continue_is_not_granted_to_who_may_not_send(guarded: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    reply = exchange(guarded, head)
    assert reply.startswith(b"HTTP/1.1 401")


def test_a_request_with_two_framings_is_refused_and_its_connection_closed(plain: Live) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    body = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    reply = exchange(plain, head + body + b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert status_of(reply) == 400
    assert reply.count(b"HTTP/1.1 ") == 1


def test_pipelined_requests_are_answered_in_order(plain: Live) -> None:
    one = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    last = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    reply = exchange(plain, one + one + last)
    assert reply.count(b"HTTP/1.1 200") == 3
    assert reply.endswith(b'{"status":"live"}')


def test_health_answers_while_many_streams_run() -> None:
    engine = FakeEngine(step_seconds=0.001)
    with live_server(engine) as live:
        clients = [live.connect() for _ in range(40)]
        for client in clients:
            client.sendall(live.post(LONG))
        wait_until(lambda: len(engine.seen) == 40)
        for _ in range(5):
            assert httpx.get(f"{live.url}/health/ready", timeout=5).status_code == 200
        for client in clients:
            client.close()
        wait_until(lambda: not engine.running)
