"""A tiny server with OpenAI's streaming shapes, and its ways to fail."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web

from etserve.bench.prompts import Prompt
from etserve.bench.records import RequestRecord
from etserve.bench.workloads import PlannedRequest
from etserve.models.files import resolve_model
from etserve.tokenizer import Tokenizer, load_tokenizer

UNIT_MODEL = Path(__file__).parents[1] / "data" / "unit_model"


@cache
def unit_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(str(UNIT_MODEL)))


@dataclass
class FakeServer:
    """Answers every prompt with `x` per token. `faults[i]` is what happens to the i-th completion request."""

    tokens_per_chunk: int = 1
    pause_seconds: float = 0.0
    faults: dict[int, str] = field(
        default_factory=dict
    )  # refuse | drop | error | garbage | no_usage | empty | cut | hang
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        index = len(self.bodies)
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self._answer(request, self.bodies[index], self.faults.get(index, ""))
        finally:
            self.num_open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        if fault == "refuse":
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": a comment\n\n")
        num_tokens = body["max_tokens"]
        sent = 0
        while sent < num_tokens and fault != "empty":
            await asyncio.sleep(self.pause_seconds)
            size = min(self.tokens_per_chunk, num_tokens - sent)
            await self._event(response, {"choices": [self._choice(body, "x" * size)]})
            sent += size
            if fault == "hang":
                await asyncio.sleep(30.0)
            if fault == "drop" and request.transport is not None:
                request.transport.abort()
                return response
            if fault in ("error", "garbage"):
                await response.write(
                    b'data: {"error": {"message": "broken"}}\n\n' if fault == "error" else b"data: {{\n\n"
                )
                return response
        if fault != "no_usage":
            usage = {
                "prompt_tokens": self.count(body),
                "completion_tokens": num_tokens,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            await self._event(response, {"choices": [], "usage": usage})
        if fault != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if "messages" in body else {"text": text, "finish_reason": None}

    async def _event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def count(self, body: dict[str, Any]) -> int:
        if "messages" in body:
            return len(unit_tokenizer().apply_chat_template(body["messages"], add_generation_prompt=True))
        prompt = body["prompt"]
        return len(unit_tokenizer().encode(prompt)) if isinstance(prompt, str) else len(prompt)


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free port in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    server.url = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def planned(count: int, *, num_output_tokens: int = 4, gap_seconds: float | None = None) -> list[PlannedRequest]:
    prompts = [Prompt(f"prompt number {i}", len(unit_tokenizer().encode(f"prompt number {i}"))) for i in range(count)]
    return [
        PlannedRequest(i, prompts[i], num_output_tokens, None if gap_seconds is None else i * gap_seconds)
        for i in range(count)
    ]


def record(
    index: int = 0,
    *,
    scheduled: float = 0.0,
    chunks: tuple[float, ...] = (1.0, 2.0),
    tokens: tuple[int, ...] = (1, 1),
    end: float = 2.0,
    error: str | None = None,
    prompt_tokens: int = 10,
) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled_seconds=scheduled,
        sent_seconds=scheduled,
        end_seconds=end,
        prompt_tokens_asked=10,
        output_tokens_asked=sum(tokens),
        prompt_tokens=prompt_tokens,
        output_tokens=sum(tokens),
        chunk_seconds=list(chunks),
        chunk_tokens=list(tokens),
        error=error,
    )
