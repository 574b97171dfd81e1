"""`etserve doctor`: what it finds, what it says no to, and that its numbers are those of a real start."""

import json
from pathlib import Path
from typing import Any

import pytest

from etserve.cli import doctor_checks
from etserve.cli.doctor_checks import examine
from etserve.cli.doctor_model import fit_model
from etserve.cli.main import run
from etserve.config import EngineConfig
from etserve.engine.building import build_engine
from etserve.errors import ConfigError, ModelError
from etserve.kernels import native

Capture = pytest.CaptureFixture[str]
UNIT_MODEL = str(Path(__file__).parents[1] / "data" / "unit_model")
MANY_BYTES = 64 << 30
needs_native = pytest.mark.skipif(not native.is_available(), reason="the native module is not built")


def found(config: EngineConfig, measure: bool = False) -> dict[str, Any]:
    return {f"{one.section}.{one.name}": one for one in examine(config, measure=measure)}


@pytest.mark.parametrize(
    ("backend", "dtype", "sketch_bits"),
    [
        ("torch", "float32", 0),
        pytest.param("native", "bfloat16", 0, marks=needs_native),
        pytest.param("native", "bfloat16", 2, marks=needs_native),
    ],
)
def test_the_fit_is_what_an_engine_with_these_settings_takes(backend: Any, dtype: Any, sketch_bits: int) -> None:
    config = EngineConfig(
        model=UNIT_MODEL,
        backend=backend,
        dtype=dtype,
        kv_memory_bytes=1_000_001,
        max_model_len=77,
        max_num_seqs=3,
        pruning_sketch_bits=sketch_bits,
    )
    fit, info = fit_model(config, MANY_BYTES), build_engine(config).info
    assert (fit.num_kv_blocks, fit.kv_cache_bytes) == (info.num_kv_blocks, info.kv_cache_bytes)
    assert (fit.max_model_len, fit.dtype, fit.kv_dtype) == (info.max_model_len, info.dtype, info.kv_dtype)
    assert (fit.num_parameters, fit.architecture, fit.name) == (
        info.num_parameters,
        info.architecture,
        info.model_name,
    )
    assert fit.weight_bytes == pytest.approx(info.weight_bytes, rel=0.05)  # packing pads, norms are f32


def test_a_short_pool_shortens_the_context_with_a_warning() -> None:
    config = EngineConfig(model=UNIT_MODEL, num_kv_blocks=5)
    fit = fit_model(config, MANY_BYTES)
    assert (fit.max_model_len, fit.num_kv_blocks) == (80, 5)
    finding = found(config)["model.max_model_len"]
    assert finding.status == "warn"
    assert "shortened" in finding.shown


def test_weights_beyond_the_free_memory_do_not_fit() -> None:
    config = EngineConfig(model=UNIT_MODEL)
    needed = fit_model(config, MANY_BYTES).weight_bytes
    with pytest.raises(ConfigError, match="weights take"):
        fit_model(config, needed - 1)


def test_a_pool_set_beyond_the_free_memory_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "free_memory_bytes", lambda: 40 << 20)
    config = EngineConfig(model=UNIT_MODEL, num_kv_blocks=100_000)
    assert found(config)["model.fits"].status == "fail"


def test_a_missing_model_is_a_finding_and_exit_code_1(capsys: Capture) -> None:
    assert run(["doctor", "/nowhere/model", "--no-measure"]) == 1
    shown = capsys.readouterr().out
    assert "fail  model    fits" in shown
    assert "/nowhere/model: No such file" in shown
    with pytest.raises(ModelError):
        fit_model(EngineConfig(model="/nowhere/model"), MANY_BYTES)


def test_the_json_holds_plain_values(capsys: Capture) -> None:
    assert run(["doctor", UNIT_MODEL, "--no-measure", "--json", "--threads", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    values = {f"{one['section']}.{one['name']}": one["value"] for one in report["findings"]}
    assert report["ok"] is True
    assert values["cpu.threads"] == 1
    assert values["model.fits"] is True
    assert values["memory.free_bytes"] > values["model.kv_cache_bytes"] > 0
    assert "measured.read_bytes_per_second" not in values


@needs_native
def test_what_is_measured_bounds_the_decode_rate() -> None:
    findings = found(EngineConfig(model=UNIT_MODEL, threads=1), measure=True)
    bandwidth, weights = findings["measured.read_bytes_per_second"].value, findings["model.weight_bytes"].value
    assert bandwidth > 1e8
    assert findings["measured.f32_flops"].value > 1e8
    assert findings["measured.bf16_flops"].value > 1e7
    assert findings["model.tokens_per_second_bound"].value == pytest.approx(bandwidth / weights)


@needs_native
def test_the_instruction_set_in_use_is_named_and_a_weaker_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(EngineConfig(model=UNIT_MODEL))["cpu.isa"]
    assert finding.value == native.isa()
    monkeypatch.setattr(native, "isa", lambda: "generic")
    assert found(EngineConfig(model=UNIT_MODEL))["cpu.isa"].status == "warn"


@pytest.mark.parametrize(("backend", "status"), [("auto", "warn"), ("native", "fail")])
def test_a_build_without_native_kernels_is_said(backend: Any, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert found(EngineConfig(model=UNIT_MODEL, backend=backend), measure=True)["cpu.native"].status == status


def test_more_threads_than_cores_are_a_warning() -> None:
    assert found(EngineConfig(model=UNIT_MODEL, threads=4096))["cpu.threads"].status == "warn"


def test_a_machine_without_cpuinfo_still_gets_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_CPUINFO", Path("/nowhere/cpuinfo"))
    assert found(EngineConfig(model=UNIT_MODEL))["cpu.features"].value == []
