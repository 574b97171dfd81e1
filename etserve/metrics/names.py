"""Every series that is exported, with its buckets. Labels come from closed sets: never a request, a user or a key."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from etserve.control.choice import FALLBACKS
from etserve.control.cost_model import STEP_KINDS

FINISH_REASONS: Final = ("stop", "length", "abort", "error")
REJECT_REASONS: Final = (
    "invalid",
    "context_length",
    "unauthorized",
    "not_found",
    "too_large",
    "timeout",
    "overloaded",
    "request_rate",
    "token_rate",
    "unavailable",
    "internal",
)
STEP_PHASES: Final = ("schedule", "execute")
SATURATION_SIDES: Final = ("low", "high")
BLOCK_STATES: Final = ("active", "cached", "free")

# Inter-token times of a small model on a CPU are a few milliseconds: buckets start at 1 ms.
LATENCY_BUCKETS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640,
)  # fmt: skip
TOKEN_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ENTROPY_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12)  # ln V of 2^17: 11.8
VARENTROPY_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)
TEMPERATURE_BUCKETS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2)
RATIO_BUCKETS: Final = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
MASS_BUCKETS: Final = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5)
TAU_BUCKETS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)


class Series:
    """All series of one server, registered in the registry that is handed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series per histogram and counter that nothing here reads
        self._registry = registry
        self._make_serving()
        self._make_latencies()
        self._make_entropic()
        self._make_control()

    def _counter(self, name: str, help_text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, help_text, tuple(labels), registry=self._registry)

    def _gauge(self, name: str, help_text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(name, help_text, tuple(labels), registry=self._registry)

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(name, help_text, tuple(labels), buckets=buckets, registry=self._registry)

    def _make_serving(self) -> None:
        self.kv_blocks = self._gauge("etserve_kv_blocks", "KV blocks by state.", ["state"])
        for state in BLOCK_STATES:
            self.kv_blocks.labels(state)
        self.build_info = self._gauge(
            "etserve_build_info",
            "Always 1: what is running.",
            ["version", "model_name", "dtype", "backend", "entropy_estimator"],
        )
        self.startup_seconds = self._gauge("etserve_startup_seconds", "Time that a start-up phase took.", ["phase"])
        self.prompt_tokens = self._counter("etserve_prompt_tokens", "Prompt tokens of admitted sequences.")
        self.prompt_tokens_cached = self._counter(
            "etserve_prompt_tokens_cached", "Prompt tokens that the prefix cache spared."
        )
        self.generation_tokens = self._counter("etserve_generation_tokens", "Tokens drawn.")
        self.finished = self._counter("etserve_requests_finished", "Choices that ended, by reason.", ["finish_reason"])
        for reason in FINISH_REASONS:
            self.finished.labels(reason)
        self.rejected = self._counter("etserve_requests_rejected", "Requests refused, by reason.", ["reason"])
        for reason in REJECT_REASONS:
            self.rejected.labels(reason)
        self.preemptions = self._counter("etserve_preemptions", "Sequences put back to wait for memory.")
        self.nonfinite_rows = self._counter("etserve_nonfinite_rows", "Rows of logits that held NaN or infinity.")
        self.model_flops = self._counter("etserve_model_flops", "Floating-point operations of the model.")
        self.model_bytes = self._counter("etserve_model_bytes", "Bytes of weights and KV read by the model.")
        self.http_requests = self._counter(
            "etserve_http_requests", "HTTP requests answered.", ["route", "method", "status_class"]
        )

    def _make_latencies(self) -> None:
        self.time_to_first_token = self._histogram(
            "etserve_time_to_first_token_seconds", "From the request's arrival to its first token.", REQUEST_BUCKETS
        )
        self.inter_token = self._histogram(
            "etserve_inter_token_latency_seconds", "Between two tokens of one choice.", LATENCY_BUCKETS
        )
        self.duration = self._histogram(
            "etserve_request_duration_seconds", "From the request's arrival to its end.", REQUEST_BUCKETS
        )
        self.queue = self._histogram("etserve_request_queue_seconds", "Waiting before the first step.", REQUEST_BUCKETS)
        self.prefill = self._histogram("etserve_request_prefill_seconds", "First step to first token.", REQUEST_BUCKETS)
        self.decode = self._histogram("etserve_request_decode_seconds", "First token to the last.", REQUEST_BUCKETS)
        self.request_prompt_tokens = self._histogram(
            "etserve_request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "etserve_request_generation_tokens", "Tokens generated for a choice.", TOKEN_BUCKETS
        )
        self.step_seconds = self._histogram(
            "etserve_step_seconds", "Engine step, by phase.", LATENCY_BUCKETS, ["phase"]
        )
        for phase in STEP_PHASES:
            self.step_seconds.labels(phase)
        self.step_tokens = self._histogram("etserve_step_tokens", "Tokens computed in one step.", TOKEN_BUCKETS)

    def _make_entropic(self) -> None:
        self.tau = self._counter("etserve_tau_nats", "Entropic time: falls of the next-token entropy, summed.")
        self.tau_up = self._counter("etserve_tau_up_nats", "Rises of the next-token entropy, summed.")
        self.nats_resolved = self._counter("etserve_nats_resolved", "Next-token entropy of all drawn tokens, summed.")
        self.entropy = self._histogram("etserve_entropy_nats", "Next-token entropy of a drawn token.", ENTROPY_BUCKETS)
        self.varentropy = self._histogram(
            "etserve_varentropy", "Variance of the surprisal at a drawn token, nats squared.", VARENTROPY_BUCKETS
        )
        self.temperature = self._histogram(
            "etserve_temperature", "Temperature in force at a drawn token.", TEMPERATURE_BUCKETS
        )
        self.request_tau = self._histogram(
            "etserve_request_tau_nats", "Entropic time of a finished choice.", TAU_BUCKETS
        )

    def _make_control(self) -> None:
        self.kept_ratio = self._histogram(
            "etserve_kept_block_ratio", "Share of KV blocks read in a step that may skip.", RATIO_BUCKETS
        )
        self.skipped_mass = self._histogram(
            "etserve_skipped_mass_ratio", "Attention mass that the skipped blocks were estimated to hold.", MASS_BUCKETS
        )
        self.blocks_skipped = self._counter(
            "etserve_blocks_skipped", "Block reads that attention was spared, over layers and KV heads."
        )
        self.blocks_evicted = self._counter(
            "etserve_blocks_evicted", "KV blocks taken from running sequences for good, to spare memory."
        )
        self.sequences_evicted = self._counter(
            "etserve_sequences_evicted", "Sequences that lost their first KV block to eviction."
        )
        self.verifications = self._counter(
            "etserve_verifications", "Times that what a sequence drew with blocks skipped was computed again densely."
        )
        self.draft_tokens = self._counter("etserve_draft_tokens", "Tokens computed on a guess.")
        self.draft_tokens_accepted = self._counter(
            "etserve_draft_tokens_accepted", "Guessed tokens that were drawn so: each spares its sequence a step."
        )
        self.prune_fallback = self._counter(
            "etserve_prune_fallback", "Times that skipping stepped back, by reason.", ["reason"]
        )
        for reason in FALLBACKS:
            self.prune_fallback.labels(reason)
        self.temperature_saturated = self._counter(
            "etserve_temperature_saturated", "Tokens at which the thermostat was clamped, by side.", ["side"]
        )
        for side in SATURATION_SIDES:
            self.temperature_saturated.labels(side)
        self.schedule_age = self._histogram(
            "etserve_schedule_age_seconds", "Since a scheduled sequence was last served, or arrived.", REQUEST_BUCKETS
        )
        self.starvation_forced = self._counter(
            "etserve_starvation_forced", "Sequences served because they were overdue."
        )
        self.cost_model_r2 = self._gauge(
            "etserve_cost_model_r2", "Share of the step times' variance that the cost model explains.", ["phase"]
        )
        for kind in STEP_KINDS:
            self.cost_model_r2.labels(kind)
