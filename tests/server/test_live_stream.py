"""GET /v1/entropic/stream and GET /v1/entropic: who may watch, how often, and what a slow viewer costs."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from etserve.errors import OverloadedError
from etserve.server.app import state_of
from etserve.server.live import FRAME_SECONDS, HEARTBEAT_SECONDS, MAX_VIEWERS, QUEUE_FRAMES, LiveFeed, Viewer
from etserve.server.schemas import ENTROPIC_NOT_OFFERED, EntropicOptions
from tests.fakes import FakeEngine, fake_model_info
from tests.server.helpers import call, live_server, wait_until
from tests.server.test_live_state import drawn, stats_of

KEY = "key-of-anna-1234"
PATH = "/v1/entropic/stream"


@dataclass
class FakeLoop:
    """Time that moves only when told."""

    now: float = 100.0
    timers: list["FakeTimer"] = field(default_factory=list)

    def call_later(self, seconds: float, action: Callable[[], None]) -> "FakeTimer":
        timer = FakeTimer(self.now + seconds, action)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while ready := sorted((t for t in self.timers if t.due <= end + 1e-9 and t.is_alive), key=lambda t: t.due):
            self.now = max(self.now, ready[0].due)
            ready[0].is_alive = False
            ready[0].action()
        self.now = end


@dataclass
class FakeTimer:
    due: float
    action: Callable[[], None]
    is_alive: bool = True

    def cancel(self) -> None:
        self.is_alive = False


def feed_of(loop: FakeLoop) -> LiveFeed:
    return LiveFeed(FakeEngine(), now=lambda: loop.now, call_later=loop.call_later)


def read(viewer: Viewer) -> list[tuple[str, Any]]:
    """What is in the queue, as (event name, data)."""
    viewer.close()

    async def go() -> bytes:
        found = b""
        while (event := await viewer.next_event()) is not None:
            found += event
        return found

    blocks = [block.split("\n") for block in asyncio.run(go()).decode().split("\n\n")[:-1]]
    named = [(lines[0].removeprefix("event: ") if len(lines) == 2 else "message", lines[-1]) for lines in blocks]
    return [(name, json.loads(line.removeprefix("data: "))) for name, line in named]


def test_the_first_frame_comes_at_once_and_then_one_a_second_without_steps() -> None:
    loop = FakeLoop()
    feed = feed_of(loop)
    viewer = feed.subscribe()
    loop.advance(0.0)
    loop.advance(2.5 * HEARTBEAT_SECONDS)
    frames = read(viewer)
    assert len(frames) == 3
    assert all(frame["state"] == "ready" and frame["num_steps"] == 0 for _, frame in frames)


def test_frames_are_at_least_a_tenth_of_a_second_apart_and_lose_no_step() -> None:
    loop = FakeLoop()
    feed = feed_of(loop)
    viewer = feed.subscribe()
    loop.advance(0.0)
    for _ in range(70):
        feed.on_step(stats_of([1.0]), [drawn("a")])
        loop.advance(0.01)
    frames = [frame for _, frame in read(viewer)]
    assert len(frames) == 8
    assert [round(frame["interval_seconds"], 6) for frame in frames[1:]] == [FRAME_SECONDS] * 7
    assert sum(frame["num_steps"] for frame in frames) == 70
    assert sum(len(frame["sequences"][0]["entropies_nats"]) for frame in frames[1:]) == 70


def test_a_slow_viewer_misses_the_oldest_frames_and_is_told_while_a_fast_one_gets_all() -> None:
    loop = FakeLoop()
    feed = feed_of(loop)
    slow, fast = feed.subscribe(), feed.subscribe()
    got: list[bytes] = []
    for step in range(30):
        feed.on_step(stats_of([1.0], step=step), [drawn("a")])
        loop.advance(FRAME_SECONDS)
        got.append(asyncio.run(asyncio.wait_for(fast.next_event(), 5)) or b"")
    assert b"missed" not in b"".join(got)
    events = read(slow)
    assert events[0][0] == "missed"
    num_missed = events[0][1]["num_frames"]
    frames = [frame for name, frame in events if name == "message"]
    assert len(frames) == QUEUE_FRAMES
    assert num_missed + QUEUE_FRAMES == len(got)
    assert [frame["step"] for frame in frames] == list(range(30 - QUEUE_FRAMES, 30))


def test_without_viewers_no_timer_runs() -> None:
    loop = FakeLoop()
    feed = feed_of(loop)
    feed.on_step(stats_of([1.0]), [drawn("a")])
    assert loop.timers == []
    viewer = feed.subscribe()
    feed.unsubscribe(viewer)
    feed.unsubscribe(viewer)
    assert not any(timer.is_alive for timer in loop.timers)


def test_viewers_are_bounded_and_a_closed_feed_ends_them() -> None:
    feed = feed_of(FakeLoop())
    viewers = [feed.subscribe() for _ in range(MAX_VIEWERS)]
    with pytest.raises(OverloadedError):
        feed.subscribe()
    feed.close()
    assert feed.num_viewers == 0
    assert all(read(viewer) == [] for viewer in (*viewers, feed.subscribe()))


def test_the_stream_tells_of_a_running_request_and_its_end() -> None:
    with live_server(FakeEngine(step_seconds=0.02)) as live, httpx.stream("GET", live.url + PATH, timeout=20) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-accel-buffering"] == "no"
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        body = {"prompt": "a", "max_tokens": 40, "stream": True, "entropic": {"trace": "tokens"}}
        answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200
        reply_id = json.loads(answer.text.split("\n", 1)[0].removeprefix("data: "))["id"]
        entropies: list[float] = []
        for line in lines:
            if not line.startswith("data: "):
                continue
            mine = [s for s in json.loads(line[6:])["sequences"] if s["id"].startswith(reply_id)]
            entropies += [h for sequence in mine for h in sequence["entropies_nats"]]
            if mine and mine[0]["finish_reason"]:
                break
        assert mine[0]["finish_reason"] == "length"
        assert mine[0]["num_tokens"] == len(entropies) == 40
        assert mine[0]["kept_fraction"] == 1.0  # what its client traces is the newer
        assert mine[0]["blocks"] == {"read": 28, "skipped": 28, "evicted": 8}


def test_a_viewer_that_leaves_is_forgotten_and_one_too_many_is_refused() -> None:
    with live_server() as live:
        feed = state_of(live.app).live
        request = b"GET /v1/entropic/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        sockets = [live.connect() for _ in range(MAX_VIEWERS)]
        for raw in sockets:
            raw.sendall(request)
        wait_until(lambda: feed.num_viewers == MAX_VIEWERS)
        refused = httpx.get(live.url + PATH)
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        for raw in sockets:
            raw.close()
        wait_until(lambda: feed.num_viewers == 0)


def test_the_end_of_the_server_ends_the_stream_properly() -> None:
    with live_server() as live, httpx.stream("GET", live.url + PATH, timeout=20) as reply:
        lines = reply.iter_lines()
        next(lines)
        feed = state_of(live.app).live
        feed.close()
        assert len(list(lines)) < 10  # ends, without an error


def test_the_stream_and_the_options_need_the_key() -> None:
    for path in (PATH, "/v1/entropic"):
        assert call("GET", path, config={"api_keys": (KEY,)}).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    assert call("GET", "/v1/entropic", config={"api_keys": (KEY,)}, headers=headers).status_code == 200
    with live_server(api_keys=(KEY,)) as live:
        with httpx.stream("GET", live.url + PATH, headers=headers) as reply:
            assert reply.status_code == 200
        assert httpx.get(live.url + PATH).status_code == 401


def test_the_options_are_those_that_requests_may_carry() -> None:
    told = call("GET", "/v1/entropic").json()
    assert told["model"]["id"] == "unit"
    assert told["model"]["num_kv_blocks"] == 256
    options = told["options"]
    assert options["trace"] == {"offered": True, "enum": ["none", "summary", "tokens"]}
    assert set(options["temperature_mode"]["enum"]) >= {"off", "cool", "two_sided"}
    assert options["target_entropy_nats"] == {"offered": True, "minimum": 0.0, "maximum": 20.0}
    assert set(options) == {*EntropicOptions.model_fields, *ENTROPIC_NOT_OFFERED}
    for name in ENTROPIC_NOT_OFFERED:
        assert not options[name]["offered"]
        reply = call("POST", "/v1/completions", json={"prompt": "a", "entropic": {name: "on"}})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == f"entropic.{name}"


@pytest.mark.parametrize("bits", [0, 2])
def test_skipping_is_offered_where_sketches_are_kept(bits: int) -> None:
    engine = FakeEngine(info=fake_model_info(pruning_sketch_bits=bits))
    pruning = call("GET", "/v1/entropic", engine=engine).json()["options"]["pruning"]
    assert pruning["offered"] is (bits > 0)
    assert ("sketches" in pruning.get("reason", "")) is (bits == 0)


def test_nothing_is_steered_by_entropies_that_are_for_display_only() -> None:
    engine = FakeEngine(info=fake_model_info(pruning_sketch_bits=2, can_evict=True, entropy_estimator="topk_renorm"))
    told = call("GET", "/v1/entropic", engine=engine).json()
    assert told["model"]["entropy_estimator"] == "topk_renorm"
    for name in ("temperature_mode", "pruning", "eviction"):
        assert told["options"][name] == {"offered": False, "reason": told["options"][name]["reason"]}
        assert "display" in told["options"][name]["reason"]


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_guessing_is_offered_where_the_server_guesses(drafter: str) -> None:
    engine = FakeEngine(info=fake_model_info(speculation=drafter))
    option = call("GET", "/v1/entropic", engine=engine).json()["options"]["speculation"]
    assert option["offered"] is (drafter == "ngram")
    assert ("guesses" in option.get("reason", "")) is (drafter == "off")


@pytest.mark.parametrize("can_evict", [False, True])
@pytest.mark.parametrize("bits", [0, 2])
def test_protection_is_offered_where_blocks_can_be_skipped_or_evicted(bits: int, can_evict: bool) -> None:
    engine = FakeEngine(info=fake_model_info(pruning_sketch_bits=bits, can_evict=can_evict))
    options = call("GET", "/v1/entropic", engine=engine).json()["options"]
    assert options["kv_protect"]["offered"] is (bits > 0 or can_evict)
    assert options["pruning"]["offered"] is (bits > 0)
    assert options["eviction"]["offered"] is can_evict
