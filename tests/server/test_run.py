"""The life of the server: start, readiness, drain, second signal, engine failure, exit codes."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from etserve.config import ServerConfig
from etserve.errors import ConfigError
from etserve.server.auth import is_loopback
from etserve.server.listening import bind, check_exposure
from tests.server.helpers import events, wait_until

ROOT = Path(__file__).parents[2]


class Service:
    """The server in a process of its own."""

    def __init__(self, **options: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        options["server"] = {"port": self.port, **options.get("server", {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.service_main", json.dumps(options)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def wait_ready(self) -> "Service":
        wait_until(lambda: self.status("/health/ready") == 200 or self.process.poll() is not None, 30)
        return self

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Streaming(threading.Thread):
    """A stream read to its end."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, {"prompt": "a", "max_tokens": max_tokens, "stream": True}
        self.text = ""
        self.start()
        wait_until(lambda: self.text.count("data:") > 2)

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as reply:
            for part in reply.iter_text():
                self.text += part


def test_the_port_answers_while_the_model_loads_and_one_line_tells_of_readiness() -> None:
    with Service(engine={"start_seconds": 1.5}) as service:
        wait_until(lambda: service.status("/health/live") == 200, 30)
        assert service.status("/health/ready") == 503
        assert service.status("/v1/models") == 503
        service.wait_ready()
        service.process.send_signal(signal.SIGTERM)
        out, err = service.process.communicate(timeout=120)
    assert service.process.returncode == 0
    line = re.fullmatch(r"etserve is ready: http://127\.0\.0\.1:(\d+) serves unit \((\d+\.\d) s to start\)\n", out)
    assert line is not None, (out, err)
    assert int(line[1]) == service.port
    assert float(line[2]) >= 1.5
    assert "Traceback" not in err


def test_a_signal_while_loading_ends_the_start() -> None:
    with Service(engine={"start_seconds": 60.0}) as service:
        wait_until(lambda: service.status("/health/live") == 200, 30)
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(20) == 0


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    server = {"drain_delay_seconds": 0.6, "drain_timeout_seconds": 30.0}
    with Service(engine={"step_seconds": 0.02}, server=server) as service:
        service.wait_ready()
        running = Streaming(service.url, 120)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: service.status("/health/ready") == 503)
        # Within the delay: not ready any more, but requests that a router still sends are served.
        early = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert early.status_code == 200
        time.sleep(0.8)
        late = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert late.status_code == 503
        assert "retry-after" in late.headers
        assert service.status("/health/live") == 200
        running.join(20)
        assert events(running.text)[-1] == "[DONE]"
        assert service.process.wait(20) == 0


def test_what_outlasts_the_drain_ends_with_an_error_event() -> None:
    with Service(engine={"step_seconds": 0.02}, server={"drain_timeout_seconds": 0.3}) as service:
        service.wait_ready()
        running = Streaming(service.url, 1500)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        running.join(10)
    last = events(running.text)[-1]
    assert last["error"]["code"] == "aborted"


def test_a_second_signal_ends_at_once() -> None:
    with Service(engine={"step_seconds": 0.05}, server={"drain_timeout_seconds": 600.0}) as service:
        service.wait_ready()
        Streaming(service.url, 1500)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: service.status("/health/ready") == 503)
        assert service.process.poll() is None
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(10) == 1


def test_an_engine_that_failed_for_good_makes_the_server_exit_with_70(tmp_path: Path) -> None:
    trigger = tmp_path / "fail"
    with Service(engine={"trigger": str(trigger)}) as service:
        service.wait_ready()
        trigger.touch()
        wait_until(lambda: service.status("/health/ready") in (503, 0))
        assert service.process.wait(20) == 70


def test_a_model_that_does_not_load_is_the_starts_own_error() -> None:
    with Service(engine={"start_error": "model.safetensors: truncated"}) as service:
        _, err = service.process.communicate(timeout=120)
    assert service.process.returncode == 3
    assert err.strip() == "model.safetensors: truncated"
    with Service(model="/nonexistent") as service:
        _, err = service.process.communicate(timeout=120)
    assert service.process.returncode == 3
    assert len(err.strip().splitlines()) == 1


def test_a_port_in_use_and_an_open_address_without_keys_are_config_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        bind(ServerConfig(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerConfig(host="no.such.host.invalid", port=0))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="API key"):
            check_exposure(ServerConfig(host=host))
        check_exposure(ServerConfig(host=host, insecure=True))
        check_exposure(ServerConfig(host=host, api_keys=("key-of-anna-1234",)))
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        check_exposure(ServerConfig(host=host))
    with Service(server={"host": "0.0.0.0"}) as service:
        assert service.process.wait(30) == 2


def test_the_server_floor_never_imports_torch() -> None:
    code = "import sys, etserve.server.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
