"""Run the image hardened, ask it, and stop it under a running stream."""

import contextlib
import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.container.shell import capture, expect

PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
NAME = f"etserve-check-{os.getpid()}"
KEY = "container-test-key"
HARDENED = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:size=64m,mode=1777", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--memory", "3g", "--pids-limit", "512"),
    *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--network", "host"),
)
STREAM_TOKENS = 300  # some seconds on a fast machine, half a minute on a busy one
START_SECONDS, ANSWER_SECONDS, DRAIN_SECONDS = 180.0, 120.0, 90.0
HARDENING = (
    ("id -u; id -g", "10001\n10001", "runs as 10001:10001"),
    ("grep -cE '^Cap(Prm|Eff|Bnd):.0{16}$' /proc/self/status", "3", "has no capability"),
    ("grep NoNewPrivs /proc/self/status | tr -dc 01", "1", "cannot gain privileges"),
    ("touch /app/x 2>/dev/null || echo refused", "refused", "cannot write to its root file system"),
    ("touch /models/x 2>/dev/null || echo refused", "refused", "cannot write to the models"),
    ("touch /tmp/x && rm /tmp/x && echo written", "written", "can write to /tmp"),
    ("command -v gcc g++ cc c++ ld as make pip pip3 || echo none", "none", "holds no compiler and no pip"),
    ("cat /proc/1/comm", "tini", "has tini as process 1"),
)


def check(image: str, model: Path, port: int) -> None:
    """Every check of the running container; SystemExit(1) at the first that does not hold."""
    with container(image, model, port):
        began = time.monotonic()
        until(lambda: health_check() == 0, START_SECONDS, "the health check passes")
        print(f"      {time.monotonic() - began:.1f} s after the start")
        for script, wanted, what in HARDENING:
            expect(inside(script) == wanted, what)
        status, body = post(port, {"prompt": "The sea is", "max_tokens": 8, "temperature": 0})
        expect(status == 200 and body["usage"]["completion_tokens"] == 8, f"answers a completion ({status})")
        expect(post(port, {"prompt": "x"}, key="wrong")[0] == 401, "refuses a wrong key")
        expect(inside("etserve doctor --no-measure > /dev/null; echo $?") == "0", "doctor finds nothing wrong inside")
        check_drain(port)


def check_drain(port: int) -> None:
    """SIGTERM while a stream runs: it ends by itself, new requests are refused, the exit code is 0."""
    stream = Stream(port, num_tokens=STREAM_TOKENS)
    until(lambda: stream.num_tokens > 0, ANSWER_SECONDS, "a stream runs")
    subprocess.run([*PODMAN, "kill", "--signal", "TERM", NAME], check=True, capture_output=True)
    until(lambda: post(port, {"prompt": "x", "max_tokens": 1})[0] == 503, 10.0, "SIGTERM: new requests get 503")
    seen = stream.num_tokens
    expect(not stream.is_done, f"the stream goes on meanwhile ({seen} of {STREAM_TOKENS} tokens so far)")
    expect(health_check() != 0, "the health check says that it drains")
    stream.thread.join(DRAIN_SECONDS)
    expect(
        stream.is_done and stream.num_tokens == STREAM_TOKENS,
        f"the stream in flight finishes ({stream.num_tokens} tokens)",
    )
    code = capture(*PODMAN, "wait", NAME)
    expect(code == "0", f"the exit code is 0 (is {code})")


@contextlib.contextmanager
def container(image: str, model: Path, port: int) -> Iterator[None]:
    """Start it with the model's folder as the read-only volume; in the end print its log and remove it."""
    options = ["-v", f"{model.parent}:/models:ro", "-e", f"ETSERVE_API_KEYS={KEY}", "-e", f"ETSERVE_PORT={port}"]
    options += ["-e", "ETSERVE_HOST=127.0.0.1", "-e", f"ETSERVE_MODEL=/models/{model.name}", "-e", "ETSERVE_THREADS=2"]
    options += ["-e", "ETSERVE_SERVED_MODEL_NAME=demo", "-e", "ETSERVE_DRAIN_TIMEOUT_SECONDS=80"]
    command = [*PODMAN, "run", "--detach", "--name", NAME, *HARDENED, *options, image]
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        done = subprocess.run([*PODMAN, "logs", NAME], capture_output=True, text=True, check=False)
        print("--- the container's log\n" + done.stdout + done.stderr + "---", flush=True)
        subprocess.run([*PODMAN, "rm", "--force", "--time", "5", NAME], capture_output=True, check=False)


def inside(script: str) -> str:
    """What a shell in the container prints."""
    done = subprocess.run([*PODMAN, "exec", NAME, "sh", "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def health_check() -> int:
    """The image's own HEALTHCHECK, run once."""
    return subprocess.run([*PODMAN, "healthcheck", "run", NAME], capture_output=True, check=False).returncode


def until(condition: Any, seconds: float, what: str) -> None:
    deadline, state = time.monotonic() + seconds, "running"
    while not (holds := bool(condition())) and state == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
        state = capture(*PODMAN, "inspect", "--format", "{{.State.Status}}", NAME)
    expect(holds, what if holds else f"{what} (waited {seconds:.0f} s at most; the container is {state})")


def post(port: int, body: dict[str, Any], key: str = KEY) -> tuple[int, Any]:
    """Status and JSON of a completion; (0, None) if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), _headers(key))
        response = connection.getresponse()
        return response.status, json.load(response)
    except (OSError, ValueError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()


class Stream:
    """A streamed completion, read in a thread of its own."""

    def __init__(self, port: int, num_tokens: int) -> None:
        self.num_tokens = 0
        self.is_done = False
        self._port, self._asked = port, num_tokens
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": self._asked, "stream": True, "ignore_eos": True}
        body |= {"temperature": 0, "entropic": {"trace": "tokens"}}  # one event entry per token, whatever its text
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), _headers(KEY))
        for line in connection.getresponse():
            if line.startswith(b"data: [DONE]"):
                self.is_done = True
            elif line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                self.num_tokens += len(choice.get("entropic", {}).get("tokens", ()))
        connection.close()


def _headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
