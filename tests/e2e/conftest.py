"""One live server with the demo model, started by the command that users type."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            body = reply.read().decode()
            return json.loads(body) if "json" in reply.headers["content-type"] else body

    def metric(self, name: str) -> float:
        """Sum over the labels of one metric family's samples called exactly `name`."""
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").splitlines()
            if line.startswith((name + " ", name + "{"))
        ]
        return sum(values)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(log: Path, *arguments: str, model: str = "demo") -> Server:
    port = free_port()
    command = [sys.executable, "-m", "etserve", "serve", model, "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{log.read_text()}")
        try:
            server.get("/health/ready")
            return server
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    process.kill()
    raise AssertionError(f"not ready in time:\n{log.read_text()}")


def stop_server(server: Server) -> int:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    return server.process.wait(timeout=60)


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("server") / "server.log", "--num-kv-blocks", "1200")
    yield server
    assert stop_server(server) == 0, server.log.read_text()
