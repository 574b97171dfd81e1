"""docs/operations.md names every setting with its default, every exit code, and only what exists."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etserve.cli import main
from etserve.cli.options import SECTIONS
from etserve.server import run
from etserve.server.schemas import EntropicOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SETTINGS, ASKED = PAGE.split("## Settings")[1].split("\n## ")[0].split("### What a request may ask")
ROWS = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", SETTINGS, re.MULTILINE))
FIELDS = [
    (section, field)
    for section, (struct, _) in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
    if field.name != "control"  # a table of its own
]


def shown(value: Any) -> set[str]:
    """How the page may spell a default."""
    if isinstance(value, bool):
        return {"on" if value else "off"}
    if isinstance(value, float):
        return {str(value), f"{value:g}"}
    return {str(value), f"`{value}`"}


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=[f"{section}.{field.name}" for section, field in FIELDS])
def test_every_setting_has_its_row_and_its_default(section: str, field: Any) -> None:
    assert field.name in ROWS, f"{section}.{field.name} is not described in docs/operations.md"
    if field.default is not None and field.default != ():
        assert ROWS[field.name] in shown(field.default)


def test_no_row_describes_a_setting_that_is_gone() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", SETTINGS, re.MULTILINE))
    assert named == {field.name for _, field in FIELDS}


def test_the_page_tells_all_that_a_request_may_ask_and_its_choices() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", ASKED, re.MULTILINE))
    asked = EntropicOptions.model_fields
    assert rows.keys() == asked.keys()
    for name, field in asked.items():
        choices = set(re.findall(r"Literal\[(.*?)\]", str(field.annotation))) or {""}
        assert set(re.findall(r"`(\w+)`", rows[name])) == set(re.findall(r"'(\w+)'", *choices)), name


def test_the_exit_codes_are_those_of_the_code() -> None:
    listed = {
        int(code)
        for code in re.findall(r"^\| (\d+) \|", PAGE.split("## Exit codes")[1].split("\n## ")[0], re.MULTILINE)
    }
    codes = {main.EXIT_OK, main.EXIT_CONFIG, main.EXIT_MODEL, main.EXIT_ENGINE, main.EXIT_INTERRUPTED}
    assert listed == codes | {run.EXIT_OK, run.EXIT_FORCED, run.EXIT_ENGINE_FAILED}


def test_make_targets_files_and_pages_that_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)`", PAGE))
    assert targets
    assert [name for name in targets if f"\n{name}:" not in makefile] == []
    paths = re.findall(r"`((?:configs|docker|benchmarks)/[\w./-]+|docs/control\.md)`", PAGE)
    assert [path for path in paths if not (ROOT / path).exists()] == []
