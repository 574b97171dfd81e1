"""One log line per request: with its id, route, status, times and counts, and without anything that was said."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from etserve import log
from tests.fakes import FakeEngine
from tests.server.helpers import client_of, make_app

SECRET = "tell nobody of the swordfish"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger("etserve")
    before = (logger.handlers[:], logger.level, logger.propagate)
    written = io.StringIO()
    log.configure("info", written)
    yield written
    logger.handlers[:], logger.level, logger.propagate = before


def ask(path: str, body: dict[str, Any] | None = None, engine: FakeEngine | None = None, **headers: str) -> None:
    async def go() -> None:
        async with client_of(make_app(engine)) as client:
            if body is None:
                await client.get(path, headers=headers)
            else:
                await client.post(path, json=body, headers=headers)

    asyncio.run(go())


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [entry for entry in map(json.loads, stream.getvalue().splitlines()) if entry["event"] == "request"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_completion_is_logged_with_its_counts_and_without_its_words(stream: io.StringIO, is_stream: bool) -> None:
    body = {"prompt": SECRET, "max_tokens": 5, "n": 2, "stream": is_stream, "user": "someone"}
    ask("/v1/completions", body, **{"x-request-id": "abc-1"})
    (entry,) = lines(stream)
    assert (entry["method"], entry["route"], entry["status"]) == ("POST", "/v1/completions", 200)
    assert (entry["client_request"], len(entry["request"])) == ("abc-1", 32)
    assert (entry["prompt_tokens"], entry["output_tokens"]) == (len(SECRET), 10)  # the unit model's tokens are bytes
    assert entry["finish_reasons"] == ["length", "length"]
    assert 0.0 <= entry["first_token_seconds"] <= entry["seconds"]
    assert "swordfish" not in stream.getvalue()
    assert "someone" not in stream.getvalue()


def test_a_refusal_is_logged_by_route_template_and_never_by_the_path_that_was_sent(stream: io.StringIO) -> None:
    ask("/v1/completions", {"prompt": SECRET, "no_such_field": 1})
    ask("/v1/models/swordfish")
    ask("/swordfish?key=swordfish")
    found = [(entry["route"], entry["status"]) for entry in lines(stream)]
    assert found == [("/v1/completions", 400), ("/v1/models/{model_id:path}", 404), (None, 404)]
    assert "swordfish" not in stream.getvalue()
    assert all("output_tokens" not in entry for entry in lines(stream))


def test_probes_are_logged_at_debug_only(stream: io.StringIO) -> None:
    for path in ("/health/live", "/health/ready", "/health", "/metrics", "/load"):
        ask(path)
    assert lines(stream) == []
    log.configure("debug", stream)
    ask("/health/live")
    assert [entry["level"] for entry in lines(stream)] == ["debug"]


def test_an_indecent_request_id_is_neither_logged_nor_echoed(stream: io.StringIO) -> None:
    ask("/version", **{"x-request-id": 'a"b{'})
    (entry,) = lines(stream)
    assert "client_request" not in entry


def test_a_request_that_ends_in_an_engine_error_says_so(stream: io.StringIO) -> None:
    ask("/v1/completions", {"prompt": "hello", "max_tokens": 8}, FakeEngine(fail_after=2))
    (entry,) = lines(stream)
    assert (entry["status"], entry["finish_reasons"]) == (500, ["error"])
