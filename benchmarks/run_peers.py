"""Measure etserve beside llama.cpp's server and vLLM, with the same weights and prompts, in interleaved rounds.

    python benchmarks/run_peers.py --workloads W1,W2 --rounds 3

All servers are resident; only the one being measured runs, the others are held by SIGSTOP (see peers/README.md).
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from export_demo import FOLDER_NAME, GGUF_NAME, export_folder, export_gguf

from etserve.bench import plots, report, session
from etserve.bench.client import Target
from etserve.bench.errors import BenchError
from etserve.bench.prepare import Asked, prepare
from etserve.bench.records import BenchResult, RoundResult
from etserve.bench.session import Server
from etserve.bench.summary import summarise
from etserve.models.files import resolve_model

HERE = Path(__file__).resolve().parent
FIRST_PORT = 18_431
READY_SECONDS = 900.0  # vLLM compiles for minutes at its first start
WAKE_SECONDS = 30.0


@dataclass(frozen=True)
class Peer:
    """A server that can be launched: peers/SCRIPT PORT MODEL THREADS."""

    name: str
    script: str
    model: str  # demo, or what export_demo.py writes
    variable: str | None = None  # environment variable that says where the peer is

    @property
    def path(self) -> str | None:
        return os.environ.get(self.variable) if self.variable else sys.executable

    def missing(self) -> str | None:
        """Why it cannot be measured here; None when it can."""
        if self.path is None:
            return f"{self.variable} is not set"
        return None if Path(self.path).exists() else f"{self.path} does not exist"


PEERS = [
    Peer("etserve", "etserve.sh", "demo"),
    Peer("llama.cpp", "llama_server.sh", GGUF_NAME, "ETSERVE_PEER_LLAMA_SERVER"),
    Peer("vLLM", "vllm.sh", FOLDER_NAME, "ETSERVE_PEER_VLLM_PYTHON"),
]


class Running:
    """A launched server in a process group of its own."""

    def __init__(self, peer: Peer, port: int, model: str, threads: int, log: Path) -> None:
        self.peer = peer
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        began = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [HERE / "peers" / peer.script, str(port), model, str(threads)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ETSERVE_PYTHON": sys.executable},
                start_new_session=True,
            )
        self.wait_ready(READY_SECONDS)
        self.ready_seconds = time.monotonic() - began

    @property
    def server(self) -> Server:
        return Server(self.peer.name, Target(self.url, "demo"), (self.process.pid,))

    def wait_ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        ended = f"ended with {self.process.returncode}" if self.process.returncode is not None else "is not ready"
        tail = self._log.read_text(errors="replace").splitlines()[-3:]
        raise BenchError(f"{self.peer.name} {ended} (log: {self._log}): {' | '.join(tail)}")

    def hold(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the server run for the time of a measurement."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            self.wait_ready(WAKE_SECONDS)
            yield
        finally:
            if self.process.poll() is None:
                self.hold()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def launch(peers: Sequence[Peer], options: argparse.Namespace) -> list[Running]:
    """Start one server after the other, each held as soon as it is ready. Those that cannot be had are said."""
    running: list[Running] = []
    try:
        for place, peer in enumerate(peers):
            reason = peer.missing()
            if reason is not None:
                print(f"{peer.name}: not measured, {reason}")
                continue
            model = peer.model if peer.model == "demo" else str(exported(options.models, peer.model))
            options.out.mkdir(parents=True, exist_ok=True)
            started = Running(peer, FIRST_PORT + place, model, options.threads, options.out / f"{peer.name}.log")
            running.append(started)
            started.hold()
            print(f"{peer.name}: ready after {started.ready_seconds:.1f} s", flush=True)
    except BaseException:
        stop(running)
        raise
    return running


def exported(folder: Path, name: str) -> Path:
    """The demo model in the form a peer reads, written if it is not there yet."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", flush=True)
        (export_gguf if name == GGUF_NAME else export_folder)(resolve_model("demo").path, path)
    return path


def stop(running: Sequence[Running]) -> None:
    for server in running:
        server.end()


def measure(running: Sequence[Running], workload: str, options: argparse.Namespace) -> list[BenchResult]:
    """`rounds` clean cycles over all servers; a cycle with too much foreign CPU is repeated."""
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
    num_discarded = 0
    index = 0
    while len(kept[0]) < options.rounds:
        cycle = [_one(server, given, index) for server in running]
        index += 1
        foreign = max((each.cpu.foreign or 0.0 for each in cycle if each.cpu), default=0.0)
        if foreign > options.max_foreign and num_discarded < options.retries:
            num_discarded += 1
            print(f"{workload}: cycle discarded, {foreign:.0%} of the CPU went to other processes", flush=True)
            continue
        for rounds, found in zip(kept, cycle, strict=True):
            rounds.append(found)
    return [session.result(each.server, given, rounds) for each, rounds in zip(running, kept, strict=True)]


def _one(server: Running, given: session.Load, index: int) -> RoundResult:
    with server.awake():
        found = session.run_round(server.server, given, index)
    rate = summarise(found).output_tokens_per_second
    print(f"{given.described['name']} round {index + 1}: {server.peer.name} {rate:.1f} tokens/s", flush=True)
    return found


def _rate(workload: str, options: argparse.Namespace) -> float | None:
    return options.rate if workload.upper() == "W6" else None


def write(results: list[BenchResult], running: Sequence[Running], out: Path) -> None:
    """One result file per workload and server, a plot per workload, one Markdown table over all."""
    for found in results:
        session.save(found, session.path_for(found, out))
    for name in dict.fromkeys(found.workload["name"] for found in results):
        plots.draw([found for found in results if found.workload["name"] == name], out / f"{name}.png")
    table = report.markdown(*report.comparison_rows(results))
    ready = ", ".join(f"{server.peer.name} {server.ready_seconds:.1f} s" for server in running)
    (out / "table.md").write_text(f"{table}\nStart to ready: {ready}.\n", encoding="utf-8")
    print(f"\n{table}\nstart to ready: {ready}\nwritten to {out}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5,W6")
    parser.add_argument(
        "--servers", default=",".join(peer.name for peer in PEERS), help="base of the ratios: the first"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the workloads, for a smoke test")
    parser.add_argument("--rate", type=float, default=None, help="arrivals per second of W6")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=4, help="requests before each round")
    parser.add_argument("--max-foreign", type=float, default=0.05, help="share of the CPU that others may take")
    parser.add_argument("--retries", type=int, default=3, help="cycles per workload that may be discarded")
    parser.add_argument(
        "--models", type=Path, default=HERE.parent / "build" / "demo", help="where exported weights lie"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    wanted = options.servers.split(",")
    unknown = [name for name in wanted if name not in {peer.name for peer in PEERS}]
    if unknown:
        print(f"unknown server {unknown[0]!r}: {', '.join(peer.name for peer in PEERS)}", file=sys.stderr)
        return 2
    running: list[Running] = []
    try:
        running = launch([peer for name in wanted for peer in PEERS if peer.name == name], options)
        if not running:
            print("no server to measure", file=sys.stderr)
            return 2
        results: list[BenchResult] = []
        for workload in options.workloads.split(","):
            results += measure(running, workload, options)
            write(results, running, options.out)
    except BenchError as error:
        print(f"run_peers: {error}", file=sys.stderr)
        return 2
    finally:
        stop(running)
    return 0


if __name__ == "__main__":
    sys.exit(main())
