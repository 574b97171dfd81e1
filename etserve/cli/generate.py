"""`etserve generate`: one prompt, one answer, no server."""

from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from etserve.cli.options import ConfigFile, read_config, with_config_options
from etserve.errors import ConfigError

Model = Annotated[str | None, typer.Option("--model", "-m", help="demo, a folder or a .gguf file. Default: demo.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer. Default: to the end of the context.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="0: the likeliest token each time.")]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this total probability.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Trace = Annotated[Literal["none", "summary"], typer.Option(help="summary: print the entropic record after the text.")]


@with_config_options("engine", "control")
def generate(
    prompt: Annotated[str, typer.Argument(help='The text to go on from; "-" reads standard input.')],
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    trace: Trace = "none",
    config: ConfigFile = None,
    *,
    flags: dict[str, dict[str, Any]],
) -> None:
    """Continue a text and print it as it comes. Nothing but the text goes to standard output."""
    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"top-p must be in (0, 1], got {top_p}")
    settings = read_config(config, flags, model)

    from etserve.cli.local import open_model, read_prompt
    from etserve.sampling_params import SamplingParams

    text = read_prompt(prompt)
    params = SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop=tuple(stop or ()), trace=trace
    )
    console = Console(stderr=True)
    with open_model(settings.engine, console) as local:
        ids = (
            local.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            if as_chat
            else local.tokenizer.encode(text)
        )
        last = None
        for output in local.stream(ids, params):
            typer.echo(output.text, nl=False)
            last = output
        typer.echo()
        if trace == "summary" and last is not None and last.entropy_summary is not None:
            facts = last.entropy_summary
            console.print(
                f"τ {facts.tau_nats:.2f} nats · resolved {facts.nats_resolved:.2f} nats · "
                f"mean entropy {facts.mean_entropy_nats:.2f} nats · τ per GFLOP {facts.tau_per_gflop:.3f}",
                highlight=False,
                soft_wrap=True,
            )
