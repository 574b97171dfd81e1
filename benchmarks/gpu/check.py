"""Everything that is to be measured on a GPU, in one run: build, tests, sanitizer, kernels, whole models, ablation.

    python -m benchmarks.gpu.check --out DIR            # on a machine with an NVIDIA GPU: minutes
    python -m benchmarks.gpu.check --out DIR --emulate  # anywhere: tiny sizes on the emulator; no figure means anything
Every part has a time limit and a log in DIR; a part that fails does not stop the others. Exit code 1 if any failed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.models import SHAPES, write_model
from benchmarks.gpu.tables import Row, write_table

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "etserve" / "libetserve_cuda.so"


@dataclass(frozen=True, slots=True)
class Part:
    """One command of the check."""

    name: str
    command: tuple[str, ...]
    limit_seconds: int


def find_fault() -> str | None:
    """Why this machine cannot run the check; None if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None if shutil.which("nvcc") else "nvcc is not on the path"


def parts(out: Path, model: Path, ablation: Path) -> list[Part]:
    """Of a run on a device. `model`: a small random one to ablate, into the empty folder `ablation`."""
    python, tests = sys.executable, ("tests/cuda", "-m", "gpu", "-q", "-p", "no:cacheprovider")
    smoke = ("--device", "cuda", "--preset", "smoke", "--rounds", "1")
    small = "rope or rms or silu or padding or large_scores or guards"
    found = [
        Part("build", (str(ROOT / "csrc" / "build_cuda.sh"), "device", str(LIBRARY)), 120),
        Part("tests", (python, "-m", "pytest", *tests), 90),
        Part("kernels", (python, "-m", "benchmarks.gpu.kernels", "--out", str(out)), 30),
        Part("decoding", (python, "-m", "benchmarks.gpu.decoding", "--out", str(out)), 120),
        Part("ablation", (*_etserve(), "ablate", str(model), *smoke, "--out", str(ablation)), 60),
    ]
    if sanitizer := shutil.which("compute-sanitizer"):
        command = (sanitizer, "--error-exitcode", "9", python, "-m", "pytest", *tests, "-k", small)
        found.insert(2, Part("sanitizer", command, 60))
    return found


def emulated_parts(out: Path) -> list[Part]:
    """What of it runs anywhere."""
    python, library = sys.executable, out / "emulator.so"
    own = (python, "-m", "benchmarks.gpu.decoding", "--out", str(out), "--shapes", "tiny", "--device", "cpu")
    return [
        Part("build", (str(ROOT / "csrc" / "build_cuda.sh"), "emulator", str(library)), 400),
        Part("kernels", (python, "-m", "benchmarks.gpu.kernels", "--out", str(out), "--emulator", str(library)), 120),
        Part("decoding", own, 120),
    ]


def _etserve() -> tuple[str, ...]:
    return sys.executable, "-m", "etserve"


def run(part: Part, out: Path) -> Row:
    """Run it, its output to a log."""
    begin, log = time.monotonic(), out / f"{part.name}.log"
    with log.open("wb") as file:
        try:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                part.command, cwd=ROOT, stdout=file, stderr=file, timeout=part.limit_seconds, env=environment
            )
            verdict = "ok" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            verdict = f"longer than {part.limit_seconds} s"
        except OSError as error:
            verdict = str(error)
    return {"part": part.name, "verdict": verdict, "seconds": time.monotonic() - begin, "log": log.name}


def _run_emulated(out: Path) -> list[Row]:
    return [run(part, out) for part in emulated_parts(out)]


def _run_on_device(out: Path) -> list[Row]:
    """An ablation goes on in the folder that it finds: each run gets one of its own, and leaves the report in `out`."""
    report = out / "ablation"
    if report.exists():
        shutil.rmtree(report)
    with tempfile.TemporaryDirectory() as folder:
        model, ablation = Path(folder) / "model", Path(folder) / "ablation"
        write_model(model, SHAPES["1b"], device="cuda")
        rows = [run(part, out) for part in parts(out, model, ablation)]
        if ablation.exists():
            shutil.copytree(ablation, report)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, 1 if a part failed, 2 where there is no GPU to check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--emulate", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    options = parser.parse_args(arguments)
    if not options.emulate and (fault := find_fault()):
        print(f"gpu-check: nothing was checked: {fault} (--emulate runs without a GPU)", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = _run_emulated(out) if options.emulate else _run_on_device(out)
    print(write_table(out, "summary", rows).read_text())
    return 0 if all(row["verdict"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
