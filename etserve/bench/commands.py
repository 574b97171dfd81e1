"""`etserve bench`: options in, tables and files out. Heavy imports wait until a command runs, so that help is fast."""

from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import typer
from rich.console import Console

from etserve.bench.errors import BenchError

app = typer.Typer(no_args_is_help=True, help="Measure servers: etserve or any other with OpenAI's completions API.")

WorkloadName = Annotated[str, typer.Option("--workload", "-w", help="W1 to W6, or custom.")]
Tokenizer = Annotated[str, typer.Option(help="Model whose tokenizer cuts the prompts: demo, a folder or a .gguf file.")]
ApiKind = Annotated[Literal["completions", "chat"], typer.Option(help="Endpoint to use.")]
Rounds = Annotated[int, typer.Option(min=1, max=100, help="Repeat the workload, each time with other prompts.")]
Scale = Annotated[float, typer.Option(help="Shrink counts and lengths, for smoke tests (0 to 1].")]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Of prompts and arrivals. Default: drawn, and kept in the result.")
]
Warmup = Annotated[int, typer.Option(min=0, max=64, help="Requests before each round that are not counted.")]
SendIds = Annotated[bool, typer.Option("--send-ids", help="Send prompts as token ids instead of text.")]
Requests = Annotated[int | None, typer.Option("--num-requests", "-n", min=1, help="Custom: how many requests.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", "-c", min=1, help="Custom: open at once (closed loop).")
]
Rate = Annotated[float | None, typer.Option(help="W6 or custom: arrivals per second (open loop).")]
Burstiness = Annotated[float, typer.Option(help="Open loop: shape of the Gamma gaps; 1 is Poisson.")]
PromptTokens = Annotated[str | None, typer.Option(help="Custom: N, or LOW-HIGH for a log-normal spread.")]
OutputTokens = Annotated[str | None, typer.Option(help="Custom: N, or LOW-HIGH for a log-normal spread.")]
SharedPrefix = Annotated[int, typer.Option(min=0, help="Custom: leading prompt tokens that all requests share.")]
Trace = Annotated[Path | None, typer.Option(help="Replay arrivals: Azure LLM inference CSV or Mooncake JSONL.")]
Speedup = Annotated[float, typer.Option(help="Trace: how much faster than recorded.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Trace: only the first entries.")]
MaxContext = Annotated[int | None, typer.Option(min=2, help="Trace: clip prompt + output to this many tokens.")]
ExtraBody = Annotated[str, typer.Option(help="JSON object merged into every request; null removes a field.")]
NoIgnoreEos = Annotated[bool, typer.Option("--no-ignore-eos", help="Let the model stop by itself.")]
KeyFile = Annotated[Path | None, typer.Option(help="File holding the API key.")]
Timeout = Annotated[float, typer.Option(min=1.0, help="Seconds that one request may take.")]
SloTtft = Annotated[float | None, typer.Option(help="Goodput: milliseconds to the first token.")]
SloItl = Annotated[float | None, typer.Option(help="Goodput: milliseconds between tokens (95th percentile).")]


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="The server's root, without /v1.")] = "http://127.0.0.1:8000",
    workload: WorkloadName = "W2",
    model: Annotated[str | None, typer.Option(help="Model name to ask for. Default: the first one listed.")] = None,
    name: Annotated[str | None, typer.Option(help="The server's name in tables. Default: the URL.")] = None,
    tokenizer: Tokenizer = "demo",
    api: ApiKind = "completions",
    rounds: Rounds = 1,
    scale: Scale = 1.0,
    seed: Seed = None,
    warmup: Warmup = 2,
    send_ids: SendIds = False,
    num_requests: Requests = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    shared_prefix: SharedPrefix = 0,
    trace: Trace = None,
    speedup: Speedup = 1.0,
    limit: Limit = None,
    max_context: MaxContext = None,
    extra_body: ExtraBody = "{}",
    no_ignore_eos: NoIgnoreEos = False,
    api_key_file: KeyFile = None,
    timeout: Timeout = 600.0,
    slo_ttft: SloTtft = None,
    slo_itl: SloItl = None,
    server_pid: Annotated[
        list[int] | None, typer.Option(help="The server's process, for CPU shares. Default: found by its port.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Result file (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the result (PNG).")] = None,
) -> None:
    """Put a workload onto one server and report latencies, rates and errors."""
    actions, console = _actions(), Console()
    given = actions.prepare_load(
        console, workload=workload, tokenizer=tokenizer, api=api, send_ids=send_ids, seed=actions.drawn_seed(seed),
        scale=scale, warmup=warmup, num_requests=num_requests, concurrency=concurrency, rate=rate,
        burstiness=burstiness, prompt_tokens=prompt_tokens, output_tokens=output_tokens, shared_prefix=shared_prefix,
        trace=trace, speedup=speedup, limit=limit, max_context=max_context,
    )  # fmt: skip
    options = actions.TargetOptions(
        api, actions.parse_object(extra_body), not no_ignore_eos, actions.read_key(api_key_file), timeout
    )
    server = actions.server_at(name or url, url, model, options, tuple(server_pid or ()))
    measured = actions.measure(console, [server], given, rounds)
    actions.show_result(
        console,
        actions.results_of([server], given, measured, actions.slo_from(slo_ttft, slo_itl)),
        actions.slo_from(slo_ttft, slo_itl),
        out,
        plot,
    )


@app.command()
def compare(
    files: Annotated[list[Path] | None, typer.Argument(help="Result files to set side by side.")] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of a server to measure now, in turns with the others.")
    ] = None,
    workload: WorkloadName = "W2",
    tokenizer: Tokenizer = "demo",
    api: ApiKind = "completions",
    rounds: Rounds = 3,
    scale: Scale = 1.0,
    seed: Seed = None,
    warmup: Warmup = 2,
    rate: Rate = None,
    timeout: Timeout = 600.0,
    api_key_file: KeyFile = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for one result file per server.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the comparison (PNG).")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
) -> None:
    """Compare servers: from result files, or measured now in interleaved rounds (A B C A B C …)."""
    actions, console = _actions(), Console()
    results = [actions.session.read(path) for path in files or []]
    if url:
        given = actions.prepare_load(
            console,
            workload=workload,
            tokenizer=tokenizer,
            api=api,
            seed=actions.drawn_seed(seed),
            scale=scale,
            warmup=warmup,
            rate=rate,
        )
        options = actions.TargetOptions(api, {}, True, actions.read_key(api_key_file), timeout)
        servers = [actions.server_at(*actions.parse_named(each), None, options, ()) for each in url]
        fresh = actions.results_of(servers, given, actions.measure(console, servers, given, rounds), None)
        for found in fresh if out else []:
            actions.session.save(found, actions.session.path_for(found, out or Path()))
        results += fresh
    if not results:
        raise BenchError("nothing to compare: give result files or --url NAME=URL")
    actions.show_comparison(console, results, plot, markdown)


def _actions() -> ModuleType:
    """What the commands do, or a word on the extra that is missing."""
    try:
        from etserve.bench import actions
    except ImportError as error:
        raise BenchError(f"{error.name} is not installed: pip install 'etserve[bench]'") from None
    return actions
