"""A schema made to blow up costs bounded time and memory: llguidance's limits hold, so that no process need die."""

import resource
import subprocess
import sys

import pytest

from tests.engine.grammar_attack import SCHEMAS

MAX_CPU_SECONDS = 60  # of all of them together, in an interpreter of their own; they take one or two
MAX_DATA_BYTES = 1 << 30


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))


def test_schemas_made_to_blow_up_are_refused_limited_or_served_within_time_and_memory() -> None:
    pytest.importorskip("llguidance")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.grammar_attack"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-1000:]
    ends = dict(line.split(": ") for line in done.stdout.splitlines())
    assert ends.keys() == SCHEMAS.keys()
    assert set(ends.values()) <= {"refused", "limited", "ended", "running"}
    assert "refused" in ends.values()  # the limits are reached, not just far away
    assert "running" in ends.values()
