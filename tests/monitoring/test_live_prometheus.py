"""A real Prometheus with the committed configuration scrapes a live server under load: every panel has data."""

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import Server, free_port, start_server, stop_server
from tests.fakes import UNIT_MODEL
from tests.monitoring.helpers import (
    PROMETHEUS,
    ROOT,
    WAITING_FOR,
    Expression,
    boards,
    panel_expressions,
    rules,
)
from tests.monitoring.load import Load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian package) is not installed"),
]
GUESSING = ("--speculation", "ngram", "--verify", "bounded")
ENTROPIC = ROOT / "configs" / "entropic.toml"
VARIABLES = {"$__rate_interval": "20s", "$instance": ".+", "$model": ".+"}
PATIENCE_SECONDS = 90.0


class Prometheus:
    """Asks a Prometheus over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **fields: str) -> Any:
        query = urllib.parse.urlencode(fields)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as reply:
            return json.load(reply)["data"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def has_data(self, expr: str) -> bool:
        """Whether the answer now has a finite value."""
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        found = self.get("query", query=expr)["result"]
        return any(math.isfinite(float(series["value"][1])) for series in found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    running = start_server(log, "--num-kv-blocks", "1000", "--config", str(ENTROPIC), *GUESSING, model=str(UNIT_MODEL))
    yield running
    assert stop_server(running) == 0, log.read_text()


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(_quick_config(server.url.removeprefix("http://"), port)), encoding="utf-8")
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    asked = Prometheus(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 60
    while not asked.is_ready():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield asked
    process.terminate()
    process.wait(timeout=30)


def _quick_config(target: str, own_port: int) -> dict[str, Any]:
    """The committed configuration, in a hurry and with these targets."""
    config: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / path) for path in config["rule_files"]]
    targets = {"etserve": target, "prometheus": f"127.0.0.1:{own_port}"}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    return config


def test_every_panel_and_every_recorded_series_has_data(server: Server, prometheus: Prometheus) -> None:
    asked = [*panel_expressions(), *(Expression(rule["record"], rule["record"]) for rule in rules("record"))]
    empty = [expression for expression in asked if not expression.metrics & set(WAITING_FOR)]
    assert len(empty) > 100
    deadline = time.monotonic() + PATIENCE_SECONDS
    with Load(server.url):
        while empty and time.monotonic() < deadline:
            time.sleep(1.0)
            empty = [expression for expression in empty if not prometheus.has_data(expression.text)]
    assert [f"{expression.place}: {expression.text}" for expression in empty] == []


def test_what_is_waited_for_has_not_come(prometheus: Prometheus) -> None:
    come = [name for name in WAITING_FOR if prometheus.has_data(f"{name} > 0 or {name}_count > 0")]
    assert come == [], "delete these lines from WAITING_FOR in helpers.py"
    for expression in panel_expressions():
        prometheus.has_data(expression.text)  # a wrong expression is answered with 400, which raises


def test_the_choices_above_a_dashboard_are_filled(prometheus: Prometheus) -> None:
    for board in boards():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                selector, label = variable["query"]["query"].removeprefix("label_values(").rstrip(")").rsplit(", ", 1)
                found = prometheus.get("series", **{"match[]": selector.replace("$model", ".+")})
                assert all(series[label] for series in found), variable["name"]
                assert len(found) == 1, variable["name"]


def test_all_rules_are_healthy_and_a_sound_server_alerts_nobody(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    healths = {rule["name"]: (rule["health"], rule.get("lastError")) for group in groups for rule in group["rules"]}
    assert len(healths) == len(rules("record")) + len(rules("alert"))
    assert {name: health for name, health in healths.items() if health[0] != "ok"} == {}
    firing = [alert["labels"] for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"]
    assert firing == []
    assert {target["health"] for target in prometheus.get("targets", state="active")["activeTargets"]} == {"up"}
