"""The engine's entropic state as server-sent events, and what the live page asks before it offers a switch."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from etserve import __version__
from etserve.engine.client import AsyncEngine
from etserve.errors import OverloadedError
from etserve.outputs import ModelInfo, SequenceOutput, StepStats
from etserve.server.live_state import LiveState
from etserve.server.schemas import ENTROPIC_NOT_OFFERED, EntropicOptions
from etserve.server.streaming import wait_for_disconnect

FRAME_SECONDS: Final = 0.1  # no viewer gets frames closer together
HEARTBEAT_SECONDS: Final = 1.0  # a frame also when no step was made
QUEUE_FRAMES: Final = 8  # per viewer; beyond it the oldest is dropped
MAX_VIEWERS: Final = 32
_PRUNING_OPTIONS: Final = ("pruning", "epsilon", "verify")
_encode = msgspec.json.Encoder().encode
router = APIRouter(redirect_slashes=False)


class Timer(Protocol):
    """What `call_later` of an event loop returns."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class Viewer:
    """One reader's queue. A reader that is slow misses frames, and is told how many."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._num_missed = 0
        self._is_closed = False

    def put(self, frame: bytes) -> None:
        """Queue a frame; the oldest one gives way when the queue is full."""
        if len(self._frames) == QUEUE_FRAMES:
            self._frames.popleft()
            self._num_missed += 1
        self._frames.append(frame)
        self._changed.set()

    def close(self) -> None:
        """No frame comes any more; those in the queue are still read."""
        self._is_closed = True
        self._changed.set()

    async def next_event(self) -> bytes | None:
        """Wait for the next event to send; None at the end. A `missed` event goes before the frame after a gap."""
        while not self._frames:
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        event = b"data: " + self._frames.popleft() + b"\n\n"
        if self._num_missed:
            event = b'event: missed\ndata: {"num_frames":%d}\n\n' % self._num_missed + event
            self._num_missed = 0
        return event


class LiveFeed:
    """Step listener of the engine that sends frames to its viewers, at most one every FRAME_SECONDS."""

    def __init__(
        self, engine: AsyncEngine, now: Callable[[], float] = time.monotonic, call_later: CallLater | None = None
    ) -> None:
        """`call_later` defaults to that of the running event loop."""
        self._engine = engine
        self._now = now
        self._call_later = call_later
        self._state = LiveState()
        self._viewers: set[Viewer] = set()
        self._timer: Timer | None = None
        self._due = 0.0
        self._last_frame = 0.0
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def on_step(self, stats: StepStats, outputs: list[SequenceOutput]) -> None:
        """Step listener of the engine."""
        self._state.observe(stats, outputs)
        if self._viewers:
            self._schedule(FRAME_SECONDS)

    def subscribe(self) -> Viewer:
        """Add a viewer; the first frame comes at once. Raises OverloadedError beyond MAX_VIEWERS."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError("too many viewers", 5.0)
        viewer = Viewer()
        if self._is_closed:
            viewer.close()
            return viewer
        if not self._viewers:
            self._last_frame = self._now() - FRAME_SECONDS
        self._viewers.add(viewer)
        self._watch(True)
        self._schedule(FRAME_SECONDS)
        return viewer

    def unsubscribe(self, viewer: Viewer) -> None:
        """Forget a viewer. Idempotent; without any, nothing is gathered."""
        self._viewers.discard(viewer)
        if not self._viewers:
            self._watch(False)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def close(self) -> None:
        """End every stream: the server stops."""
        self._is_closed = True
        for viewer in list(self._viewers):
            viewer.close()
            self.unsubscribe(viewer)

    def _watch(self, is_watched: bool) -> None:
        if self._state.is_watched != is_watched:
            self._state.is_watched = is_watched
            self._engine.watch(is_watched)

    def _schedule(self, seconds: float) -> None:
        """Send a frame `seconds` after the last one, or as soon as possible; an earlier date stands."""
        due = max(self._last_frame + seconds, self._now())
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        call_later = self._call_later or asyncio.get_running_loop().call_later
        self._timer = call_later(due - self._now(), self._publish)

    def _publish(self) -> None:
        self._timer = None
        now = self._now()
        interval, self._last_frame = now - self._last_frame, now
        frame = {"state": self._engine.health().state, "interval_seconds": interval, **self._state.take_frame()}
        data = _encode(frame)
        for viewer in self._viewers:
            viewer.put(data)
        self._schedule(HEARTBEAT_SECONDS)


class LiveStream(Response):
    """Send one viewer's events until it leaves or the feed ends."""

    def __init__(self, feed: LiveFeed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        viewer = self._feed.subscribe()
        tasks = [asyncio.create_task(_send_all(viewer, send)), asyncio.create_task(wait_for_disconnect(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._feed.unsubscribe(viewer)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _send_all(viewer: Viewer, send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while (event := await viewer.next_event()) is not None:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.get("/v1/entropic/stream")
async def stream(request: Request) -> Response:
    return LiveStream(request.app.state.etserve.live)


@router.get("/v1/entropic")
async def describe(request: Request) -> Response:
    """What this server measures and which entropic options its requests may carry."""
    model = request.app.state.etserve.model
    info = model.info if model else None
    return JSONResponse(
        {"version": __version__, "model": _model(info) if info else None, "options": _options(info)},
        headers={"cache-control": "no-store"},
    )


def _model(info: ModelInfo) -> dict[str, Any]:
    names = (
        *("max_model_len", "num_parameters", "vocab_size", "num_kv_blocks", "block_size", "max_num_seqs", "backend"),
        "entropy_estimator",
    )
    return {"id": info.model_name, **{name: getattr(info, name) for name in names}}


def _options(model: ModelInfo | None) -> dict[str, Any]:
    """Each entropic option by name, read off the schema that requests are checked against."""
    offered = EntropicOptions.model_json_schema()["properties"]
    reason = "This version does not have it."
    options: dict[str, Any] = {name: {"offered": False, "reason": reason} for name in sorted(ENTROPIC_NOT_OFFERED)}
    for name, schema in offered.items():
        facts: dict[str, Any] = {"offered": True}
        for part in (schema, *schema.get("anyOf", ())):
            facts |= {key: part[key] for key in ("enum", "minimum", "maximum") if key in part}
        options[name] = facts
    if model is not None and model.pruning_sketch_bits == 0:
        reason = "This server keeps no key sketches to skip by (--pruning-sketch-bits)."
        names = _PRUNING_OPTIONS if model.can_evict else (*_PRUNING_OPTIONS, "kv_protect")
        options |= {name: {"offered": False, "reason": reason} for name in names}
    if model is not None and model.speculation == "off":
        options["speculation"] = {"offered": False, "reason": "This server guesses no tokens (--speculation)."}
    if model is not None and not model.can_evict:
        reason = "It takes a model without a sliding window."
        options |= {name: {"offered": False, "reason": reason} for name in ("eviction", "block_budget")}
    if model is not None and model.entropy_estimator == "topk_renorm":
        reason = "This server's entropies are for display only (--entropy-estimator)."
        options |= {name: {"offered": False, "reason": reason} for name in ("temperature_mode", "pruning", "eviction")}
    return options
