"""Restart two servers in turn, behind nginx and under load, and count the requests that were lost.

    python benchmarks/rolling_restart.py --restarts 2 --out benchmarks/results/rolling-restart.json

The proxy is configs/nginx/etserve.conf with other addresses, the load `etserve bench serve` in a closed loop. Exit code
0: every server drained with code 0 and no request failed; 1: something was lost; 2: it could not be measured.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROXY_CONFIG = ROOT / "configs" / "nginx" / "etserve.conf"
READY_SECONDS, DRAIN_SECONDS = 180.0, 90.0


class NotMeasuredError(Exception):
    """The run says nothing about lost requests."""


@dataclass
class Server:
    """One etserve process that can be restarted."""

    model: str
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    stops: list[dict[str, Any]] = field(default_factory=list)  # one per restart

    def start(self) -> None:
        """Return when it is ready."""
        command = [sys.executable, "-m", "etserve", "serve", self.model, "--port", str(self.port), "--threads", "1"]
        command += ["--drain-timeout-seconds", str(DRAIN_SECONDS - 10), "--kv-memory-bytes", str(1 << 28)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_until(self.is_ready, READY_SECONDS, f"the server on port {self.port} is not ready; see {self.log}")

    def is_ready(self) -> bool:
        return status_of(f"http://127.0.0.1:{self.port}/health/ready") == 200

    def restart(self) -> None:
        """SIGTERM, wait for the end, start again; keep what was running and how long it took."""
        began, running = time.monotonic(), self.num_running()
        code = self.stop()
        drained = time.monotonic()
        self.start()
        self.stops.append(
            {
                "port": self.port,
                "running_at_sigterm": running,
                "exit_code": code,
                "drain_seconds": round(drained - began, 2),
                "start_seconds": round(time.monotonic() - drained, 2),
            }
        )

    def stop(self) -> int | None:
        """SIGTERM and the exit code; None for a process that had to be killed."""
        if self.process is None or self.process.poll() is not None:
            return None if self.process is None else self.process.returncode
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def num_running(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/load", timeout=5) as response:
            return int(json.load(response)["running"])


def main() -> int:
    options = parse_options()
    try:
        outcome = measure(options)
    except NotMeasuredError as fault:
        print(f"rolling_restart: {fault}", file=sys.stderr)
        return 2
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(outcome, indent=2))
    is_clean = all(stop["exit_code"] == 0 for stop in outcome["restarts"])
    return 0 if is_clean and not outcome["num_failed"] else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--restarts", type=int, default=2, help="Of each server.")
    parser.add_argument("--num-requests", type=int, default=160)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run. Raises NotMeasuredError."""
    if shutil.which("nginx") is None:
        raise NotMeasuredError("nginx is not installed (Debian: apt-get install nginx)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port, *ports = free_ports(3)
        servers = [Server(options.model, one, folder / f"server-{one}.log") for one in ports]
        with contextlib.ExitStack() as stack:
            for server in servers:
                stack.callback(server.stop)
                server.start()
            stack.enter_context(proxy(port, ports, folder))
            with load(options, port, folder / "bench.json") as bench:
                restart_in_turn(servers, options.restarts, bench)
                if bench.wait(600) != 0:
                    raise NotMeasuredError("`etserve bench serve` failed")
        return outcome_of(json.loads((folder / "bench.json").read_text(encoding="utf-8")), servers)


def restart_in_turn(servers: list[Server], num_restarts: int, bench: subprocess.Popen[bytes]) -> None:
    """Restart each server while the other one serves; the load must outlast it, or it would prove nothing."""
    for _ in range(num_restarts):
        for server in servers:
            wait_until(lambda one=server: one.num_running() > 0, 120.0, "no load arrived")
            server.restart()
    if bench.poll() is not None:
        raise NotMeasuredError("the load ended before the last restart: raise --num-requests")


@contextlib.contextmanager
def proxy(port: int, upstreams: list[int], folder: Path) -> Iterator[None]:
    """nginx with the shipped configuration, on loopback."""
    text = PROXY_CONFIG.read_text(encoding="utf-8").replace("listen 8080", f"listen 127.0.0.1:{port}")
    for index, upstream in enumerate(upstreams, start=1):
        text = text.replace(f"etserve-{index}:8000", f"127.0.0.1:{upstream}")
    (folder / "site.conf").write_text(text, encoding="utf-8")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    main_part = f"daemon off; pid {folder}/pid; error_log {folder}/error.log warn; events {{}}"
    if os.geteuid() == 0:
        main_part = "user root; " + main_part  # the worker must reach the temporary folder
    config = f"{main_part} http {{ access_log off; {temporary} include {folder}/site.conf; }}"
    (folder / "nginx.conf").write_text(config, encoding="utf-8")
    process = subprocess.Popen(["nginx", "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"])
    try:
        wait_until(lambda: status_of(f"http://127.0.0.1:{port}/health/ready") == 200, 10.0, "nginx does not answer")
        if process.poll() is not None:
            raise NotMeasuredError("nginx could not be started")
        yield
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(10)


@contextlib.contextmanager
def load(options: argparse.Namespace, port: int, result: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`etserve bench serve` against the proxy."""
    command = [sys.executable, "-m", "etserve", "bench", "serve", "--url", f"http://127.0.0.1:{port}"]
    command += ["--workload", "custom", "--num-requests", str(options.num_requests), "--tokenizer", options.model]
    command += ["--concurrency", str(options.concurrency), "--prompt-tokens", "64", "--warmup", "0"]
    command += ["--output-tokens", str(options.output_tokens), "--seed", "1", "--out", str(result)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def outcome_of(result: dict[str, Any], servers: list[Server]) -> dict[str, Any]:
    """What came of every request and every restart."""
    records = [record for part in result["rounds"] for record in part["records"]]
    errors = [record["error"] for record in records if record.get("error")]
    return {
        "num_requests": len(records),
        "num_failed": len(errors),
        "errors": {kind: errors.count(kind) for kind in sorted(set(errors))},
        "output_tokens": sum(record.get("output_tokens", 0) for record in records),
        "restarts": sorted((stop for server in servers for stop in server.stops), key=lambda stop: str(stop["port"])),
        "commit": commit(),
    }


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listened on a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if re.fullmatch(r"[0-9a-f]+\s*", done.stdout) else "unknown"


def status_of(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def wait_until(condition: Any, seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise NotMeasuredError(otherwise)
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
