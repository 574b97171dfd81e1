"""docs/metrics.md says what the code exports."""

import re
import subprocess
import sys
from pathlib import Path

from tests.monitoring.helpers import ROOT, exported, rules

PAGE = ROOT / "docs" / "metrics.md"


def test_writing_the_page_again_gives_the_same_bytes(tmp_path: Path) -> None:
    written = tmp_path / "metrics.md"
    subprocess.run([sys.executable, ROOT / "docs" / "generate_metrics.py", "--output", written], check=True)
    assert written.read_bytes() == PAGE.read_bytes(), "run: python docs/generate_metrics.py"


def test_the_page_names_every_series_every_label_and_every_rule() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(etserve_\w+)` \|", text, re.MULTILINE))
    assert named == set(exported())
    for name, family in exported().items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert family.documentation in row
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert all(f"`{label}`: " in row for label in labels), name
    assert all(f"| `{rule['record']}` |" in text for rule in rules("record"))
    assert all(f"| {rule['alert']} |" in text for rule in rules("alert"))


def test_every_bucket_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, family in exported().items():
        if family.type == "histogram":
            row = next(line for line in text.splitlines() if f"`{name}`" in line and "+Inf" in line)
            bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
            if bounds:  # a labelled histogram without a value yet has none
                assert {float(bound) for bound in row.split("|")[1].split()} == bounds, name
