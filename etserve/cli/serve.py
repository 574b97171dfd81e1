"""`etserve serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from etserve.cli.options import ConfigFile, read_config, with_config_options

ModelArgument = Annotated[
    str | None, typer.Argument(help="demo, a Hugging Face folder or a .gguf file. Default: demo.", show_default=False)
]


@with_config_options("engine", "control", "server")
def serve(
    model: ModelArgument = None,
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Serve a model over HTTP, in OpenAI's shapes. Stops with SIGTERM or Ctrl-C, finishing what runs."""
    settings = read_config(Path(config) if config else None, flags, model)

    from etserve import log
    from etserve.engine.process import ProcessEngine
    from etserve.models.files import resolve_model
    from etserve.server.run import serve as run_server

    log.configure(settings.server.log_level)
    resolve_model(settings.engine.model)  # a missing file is said at once, not by the engine process
    typer.echo(f"etserve: loading {settings.engine.model}", err=True)
    code = run_server(settings, ProcessEngine(settings.engine, log_level=settings.server.log_level))
    raise typer.Exit(code or 0)
