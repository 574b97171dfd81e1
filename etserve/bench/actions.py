"""What the bench commands do, once their options are read: talk to the user, measure, report."""

import asyncio
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from etserve.bench import report, session
from etserve.bench.client import Api, Target, first_model
from etserve.bench.errors import BenchError
from etserve.bench.plots import draw
from etserve.bench.prepare import Asked, prepare
from etserve.bench.records import BenchResult, RoundResult
from etserve.bench.session import Load, Server, result, run_round
from etserve.bench.summary import Slo, summarise


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What all requests of a run have in common."""

    api: Api
    extra_body: dict[str, Any]
    ignore_eos: bool
    api_key: str | None
    timeout_seconds: float


def prepare_load(console: Console, **asked: Any) -> Load:
    with console.status("reading the tokenizer"):
        return prepare(Asked(**asked))


def server_at(name: str, url: str, model: str | None, options: TargetOptions, pids: tuple[int, ...]) -> Server:
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


def measure(console: Console, servers: list[Server], given: Load, rounds: int) -> list[list[RoundResult]]:
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


def results_of(
    servers: list[Server], given: Load, measured: list[list[RoundResult]], slo: Slo | None
) -> list[BenchResult]:
    return [result(server, given, rounds, slo) for server, rounds in zip(servers, measured, strict=True)]


def show_result(
    console: Console, results: list[BenchResult], slo: Slo | None, out: Path | None, plot: Path | None
) -> None:
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


def _first_fault(found: BenchResult) -> str:
    faults = (record for each in found.rounds for record in each.records if record.error)
    first = next(faults, None)
    return f"{first.error}: {first.detail}" if first else "nothing was sent"


def show_comparison(console: Console, results: list[BenchResult], plot: Path | None, markdown: Path | None) -> None:
    header, rows = report.comparison_rows(results)
    console.print(report.comparison_table(header, rows))
    if markdown:
        try:
            markdown.write_text(report.markdown(header, rows), encoding="utf-8")
        except OSError as error:
            raise BenchError(f"{markdown}: {error.strerror}") from None
    if plot:
        _draw(results, plot, console)


def _draw(results: list[BenchResult], plot: Path, console: Console) -> None:
    draw(results, plot)
    console.print(f"plot: {plot}", highlight=False)


def slo_from(ttft_ms: float | None, itl_ms: float | None) -> Slo | None:
    if ttft_ms is None and itl_ms is None:
        return None
    return Slo(
        ttft_seconds=None if ttft_ms is None else ttft_ms / 1e3, itl_seconds=None if itl_ms is None else itl_ms / 1e3
    )


def drawn_seed(seed: int | None) -> int:
    """A drawn seed keeps one run's prompts out of the prefix cache that an earlier run has filled."""
    return secrets.randbelow(2**31) if seed is None else seed


def parse_named(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not separator or not name:
        raise BenchError(f"--url takes NAME=URL here, got {text!r}")
    return name, url


def parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchError(f"--extra-body: {error}") from None
    if not isinstance(value, dict):
        raise BenchError("--extra-body must be a JSON object")
    return value


def read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").split()[0]
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except (IndexError, UnicodeDecodeError):
        raise BenchError(f"{path}: holds no API key") from None
