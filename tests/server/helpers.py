"""Clients and servers for the tests of the HTTP face."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from etserve.config import ServerConfig
from etserve.server.app import create_app, state_of
from etserve.server.edge import Edge
from etserve.server.run import make_server
from tests.fakes import FakeEngine, unit_tokenizer

BASE = "http://127.0.0.1"
TOKENIZER = unit_tokenizer()


def make_app(engine: FakeEngine | None = None, **config: Any) -> Edge:
    """An app whose fake engine is ready."""
    engine = engine or FakeEngine()
    app = create_app(ServerConfig(**config), engine)
    state_of(app).set_model(engine.info, TOKENIZER)
    return app


@contextlib.asynccontextmanager
async def client_of(app: Edge, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url=BASE, **options) as client:
        yield client


def call(
    method: str, path: str, *, engine: FakeEngine | None = None, config: dict[str, Any] | None = None, **options: Any
) -> httpx.Response:
    """One request to a fresh app."""

    async def go() -> httpx.Response:
        async with client_of(make_app(engine, **(config or {}))) as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


def complete(engine: FakeEngine | None = None, **body: Any) -> httpx.Response:
    return call("POST", "/v1/completions", engine=engine, json={"prompt": "hello", "max_tokens": 4, **body})


def chat(engine: FakeEngine | None = None, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return call("POST", "/v1/chat/completions", engine=engine, json={"messages": messages, "max_tokens": 4, **body})


def events(text: str) -> list[Any]:
    """The data of a stream's events, parsed; "[DONE]" as it is."""
    found = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in found]


@dataclass
class Live:
    """A server on a real socket."""

    port: int
    engine: FakeEngine
    app: Edge

    @property
    def url(self) -> str:
        return f"{BASE}:{self.port}"

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(10)
        raw.connect(("127.0.0.1", self.port))
        return raw

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextlib.contextmanager
def live_server(engine: FakeEngine | None = None, **config: Any) -> Iterator[Live]:
    """Run the app under the project's own uvicorn settings, in a thread."""
    engine = engine or FakeEngine()
    settings = ServerConfig(**config)
    app = make_app(engine, **config)
    server = make_server(app, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Live(listener.getsockname()[1], engine, app)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come about in time")
        time.sleep(0.01)


def read_all(raw: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            data += part
    return data
