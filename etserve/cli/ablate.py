"""`etserve ablate`: the control loop's gains and costs on this model and machine, in one report."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from etserve.bench.ablate.settings import UNUSED
from etserve.cli.options import ConfigFile, read_config, with_config_options
from etserve.cli.serve import ModelArgument

Preset = Annotated[
    Literal["smoke", "standard"],
    typer.Option(help="smoke: minutes, says little; standard: under an hour on two cores."),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of results; a run that was stopped goes on there.")]
Arms = Annotated[str | None, typer.Option(help="Only these, comma separated; the baseline always runs.")]
Workloads = Annotated[str | None, typer.Option(help="Only these, comma separated.")]
Rounds = Annotated[int | None, typer.Option(min=1, max=100, help="Intervals take 3 or more. Default: the preset's.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, arrivals and draws.")]


@with_config_options("engine", "control", without=UNUSED)
def ablate(
    model: ModelArgument = None,
    preset: Preset = "standard",
    out: Out = Path("ablation"),
    arms: Arms = None,
    workloads: Workloads = None,
    rounds: Rounds = None,
    seed: Seed = 0,
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Run every arm of the control loop over the same requests and write a report with pictures."""
    settings = read_config(config, flags, model)
    from etserve.bench.ablate.session import run_session

    console = Console(stderr=True)
    path = run_session(
        settings, console, preset=preset, out=out, arms=arms, workloads=workloads, rounds=rounds, seed=seed
    )
    typer.echo(str(path))
