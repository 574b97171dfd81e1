"""Reads dashboards and rules as they are committed, and what the code exports."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from etserve.metrics import energy
from etserve.metrics.engine_view import EngineCollector
from etserve.metrics.names import Series
from tests.fakes import FakeEngine

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"
GRAFANA = ROOT / "configs" / "grafana"
BOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))

# Families whose panels show nothing yet, even with every feature on, and what they wait for. The list only shrinks: the
# live test fails on a line whose family has data.
WAITING_FOR = (
    {} if energy.EnergyMeter().joules() is not None else {"etserve_energy_joules_total": "a machine that tells"}
)


@dataclass(frozen=True)
class Expression:
    """One PromQL expression and where it is asked."""

    place: str
    text: str

    @property
    def metrics(self) -> set[str]:
        """Names of the families it reads; recorded series are looked through to what they are made of."""
        made_of = {rule["record"]: rule["expr"] for rule in rules("record")}
        text = self.text
        for name in re.findall(r"instance:\w+:\w+", text):
            text = text.replace(name, made_of[name])
        return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\betserve_\w+", text)}


def boards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in BOARDS]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something: rows left out."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_expressions() -> Iterator[Expression]:
    for board in boards():
        for panel in panels(board):
            for target in panel["targets"]:
                yield Expression(f"{board['uid']} / {panel['title']} / {target['refId']}", target["expr"])


@cache
def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of a kind, "record" or "alert"."""
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RULES]
    return [rule for page in documents for group in page["groups"] for rule in group["rules"] if kind in rule]


def rule_expressions() -> list[Expression]:
    found = [Expression(rule["record"], rule["expr"]) for rule in rules("record")]
    return found + [Expression(rule["alert"], rule["expr"]) for rule in rules("alert")]


def exported() -> dict[str, Metric]:
    """Every family of a server by the name that PromQL uses."""
    registry = CollectorRegistry()
    Series(registry)
    registry.register(EngineCollector(FakeEngine(), compat=False))
    families = (*registry.collect(), CounterMetricFamily(energy.NAME, energy.HELP))  # the last where the machine tells
    return {f"{m.name}_total" if m.type == "counter" else m.name: m for m in families}
