"""What this process may use: cores and memory, as affinity and control groups allow. Linux; no torch."""

import os
from pathlib import Path

from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.errors import ConfigError

DEFAULT_POOL_BYTES = 2 << 30  # what a pool takes by default, however much memory is free
_CGROUP = Path("/sys/fs/cgroup")


def count_cores() -> int:
    """Cores by affinity, at most the control group's CPU quota; at least 1."""
    num_cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return max(1, num_cores if quota is None else min(num_cores, int(quota + 0.5)))


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping: the system's, at most what the control group has left."""
    available = _meminfo_available()
    limit = _first_number(_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes")
    used = _first_number(_CGROUP / "memory.current", _CGROUP / "memory" / "memory.usage_in_bytes")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used + _reclaimable_bytes()))


def num_kv_blocks(config: EngineConfig, block_bytes: int, max_model_len: int, free_bytes: int) -> int:
    """Size the pool, the null block included: as configured, else from free memory and at most what can be used.

    On the CPU the default also stops at 2 GiB (or two full contexts, if that is more): a pool is no surprise.
    Raises ConfigError if there is no room for a single block.
    """
    context_blocks = -(-max_model_len // BLOCK_SIZE)
    if config.num_kv_blocks is not None:
        count = config.num_kv_blocks
    elif config.kv_memory_bytes is not None:
        count = min(config.kv_memory_bytes // block_bytes, config.max_num_seqs * context_blocks)
    else:
        default_bytes = max(DEFAULT_POOL_BYTES, 2 * context_blocks * block_bytes)
        usable_bytes = int(config.memory_fraction * free_bytes)
        if config.device == "cpu":
            usable_bytes = min(usable_bytes, default_bytes)
        count = min(usable_bytes // block_bytes, config.max_num_seqs * context_blocks)
    if count < 1:
        raise ConfigError(f"the KV cache needs at least one block of {block_bytes} bytes; there is no room for it")
    return count + 1


def fit_context(config: EngineConfig, num_blocks: int, model_max_len: int) -> int:
    """The longest sequence to serve. Raises ConfigError if max_model_len was set and the pool cannot hold it."""
    room = (num_blocks - 1) * BLOCK_SIZE
    if room >= model_max_len:
        return model_max_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len {model_max_len} needs {-(-model_max_len // BLOCK_SIZE)} KV blocks of {BLOCK_SIZE} tokens, "
            f"the cache has {num_blocks - 1}: raise kv_memory_bytes (or num_kv_blocks) or lower max_model_len"
        )
    return room


def _cpu_quota() -> float | None:
    text = _read(_CGROUP / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us = _first_number(_CGROUP / "cpu" / "cpu.cfs_quota_us")
    period_us = _first_number(_CGROUP / "cpu" / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _meminfo_available() -> int:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))


def _reclaimable_bytes() -> int:
    """Page cache counted into the control group's use, which gives way to us."""
    text = _read(_CGROUP / "memory.stat") or _read(_CGROUP / "memory" / "memory.stat") or ""
    fields = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _first_number(*paths: Path) -> int | None:
    for path in paths:
        text = _read(path)
        if text is not None and text.lstrip("-").isdigit():
            return int(text)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
