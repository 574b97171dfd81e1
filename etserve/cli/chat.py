"""`etserve chat`: a conversation in the terminal, with a model loaded here or one that a server holds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from etserve.cli.generate import MaxTokens, Seed, Temperature, TopP
from etserve.cli.options import ConfigFile, read_config, with_config_options
from etserve.cli.serve import ModelArgument
from etserve.errors import RequestError

Messages = list[dict[str, str]]
Reply = Callable[[Messages], Iterator[str]]
HELP = "/exit ends, /clear forgets the conversation, /help shows this."


@with_config_options("engine", "control")
def chat(
    model: ModelArgument = None,
    url: Annotated[str | None, typer.Option(help="Talk to this server instead of loading a model.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File holding the server's API key.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Talk to a model. It remembers the conversation; Ctrl-C stops an answer, /exit leaves."""
    console = Console()
    if url is not None:
        from etserve.cli.remote import RemoteChat

        remote = RemoteChat(url, model=model, api_key_file=api_key_file)
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        console.print(f"{remote.model} at {url}. {HELP}", style="dim", highlight=False)
        converse(console, lambda messages: remote.reply(messages, options), system)
        return
    _chat_locally(console, read_config(config, flags, model), system, max_tokens, temperature, top_p, seed)


def converse(console: Console, reply: Reply, system: str | None = None) -> None:
    """Read lines, print answers, keep the conversation, until /exit or the end of input."""
    first: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (line := _read_line(console)) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            messages = list(first)
            console.print("forgotten", style="dim")
        elif line.startswith("/"):
            console.print(HELP, style="dim", highlight=False)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(console, reply, messages)
            messages = [*messages, {"role": "assistant", "content": answer}] if answer is not None else messages[:-1]


def _answer(console: Console, reply: Reply, messages: Messages) -> str | None:
    """Print an answer as it comes. None when the model refuses the conversation; the part shown if interrupted."""
    parts: list[str] = []
    pieces = reply(messages)
    try:
        for text in pieces:
            parts.append(text)
            typer.echo(text, nl=False)
    except KeyboardInterrupt:
        typer.echo(" …", nl=False)
    except RequestError as fault:
        console.print(f"{fault.message} /clear starts over.", style="yellow", highlight=False)
        return None
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    typer.echo()
    return "".join(parts)


def _read_line(console: Console) -> str | None:
    """One stripped line; None at the end of input or on Ctrl-C."""
    if console.is_terminal:
        import readline  # noqa: F401  (history and editing for input())
    try:
        return input("> " if console.is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None


def _chat_locally(
    console: Console,
    settings: Any,
    system: str | None,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int | None,
) -> None:
    from etserve.cli.local import open_model
    from etserve.sampling_params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    with open_model(settings.engine, Console(stderr=True)) as local:

        def reply(messages: Messages) -> Iterator[str]:
            ids = local.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            return (output.text for output in local.stream(ids, params))

        name = local.info.model_name if local.info else settings.engine.model
        console.print(f"{name}. {HELP}", style="dim", highlight=False)
        converse(console, reply, system)
