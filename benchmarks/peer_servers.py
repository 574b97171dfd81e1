"""The servers that run_peers.py measures: how each is launched, in which precisions, and held until it is its turn."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from export_demo import FOLDER_NAME, FORMATS, export_folder, export_gguf, gguf_name

from etserve.bench.client import Target
from etserve.bench.errors import BenchError
from etserve.bench.session import Server
from etserve.models.files import resolve_model

HERE = Path(__file__).resolve().parent
FIRST_PORT = 18_431
READY_SECONDS = 900.0  # vLLM compiles for minutes at its first start
WAKE_SECONDS = 30.0
GGUF_PRECISIONS = {"bf16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0"}


@dataclass(frozen=True)
class Peer:
    """A server that can be launched: peers/SCRIPT PORT MODEL THREADS."""

    name: str
    script: str
    models: Mapping[str, str]  # precision -> format of the GGUF file, or the folder's name
    variable: str | None = None  # environment variable that says where the peer is

    @property
    def path(self) -> str | None:
        return os.environ.get(self.variable) if self.variable else sys.executable

    def missing(self, precision: str) -> str | None:
        """Why it cannot be measured here in this precision; None when it can."""
        if precision not in self.models:
            return f"it does not run {precision} weights"
        if self.path is None:
            return f"{self.variable} is not set"
        return None if Path(self.path).exists() else f"{self.path} does not exist"


PEERS = [
    Peer("etserve", "etserve.sh", GGUF_PRECISIONS),
    Peer("llama.cpp", "llama_server.sh", GGUF_PRECISIONS, "ETSERVE_PEER_LLAMA_SERVER"),
    # Its GGUF reader knows no bf16: float16 weights, which hold the same numbers, computed with in bf16.
    Peer("OpenVINO", "openvino.sh", {**GGUF_PRECISIONS, "bf16": "f16"}, "ETSERVE_PEER_OPENVINO_PYTHON"),
    Peer("vLLM", "vllm.sh", {"bf16": FOLDER_NAME}, "ETSERVE_PEER_VLLM_PYTHON"),
]


class Running:
    """A launched server in a process group of its own."""

    def __init__(self, peer: Peer, port: int, model: Path, threads: int, log: Path) -> None:
        self.peer = peer
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        began = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [HERE / "peers" / peer.script, str(port), str(model), str(threads)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ETSERVE_PYTHON": sys.executable},
                start_new_session=True,
            )
        try:
            self.wait_ready(READY_SECONDS)
        except BaseException:
            self.end()
            raise
        self.ready_seconds = time.monotonic() - began

    @property
    def server(self) -> Server:
        return Server(self.peer.name, Target(self.url, "demo"), (self.process.pid,))

    def wait_ready(self, seconds: float) -> None:
        """Raises BenchError with the log's last lines if the server ends or does not get ready."""
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
        """Idempotent."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def launched(
    peers: Sequence[Peer], precision: str, *, models: Path, threads: int, logs: Path
) -> Iterator[list[Running]]:
    """Start one server after the other, each held as soon as it is ready. Those that cannot be had are said."""
    running: list[Running] = []
    try:
        for place, peer in enumerate(peers):
            reason = peer.missing(precision)
            if reason is not None:
                print(f"{peer.name}: not measured in {precision}, {reason}")
                continue
            model = exported(models, peer.models[precision])
            logs.mkdir(parents=True, exist_ok=True)
            running.append(Running(peer, FIRST_PORT + place, model, threads, logs / f"{peer.name}.log"))
            running[-1].hold()
            print(f"{peer.name}: ready after {running[-1].ready_seconds:.1f} s", flush=True)
        yield running
    finally:
        for server in running:
            server.end()


def exported(folder: Path, name: str) -> Path:
    """The demo model in the form a peer reads, written if it is not there yet."""
    path = folder / (gguf_name(name) if name in FORMATS else name)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", flush=True)
        unfinished = path.with_name(path.name + ".part")
        if name in FORMATS:
            export_gguf(resolve_model("demo").path, unfinished, name)
        else:
            export_folder(resolve_model("demo").path, unfinished)
        unfinished.rename(path)
    return path
