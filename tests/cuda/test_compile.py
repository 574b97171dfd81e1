"""Every kernel compiles for every target, and no more of its values live in memory than resources.tsv records.

`python -m tests.cuda.test_compile` compiles and writes the table anew.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from etserve.kernels.cuda import CudaKernels
from tests.cuda.conftest import BUILD

TABLE = Path(__file__).with_name("resources.tsv")
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
REGISTER_SLACK = 16  # another release of nvcc may allocate a little differently
NVCC = os.environ.get("NVCC", "nvcc")


class Resources(NamedTuple):
    """What ptxas says of one kernel on one target."""

    registers: int
    spill_bytes: int


Key = tuple[str, str]  # kernel with its template arguments, target


def parse(report: str) -> dict[Key, Resources]:
    """Read the report of `ptxas -v`."""
    found: dict[Key, Resources] = {}
    entries = re.split(r"Compiling entry function ", report)[1:]
    for entry in entries:
        name = re.match(r"'(\S+)' for '(\S+)'", entry)
        spills, registers = re.search(r"(\d+) bytes spill stores", entry), re.search(r"Used (\d+) registers", entry)
        assert name, entry
        assert spills, entry
        assert registers, entry
        found[kernel_name(name[1]), name[2]] = Resources(int(registers[1]), int(spills[1]))
    return found


def kernel_name(mangled: str) -> str:
    """`draw<Bf16>` of a mangled name, whose namespace changes with the file's path."""
    plain = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    own = plain.split("(anonymous namespace)::", 1)[1] if "(anonymous namespace)::" in plain else plain
    return re.sub(r"\(.*", "", own.replace("etserve::cuda::", "")).strip().replace(", ", ",")


def recorded() -> dict[Key, Resources]:
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return {(kernel, target): Resources(int(registers), int(spills)) for kernel, target, registers, spills in rows}


def compile_all(library: Path) -> dict[Key, Resources]:
    built = subprocess.run([BUILD, "device", library], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return parse(built.stderr)


@pytest.mark.skipif(shutil.which(NVCC) is None or shutil.which("c++filt") is None, reason="no nvcc, or no c++filt")
@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_all_kernels_compile_for_all_targets_within_the_recorded_resources(tmp_path: Path) -> None:
    library = tmp_path / "libetserve_cuda.so"
    found, expected = compile_all(library), recorded()
    assert found.keys() == expected.keys()
    worse = {
        key: (now, expected[key])
        for key, now in found.items()
        if now.spill_bytes > expected[key].spill_bytes or now.registers > expected[key].registers + REGISTER_SLACK
    }
    assert not worse
    assert CudaKernels(library).device_type == "cuda"  # loads without a driver


def test_the_recorded_table_has_every_kernel_for_every_target() -> None:
    table = recorded()
    kernels = {kernel for kernel, _ in table}
    assert set(table) == {(kernel, target) for kernel in kernels for target in TARGETS}
    for name in ("measure_chunk", "merge_chunks", "draw", "normalise", "gate_up", "rotate", "attend_partition"):
        assert any(kernel.split("<")[0] == name for kernel in kernels), name


def test_a_spill_is_read_from_the_report() -> None:
    report = """ptxas info    : Compiling entry function '_ZN7etserve4cuda4drawIfEEvv' for 'sm_90'
    24 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 33024 bytes smem"""
    assert list(parse(report).values()) == [Resources(255, 20)]


def write_table(found: dict[Key, Resources]) -> None:
    """Replace the recorded table."""
    rows = [f"{kernel}\t{target}\t{r.registers}\t{r.spill_bytes}" for (kernel, target), r in sorted(found.items())]
    TABLE.write_text("\n".join(["kernel\ttarget\tregisters\tspill_bytes", *rows]) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a report that is there already
        write_table(parse(Path(sys.argv[1]).read_text()))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_table(compile_all(Path(folder) / "libetserve_cuda.so"))
