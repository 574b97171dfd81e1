"""Measure etserve beside llama.cpp, OpenVINO GenAI and vLLM, with the same weights and prompts, in interleaved rounds.

    python benchmarks/run_peers.py --precisions bf16,q8_0,q4_0 --workloads W1,W2,W3 --rounds 3

For each precision all servers are resident; only the one being measured runs, the others are held by SIGSTOP (see
peers/README.md). A workload gets at most --budget-seconds: what is measured by then counts, at least one round.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peer_servers import HERE, PEERS, Peer, Running, launched

from etserve.bench import plots, report, session
from etserve.bench.errors import BenchError
from etserve.bench.prepare import Asked, prepare
from etserve.bench.records import BenchResult, RoundResult
from etserve.bench.summary import summarise

PRECISIONS = tuple(PEERS[0].models)


def measure(running: Sequence[Running], workload: str, options: argparse.Namespace) -> list[BenchResult]:
    """`rounds` clean cycles over all servers, or what the budget allows; one with too much foreign CPU is repeated."""
    given = prepare(
        Asked(
            workload=workload,
            seed=options.seed,
            scale=options.scale,
            warmup=options.warmup,
            rate=_rate(workload, options),
        )
    )
    kept: list[list[RoundResult]] = [[] for _ in running]
    began, num_cycles, num_discarded = time.monotonic(), 0, 0
    while len(kept[0]) < options.rounds and (num_cycles == 0 or _has_time(began, num_cycles, options)):
        cycle = [_one(server, given, num_cycles) for server in running]
        num_cycles += 1
        foreign = max((each.cpu.foreign or 0.0 for each in cycle if each.cpu), default=0.0)
        may_repeat = num_discarded < options.retries and _has_time(began, num_cycles, options)
        if foreign > options.max_foreign and may_repeat:
            num_discarded += 1
            print(f"{workload}: cycle discarded, {foreign:.0%} of the CPU went to other processes", flush=True)
            continue
        for rounds, found in zip(kept, cycle, strict=True):
            rounds.append(found)
    if len(kept[0]) < options.rounds:
        print(
            f"{workload}: {len(kept[0])} of {options.rounds} rounds within {options.budget_seconds:.0f} s", flush=True
        )
    return [session.result(each.server, given, rounds) for each, rounds in zip(running, kept, strict=True)]


def _has_time(began: float, num_cycles: int, options: argparse.Namespace) -> bool:
    """Whether one more cycle like those before it ends within the budget."""
    spent = time.monotonic() - began
    return bool(spent * (num_cycles + 1) / num_cycles <= options.budget_seconds)


def _one(server: Running, given: session.Load, index: int) -> RoundResult:
    with server.awake():
        found = session.run_round(server.server, given, index)
    rate = summarise(found).output_tokens_per_second
    print(f"{given.described['name']} round {index + 1}: {server.peer.name} {rate:.1f} tokens/s", flush=True)
    return found


def _rate(workload: str, options: argparse.Namespace) -> float | None:
    return options.rate if workload.upper() == "W6" else None


def write(results: list[BenchResult], running: Sequence[Running], precision: str, out: Path) -> str:
    """One result file per workload and server, a plot per workload, one Markdown table over all, which is returned."""
    for found in results:
        session.save(found, session.path_for(found, out))
    for name in dict.fromkeys(found.workload["name"] for found in results):
        plots.draw([found for found in results if found.workload["name"] == name], out / f"{name}.png")
    table = report.markdown(*report.comparison_rows(results))
    ready = ", ".join(f"{server.peer.name} {server.ready_seconds:.1f} s" for server in running)
    text = f"### {precision}\n{table}\nStart to ready: {ready}.\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    return text


def run(options: argparse.Namespace, peers: Sequence[Peer]) -> list[str]:
    """A table per precision. Raises BenchError."""
    tables: list[str] = []
    for precision in options.precisions.split(","):
        out = options.out / precision
        with launched(peers, precision, models=options.models, threads=options.threads, logs=out) as running:
            results: list[BenchResult] = []
            for workload in options.workloads.split(",") if running else ():
                results += measure(running, workload, options)
                text = write(results, running, precision, out)
            if results:
                tables.append(text)
                print(f"\n{text}written to {out}", flush=True)
    return tables


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--workloads", default="W1,W2,W3", help="of W1 to W7")
    names = ",".join(peer.name for peer in PEERS)
    parser.add_argument("--servers", default=names, help="base of the ratios: the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=180.0, help="of one workload in one precision")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the workloads, for a smoke test")
    parser.add_argument("--rate", type=float, default=None, help="arrivals per second of W6")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=4, help="requests before each round")
    parser.add_argument("--max-foreign", type=float, default=0.05, help="share of the CPU that others may take")
    parser.add_argument("--retries", type=int, default=3, help="cycles per workload that may be discarded")
    models = HERE.parent / "build" / "demo"
    parser.add_argument("--models", type=Path, default=models, help="where exported weights lie")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    for kind, wanted, known in (
        ("server", options.servers, [peer.name for peer in PEERS]),
        ("precision", options.precisions, list(PRECISIONS)),
    ):
        unknown = [name for name in wanted.split(",") if name not in known]
        if unknown:
            print(f"unknown {kind} {unknown[0]!r}: {', '.join(known)}", file=sys.stderr)
            return 2
    try:
        tables = run(options, [peer for name in options.servers.split(",") for peer in PEERS if peer.name == name])
    except BenchError as error:
        print(f"run_peers: {error}", file=sys.stderr)
        return 2
    if not tables:
        print("no server to measure", file=sys.stderr)
        return 2
    (options.out / "table.md").write_text("\n".join(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
