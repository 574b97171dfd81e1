"""`etserve calibrate`: what the control loop must know of a model, as a file for `--config`."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from etserve.bench.ablate.settings import UNUSED, plain
from etserve.cli.options import ConfigFile, with_config_options, with_model
from etserve.cli.serve import ModelArgument
from etserve.config import calibration_folder, load_config

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="TOML file to write. Default: in ~/.config/etserve/calibration, where a start finds it."
    ),
]
Temperature = Annotated[float, typer.Option(min=0.01, max=2.0, help="That requests will mostly use.")]
Tokens = Annotated[int, typer.Option(min=64, max=65_536, help="How many tokens the model writes.")]
ContextTokens = Annotated[int, typer.Option(min=544, max=65_536, help="Context at which epsilon is judged.")]


@with_config_options("engine", "control", without=UNUSED)
def calibrate(
    model: ModelArgument = None,
    out: Out = None,
    temperature: Temperature = 0.8,
    tokens: Tokens = 2048,
    context_tokens: ContextTokens = 1536,
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Measure entropies, the target of the thermostat, and how much attention may miss.

    Every later command with the model finds the file by itself; any setting given to it goes before the file's. A
    calibration that is there already plays no part.
    """
    given = with_model(flags, model)
    given["control"]["temperature_mode"] = "off"  # another may need the target that is measured here
    settings = load_config(config, given)
    from etserve.bench.calibrate import calibrate_model
    from etserve.bench.calibration import write_calibration
    from etserve.cli.local import loading
    from etserve.models.calibration_files import own_path
    from etserve.models.files import resolve_model

    console = Console(stderr=True)
    with loading(console, "calibrating: the model writes, then reads with blocks skipped"):
        engine = msgspec.structs.replace(settings.engine, control=plain(settings.control))
        found = calibrate_model(engine, temperature=temperature, num_tokens=tokens, context_tokens=context_tokens)
    path = out or own_path(resolve_model(settings.engine.model), calibration_folder())
    write_calibration(found, path)
    typer.echo(str(path))
