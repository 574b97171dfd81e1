import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from etserve.kernels import matrix, native
from tests.kernels.isas import num_threads

__all__ = ["num_threads"]
cpu = native.module()


@pytest.mark.parametrize("items", [0, 1, 2, 37])
def test_every_item_is_handed_out_once_between_two_barriers(num_threads: int, items: int) -> None:
    assert cpu.num_threads() == num_threads
    assert cpu.exercise_team(500, items) == 500 * items


def test_a_pool_that_has_slept_runs_again(num_threads: int) -> None:
    for pause in (0.0, 0.01, 0.0):
        time.sleep(pause)
        assert cpu.exercise_team(3, 5) == 15


def test_more_threads_than_cores_still_finish() -> None:
    native.set_num_threads(7)
    assert cpu.exercise_team(20, 100) == 2000
    native.set_num_threads(1)


@pytest.mark.parametrize("count", [0, -1, 513])
def test_an_absurd_number_of_threads_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        native.set_num_threads(count)


def test_callers_on_several_python_threads_take_turns() -> None:
    native.set_num_threads(2)
    weight = matrix.pack(torch.randn(100, 64))
    inputs = [torch.randn(3, 64) for _ in range(40)]
    expected = [matrix.linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda x: matrix.linear(x, weight), inputs))
    native.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def _import_with(wish: str) -> subprocess.CompletedProcess[str]:
    code = "from etserve.kernels import native; print(native.isa())"
    return subprocess.run(
        [sys.executable, "-c", code], env={"ETSERVE_ISA": wish}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("wish", cpu.available_isas())
def test_the_environment_chooses_the_instruction_set(wish: str) -> None:
    assert _import_with(wish).stdout.strip() == wish


def test_an_unknown_instruction_set_stops_the_import_and_says_what_is_known() -> None:
    result = _import_with("sse9")
    assert result.returncode != 0
    assert "ETSERVE_ISA must be generic, avx2 or avx512, got 'sse9'" in result.stderr


def test_switching_to_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="sse9"):
        cpu.use_isa("sse9")


def test_ceilings_are_measured() -> None:
    assert native.measure_bandwidth(1 << 22, 0.01) > 0.0
    assert native.measure_matrix_rate(torch.bfloat16, 0.01) > 0.0
    assert native.measure_matrix_rate(torch.float32, 0.01) > 0.0
    with pytest.raises(ValueError, match="some time"):
        native.measure_matrix_rate(torch.float32, 0.0)
