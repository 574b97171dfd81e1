"""Parts of the report with the figures behind the verdicts: one per workload, one on quality."""

from collections.abc import Mapping, Sequence

import numpy as np

from etserve.bench.ablate import similarity
from etserve.bench.ablate.arms import ARMS, BASELINE
from etserve.bench.ablate.figures import FIGURE, STEADY_FIGURES, WHOLE_FIGURES, Figure, kept_share
from etserve.bench.ablate.goals import ratio_text
from etserve.bench.ablate.records import QualityRun, RoundRun
from etserve.bench.ablate.statistics import Loss, compare, loss
from etserve.bench.ablate.verdicts import JUDGED, Figures, steering
from etserve.bench.report import FOREIGN_LIMIT, markdown, shown

_ALSO = ("steady_tau_per_gflop", "steady_nats_per_second", "tau_per_second", "e2e_p99_seconds", "goodput")


def workload_section(workload: str, rounds: Mapping[str, Sequence[RoundRun]], figures: Figures) -> str:
    return "\n\n".join(
        [
            f"## {workload}",
            "By the baseline's, paired by round, with a 95 % bootstrap interval; *s*: steady window, *w*: whole run.",
            _relative(figures),
            *_warnings(figures),
            f"![Latency and throughput]({workload}-ratios.png)",
            "Steady window (medians over rounds; τ and nats of a dense replay of the text at temperature 1):",
            _absolute(figures, STEADY_FIGURES),
            f"Whole run{_prompts(rounds)}:",
            _absolute(figures, WHOLE_FIGURES),
            _texts(rounds),
            f"![Entropy and entropic time]({workload}-clock.png)",
        ]
    )


def _prompts(rounds: Mapping[str, Sequence[RoundRun]]) -> str:
    """What the reader must know where prompts were read once for all arms."""
    read = [run.prompts.seconds for runs in rounds.values() for run in runs if run.prompts is not None]
    if not read:
        return ", prompts included"
    return (
        f", prompts included: no arm reads a prompt differently, so they were read once a round for all arms "
        f"({float(np.median(read)):.1f} s), and that time and cost is added to each"
    )


def _absolute(figures: Figures, wanted: Sequence[Figure]) -> str:
    shown_figures = [f for f in wanted if any(f.name in each for rounds in figures.values() for each in rounds)]
    header = ["arm", "rounds", *(figure.heading for figure in shown_figures)]
    rows = []
    for name, rounds in figures.items():
        cells = []
        for figure in shown_figures:
            values = [each[figure.name] for each in rounds if figure.name in each]
            cells.append(shown(float(np.median(values)) if values else None, figure.scale, figure.decimals))
        rows.append([name, str(len(rounds)), *cells])
    return markdown(header, rows)


def _warnings(figures: Figures) -> list[str]:
    busy = [each["cpu_foreign"] for rounds in figures.values() for each in rounds if "cpu_foreign" in each]
    if busy and max(busy) > FOREIGN_LIMIT:
        return [f"**Up to {max(busy):.0%} of the CPU went to other processes: repeat on a quiet machine.**"]
    return []


def short_heading(name: str) -> str:
    """Of a ratio: which window, and the figure without its unit."""
    window = "s" if name.startswith("steady_") else "w"
    return f"{window}: {FIGURE[name].heading.split(',')[0]}"


def _relative(figures: Figures) -> str:
    names = (*JUDGED, *_ALSO)
    rows = []
    for arm in (name for name in figures if name != BASELINE):
        cells = [ratio_text(compare(figures[arm], figures[BASELINE], name)) for name in names]
        rows.append([arm, ARMS[arm].description, *cells])
    return markdown(["arm", "what it is", *map(short_heading, names)], rows)


def _texts(rounds: Mapping[str, Sequence[RoundRun]]) -> str:
    """Sampled texts part at their first different token: equal seeds keep them together as long as they can be."""
    base = {(run.round, request.index): request.text for run in rounds[BASELINE] for request in run.requests}
    rows = []
    for name, runs in rounds.items():
        requests = [(base.get((run.round, r.index)), r) for run in runs for r in run.requests]
        pairs = [(r.text, reference) for reference, r in requests if reference is not None]
        texts, references = [text for text, _ in pairs], [reference for _, reference in pairs]
        rows.append(
            [
                name,
                f"{similarity.rouge_l(texts, references):.3f}",
                f"{similarity.bleu(texts, references):.1f}",
                f"{similarity.repetition([r.token_ids for _, r in requests]):.2%}",
            ]
        )
    return markdown(["arm", "ROUGE-L to baseline", "BLEU to baseline", "repeated 4-grams"], rows)


def quality_section(quality: Mapping[str, QualityRun]) -> str:
    rows = [_quality_row(name, run, quality.get(BASELINE)) for name, run in quality.items()]
    header = [
        "arm",
        "NLL, nats",
        "ΔNLL",
        "blocks read where it skips, %",
        "steps that skip, %",
        "cloze",
        "its NLL",
        "needles",
        "their NLL",
    ]
    steered = steering(dict(quality))
    lines = [
        "## Quality",
        "Held-out text, one decode step a token, each arm's law in force. Arms that are missing here skip nothing: the "
        "same text gives them the baseline's distributions, bit for bit.",
        markdown(header, rows),
    ]
    if steered is not None:
        lines.append(f"NLL with epsilon steered by entropy, against a constant epsilon: {loss_text(steered)}.")
    return "\n\n".join([*lines, "![Quality](quality.png)"])


def loss_text(found: Loss | None) -> str:
    if found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" [{found.low:+.2%}, {found.high:+.2%}]"
    return f"{found.value:+.2%}{interval}"


def _quality_row(name: str, run: QualityRun, baseline: QualityRun | None) -> list[str]:
    nll = [value for each in run.nll_nats for value in each]
    shares = [value for each in run.kept_fractions for value in each]
    return [
        name,
        shown(float(np.mean(nll)) if nll else None, 1.0, 4),
        loss_text(None if baseline is None else loss(run, baseline)),
        shown(kept_share(shares), 100.0, 1),
        shown(float(np.mean([share < 1.0 for share in shares])) if shares else None, 100.0, 0),
        _accuracy(run.cloze_hits),
        _mean(run.cloze_nll),
        _accuracy(run.needle_hits),
        _mean(run.needle_nll),
    ]


def _mean(values: Sequence[float]) -> str:
    return shown(float(np.mean(values)) if values else None, 1.0, 3)


def _accuracy(hits: Sequence[bool]) -> str:
    return f"{sum(hits)}/{len(hits)}" if hits else "–"
