"""What is read off the engine at the moment of the scrape, so that no gauge outlives the work it counted."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class HealthView(Protocol):
    @property
    def is_ready(self) -> bool: ...
    @property
    def num_restarts(self) -> int: ...


class LoadView(Protocol):
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage_ratio(self) -> float: ...


class EngineView(Protocol):
    """The part of the engine's seam that is read here; snapshots, they never wait."""

    def health(self) -> HealthView: ...
    def load(self) -> LoadView: ...


class EngineCollector(Collector):
    """Gauges of the engine's present state."""

    def __init__(self, engine: EngineView, *, compat: bool) -> None:
        self._engine = engine
        self._compat = compat

    def collect(self) -> Iterator[Metric]:
        health, load = self._engine.health(), self._engine.load()
        yield _gauge("etserve_engine_up", "1 while the engine takes requests.", float(health.is_ready))
        restarts = CounterMetricFamily("etserve_engine_restarts", "Engine processes started again after a death.")
        restarts.add_metric([], float(health.num_restarts))
        yield restarts
        running, waiting, usage = float(load.num_running), float(load.num_waiting), load.kv_usage_ratio
        yield _gauge("etserve_requests_running", "Sequences that hold KV blocks.", running)
        yield _gauge("etserve_requests_waiting", "Sequences in the queue.", waiting)
        yield _gauge("etserve_kv_cache_usage_ratio", "Share of the KV blocks that sequences hold.", usage)
        if self._compat:
            yield _gauge("vllm:num_requests_running", "As etserve_requests_running.", running)
            yield _gauge("vllm:num_requests_waiting", "As etserve_requests_waiting.", waiting)
            yield _gauge("vllm:kv_cache_usage_perc", "As etserve_kv_cache_usage_ratio (1 is full).", usage)


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text)
    family.add_metric([], value)
    return family
