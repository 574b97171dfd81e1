"""What the emulator must find: each mistake of faulty.cu ends the process with the place, or gives wrong results."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cuda.conftest import COMPILER

CSRC = Path(__file__).parents[2] / "csrc"
FAULTY = Path(__file__).with_name("faulty.cu")


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(FAULTY.read_text().splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER}")
    program = tmp_path_factory.mktemp("faulty") / "faulty"
    flags = ("-std=c++20", "-O1", "-DETSERVE_EMULATE", "-Wno-unknown-pragmas")
    sources = ("-x", "c++", FAULTY, CSRC / "cuda" / "emulation.cpp")
    includes = ("-I", CSRC / "cuda", "-I", CSRC / "include")
    subprocess.run([COMPILER, *flags, *includes, *sources, "-o", program], check=True)
    return program


def run(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, case], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})


@pytest.mark.parametrize(
    ("case", "what", "lines"),
    [
        ("divergent_barrier", "divergent barrier", [line_of("// first"), line_of("// second")]),
        ("thread_that_returned", "divergent barrier", [line_of("return;") + 1]),
        ("absent_lane", "divergent barrier or warp operation", [line_of("!= 7")]),
        ("divergent_shuffle", "divergent warp operation", [line_of("// even"), line_of("// odd")]),
        ("partial_mask", "less than all lanes", [line_of("0xffffu")]),
        ("write_behind_the_end", "behind a shared array", []),
        ("too_much_shared_memory", "48 KB", []),
    ],
)
def test_a_misuse_ends_the_process_and_says_where(faulty: Path, case: str, what: str, lines: list[int]) -> None:
    ended = run(faulty, case)
    assert ended.returncode == -signal.SIGABRT
    assert what in ended.stderr
    for line in lines:
        assert f"faulty.cu:{line}" in ended.stderr


@pytest.mark.parametrize("case", ["unwritten_shared_memory", "missing_barrier"])
def test_a_race_gives_wrong_results_in_some_order(faulty: Path, case: str) -> None:
    ended = run(faulty, case)
    assert ended.returncode == 0
    assert int(ended.stdout) > 0


def test_a_correct_kernel_gives_right_results_in_every_order(faulty: Path) -> None:
    ended = run(faulty, "correct")
    assert (ended.returncode, ended.stdout.strip()) == (0, "0"), ended.stderr
