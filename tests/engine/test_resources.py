"""Cores and memory are what affinity and control groups allow; the pool is sized from them."""

import os
from pathlib import Path
from typing import Any

import pytest

from etserve.config import EngineConfig
from etserve.engine import resources
from etserve.engine.resources import count_cores, fit_context, free_memory_bytes, num_kv_blocks
from etserve.errors import ConfigError

GIB = 1 << 30
BLOCK = 368_640  # bytes of the demo model's KV block


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(resources, "_meminfo_available", lambda: 16 * GIB)
    return tmp_path


def test_without_control_groups_the_system_counts(cgroup: Path) -> None:
    assert count_cores() == 8
    assert free_memory_bytes() == 16 * GIB


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("20000 100000", 1)])
def test_the_cpu_quota_limits_the_cores(cgroup: Path, quota: str, cores: int) -> None:
    write(cgroup, cpu_dot_max=quota)
    assert count_cores() == cores


def test_the_older_cpu_quota_counts_too(cgroup: Path) -> None:
    write(cgroup, cpu__cpu_dot_cfs_quota_us="200000", cpu__cpu_dot_cfs_period_us="100000")
    assert count_cores() == 2
    write(cgroup, cpu__cpu_dot_cfs_quota_us="-1")
    assert count_cores() == 8


def test_the_memory_limit_counts_and_page_cache_gives_way(cgroup: Path) -> None:
    write(cgroup, memory_dot_max=str(4 * GIB), memory_dot_current=str(3 * GIB))
    assert free_memory_bytes() == GIB
    write(cgroup, memory_dot_stat=f"anon 5\ninactive_file {2 * GIB}\n")
    assert free_memory_bytes() == 3 * GIB
    write(cgroup, memory_dot_max="max")
    assert free_memory_bytes() == 16 * GIB


@pytest.mark.parametrize(
    ("settings", "free", "expected_bytes"),
    [
        ({}, 16 * GIB, 2 * GIB),  # the default stays modest
        ({}, 2 * GIB, GIB),  # half of what is free
        ({"memory_fraction": 0.25}, 2 * GIB, GIB // 2),
        ({"kv_memory_bytes": 3 * GIB}, 2 * GIB, 3 * GIB),
        ({"max_num_seqs": 1}, 16 * GIB, 512 * BLOCK),  # no more than can be used
        ({"max_num_seqs": 1, "kv_memory_bytes": 3 * GIB}, 16 * GIB, 512 * BLOCK),
        ({"num_kv_blocks": 7}, 16 * GIB, 7 * BLOCK),
    ],
    ids=str,
)
def test_the_pool_is_sized_by_setting_or_from_free_memory(
    settings: dict[str, Any], free: int, expected_bytes: int
) -> None:
    assert num_kv_blocks(EngineConfig(**settings), BLOCK, 8192, free) == expected_bytes // BLOCK + 1


def test_a_model_with_a_long_context_gets_room_for_two(cgroup: Path) -> None:
    assert num_kv_blocks(EngineConfig(), BLOCK, 131_072, 64 * GIB) == 2 * 8192 + 1


def test_no_memory_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match="no room"):
        num_kv_blocks(EngineConfig(), BLOCK, 8192, 1000)


def test_the_context_is_cut_only_if_nobody_asked_for_it() -> None:
    assert fit_context(EngineConfig(), 101, 8192) == 1600
    assert fit_context(EngineConfig(), 513, 8192) == 8192
    with pytest.raises(ConfigError, match="max_model_len"):
        fit_context(EngineConfig(max_model_len=8192), 101, 8192)
