"""The kernels that a test runs: the emulator's, built once a session, and with `-m gpu` the device's."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from etserve.kernels.cuda import CudaKernels, load

BUILD = Path(__file__).parents[2] / "csrc" / "build_cuda.sh"
COMPILER = os.environ.get("CXX", "g++")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> CudaKernels:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} to build the emulator with")
    library = tmp_path_factory.mktemp("emulator") / "libetserve_cuda.so"
    built = subprocess.run([BUILD, "emulator", library], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "warning" not in built.stderr, built.stderr
    return CudaKernels(library)


@pytest.fixture(params=[1, 2, pytest.param("device", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Iterator[CudaKernels]:
    """In two orders of execution on the emulator; on a device where there is one."""
    if request.param == "device":
        device = load()
        if device is None or not torch.cuda.is_available():
            pytest.skip("no CUDA device, or built without CUDA")
        yield device
    else:
        emulated: CudaKernels = request.getfixturevalue("emulator")
        emulated.set_emulation_seed(request.param)
        yield emulated
