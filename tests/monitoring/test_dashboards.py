"""The committed dashboards: generated, complete, and about series that exist."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.helpers import (
    BOARDS,
    GRAFANA,
    WAITING_FOR,
    boards,
    exported,
    panel_expressions,
    panels,
    rule_expressions,
)


def test_generating_them_again_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    command = [sys.executable, str(GRAFANA / "generate.py"), "--output", str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert [path.name for path in BOARDS] == sorted(path.name for path in tmp_path.iterdir())
    for path in BOARDS:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name}: run configs/grafana/generate.py"


@pytest.mark.parametrize("board", boards(), ids=lambda board: board["uid"])
def test_a_dashboard_can_be_read_by_somebody_new(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] >= 39
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "model", "instance"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len({panel["title"] for panel in panels(board)}) == len(panels(board))
    for panel in panels(board):
        title = panel["title"]
        assert len(panel["description"]) > 10, title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title
        assert panel["targets"], title
        assert all("$instance" in target["expr"] or "ALERTS" in target["expr"] for target in panel["targets"]), title
        assert all(target.get("legendFormat") or panel["type"] == "table" for target in panel["targets"]), title


@pytest.mark.parametrize("board", boards(), ids=lambda board: board["uid"])
def test_no_panel_lies_on_another(board: dict[str, Any]) -> None:
    areas = [(panel["title"], panel["gridPos"]) for panel in board["panels"]]
    assert all(area["x"] + area["w"] <= 24 for _, area in areas)
    for (one, a), (other, b) in combinations(areas, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (one, other)


def test_dashboards_and_rules_name_only_series_that_exist_or_are_waited_for() -> None:
    known = set(exported()) | set(WAITING_FOR)
    for expression in (*panel_expressions(), *rule_expressions()):
        assert expression.metrics <= known, expression.place


def test_every_exported_series_is_on_a_dashboard() -> None:
    shown = set().union(*(expression.metrics for expression in panel_expressions()))
    assert set(exported()) - shown == set()


def test_both_dashboards_are_there_and_one_is_home() -> None:
    assert [board["uid"] for board in boards()] == ["etserve-entropic", "etserve-serving"]
    assert "dashboards/serving.json" in (GRAFANA / "grafana.ini").read_text(encoding="utf-8")
