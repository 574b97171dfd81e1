"""`etserve`: the commands and their exit codes. Importing this stays fast; each command imports what it needs."""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from etserve import __version__
from etserve.bench.commands import app as bench_app
from etserve.cli import ablate, bench_step, calibrate, chat, config, doctor, generate, health, models, serve
from etserve.errors import ConfigError, EtserveError, ModelError, RequestError

EXIT_OK = 0
EXIT_CONFIG = 2  # a setting, an option or a request is wrong
EXIT_MODEL = 3  # weights, tokenizer or model config are wrong
EXIT_ENGINE = 70  # the engine could not be started, or failed for good
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="etserve",
    help="Serve a language model, talk to it, measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,  # --install-completion, --show-completion
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="serve")(serve.serve)
app.command(name="generate")(generate.generate)
app.command(name="chat")(chat.chat)
app.command(name="models")(models.models)
app.command(name="doctor")(doctor.doctor)
app.command(name="healthcheck")(health.healthcheck)
app.command(name="calibrate")(calibrate.calibrate)
app.command(name="ablate")(ablate.ablate)
app.add_typer(config.app, name="config")
bench_app.command(name="step")(bench_step.step)
app.add_typer(bench_app, name="bench")


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an internal error.")] = False,
) -> None:
    _Debug.wanted = debug


class _Debug:
    """Set by --debug before a command runs, read when one has failed."""

    wanted = False


@app.command()
def version() -> None:
    """Print the version of etserve and of what it computes with."""
    import platform
    from importlib import metadata

    parts = [f"Python {platform.python_version()}"]
    for name in ("torch", "transformers", "tokenizers"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{name} not installed")
    typer.echo(f"etserve {__version__} ({', '.join(parts)})")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. A fault is one line on standard error."""
    try:
        return int(app(args=None if arguments is None else list(arguments), standalone_mode=False) or EXIT_OK)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return EXIT_OK
    except EtserveError as fault:
        return _fail(fault, exit_code(fault))
    except Exception as fault:
        if isinstance(fault, SystemExit):
            raise
        code = getattr(fault, "exit_code", None)
        if isinstance(code, int):  # typer's own: a wrong option
            return _fail(getattr(fault, "format_message", fault.__str__)(), code)
        if _Debug.wanted:
            traceback.print_exc()
        return _fail(f"internal error: {type(fault).__name__}: {fault} (etserve --debug shows where)", EXIT_ENGINE)


def exit_code(fault: EtserveError) -> int:
    """What a process manager or a script reads off a fault."""
    if isinstance(fault, ConfigError | RequestError):
        return EXIT_CONFIG
    if isinstance(fault, ModelError):
        return EXIT_MODEL
    return EXIT_ENGINE


def _fail(fault: object, code: int) -> int:
    line = " ".join(str(fault).split())
    if line:
        print(f"etserve: {line}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the `etserve` script."""
    sys.exit(run())
