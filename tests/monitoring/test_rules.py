"""Prometheus' own tool reads the configuration, and every alert fires when it should and not when it should not."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.helpers import PROMETHEUS, RULE_TESTS, exported, panel_expressions, rule_expressions, rules

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)
SEVERITIES = {"critical", "warning", "info"}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def cases(alert: str) -> list[tuple[bool, dict[str, Any]]]:
    """Whether it must fire, and the case, for every case of an alert."""
    found = []
    for path in RULE_TESTS:
        for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for asked in case.get("promql_expr_test", []):
                if f'alertname="{alert}"' in asked["expr"]:
                    found.append((bool(asked["exp_samples"]), case))
    return found


@needs_promtool
def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    checked = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 rule files found" in checked.stdout


@needs_promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_rules_do_what_their_cases_say(path: Path) -> None:
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules("alert")])
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(alert: str) -> None:
    assert {fires for fires, _ in cases(alert)} == {True, False}


@needs_promtool
@pytest.mark.parametrize(("expr", "wrong"), [("vector(1) == 0", True), ("vector(1) == 1", False)])
def test_the_cases_notice_an_alert_that_never_or_always_fires(expr: str, wrong: bool, tmp_path: Path) -> None:
    for folder in ("rules", "tests"):
        shutil.copytree(PROMETHEUS / folder, tmp_path / folder)
    alerts = tmp_path / "rules" / "alerts.yml"
    page = yaml.safe_load(alerts.read_text(encoding="utf-8"))
    for group in page["groups"]:
        for rule in group["rules"]:
            rule["expr"], rule["for"] = expr, "0s"
    alerts.write_text(yaml.safe_dump(page), encoding="utf-8")
    (tmp_path / "rules" / "recording.yml").write_text("groups: []", encoding="utf-8")  # nobody asks for it any more
    for path in (tmp_path / "tests").iterdir():  # nor minds how often
        seldom = re.sub(r"evaluation_interval: \w+", "evaluation_interval: 4m", path.read_text(encoding="utf-8"))
        path.write_text(seldom, encoding="utf-8")
    said = ""
    for path in RULE_TESTS:
        tested = promtool("test", "rules", tmp_path / "tests" / path.name)
        said += tested.stdout + tested.stderr
    noticed = set(re.findall(r'alertname=\\"(\w+)\\"', said))
    assert noticed == {
        rule["alert"] for rule in rules("alert") if any(fires == wrong for fires, _ in cases(rule["alert"]))
    }


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in SEVERITIES, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "runbook"}, rule["alert"]
        assert len(rule["annotations"]["runbook"]) > 40, rule["alert"]


def test_every_bucket_that_is_asked_for_exists() -> None:
    bounds = {
        (sample.name, sample.labels["le"])
        for family in exported().values()
        for sample in family.samples
        if "le" in sample.labels
    }
    asked = re.compile(r'(etserve_\w+_bucket){[^}]*\ble="([^"]+)"')
    found = [pair for e in (*rule_expressions(), *panel_expressions()) for pair in asked.findall(e.text)]
    assert len(found) >= 10
    assert set(found) <= bounds


def test_names_are_unique() -> None:
    for kind in ("record", "alert"):
        names = [rule[kind] for rule in rules(kind)]
        assert len(names) == len(set(names))
