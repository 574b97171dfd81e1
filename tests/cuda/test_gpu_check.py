"""The parts of `make gpu-check` that run without a GPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import check, decoding, kernels
from benchmarks.gpu.models import SHAPES, write_model
from benchmarks.gpu.tables import write_table
from etserve.kernels.cuda import CudaKernels
from etserve.llm import LLM


def test_a_random_model_of_a_given_shape_loads_and_is_the_same_each_time(tmp_path: Path) -> None:
    size = write_model(tmp_path / "a", SHAPES["tiny"])
    write_model(tmp_path / "b", SHAPES["tiny"])
    first, second = (tmp_path / name / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    llm = LLM(str(tmp_path / "a"), max_model_len=64)
    assert llm.info.num_parameters * 2 == size
    assert llm.info.architecture == "LlamaForCausalLM"
    row = decoding.measure(llm, "tiny", 2, 8, 3, size)
    assert row["tokens/s"] > 0.0


def test_the_big_shapes_are_those_of_the_models_they_are_named_after() -> None:
    for name, billions in (("1b", 1.5), ("8b", 8.0)):  # the head is not tied here
        shape = SHAPES[name]
        matrices = shape.hidden_size * (
            shape.head_dim * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads)
            + 3 * shape.intermediate_size
        )
        total = shape.num_hidden_layers * matrices + 2 * shape.vocab_size * shape.hidden_size
        assert total == pytest.approx(billions * 1e9, rel=0.02)


def test_tables_hold_every_row_and_refuse_others(tmp_path: Path) -> None:
    path = write_table(tmp_path, "t", [{"a": 1, "b": 2.34567}, {"a": "x", "b": 0.0}])
    assert path.read_text().splitlines() == ["| a | b |", "| --- | --- |", "| 1 | 2.346 |", "| x | 0 |"]
    assert (tmp_path / "t.jsonl").read_text().count("\n") == 2
    with pytest.raises(ValueError, match="columns"):
        write_table(tmp_path, "t", [{"a": 1}, {"b": 1}])


def test_the_kernel_benchmark_runs_every_way_on_the_emulator(emulator: CudaKernels) -> None:
    rows = [*kernels.row_pass_rows(emulator, 2, 1000, 1e9, 1), *kernels.decode_rows(emulator, 1, 640, 1e9, 1)]
    ways = [row["way"].split(",")[0] for row in rows]
    assert ways == ["ours", "torch", "dense", "newest third", "sketch"]
    assert "35% kept" in rows[3]["way"]  # 14 of 40 blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_it_says_so_and_checks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--out", str(tmp_path / "out")]) == 2
    assert "nothing was checked" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_or_takes_too_long_is_told(tmp_path: Path) -> None:
    for command, limit, verdict in (
        ("print('fine')", 600, "ok"),
        ("raise SystemExit(3)", 600, "exit code 3"),
        ("import time; time.sleep(60)", 1, "longer than 1 s"),
    ):
        row = check.run(check.Part("part", (sys.executable, "-c", command), limit), tmp_path)
        assert row["verdict"] == verdict
    missing = check.run(check.Part("part", ("/nonexistent",), 1), tmp_path)
    assert "No such file" in missing["verdict"]


ABLATE = """
import sys
from pathlib import Path
from etserve.bench.ablate.store import Store
out = Path(sys.argv[sys.argv.index("--out") + 1])
Store(out, {"model": sys.argv[2]})
(out / "report.md").write_text(sys.argv[2])
"""  # refuses a folder as the real one does


def test_a_second_run_into_the_same_folder_passes_and_replaces_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Path] = []
    every_part = check.parts

    def ablation_alone(*paths: Path) -> list[check.Part]:
        return [replace(part, limit_seconds=600) for part in every_part(*paths) if part.name == "ablation"]

    (tmp_path / "ablate.py").write_text(ABLATE)
    monkeypatch.setattr(check, "find_fault", lambda: None)
    monkeypatch.setattr(check, "write_model", lambda folder, shape, device: models.append(folder))
    monkeypatch.setattr(check, "_etserve", lambda: (sys.executable, str(tmp_path / "ablate.py")))
    monkeypatch.setattr(check, "parts", ablation_alone)
    for _ in range(2):
        assert check.main(["--out", str(tmp_path / "out")]) == 0
        assert (tmp_path / "out" / "ablation" / "report.md").read_text() == str(models[-1])
    assert models[0] != models[1]


def test_the_parts_of_a_real_run_fit_into_eight_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.shutil, "which", lambda name: f"/bin/{name}")
    found = check.parts(tmp_path, tmp_path, tmp_path)
    assert [part.name for part in found] == ["build", "tests", "sanitizer", "kernels", "decoding", "ablation"]
    assert sum(part.limit_seconds for part in found) <= 480
