"""Where settings came from, how a container asks for health, and completion in the shell."""

import http.server
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from etserve.cli.main import run
from etserve.config import setting_origins

Capture = pytest.CaptureFixture[str]


class _Server(http.server.BaseHTTPRequestHandler):
    """Ready under the Host name `etserve.example` or its own; live under any."""

    def do_GET(self) -> None:
        is_known = self.headers["host"].split(":")[0] in ("127.0.0.1", "etserve.example")
        is_ready = is_known and self.path == "/health/ready" and not getattr(self.server, "is_draining", False)
        self.send_response(200 if is_ready or self.path == "/health/live" else 503)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    running = http.server.HTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def line_of(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} = "))
    return line


def test_config_show_says_where_each_value_came_from(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "etserve.toml"
    path.write_text("[engine]\nthreads = 1\nmax_num_seqs = 64\n[server]\nport = 1\n", encoding="utf-8")
    monkeypatch.setenv("ETSERVE_PORT", "2")
    monkeypatch.setenv("ETSERVE_LOG_LEVEL", "error")
    assert run(["config", "show", "some/model", "--config", str(path), "--log-level", "debug"]) == 0
    shown = capsys.readouterr().out
    assert line_of(shown, "model") == 'model = "some/model"  # flag'
    assert line_of(shown, "threads") == "threads = 1  # file"
    assert line_of(shown, "max_num_seqs") == "max_num_seqs = 64  # file"  # set, though to the default
    assert line_of(shown, "port") == "port = 2  # environment"
    assert line_of(shown, "log_level") == 'log_level = "debug"  # flag'
    assert line_of(shown, "host") == 'host = "127.0.0.1"  # default'
    assert tomllib.loads(shown)["server"]["port"] == 2


def test_a_flag_that_was_not_given_is_no_origin() -> None:
    assert setting_origins(None, {"server": {"port": None, "host": "::1"}}, {}) == {"server": {"host": "flag"}}


def test_the_health_check_finds_the_port_and_the_host_name_in_the_servers_environment(
    server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETSERVE_PORT", str(server.server_port))
    monkeypatch.setenv("ETSERVE_HOST", "0.0.0.0")
    assert run(["healthcheck"]) == 0
    monkeypatch.setenv("ETSERVE_ALLOWED_HOSTS", "etserve.example,other.example")
    assert run(["healthcheck"]) == 0
    monkeypatch.setenv("ETSERVE_ALLOWED_HOSTS", "other.example")
    assert run(["healthcheck"]) == 1


def test_the_health_check_tells_ready_from_live(server: http.server.HTTPServer, capsys: Capture) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    assert run(["healthcheck", "--url", url]) == 0
    server.is_draining = True  # type: ignore[attr-defined]
    assert run(["healthcheck", "--url", url]) == 1
    assert "answers 503" in capsys.readouterr().err
    assert run(["healthcheck", "--url", url, "--live"]) == 0


def test_the_health_check_of_a_server_that_is_gone_fails(capsys: Capture) -> None:
    assert run(["healthcheck", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("etserve he", "healthcheck"), ("etserve config s", "show"), ("etserve serve --max-num", "-seqs")],
)
def test_the_shell_completes_commands_and_options(typed: str, wanted: str) -> None:
    variables = {"_ETSERVE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    program = "import sys; sys.argv = ['etserve']; from etserve.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert wanted in done.stdout, done.stderr


def test_the_completion_script_can_be_printed() -> None:
    program = "import sys; sys.argv = ['etserve', '--show-completion', 'bash']; import etserve.cli.main as m; m.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "_ETSERVE_COMPLETE=complete_bash" in done.stdout
