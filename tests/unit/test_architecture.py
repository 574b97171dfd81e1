"""What import-linter cannot see: importing the planning floors and the front end must not import torch."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "etserve",
    "etserve.control",
    "etserve.config",
    "etserve.sequence",
    "etserve.outputs",
    "etserve.plan",
    "etserve.tokenizer.loading",
    "etserve.models.files",
    "etserve.kv.manager",
    "etserve.scheduler.scheduler",
    "etserve.engine.process",
    "etserve.metrics.recorder",
    "etserve.server.run",
    "etserve.cli.main",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
