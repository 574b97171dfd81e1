"""The checks of the images, on made-up answers."""

import subprocess

import pytest

from tests.container import targets


@pytest.mark.parametrize(
    ("code", "said"), [(0, "no tests ran in 0.01s"), (1, "1 failed, 3 passed in 2.00s"), (4, "ERROR: file not found")]
)
def test_a_test_image_whose_suite_does_not_pass_is_found(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    answer(monkeypatch, code, said)
    with pytest.raises(SystemExit):
        targets.check_test(lambda *options: None)


def test_a_test_image_whose_suite_passes_is_told_with_its_number_of_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, 0, "....\n12 passed, 1 warning in 2.00s\n")
    targets.check_test(lambda *options: None)
    assert "12 passed)" in capsys.readouterr().out


def answer(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    """Let every command exit and say so."""
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: subprocess.CompletedProcess(command, code, said))
