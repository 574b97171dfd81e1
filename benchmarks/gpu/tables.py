"""Rows of measurements as a Markdown table and as JSON lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_table(folder: Path, name: str, rows: Sequence[Row]) -> Path:
    """Write NAME.md and NAME.jsonl, columns in the order of the first row; all rows have the same."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0]) if rows else []
    for row in rows:
        if list(row) != columns:
            raise ValueError(f"{name}: a row has the columns {list(row)}, not {columns}")
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
