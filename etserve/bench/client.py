"""One streamed request to an OpenAI-compatible server, timed as its bytes arrive. The only module that speaks HTTP."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from etserve.bench.errors import BenchError
from etserve.bench.records import RequestRecord
from etserve.bench.workloads import PlannedRequest

Api = Literal["completions", "chat"]
ERROR_KINDS = ("refused", "connect", "disconnect", "timeout", "stream", "incomplete")
# refused: an HTTP status other than 200 · connect: no connection · disconnect: closed before the stream's end ·
# timeout: longer than the limit · stream: an error object or garbage in it · incomplete: ended without usage or text
_ROUTES: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is spoken to. `extra_body` is merged into every request; a None in it removes the field."""

    url: str
    model: str
    api: Api = "completions"
    api_key: str | None = None
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 600.0

    @property
    def endpoint(self) -> str:
        return self.url.rstrip("/") + _ROUTES[self.api]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: PlannedRequest) -> bytes:
        """JSON of one greedy streaming request of a fixed output length."""
        content = request.prompt.content
        prompt = {"messages": [{"role": "user", "content": content}]} if self.api == "chat" else {"prompt": content}
        body: dict[str, Any] = {
            "model": self.model,
            **prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None  # llama.cpp's own count of prompt tokens that it found in its cache


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


@dataclass(slots=True)
class _Stream:
    """What has arrived of one reply."""

    seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # characters per piece
    usage: _Usage | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def take(self, event: _Event, at: float) -> None:
        if event.error is not None:
            self.error = str(event.error)[:300]
        for choice in event.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            text = choice.text or (choice.delta.content if choice.delta else None)
            if text:
                self._add_text(len(text), at)
        if event.usage is not None:
            self.usage = event.usage
            details = event.usage.prompt_tokens_details
            self.cached_tokens = max(self.cached_tokens, (details.cached_tokens or 0) if details else 0)
        if event.timings is not None:
            self.cached_tokens = max(self.cached_tokens, event.timings.cache_n or 0)

    def _add_text(self, length: int, at: float) -> None:
        if self.seconds and self.seconds[-1] == at:  # one network read: the client sees both pieces at once
            self.lengths[-1] += length
        else:
            self.seconds.append(at)
            self.lengths.append(length)


def share_tokens(lengths: list[int], total: int) -> list[int]:
    """Spread `total` tokens over pieces of text: one each where they match, else by length (largest remainders).

    Servers say how many tokens came in all, not how many came in a piece that carries several.
    """
    if total == len(lengths) or not lengths:
        return [1] * len(lengths)
    base = 1 if total > len(lengths) else 0
    spare = total - base * len(lengths)
    exact = [spare * length / sum(lengths) for length in lengths]
    counts = [base + int(share) for share in exact]
    order = sorted(range(len(lengths)), key=lambda i: exact[i] - int(exact[i]), reverse=True)
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


async def send(
    session: aiohttp.ClientSession, target: Target, request: PlannedRequest, body: bytes, origin: float
) -> RequestRecord:
    """Send one request and read its stream to the end. Never raises for what the server does: it is in the record."""
    sent = time.monotonic() - origin
    stream = _Stream()
    error, detail = None, ""
    try:
        headers = {"Content-Type": "application/json", **target.headers}
        async with session.post(target.endpoint, data=body, headers=headers) as response:
            if response.status == 200:
                async for event, at in _events(response):
                    stream.take(event, at - origin)
            else:
                error, detail = "refused", f"HTTP {response.status}: {(await response.text())[:300]}"
    except aiohttp.ClientConnectorError as fault:
        error, detail = "connect", str(fault)
    except TimeoutError:
        error, detail = "timeout", f"no end within {target.timeout_seconds:g} s"
    except (aiohttp.ClientError, ConnectionError) as fault:
        error, detail = "disconnect", str(fault)
    except msgspec.DecodeError as fault:
        error, detail = "stream", str(fault)
    return _record(request, stream, sent, time.monotonic() - origin, error, detail)


def _record(
    request: PlannedRequest, stream: _Stream, sent: float, end: float, error: str | None, detail: str
) -> RequestRecord:
    if stream.error is not None:  # says more than that the stream then broke off
        error, detail = "stream", stream.error
    if error is None and (stream.usage is None or not stream.seconds):
        error, detail = "incomplete", "the stream ended without usage" if stream.usage is None else "no text came"
    usage = stream.usage or _Usage()
    return RequestRecord(
        index=request.index,
        scheduled_seconds=sent if request.arrival_seconds is None else request.arrival_seconds,
        sent_seconds=sent,
        end_seconds=end,
        prompt_tokens_asked=request.prompt.num_tokens,
        output_tokens_asked=request.num_output_tokens,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=stream.cached_tokens,
        chunk_seconds=[round(at, 6) for at in stream.seconds],
        chunk_tokens=share_tokens(stream.lengths, usage.completion_tokens),
        finish_reason=stream.finish_reason,
        error=error,
        detail=detail,
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[_Event, float]]:
    """The stream's events with the time (monotonic) at which the bytes that completed them were read.

    Raises ClientPayloadError when the stream ends before `[DONE]`, DecodeError for what is not an event.
    """
    decoder = msgspec.json.Decoder(_Event)
    rest = b""
    async for data in response.content.iter_any():
        at = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):  # comments, event names, blank lines
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            yield decoder.decode(payload), at
    raise aiohttp.ClientPayloadError("the stream ended before [DONE]")


def open_session(target: Target) -> aiohttp.ClientSession:
    """A session without limits or kept-alive connections, so that no request waits for, or inherits, another's."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=target.timeout_seconds),
        read_bufsize=2**20,
    )


async def first_model(url: str, api_key: str | None) -> str:
    """The first model the server lists. Raises BenchError when it cannot be asked."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    endpoint = url.rstrip("/") + "/v1/models"
    try:
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(endpoint, headers=headers) as response,
        ):
            if response.status != 200:
                raise BenchError(f"{endpoint} answers {response.status}; name the model with --model")
            listed = await response.json(content_type=None)
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"{url} does not answer: {error or 'timeout'}") from None
    except (KeyError, IndexError, TypeError, ValueError):
        raise BenchError(f"{endpoint} lists no model; name it with --model") from None
