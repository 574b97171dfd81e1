"""Write docs/metrics.md from the code and the rules: `python docs/generate_metrics.py`. A test compares it."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase

from etserve.metrics import energy
from etserve.metrics.engine_view import EngineCollector
from etserve.metrics.names import Series

HERE = Path(__file__).parent
RULES = HERE.parent / "configs" / "prometheus" / "rules"
UNITS = {"seconds": "s", "nats": "nats", "ratio": "0 to 1", "tokens": "tokens", "bytes": "bytes", "flops": "operations"}
OWN_UNITS = {
    "etserve_varentropy": "nats²",
    "etserve_prompt_tokens_cached": "tokens",
    "etserve_tau_up_nats": "nats",
    "etserve_nats_resolved": "nats",
    "etserve_requests_running": "sequences",
    "etserve_requests_waiting": "sequences",
    "etserve_kv_blocks": "blocks",
    "etserve_cost_model_r2": "at most 1",
    "etserve_energy_joules": "J",
}
# Values of labels that are known only at run time; of the others, the values are read off the series.
OPEN_LABELS = {
    "route": "route template, or other",
    "method": "HTTP method, or other",
    "status_class": "2xx to 5xx",
    "version": "of etserve",
    "model_name": "as served",
    "dtype": "of the weights",
    "backend": "kernels and instruction set",
    "entropy_estimator": "what entropies are read by",
    "phase": "what the start spent time on",
}
INTRO = """# Metrics

Made by `python docs/generate_metrics.py` from `etserve/metrics` and `configs/prometheus/rules`; do not edit.

`GET /metrics`, Prometheus text format; with API keys set it needs one. Labels come from closed sets, never from a
request, a user or a key. `_created` series are off. `--compat-metrics` adds `vllm:num_requests_running`,
`vllm:num_requests_waiting` and `vllm:kv_cache_usage_perc` for autoscalers that look for them. Dashboards over all of
it: `configs/grafana`.
"""


def families() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Every family that a server exports, with the names of its labels."""
    registry = CollectorRegistry()
    labels: dict[str, tuple[str, ...]] = {}
    for made in vars(Series(registry)).values():
        if isinstance(made, MetricWrapperBase):
            labels[next(iter(made.describe())).name] = tuple(made._labelnames)
    health = SimpleNamespace(is_ready=True, num_restarts=0)
    load = SimpleNamespace(num_running=0, num_waiting=0, kv_usage_ratio=0.0)
    registry.register(EngineCollector(SimpleNamespace(health=lambda: health, load=lambda: load), compat=False))
    for family in registry.collect():
        yield family, labels.get(family.name, ())
    yield CounterMetricFamily(energy.NAME, energy.HELP), ()  # exported where the machine tells


def page() -> str:
    """The whole page."""
    found = sorted(families(), key=lambda pair: pair[0].name)
    parts = [INTRO]
    for kind, title in (("gauge", "Gauges"), ("counter", "Counters"), ("histogram", "Histograms")):
        parts.append(
            _table(title, ("name", "labels", "unit", "meaning"), [_row(*p) for p in found if p[0].type == kind])
        )
    parts.append(_buckets([family for family, _ in found if family.type == "histogram"]))
    parts += _rules_tables()
    return "\n".join(parts)


def _row(family: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    spelled = [f"`{label}`: {_values(family, label)}" for label in labels]
    return f"`{name}`", "; ".join(spelled) or "-", _unit(family), family.documentation


def _values(family: Metric, label: str) -> str:
    values = list(dict.fromkeys(sample.labels[label] for sample in family.samples))
    return ", ".join(values) or OPEN_LABELS[label]


def _unit(family: Metric) -> str:
    ending = family.name.rsplit("_", 1)[-1]
    plain = "count" if family.type == "counter" else "1"
    return OWN_UNITS.get(family.name) or UNITS.get(ending) or plain


def _buckets(histograms: Iterable[Metric]) -> str:
    """Histograms with the same bounds share a line."""
    shared: dict[str, list[str]] = {}
    for family in histograms:
        bounds = dict.fromkeys(_bound(sample.labels["le"]) for sample in family.samples if "le" in sample.labels)
        shared.setdefault(" ".join(bounds), []).append(f"`{family.name}`")
    return _table("Buckets", ("upper bounds", "of"), [(bounds, ", ".join(names)) for bounds, names in shared.items()])


def _bound(text: str) -> str:
    return text if text == "+Inf" else f"{float(text):g}"


def _rules_tables() -> list[str]:
    rules: list[dict[str, Any]] = []
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            rules += group["rules"]
    recorded = [(f"`{rule['record']}`", f"`{rule['expr']}`") for rule in rules if "record" in rule]
    alerts = [_alert_row(rule) for rule in rules if "alert" in rule]
    return [
        _table("Recorded series", ("name", "expression"), recorded),
        _table("Alerts", ("name", "severity", "fires when", "what to do"), alerts),
    ]


def _alert_row(rule: dict[str, Any]) -> tuple[str, ...]:
    lasting = f" for {rule['for']}" if "for" in rule else ""
    return rule["alert"], rule["labels"]["severity"], f"`{rule['expr']}`{lasting}", rule["annotations"]["runbook"]


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"## {title}", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "metrics.md")
    parser.parse_args().output.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
