"""The commands: what they print, and what their exit codes say."""

import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from etserve import __version__
from etserve.cli import options
from etserve.cli.config import as_toml
from etserve.cli.main import run
from etserve.config import Config, EngineConfig, ServerConfig, load_config
from etserve.errors import ConfigError, EngineUnavailableError, ModelError, OverloadedError, RequestError

Capture = pytest.CaptureFixture[str]
COMMANDS = ["serve", "generate", "chat", "models", "doctor", "healthcheck", "version", "config", "bench"]


def fault(capsys: Capture) -> str:
    """The one line on standard error."""
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("etserve: ")
    return line


def test_help_lists_every_command(capsys: Capture) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in shown] == []


@pytest.mark.parametrize(
    "command", [*[[name] for name in COMMANDS], ["bench", "serve"], ["bench", "compare"], ["config", "show"]]
)
def test_every_command_has_help(command: list[str], capsys: Capture) -> None:
    assert run([*command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_help_needs_neither_torch_nor_the_web_nor_numpy() -> None:
    heavy = ("torch", "numpy", "fastapi", "uvicorn", "aiohttp", "transformers", "tokenizers", "matplotlib", "scipy")
    program = (
        "import sys; from etserve.cli.main import run; code = run(['serve', '--help']);"
        f"sys.exit(code or ', '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_names_etserve_and_its_engine(capsys: Capture) -> None:
    assert run(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"etserve {__version__} (Python 3.")


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etserve", "config", "show", "--port", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "server.port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--no-such-option"],
        ["nonsense"],
        ["serve", "--port", "70000"],
        ["serve", "--config", "/nowhere/etserve.toml"],
        ["generate", "hi", "--max-tokens", "0"],
        ["generate", "hi", "--top-p", "0"],
        ["generate", "", "--model", "demo"],
        ["models", "--path", "/nowhere"],
        ["healthcheck", "--url", "ftp://x"],
        ["bench", "serve", "--workload", "W9"],
        ["bench", "serve", "--extra-body", "[]"],
        ["bench", "serve", "--workload", "W1", "--concurrency", "3"],
        ["bench", "serve", "--workload", "custom"],
        ["bench", "compare"],
        ["bench", "compare", "/nowhere.json"],
        ["bench", "compare", "--url", "http://127.0.0.1:1"],
        ["chat", "--url", "127.0.0.1:8000"],
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(arguments: list[str], capsys: Capture) -> None:
    assert run(arguments) == 2
    assert fault(capsys)


@pytest.mark.parametrize(
    "command", [["serve", "/nowhere/model"], ["generate", "hi", "-m", "/nowhere/model"], ["chat", "/nowhere/model"]]
)
def test_a_missing_model_is_one_line_and_exit_code_3(command: list[str], capsys: Capture) -> None:
    assert run(command) == 3
    captured = capsys.readouterr().err
    assert captured.splitlines()[-1] == "etserve: /nowhere/model: No such file or directory"
    assert "Traceback" not in captured


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigError("c"), 2),
        (RequestError("r"), 2),
        (ModelError("m"), 3),
        (EngineUnavailableError("e"), 70),
        (OverloadedError("o", 1.0), 70),
        (KeyError("bug"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_fault_has_its_exit_code_and_no_traceback(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*args: object) -> None:
        raise raised

    monkeypatch.setattr("etserve.cli.config.as_toml", fail)
    assert run(["config", "show"]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == (0 if isinstance(raised, KeyboardInterrupt) else 1)


def test_debug_shows_where_an_internal_error_came_from(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("etserve.cli.config.as_toml", lambda *_: 1 // 0)
    assert run(["--debug", "config", "show"]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_every_setting_but_the_secret_ones_has_a_flag_with_help() -> None:
    for section, struct, helps in (
        ("engine", EngineConfig, options.ENGINE_HELP),
        ("server", ServerConfig, options.SERVER_HELP),
    ):
        assert set(options.flag_fields(section)) | options.SECRET_FIELDS | options.OWN_FIELDS >= set(
            struct.__struct_fields__
        )
        assert set(helps) == set(options.flag_fields(section))


def test_flags_reach_the_setting_they_name(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETSERVE_THREADS", "5")
    monkeypatch.setenv("ETSERVE_PORT", "1")
    arguments = [
        "some/model",
        "--port",
        "9",
        "--no-prefix-caching",
        "--memory-fraction",
        "0.25",
        "--allowed-hosts",
        "a,b",
    ]
    assert run(["config", "show", *arguments]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["engine"]["model"] == "some/model"
    assert (shown["engine"]["threads"], shown["server"]["port"]) == (5, 9)
    assert (shown["engine"]["prefix_caching"], shown["engine"]["memory_fraction"]) == (False, 0.25)
    assert shown["server"]["allowed_hosts"] == ["a", "b"]


def test_what_config_show_prints_is_a_file_that_means_the_same(tmp_path: Path) -> None:
    config = load_config(
        None,
        {"engine": {"model": 'odd "name"\\', "num_kv_blocks": 7}, "server": {"drain_timeout_seconds": 1.5}},
        {"ETSERVE_API_KEYS": "very-secret"},
    )
    text = as_toml(config)
    assert "very-secret" not in text
    (tmp_path / "shown.toml").write_text(text, encoding="utf-8")
    again = load_config(tmp_path / "shown.toml", environment={})
    assert again == msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, api_keys=()))
    assert load_config(tmp_path / "shown.toml", environment={}) != Config()


def test_models_lists_what_lies_under_a_path(capsys: Capture) -> None:
    unit_model = Path(__file__).parents[1] / "data" / "unit_model"
    assert run(["models", "--path", str(unit_model.parent)]) == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert "unit_model" in shown
    assert "safetensors" in shown
