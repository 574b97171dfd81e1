"""`etserve bench`: options in, tables and files out. Heavy imports wait until a command runs, so that help is fast."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from etserve.bench.errors import BenchError

if TYPE_CHECKING:
    from etserve.bench.records import BenchResult, RoundResult
    from etserve.bench.session import Load, Server
    from etserve.bench.summary import Slo

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
    console = Console()
    given = _prepare(
        console, workload=workload, tokenizer=tokenizer, api=api, send_ids=send_ids, seed=_seed(seed), scale=scale,
        warmup=warmup, num_requests=num_requests, concurrency=concurrency, rate=rate, burstiness=burstiness,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, shared_prefix=shared_prefix, trace=trace,
        speedup=speedup, limit=limit, max_context=max_context,
    )  # fmt: skip
    options = _TargetOptions(api, _json_object(extra_body), not no_ignore_eos, _key(api_key_file), timeout)
    server = _server(name or url, url, model, options, tuple(server_pid or ()))
    measured = _measure(console, [server], given, rounds)
    _report(console, _results([server], given, measured, _slo(slo_ttft, slo_itl)), _slo(slo_ttft, slo_itl), out, plot)


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
    from etserve.bench import session

    console = Console()
    results = [session.read(path) for path in files or []]
    if url:
        given = _prepare(
            console,
            workload=workload,
            tokenizer=tokenizer,
            api=api,
            seed=_seed(seed),
            scale=scale,
            warmup=warmup,
            rate=rate,
        )
        options = _TargetOptions(api, {}, True, _key(api_key_file), timeout)
        servers = [_server(*_named(each), None, options, ()) for each in url]
        fresh = _results(servers, given, _measure(console, servers, given, rounds), None)
        for found in fresh if out else []:
            session.save(found, (out or Path()) / f"{found.workload['name']}-{found.name}.json")
        results += fresh
    if not results:
        raise BenchError("nothing to compare: give result files or --url NAME=URL")
    _show_comparison(console, results, plot, markdown)


@dataclass(frozen=True, slots=True)
class _TargetOptions:
    """What all requests of a run have in common."""

    api: Literal["completions", "chat"]
    extra_body: dict[str, Any]
    ignore_eos: bool
    api_key: str | None
    timeout_seconds: float


def _prepare(console: Console, **asked: Any) -> "Load":
    _require_extra()
    from etserve.bench.prepare import Asked, prepare

    with console.status("reading the tokenizer"):
        return prepare(Asked(**asked))


def _require_extra() -> None:
    try:
        import aiohttp  # noqa: F401
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise BenchError(f"{error.name} is not installed: pip install 'etserve[bench]'") from None


def _server(name: str, url: str, model: str | None, options: _TargetOptions, pids: tuple[int, ...]) -> "Server":
    import asyncio

    from etserve.bench.client import Target, first_model
    from etserve.bench.session import Server

    if not url.startswith(("http://", "https://")):
        raise BenchError(f"the URL must begin with http:// or https://, got {url!r}")
    target = Target(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model or asyncio.run(first_model(url.rstrip("/").removesuffix("/v1"), options.api_key)),
        api=options.api,
        api_key=options.api_key,
        ignore_eos=options.ignore_eos,
        extra_body=options.extra_body,
        timeout_seconds=options.timeout_seconds,
    )
    return Server(name, target, pids)


def _measure(console: Console, servers: "list[Server]", given: "Load", rounds: int) -> "list[list[RoundResult]]":
    from etserve.bench.session import run_round

    measured: list[list[RoundResult]] = [[] for _ in servers]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawing costs CPU that the server under test needs: twice a second is enough.
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        for index in range(rounds):
            for place, server in enumerate(servers):
                label = f"{given.described['name']} · {server.name} · round {index + 1}/{rounds}"
                task = progress.add_task(label, total=given.described["num_requests"])
                if not console.is_terminal:
                    console.print(label)
                measured[place].append(run_round(server, given, index, lambda _, task=task: progress.advance(task)))  # type: ignore[misc]
    return measured


def _results(
    servers: "list[Server]", given: "Load", measured: "list[list[RoundResult]]", slo: "Slo | None"
) -> "list[BenchResult]":
    from etserve.bench.session import result

    return [result(server, given, rounds, slo) for server, rounds in zip(servers, measured, strict=True)]


def _report(
    console: Console, results: "list[BenchResult]", slo: "Slo | None", out: Path | None, plot: Path | None
) -> None:
    from etserve.bench import report, session
    from etserve.bench.summary import summarise

    found = results[0]
    summaries = [summarise(each, slo) for each in found.rounds]
    console.print(report.rates_table(found, summaries))
    console.print(report.latency_table(summaries))
    console.print(report.facts(summaries), highlight=False)
    for line in report.remarks(summaries):
        console.print(f"note: {line}", style="yellow", highlight=False)
    console.print(f"seed {found.seed}", highlight=False)
    if out:
        session.save(found, out)
        console.print(f"result: {out}", highlight=False)
    if plot:
        _draw(results, plot, console)
    if not any(summary.num_complete for summary in summaries):
        raise BenchError(f"no request completed: {_first_fault(found)}")


def _first_fault(found: "BenchResult") -> str:
    faults = (record for each in found.rounds for record in each.records if record.error)
    first = next(faults, None)
    return f"{first.error}: {first.detail}" if first else "nothing was sent"


def _show_comparison(console: Console, results: "list[BenchResult]", plot: Path | None, markdown: Path | None) -> None:
    from etserve.bench import report

    header, rows = report.comparison_rows(results)
    console.print(report.comparison_table(header, rows))
    if markdown:
        try:
            markdown.write_text(report.markdown(header, rows), encoding="utf-8")
        except OSError as error:
            raise BenchError(f"{markdown}: {error.strerror}") from None
    if plot:
        _draw(results, plot, console)


def _draw(results: "list[BenchResult]", plot: Path, console: Console) -> None:
    from etserve.bench.plots import draw

    draw(results, plot)
    console.print(f"plot: {plot}", highlight=False)


def _slo(ttft_ms: float | None, itl_ms: float | None) -> "Slo | None":
    from etserve.bench.summary import Slo

    if ttft_ms is None and itl_ms is None:
        return None
    return Slo(
        ttft_seconds=None if ttft_ms is None else ttft_ms / 1e3, itl_seconds=None if itl_ms is None else itl_ms / 1e3
    )


def _seed(seed: int | None) -> int:
    """A drawn seed keeps one run's prompts out of the prefix cache that an earlier run has filled."""
    return secrets.randbelow(2**31) if seed is None else seed


def _named(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not separator or not name:
        raise BenchError(f"--url takes NAME=URL here, got {text!r}")
    return name, url


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchError(f"--extra-body: {error}") from None
    if not isinstance(value, dict):
        raise BenchError("--extra-body must be a JSON object")
    return value


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").split()[0]
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except (IndexError, UnicodeDecodeError):
        raise BenchError(f"{path}: holds no API key") from None
