"""What `etserve bench step` found, as a table and as a picture. Drawing is matplotlib's."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from etserve.bench.errors import BenchError
from etserve.bench.report import markdown, shown
from etserve.bench.step import StepProfile, StepReport

matplotlib.use("Agg")
_OTHER_PHASES = ("kv_write", "elementwise", "setup")
HEADER = [
    "sequences",
    "context",
    "step, ms",
    "attention",
    "matrices",
    "head",
    "norms, rotary, checks",
    "rows",
    "scheduling",
    "Python",
    "blocks read",
    "MB read",
    "GFLOP",
    "GB/s (of the ceiling)",
    "GFLOP/s (of the ceiling)",
    "ceiling, ms",
    "ceiling / step",
]


def table(report: StepReport) -> list[list[str]]:
    """Rows under HEADER. Phases in ms."""
    return [_row(report, each) for each in report.profiles]


def _row(report: StepReport, each: StepProfile) -> list[str]:
    phases = each.phases
    other = sum(phases.get(name, 0.0) for name in _OTHER_PHASES)
    inside = [*(phases.get(name, 0.0) for name in ("attention", "matrices", "head")), other]
    outside = [each.row_seconds, each.schedule_seconds, each.python_seconds]
    return [
        str(each.num_sequences),
        str(each.context_tokens),
        shown(each.step_seconds, 1e3, 2),
        *(shown(seconds, 1e3, 2) for seconds in (*inside, *outside)),
        f"{each.kept_share:.0%}",
        shown(each.bytes_read, 1e-6, 0),
        shown(each.flops, 1e-9, 2),
        f"{each.gb_per_second:.1f} ({each.gb_per_second / report.gb_per_second:.0%})",
        _products(each, report.gflop_per_second),
        shown(each.ceiling_seconds, 1e3, 2),
        f"{each.ceiling_seconds / each.step_seconds:.0%}",
    ]


def _products(each: StepProfile, ceiling: float | None) -> str:
    rate = f"{each.gflop_per_second:.0f}"
    return rate if ceiling is None else f"{rate} ({each.gflop_per_second / ceiling:.0%})"


def facts(report: StepReport) -> str:
    """What the table is of, in a sentence or two."""
    products = (
        "no ceiling of products is known for these weights, so bytes alone bound a step."
        if report.gflop_per_second is None
        else f"{report.gflop_per_second:.0f} GFLOP/s in a large matrix product."
    )
    sentence = (
        f"{report.model}, {report.dtype}, {report.backend}. Ceilings of this machine, measured: "
        f"{report.gb_per_second:.1f} GB/s read; {products}"
    )
    chosen = [f"{name} {value}" for name, value in report.settings.items() if not isinstance(value, list | tuple)]
    return f"{sentence} Settings: {', '.join(chosen)}." if chosen else sentence


def as_markdown(report: StepReport) -> str:
    """The sentence and the table."""
    return f"{facts(report)}\n\n{markdown(HEADER, table(report))}"


def draw(report: StepReport, path: Path) -> None:
    """Write a PNG: a step's time over the batch and over the context, the ceiling dashed. Raises BenchError."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    by_batch, by_context = figure.subplots(1, 2)
    contexts = sorted({each.context_tokens for each in report.profiles})
    batches = sorted({each.num_sequences for each in report.profiles})
    for index, context in enumerate(contexts):
        of_context = [each for each in report.profiles if each.context_tokens == context]
        _lines(by_batch, of_context, lambda p: p.num_sequences, f"{context:,} tokens", f"C{index}")
    for index, batch in enumerate(batches):
        of_batch = [each for each in report.profiles if each.num_sequences == batch]
        _lines(by_context, of_batch, lambda p: p.context_tokens, f"{batch} sequences", f"C{index}")
    _dress(by_batch, "A decode step, by batch size", "sequences", batches)
    _dress(by_context, "The same, by context", "tokens of each", contexts)
    figure.suptitle(f"{report.model}, {report.dtype}, {report.backend}; dashed: what the machine's ceilings allow")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None


def _lines(
    axes: Axes, profiles: Sequence[StepProfile], x_of: Callable[[StepProfile], int], label: str, colour: str
) -> None:
    ordered = sorted(profiles, key=x_of)
    x = [x_of(each) for each in ordered]
    axes.plot(x, [each.step_seconds * 1e3 for each in ordered], "o-", color=colour, label=label, markersize=4)
    axes.plot(x, [each.ceiling_seconds * 1e3 for each in ordered], "--", color=colour, linewidth=1)


def _dress(axes: Axes, title: str, x: str, ticks: Sequence[int]) -> None:
    axes.set_title(title, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(x)
    axes.set_ylabel("ms (logarithmic)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
