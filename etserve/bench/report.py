"""Result tables, for a terminal and as Markdown."""

from collections.abc import Sequence

from rich.table import Table

from etserve.bench.records import BenchResult
from etserve.bench.summary import Ratio, Spread, Summary, median_of, metric, ratio, summarise

FOREIGN_LIMIT = 0.05  # above it a figure says more about the neighbours than about the server

# figure, heading, unit, scale, decimals
_ROWS = [
    ("output_tokens_per_second", "output tokens/s", 1.0, 1),
    ("total_tokens_per_second", "total tokens/s", 1.0, 1),
    ("requests_per_second", "requests/s", 1.0, 2),
    ("good_requests_per_second", "good requests/s", 1.0, 2),
    ("duration_seconds", "duration, s", 1.0, 2),
]
_SPREADS = [
    ("ttft_seconds", "time to first token, ms"),
    ("tpot_seconds", "time per output token, ms"),
    ("itl_seconds", "inter-token latency, ms"),
    ("e2e_seconds", "end to end, ms"),
]
COMPARED = [
    ("output_tokens_per_second", "output tokens/s", 1.0, 1),
    ("ttft_seconds.p50", "TTFT p50, ms", 1e3, 0),
    ("ttft_seconds.p95", "TTFT p95, ms", 1e3, 0),
    ("itl_seconds.p50", "ITL p50, ms", 1e3, 1),
    ("itl_seconds.p99", "ITL p99, ms", 1e3, 1),
    ("e2e_seconds.p95", "e2e p95, ms", 1e3, 0),
    ("server_peak_bytes", "peak memory, GB", 1e-9, 2),
    ("cpu_foreign", "foreign CPU, %", 1e2, 1),
]


def shown(value: float | None, scale: float = 1.0, decimals: int = 1) -> str:
    return "–" if value is None else f"{value * scale:,.{decimals}f}"


def rates_table(found: BenchResult, summaries: Sequence[Summary]) -> Table:
    """Rates of each round and their median."""
    table = Table(
        title=f"{found.workload.get('name', '')} · {found.name} · {found.model.rstrip('/').rsplit('/', 1)[-1]}",
        title_justify="left",
    )
    table.add_column("")
    for index in range(len(summaries)):
        table.add_column(f"round {index + 1}", justify="right")
    if len(summaries) > 1:
        table.add_column("median", justify="right", style="bold")
    for path, heading, scale, decimals in _ROWS:
        values = [metric(summary, path) for summary in summaries]
        if any(value is not None for value in values):
            values += [median_of(list(summaries), path)] if len(summaries) > 1 else []
            table.add_row(heading, *(shown(value, scale, decimals) for value in values))
    return table


def latency_table(summaries: Sequence[Summary]) -> Table:
    """Spreads in milliseconds: each cell is the median over rounds."""
    table = Table(title="latency" + (", medians over rounds" if len(summaries) > 1 else ""), title_justify="left")
    for heading in ("", *Spread.__struct_fields__):
        table.add_column(heading, justify="right" if heading else "left")
    for path, heading in _SPREADS:
        cells = [median_of(list(summaries), f"{path}.{name}") for name in Spread.__struct_fields__]
        table.add_row(heading, *(shown(cell, 1e3, 1) for cell in cells))
    return table


def remarks(summaries: Sequence[Summary]) -> list[str]:
    """Everything that qualifies the figures, one line each."""
    lines = []
    for index, summary in enumerate(summaries, start=1):
        where = f"round {index}: " if len(summaries) > 1 else ""
        if summary.errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items()))
            lines.append(
                f"{where}{summary.num_requests - summary.num_complete} of {summary.num_requests} failed: {kinds}"
            )
        if summary.prompt_count_mismatches:
            lines.append(f"{where}{summary.prompt_count_mismatches} prompts were counted otherwise than cut")
        if summary.output_count_mismatches:
            lines.append(f"{where}{summary.output_count_mismatches} outputs are not of the length asked for")
        if summary.cpu_foreign is not None and summary.cpu_foreign > FOREIGN_LIMIT:
            lines.append(
                f"{where}{summary.cpu_foreign:.0%} of the CPU went to other processes: repeat on a quiet machine"
            )
    return lines


def facts(summaries: Sequence[Summary]) -> str:
    """Token counts and CPU shares of all rounds, in one line."""
    done = sum(summary.num_complete for summary in summaries)
    asked = sum(summary.num_requests for summary in summaries)
    cached = sum(summary.num_cached_tokens for summary in summaries)
    num_in = sum(summary.num_prompt_tokens for summary in summaries)
    num_out = sum(summary.num_output_tokens for summary in summaries)
    cpu = [
        f"{label} {shown(median_of(list(summaries), path), 100, 0)} %"
        for path, label in (("cpu_server", "server"), ("cpu_client", "client"), ("cpu_foreign", "others"))
    ]
    memory = shown(median_of(list(summaries), "server_peak_bytes"), 1e-9, 2)
    return (
        f"{done}/{asked} complete · {num_in:,} tokens in ({cached:,} cached), {num_out:,} out · "
        f"CPU: {', '.join(cpu)} · peak memory {memory} GB"
    )


def comparison_rows(results: Sequence[BenchResult]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row per workload and server, ratios of output rate against the workload's first server."""
    header = ["workload", "server", *(heading for _, heading, _, _ in COMPARED), "rounds", "failed", "ratio [95 %]"]
    rows = []
    for name in dict.fromkeys(str(found.workload.get("name")) for found in results):
        group = [found for found in results if str(found.workload.get("name")) == name]
        base = [summarise(each) for each in group[0].rounds]
        for found in group:
            summaries = [summarise(each) for each in found.rounds]
            cells = [shown(median_of(summaries, path), scale, decimals) for path, _, scale, decimals in COMPARED]
            failed = sum(summary.num_requests - summary.num_complete for summary in summaries)
            against = "1 (base)" if found is group[0] else _ratio_text(output_ratio(summaries, base))
            rows.append([name, found.name, *cells, str(len(summaries)), str(failed), against])
    return header, rows


def output_ratio(of: Sequence[Summary], by: Sequence[Summary]) -> Ratio | None:
    """Output tokens per second of one server by another's, paired by round."""
    return ratio([each.output_tokens_per_second for each in of], [each.output_tokens_per_second for each in by])


def _ratio_text(found: Ratio | None) -> str:
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}{interval}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A GitHub table; figures right-aligned."""
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def comparison_table(header: list[str], rows: list[list[str]]) -> Table:
    """The same for a terminal."""
    table = Table()
    for index, heading in enumerate(header):
        table.add_column(heading, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    return table
