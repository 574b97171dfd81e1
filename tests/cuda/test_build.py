"""When the build takes the CUDA kernels along, and that it says so."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etserve.kernels import cuda

ROOT = Path(__file__).parents[2]
NO_NVCC = "-DCMAKE_CUDA_COMPILER=NOTFOUND"

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Of a project that has nothing but the CUDA part."""
    project = f"cmake_minimum_required(VERSION 3.18)\nproject(part NONE)\ninclude({ROOT}/csrc/cuda/build.cmake)\n"
    (folder / "CMakeLists.txt").write_text(project)
    command = ["cmake", "-S", folder, "-B", folder / "build", f"-DPython_EXECUTABLE={sys.executable}", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_without_nvcc_the_build_goes_on_and_says_so(tmp_path: Path) -> None:
    done = configure(tmp_path, NO_NVCC)
    assert done.returncode == 0, done.stderr
    assert "going on without the CUDA kernels: nvcc was not found" in done.stdout


@pytest.mark.skipif(torch.version.cuda is not None or shutil.which("nvcc") is None, reason="a CUDA torch, or no nvcc")
def test_without_a_cuda_torch_the_build_goes_on_and_says_so(tmp_path: Path) -> None:
    done = configure(tmp_path, f"-DCMAKE_CUDA_COMPILER={shutil.which('nvcc')}")
    assert done.returncode == 0, done.stderr
    assert "going on without the CUDA kernels: no CUDA build of torch" in done.stdout


def test_asked_for_without_nvcc_the_build_fails(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DETSERVE_CUDA=ON", NO_NVCC)
    assert done.returncode != 0
    assert "ETSERVE_CUDA=ON, but nvcc was not found" in done.stderr


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DETSERVE_CUDA=MAYBE")
    assert done.returncode != 0
    assert "must be AUTO, ON or OFF" in done.stderr


def test_an_installation_without_the_library_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "not_built.so")
    cuda.load.cache_clear()
    assert cuda.load() is None
    cuda.load.cache_clear()
