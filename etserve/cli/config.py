"""`etserve config`: what a start with these settings would use."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import typer

from etserve.cli.options import (
    SECTIONS,
    ConfigFile,
    find_model_calibration,
    read_config,
    with_config_options,
    with_model,
)
from etserve.cli.serve import ModelArgument
from etserve.config import Config, Origin, setting_origins

app = typer.Typer(no_args_is_help=True, help="Look at settings.")


@app.callback()
def _group() -> None:
    """Look at settings."""


@app.command()
@with_config_options("engine", "control", "server")
def show(
    model: ModelArgument = None,
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Print every setting as TOML, with the source it was taken from. API keys are not shown."""
    settings = read_config(config, flags, model)
    calibration = find_model_calibration(config, flags, model)
    origins = setting_origins(config, with_model(flags, model), calibration=calibration)
    if calibration is not None:
        typer.echo(f"# calibration: {calibration}")
    typer.echo(as_toml(settings, origins), nl=False)


def as_toml(config: Config, origins: Mapping[str, Mapping[str, Origin]] | None = None) -> str:
    """A file that gives the same config again, API keys aside. What is unset stands as a comment.

    With `origins`, each value is followed by a comment that says where it came from.
    """
    lines: list[str] = []
    for section in SECTIONS:
        values: dict[str, Any] = msgspec.to_builtins(getattr(config, section))
        lines.append(f"[{section}]")
        for name, value in values.items():
            if name == "control":
                continue  # a table of its own
            if name == "api_keys":
                lines.append(f"# api_keys: {len(value)} set")
            elif value is None:
                lines.append(f"# {name} is not set")
            else:
                source = "" if origins is None else f"  # {origins.get(section, {}).get(name, 'default')}"
                lines.append(f"{name} = {_toml(value)}{source}")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _toml(value: Any) -> str:
    """TOML spells strings, numbers, booleans and arrays of them as JSON does."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
