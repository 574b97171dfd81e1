"""The dashboard Serving: what an operator looks at first."""

from collections.abc import Sequence

from grafana_foundation_sdk.models import dashboard as model
from panels import (
    Panel,
    bars,
    heat_panel,
    lines,
    make_dashboard,
    ready_timeline,
    stat_panel,
    table_panel,
)
from promql import SERVERS, increase, mean, quantile, quantiles, rate, ratio, series, total

TTFT = "etserve_time_to_first_token_seconds"
GAPS = "etserve_inter_token_latency_seconds"
FINISHED = "etserve_requests_finished_total"
TITLE = "etserve / Serving"


def build() -> model.Dashboard:
    """The dashboard, ready to encode."""
    return make_dashboard(
        TITLE,
        "etserve-serving",
        "Latency, throughput, queue, KV cache, errors and restarts of etserve servers.",
        [
            ("Now", _now()),
            ("Latency", _latency()),
            ("Throughput", _throughput()),
            ("Queue and KV cache", _queue()),
            ("Requests and errors", _errors()),
            ("Restarts and start-up", _restarts()),
        ],
    )


def _now() -> Sequence[Panel]:
    up = f'count(up{{job="etserve", {SERVERS}}})'
    firing = 'count(ALERTS{alertname=~"Etserve.*", alertstate="firing"}) or vector(0)'
    red, yellow = "red", "orange"
    return [
        stat_panel(
            "Servers not ready", "Scraped servers whose engine takes no requests.",
            f"{up} - ({total(series('etserve_engine_up'))} or vector(0))", "short", steps=[(1, red)], decimals=0,
        ),
        stat_panel(
            "Alerts firing", "Alerts of configs/prometheus/rules/alerts.yml that fire now, of all servers.",
            firing, "short", steps=[(1, red)], decimals=0,
        ),
        stat_panel(
            "Running", "Sequences that hold KV blocks and take part in steps.",
            total(series("etserve_requests_running")), "short", decimals=0,
        ),
        stat_panel(
            "Waiting", "Sequences in the queue.",
            total(series("etserve_requests_waiting")), "short", steps=[(5, yellow), (50, red)], decimals=0,
        ),
        stat_panel(
            "First token, p95", "From a request's arrival to its first token; 95 % were faster.",
            quantile(0.95, TTFT), "s", steps=[(1, yellow), (2.5, red)],
        ),
        stat_panel(
            "Tokens generated", "Tokens drawn per second by all chosen servers.",
            rate("etserve_generation_tokens_total"), "tok/s", decimals=1,
        ),
    ]  # fmt: skip


def _latency() -> Sequence[Panel]:
    phases = [(mean(f"etserve_request_{phase}_seconds"), phase) for phase in ("queue", "prefill", "decode")]
    burn = [
        (f"max({series(f'instance:etserve_{name}_slow:ratio_rate{window}')})", f"{label}, {window}")
        for name, label in (("time_to_first_token", "first token"), ("inter_token_latency", "between tokens"))
        for window in ("5m", "1h")
    ]
    return [
        lines("First token", "From a request's arrival to its first token. Objective: 99 % within 2.5 s.", "s",
              quantiles(TTFT, 0.5, 0.95, 0.99), limit=2.5),
        heat_panel("First token, spread", "Requests by time to first token.",
                   increase(f"{TTFT}_bucket", by="le"), "s"),
        lines("Where a choice's time goes", "Mean seconds of finished choices in the queue, in prefill and in decode.",
              "s", phases, stacked=True),
        lines("Between tokens", "Between two tokens of one choice. Objective: 99 % within 0.25 s.", "s",
              quantiles(GAPS, 0.5, 0.95, 0.99), limit=0.25),
        heat_panel("Between tokens, spread", "Gaps between tokens by length.",
                   increase(f"{GAPS}_bucket", by="le"), "s"),
        lines("Error budget", "Share that missed the objective, the worst server's. 1 % spends the budget exactly; "
              "alerts are at "
              "14.4 % (1 h and 5 min) and 6 % (6 h and 30 min).", "percentunit", burn, limit=0.01),
        lines("Whole request", "From a request's arrival to its last token.", "s",
              quantiles("etserve_request_duration_seconds", 0.5, 0.95, 0.99)),
        lines("Queue", "Waiting before the first step.",
              "s", quantiles("etserve_request_queue_seconds", 0.5, 0.95, 0.99)),
        lines("Prefill", "First step to first token.",
              "s", quantiles("etserve_request_prefill_seconds", 0.5, 0.95, 0.99)),
    ]  # fmt: skip


def _throughput() -> Sequence[Panel]:
    step = [
        (quantile(level, "etserve_step_seconds", f'phase="{phase}"'), f"{phase}, p{100 * level:g}")
        for phase in ("execute", "schedule")
        for level in (0.5, 0.95)
    ]
    return [
        lines("Tokens", "Tokens generated, and prompt tokens admitted (those from the prefix cache included).",
              "tok/s", [
            (rate("etserve_generation_tokens_total"), "generated"),
            (rate("etserve_prompt_tokens_total"), "prompt"),
            (rate("etserve_prompt_tokens_cached_total"), "prompt, from the prefix cache"),
        ]),
        lines("Step time", "Seconds of an engine step, by phase. Execute includes the model and the sampler.",
              "s", step),
        heat_panel("Step size", "Steps by the number of tokens they computed.",
                   increase("etserve_step_tokens_bucket", by="le"), "short"),
        lines("Steps", "Engine steps per second.", "ops", [(rate("etserve_step_tokens_count"), "steps")]),
        lines("Computing", "Floating-point operations of the model per second, by formula.", "flops",
              [(rate("etserve_model_flops_total"), "model")]),
        lines("Memory traffic", "Bytes of weights and KV that the model reads per second, by formula.", "Bps",
              [(rate("etserve_model_bytes_total"), "model")]),
    ]  # fmt: skip


def _queue() -> Sequence[Panel]:
    reused = ratio(rate("etserve_prompt_tokens_cached_total"), rate("etserve_prompt_tokens_total"))
    return [
        lines("Sequences", "Running ones hold KV blocks; waiting ones are in the queue.", "short", [
            (total(series("etserve_requests_running")), "running"),
            (total(series("etserve_requests_waiting")), "waiting"),
        ]),
        lines("KV blocks", "Blocks of 16 tokens. Cached ones are free, but still usable as a prefix.", "short",
              [(total(series("etserve_kv_blocks"), "state"), "{{state}}")], stacked=True),
        lines("KV cache use", "Share of the KV blocks that sequences hold, per server.", "percentunit",
              [(series("etserve_kv_cache_usage_ratio"), "{{instance}}")], limit=0.95, maximum=1),
        lines("Prefix cache", "Share of the prompt tokens that the prefix cache spared.", "percentunit",
              [(reused, "spared")], maximum=1),
        lines("Preemptions", "Sequences put back per second to wait for memory; each is computed again.", "ops",
              [(rate("etserve_preemptions_total"), "preempted")], limit=0.2),
        heat_panel("Queue, spread", "Choices by the time they waited before their first step.",
                   increase("etserve_request_queue_seconds_bucket", by="le"), "s"),
    ]  # fmt: skip


def _errors() -> Sequence[Panel]:
    failed = ratio(rate(FINISHED, 'finish_reason="error"'), rate(FINISHED))
    return [
        lines("Choices ended", "Choices that ended per second, by reason. abort: the client left.", "ops",
              [(rate(FINISHED, by="finish_reason"), "{{finish_reason}}")], stacked=True),
        lines("Requests refused", "Refusals per second. overloaded: queue full (429); internal: a bug (500).", "ops",
              [(rate("etserve_requests_rejected_total", by="reason"), "{{reason}}")], stacked=True),
        lines("HTTP answers", "Answers per second by status class, all routes.", "reqps",
              [(rate("etserve_http_requests_total", by="status_class"), "{{status_class}}")], stacked=True),
        lines("Failing choices", "Share of the choices that ended in an error.", "percentunit",
              [(failed, "failed")], limit=0.05),
        lines("NaN or infinity", "Rows of logits per second that held NaN or infinity. Anything above zero is a fault.",
              "ops", [(rate("etserve_nonfinite_rows_total"), "rows")]),
        lines("HTTP answers by route", "Answers per second by route template.", "reqps",
              [(rate("etserve_http_requests_total", by="route, method"), "{{method}} {{route}}")], stacked=True),
        heat_panel("Prompts, spread", "Requests by the tokens of their prompt.",
                   increase("etserve_request_prompt_tokens_bucket", by="le"), "short"),
        heat_panel("Outputs, spread", "Choices by the tokens generated.",
                   increase("etserve_request_generation_tokens_bucket", by="le"), "short"),
        lines("Length", "Mean tokens of a request's prompt and of a choice's output.", "short", [
            (mean("etserve_request_prompt_tokens"), "prompt"),
            (mean("etserve_request_generation_tokens"), "output"),
        ]),
    ]  # fmt: skip


def _restarts() -> Sequence[Panel]:
    hidden = ["Time", "Value", "__name__", "job"]
    return [
        ready_timeline("Engine", "Whether a server's engine takes requests.",
                       series("etserve_engine_up"), "{{instance}}"),
        lines("Engine restarts", "Engine processes started again after a death, since the server's start.", "short",
              [(series("etserve_engine_restarts_total"), "{{instance}}")]),
        bars("Last start-up", "Seconds of each phase of the latest start, the slowest server's.",
             f"max by (phase) ({series('etserve_startup_seconds')})", "{{phase}}", "s"),
        table_panel("Build", "What runs where.", series("etserve_build_info"), hidden),
    ]  # fmt: skip
