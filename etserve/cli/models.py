"""`etserve models`: what can be served from here."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def models(
    path: Annotated[
        list[Path] | None, typer.Option(help="Folder to look in: a model itself, or models directly below it.")
    ] = None,
) -> None:
    """List the models that can be served: the demo if installed, and what lies under --path."""
    from etserve.errors import ConfigError
    from etserve.models.files import DEMO_INSTALL, list_local_models

    for folder in path or []:
        if not folder.exists():
            raise ConfigError(f"{folder}: No such file or directory")
    found = list_local_models(path or [])
    if not found:
        typer.echo(f"no model found; the demo comes with: {DEMO_INSTALL}")
        return
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("serve it with", "left"), ("kind", "left"), ("size", "right")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for model in found:
        spelled = model.files.name if model.files.name == "demo" else str(model.files.path)
        table.add_row(f"etserve serve {spelled}", model.kind, f"{model.num_bytes / 1e6:,.0f} MB")
    Console().print(table, highlight=False)
