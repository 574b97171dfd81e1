"""`etserve serve`."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from etserve.cli.options import ConfigFile, find_model_calibration, read_config, with_config_options

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
    from etserve.engine.child import EngineProcess
    from etserve.engine.frames import Configure
    from etserve.models.files import resolve_model
    from etserve.server.listening import open_listener

    log_level = settings.server.log_level
    log.configure(log_level)
    resolve_model(settings.engine.model)  # a missing file is said at once, not by the engine process
    listener = open_listener(settings.server)
    typer.echo(f"etserve: loading {settings.engine.model}", err=True)
    if (calibration := find_model_calibration(config, flags, model)) is not None:
        log.log_facts(log.get_logger(__name__), logging.INFO, "calibration found", path=str(calibration))
    started = EngineProcess.spawn(Configure(settings.engine, log_level))  # it loads while this process imports the rest

    from etserve.engine.process import ProcessEngine
    from etserve.server.run import serve as run_server

    engine = ProcessEngine(
        settings.engine,
        log_level=log_level,
        started=started,
        start_timeout_seconds=settings.server.engine_start_timeout_seconds,
    )
    raise typer.Exit(run_server(settings, engine, listener=listener) or 0)
