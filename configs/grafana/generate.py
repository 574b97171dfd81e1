"""Write the dashboards: `python configs/grafana/generate.py`. Their JSON is committed; a test compares it."""

import argparse
import json
from pathlib import Path

import entropic
import serving
from grafana_foundation_sdk.cog.encoder import JSONEncoder

HERE = Path(__file__).parent
BOARDS = {"serving.json": serving.build, "entropic.json": entropic.build}


def main() -> None:
    """Write one JSON file per dashboard into --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "dashboards", help="folder, made if missing")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, build in BOARDS.items():
        text = json.dumps(build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False)
        (output / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
