"""`etserve bench step`: a profile of one decode step of this model on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from etserve.bench.ablate.settings import UNUSED_ENGINE
from etserve.bench.errors import BenchError
from etserve.cli.options import ConfigFile, read_config, with_config_options
from etserve.cli.serve import ModelArgument

Batches = Annotated[str, typer.Option("--sequences", help="Batch sizes, comma separated.")]
Contexts = Annotated[str, typer.Option("--contexts", help="Tokens that each sequence has, comma separated.")]
Steps = Annotated[int, typer.Option(min=3, max=1000, help="Steps that are timed, of each.")]
Plot = Annotated[Path | None, typer.Option(help="Picture (PNG): cost by batch and context, the ceiling beside it.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Everything as JSON.")]


@with_config_options("engine", "control", without=UNUSED_ENGINE - {"pruning_sketch_bits"})
def step(
    model: ModelArgument = None,
    sequences: Batches = "1,2,4,8,16",
    contexts: Contexts = "128,1024,4096",
    steps: Steps = 24,
    plot: Plot = None,
    out: Out = None,
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Print where a decode step's time goes, its bytes and FLOPs, and how near the machine's limits it comes.

    Steps run under the control settings given; where these skip blocks, over text that the model reads first.
    """
    batches, lengths = counts(sequences, "sequences"), counts(contexts, "contexts")
    settings = read_config(config, flags, model)
    try:
        from etserve.bench import step_report
    except ImportError as error:
        raise BenchError(f"{error.name} is not installed: pip install 'etserve[bench]'") from None
    from etserve.bench.ablate.lab import Lab
    from etserve.bench.session import write
    from etserve.bench.step import profile_steps

    console = Console(stderr=True)
    found = profile_steps(Lab(settings.engine), batches, lengths, steps, console.print)
    typer.echo(step_report.as_markdown(found), nl=False)
    if out is not None:
        write(found, out)
    if plot is not None:
        step_report.draw(found, plot)


def counts(text: str, name: str) -> list[int]:
    """Ascending positive numbers from "1,8". Raises BenchError."""
    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise BenchError(f"--{name} takes positive numbers with commas between, got {text!r}")
    return found
