"""Spans of completions: GenAI attributes, the caller's trace, no text; and no SDK unless it is asked for."""

import asyncio
import http.server
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import pytest

from etserve.config import ServerConfig, load_config
from etserve.errors import ConfigError
from etserve.metrics.recorder import Metrics
from etserve.server.app import create_app, state_of
from etserve.server.auth import ApiKeys
from etserve.server.edge import Edge
from tests.fakes import FakeEngine
from tests.server.helpers import TOKENIZER, client_of, events, make_app

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from etserve.server.tracing import Tracer

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


def spans_of(path: str, body: dict[str, Any], engine: FakeEngine | None = None, **headers: str) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    inner = make_app(engine)
    edge = Edge(
        inner.app, ServerConfig(), ApiKeys([]), Metrics(CollectorRegistry()), Tracer("http://x/v1/traces", exporter)
    )

    async def go() -> None:
        async with client_of(edge) as client:
            await client.post(path, json=body, headers=headers)
        await edge.close()

    asyncio.run(go())
    return list(exporter.get_finished_spans())


def test_a_completion_is_a_server_span_with_the_conventions_attributes_and_no_text() -> None:
    body = {"prompt": "the swordfish", "max_tokens": 4, "n": 2, "temperature": 0.5, "seed": 7, "stop": ["swordfish"]}
    (span,) = spans_of("/v1/completions", body, **PARENT)
    attributes = dict(span.attributes or {})
    assert (span.name, span.kind.name) == ("text_completion unit", "SERVER")
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == "unit"
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (4, 0.5)
    assert (attributes["gen_ai.request.seed"], attributes["gen_ai.request.choice.count"]) == (7, 2)
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (13, 8)
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert (attributes["http.route"], attributes["http.response.status_code"]) == ("/v1/completions", 200)
    assert "swordfish" not in span.to_json()


def test_the_span_belongs_to_the_callers_trace_and_lasts_as_long_as_the_request() -> None:
    began = time.time_ns()
    (span,) = spans_of("/v1/completions", {"prompt": "x", "max_tokens": 4}, FakeEngine(step_seconds=0.02), **PARENT)
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT["traceparent"].split("-")[2]
    (event,) = span.events
    assert span.start_time is not None
    assert span.end_time is not None
    assert began <= span.start_time + 10_000_000  # two clocks
    assert span.start_time <= event.timestamp <= span.end_time
    assert event.name == "gen_ai.first_token"


def test_a_chat_is_named_so_and_an_engine_error_marks_the_span() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    (span,) = spans_of("/v1/chat/completions", body)
    assert span.name == "chat unit"
    assert span.parent is None
    (failed,) = spans_of("/v1/chat/completions", body, FakeEngine(fail_after=1))
    assert failed.status.status_code.name == "ERROR"
    assert dict(failed.attributes or {})["error.type"] == "500"


def test_what_was_never_admitted_has_no_span() -> None:
    assert spans_of("/v1/completions", {"prompt": "x", "no_such_field": 1}) == []
    assert spans_of("/v1/completions", {"prompt": "x"}, FakeEngine(overloaded=True)) == []
    assert spans_of("/tokenize", {"prompt": "x"}) == []


class _Collector(http.server.BaseHTTPRequestHandler):
    bodies: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_spans_reach_a_collector_over_http_by_the_setting_alone() -> None:
    collector = http.server.HTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    _Collector.bodies.clear()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    engine = FakeEngine()
    edge = create_app(ServerConfig(otlp_endpoint=endpoint), engine)
    state_of(edge).set_model(engine.info, TOKENIZER)

    async def go() -> str:
        async with client_of(edge) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "stream": True})
        await edge.close()
        return answer.text

    try:
        assert events(asyncio.run(go()))[-1] == "[DONE]"
    finally:
        collector.shutdown()
        collector.server_close()
    ((path, body),) = _Collector.bodies
    assert path == "/v1/traces"
    assert b"gen_ai.usage.output_tokens" in body


def test_without_the_setting_neither_sdk_nor_exporter_is_imported() -> None:  # FastAPI itself imports the API
    program = (
        "import sys; from etserve.server.app import create_app; from etserve.config import ServerConfig;"
        "from tests.fakes import FakeEngine; import asyncio;"
        "asyncio.run(asyncio.sleep(0)); create_app(ServerConfig(), FakeEngine());"
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_missing_extra_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etserve.server.tracing", None)
    with pytest.raises(ConfigError, match=r"etserve\[otel\]"):
        create_app(ServerConfig(otlp_endpoint="http://127.0.0.1:4318"), FakeEngine())


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://x", "http://a b", ""])
def test_an_endpoint_that_is_no_url_stops_the_start(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        load_config(None, {"server": {"otlp_endpoint": endpoint}}, {})
