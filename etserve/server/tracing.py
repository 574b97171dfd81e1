"""OpenTelemetry spans of completions, after the GenAI semantic conventions. Imported only when asked for.

A span is made when its request has ended, from what the edge then knows; nothing is traced while tokens flow. It holds
names, counts and times, never text. A thread of the SDK sends spans in batches and drops them when nobody takes them.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from etserve import __version__
from etserve.server.record import GenerationRecord

Headers = Sequence[tuple[bytes, bytes]]
Attribute = str | int | float | Sequence[str]
EXPORT_TIMEOUT_SECONDS = 5
LAST_FLUSH_MILLISECONDS = 2000


class Tracer:
    """Turns ended requests into spans. `exporter` replaces the one of `endpoint` in tests."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        _log_as_json()
        resource = Resource.create({"service.name": "etserve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("etserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request_ended(
        self, headers: Headers, method: str, route: str, status: int, seconds: float, record: GenerationRecord
    ) -> None:
        """Make the span of a request that ended now and took `seconds`; a child of the caller's if there is one."""
        end = time.time_ns()
        start = end - int(seconds * 1e9)
        span = self._tracer.start_span(
            f"{record.operation} {record.model_name}",
            context=self._propagator.extract(_traceparent(headers)),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                **attributes_of(record),
            },
            start_time=start,
        )
        if record.first_token_seconds is not None:
            span.add_event("gen_ai.first_token", timestamp=start + int(record.first_token_seconds * 1e9))
        if status >= 500 or "error" in record.finish_reasons:
            span.set_attribute("error.type", str(status) if status >= 500 else "engine_error")
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=end)

    def close(self) -> None:
        """Send what is left, for two seconds at most. Blocks."""
        self._provider.force_flush(LAST_FLUSH_MILLISECONDS)
        self._provider.shutdown()


def attributes_of(record: GenerationRecord) -> Mapping[str, Attribute]:
    """A completion in the words of https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/."""
    params = record.params
    asked: dict[str, Attribute | None] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
    }
    return {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "etserve",
        "gen_ai.request.model": record.model_name,
        "gen_ai.response.model": record.model_name,
        "gen_ai.response.id": record.reply_id,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        **{name: value for name, value in asked.items() if value is not None},
    }


def _traceparent(headers: Headers) -> dict[str, str]:
    wanted = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in wanted}


def _log_as_json() -> None:
    """The SDK's complaints go where ours go, in our format, without the exceptions' messages."""
    theirs = logging.getLogger("opentelemetry")
    theirs.handlers[:] = logging.getLogger("etserve").handlers
    theirs.propagate = False
