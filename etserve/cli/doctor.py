"""`etserve doctor`: what this machine offers, what it reaches, and whether the model fits."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from etserve.cli.options import ConfigFile, read_config, with_config_options
from etserve.cli.serve import ModelArgument


@with_config_options("engine", "control")
def doctor(
    model: ModelArgument = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure read bandwidth and matrix rates (2 s).")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Say what this machine offers and whether a start with these settings would work. Exit code 1 if not."""
    settings = read_config(config, flags, model).engine

    from etserve.cli.doctor_checks import Finding, examine

    def shown() -> Iterator[Finding]:
        for finding in examine(settings, measure=measure):
            if not as_json:
                typer.echo(f"{finding.status:5} {finding.section:8} {finding.name:24} {finding.shown}")
            yield finding

    findings = list(shown())
    is_well = all(finding.status != "fail" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": is_well, "findings": [finding.as_json() for finding in findings]}, indent=2))
    if not is_well:
        raise typer.Exit(1)
