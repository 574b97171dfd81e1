"""Turns step reports, finished choices and HTTP answers into series."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest

from etserve import __version__
from etserve.metrics.energy import EnergyCollector, EnergyMeter
from etserve.metrics.engine_view import EngineCollector, EngineView
from etserve.metrics.names import REJECT_REASONS, Series
from etserve.outputs import ModelInfo, SequenceOutput, StepStats

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One per server. Every method is cheap and is called on the event loop."""

    def __init__(self, registry: CollectorRegistry, *, compat: bool = False, routes: Sequence[str] = ()) -> None:
        self._registry = registry
        self._compat = compat
        self._routes = frozenset(routes)
        self._series = Series(registry)
        series = self._series
        self._finished = {reason: series.finished.labels(reason) for reason in ("stop", "length", "abort", "error")}
        self._blocks = {state: series.kv_blocks.labels(state) for state in ("active", "cached", "free")}
        self._schedule_phase = series.step_seconds.labels("schedule")
        self._execute_phase = series.step_seconds.labels("execute")

    def watch(self, engine: EngineView) -> None:
        """Read the engine's gauges, and the machine's energy, at every scrape from now on. Once per registry."""
        self._registry.register(EngineCollector(engine, compat=self._compat))
        self._registry.register(EnergyCollector(EnergyMeter()))

    def started(self, model: ModelInfo) -> None:
        """Say what is running and how long its start took."""
        facts = (model.model_name, model.dtype, model.backend, model.entropy_estimator)
        self._series.build_info.labels(__version__, *facts).set(1)
        for phase, seconds in model.startup_seconds.items():
            self._series.startup_seconds.labels(phase).set(seconds)

    def on_step(self, stats: StepStats, outputs: list[SequenceOutput]) -> None:
        """Step listener of the engine."""
        series = self._series
        if stats.step_seconds > 0.0:  # else the front end reports that it ended requests without the engine
            self._schedule_phase.observe(stats.schedule_seconds)
            self._execute_phase.observe(max(0.0, stats.step_seconds - stats.schedule_seconds))
            series.step_tokens.observe(stats.num_prefill_tokens + stats.num_decode_tokens)
        series.prompt_tokens.inc(stats.num_prompt_tokens)
        series.prompt_tokens_cached.inc(stats.num_cached_tokens)
        series.generation_tokens.inc(sum(len(output.token_ids) for output in outputs))
        series.preemptions.inc(stats.num_preempted)
        series.nonfinite_rows.inc(stats.num_nonfinite_rows)
        series.model_flops.inc(stats.flops)
        series.model_bytes.inc(stats.bytes_read)
        self._blocks["active"].set(stats.kv_blocks_active)
        self._blocks["cached"].set(stats.kv_blocks_cached)
        self._blocks["free"].set(stats.kv_blocks_free)
        self._observe_entropy(stats)
        self._observe_control(stats)

    def _observe_entropy(self, stats: StepStats) -> None:
        series = self._series
        series.tau.inc(stats.tau_nats)
        series.tau_up.inc(stats.tau_up_nats)
        series.nats_resolved.inc(stats.nats_resolved)
        for value in stats.entropies:
            series.entropy.observe(value)
        for value in stats.varentropies:
            series.varentropy.observe(value)
        for value in stats.temperatures:
            series.temperature.observe(value)

    def _observe_control(self, stats: StepStats) -> None:
        series = self._series
        for value in stats.kept_fractions:
            series.kept_ratio.observe(value)
        for value in stats.skipped_masses:
            series.skipped_mass.observe(value)
        for value in stats.schedule_ages_seconds:
            series.schedule_age.observe(value)
        series.blocks_skipped.inc(stats.num_blocks_skipped)
        series.verifications.inc(stats.num_verifications)
        series.draft_tokens.inc(stats.num_drafted_tokens)
        series.draft_tokens_accepted.inc(stats.num_accepted_tokens)
        series.blocks_evicted.inc(stats.num_blocks_evicted)
        series.sequences_evicted.inc(stats.num_sequences_evicted)
        for reason, count in stats.prune_fallbacks.items():
            series.prune_fallback.labels(reason).inc(count)
        series.temperature_saturated.labels("low").inc(stats.num_saturated_low)
        series.temperature_saturated.labels("high").inc(stats.num_saturated_high)
        series.starvation_forced.inc(stats.num_forced)
        for kind, value in stats.cost_r_squared.items():
            series.cost_model_r2.labels(kind).set(value)

    def first_token(self, seconds: float) -> None:
        self._series.time_to_first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens of one choice came together, `seconds` after the ones before."""
        for _ in range(count):
            self._series.inter_token.observe(seconds / count)

    def choice_finished(self, output: SequenceOutput) -> None:
        """Record a choice's last output."""
        series = self._series
        self._finished[output.finish_reason or "abort"].inc()
        series.request_generation_tokens.observe(output.num_output_tokens)
        if output.entropy_summary is not None:
            series.request_tau.observe(output.entropy_summary.tau_nats)
        if output.timings is not None:
            series.queue.observe(output.timings.queue_seconds)
            series.prefill.observe(output.timings.prefill_seconds)
            series.decode.observe(output.timings.decode_seconds)

    def choices_aborted(self, count: int) -> None:
        """`count` choices were given up by their client."""
        self._finished["abort"].inc(count)

    def request_finished(self, seconds: float, num_prompt_tokens: int) -> None:
        self._series.duration.observe(seconds)
        self._series.request_prompt_tokens.observe(num_prompt_tokens)

    def rejected(self, reason: str) -> None:
        """Count a refusal; a reason outside the closed set counts as "invalid"."""
        self._series.rejected.labels(reason if reason in REJECT_REASONS else "invalid").inc()

    def answered(self, route: str | None, method: str, status: int) -> None:
        """Count an HTTP answer; unknown routes and methods share one label."""
        self._series.http_requests.labels(
            route if route in self._routes else OTHER,
            method if method in METHODS else OTHER,
            f"{status // 100}xx",
        ).inc()

    def exposition(self) -> bytes:
        """Return the page in the Prometheus text format."""
        return generate_latest(self._registry)
