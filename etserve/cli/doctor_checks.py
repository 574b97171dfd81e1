"""The findings of `etserve doctor`, each with a verdict. Numbers are of this process' own limits: affinity, cgroups."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from etserve import __version__
from etserve.cli.doctor_model import Fit, fit_model
from etserve.config import EngineConfig
from etserve.engine.resources import count_cores, free_memory_bytes
from etserve.errors import ConfigError, ModelError
from etserve.kernels import native

Status = Literal["ok", "warn", "fail"]
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
GIB = float(1 << 30)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: a section, a name with its unit, the plain value, how it reads, and the verdict on it."""

    section: str
    name: str
    value: Any
    shown: str
    status: Status = "ok"

    def as_json(self) -> dict[str, Any]:
        """Without the text for people, save where something is wrong."""
        fields = {"section": self.section, "name": self.name, "value": self.value, "status": self.status}
        return fields if self.status == "ok" else {**fields, "message": self.shown}


def examine(config: EngineConfig, *, measure: bool) -> Iterator[Finding]:
    """Yield findings as they are made; the slow ones come last."""
    yield from _build()
    yield from _cpu(config)
    yield from _cores(config)
    free = free_memory_bytes()
    yield Finding("memory", "free_bytes", free, f"{free / GIB:.1f} GiB that this process may still take")
    bandwidth = None
    if measure and native.is_available() and not _isa_fault():
        for finding in _measured(config):
            bandwidth = finding.value if finding.name == "read_bytes_per_second" else bandwidth
            yield finding
    yield from _model(config, free, bandwidth)


def _build() -> Iterator[Finding]:
    yield Finding("build", "etserve", __version__, __version__)
    yield Finding("build", "python", platform.python_version(), f"{platform.python_version()} on {platform.platform()}")
    yield Finding("build", "torch", metadata.version("torch"), metadata.version("torch"))


def _cpu(config: EngineConfig) -> Iterator[Finding]:
    model, flags = _cpuinfo()
    features = [name for name in FEATURES if name in flags]
    yield Finding("cpu", "model", model, model)
    yield Finding("cpu", "features", features, " ".join(features) or "none of those that kernels here use")
    if not native.is_available():
        status: Status = "fail" if config.backend == "native" else "warn"
        yield Finding("cpu", "native", False, "etserve._cpu is not built: only the slow torch reference runs", status)
        return
    fault = _isa_fault()
    if fault:
        yield Finding("cpu", "isa", None, f"ETSERVE_ISA={os.environ.get('ETSERVE_ISA', '')}: {fault}", "fail")
        return
    module = native.module()
    built = datetime.fromtimestamp(Path(module.__file__).stat().st_mtime, UTC).isoformat(timespec="seconds")
    yield Finding("cpu", "native", True, f"built {built}")
    chosen, possible = native.isa(), list(module.available_isas())
    status = "ok" if chosen == possible[-1] else "warn"
    best = "" if status == "ok" else f"; this processor also runs {possible[-1]}"
    if chosen == "generic":
        status, best = "warn", best or "; no vector instructions that the fast kernels need"
    yield Finding("cpu", "isa", chosen, f"{chosen} of {', '.join(possible)}{best}", status)


def _isa_fault() -> str:
    """Why the native module refuses to be imported; empty if it does not."""
    try:
        native.module()
    except ImportError as error:
        return str(error)
    return ""


def _cores(config: EngineConfig) -> Iterator[Finding]:
    allowed, total = count_cores(), os.cpu_count() or 1
    yield Finding("cpu", "cores", allowed, f"{allowed} of {total}, by affinity and control group")
    threads = config.threads or allowed
    status: Status = "warn" if threads > allowed else "ok"
    note = " (more than cores: they wait for each other)" if status == "warn" else ""
    yield Finding("cpu", "threads", threads, f"{threads}{note}", status)


def _measured(config: EngineConfig) -> Iterator[Finding]:
    """Ceilings, measured now with the threads that a start would use; other load on the machine lowers them."""
    import torch

    native.set_num_threads(config.threads or count_cores())
    rate = native.measure_bandwidth()
    yield Finding("measured", "read_bytes_per_second", rate, f"{rate / 1e9:.1f} GB/s from memory")
    for name, dtype in (("f32_flops", torch.float32), ("bf16_flops", torch.bfloat16)):
        rate = native.measure_matrix_rate(dtype)
        yield Finding("measured", name, rate, f"{rate / 1e9:.0f} GFLOP/s")


def _model(config: EngineConfig, free: int, bandwidth: float | None) -> Iterator[Finding]:
    try:
        fit = fit_model(config, free)
    except (ModelError, ConfigError) as fault:
        yield Finding("model", "fits", False, str(fault), "fail")
        return
    parameters = f"{fit.name}: {fit.architecture}, {fit.num_parameters / 1e6:,.0f} M parameters, {fit.dtype}"
    yield Finding("model", "num_parameters", fit.num_parameters, parameters)
    yield Finding("model", "weight_bytes", fit.weight_bytes, f"{fit.weight_bytes / GIB:.2f} GiB")
    yield Finding("model", "kv_bytes_per_token", fit.kv_bytes_per_token, f"{fit.kv_bytes_per_token:,} ({fit.kv_dtype})")
    pool = f"{fit.kv_cache_bytes / GIB:.2f} GiB, {fit.num_kv_blocks:,} blocks of {fit.block_size} tokens"
    yield Finding("model", "kv_cache_bytes", fit.kv_cache_bytes, pool)
    yield from _context(fit)
    if bandwidth:
        most = bandwidth / fit.weight_bytes
        yield Finding("model", "tokens_per_second_bound", most, f"{most:.0f} for one sequence (bandwidth / weights)")
    yield _memory_verdict(fit, free)


def _context(fit: Fit) -> Iterator[Finding]:
    shortened = fit.max_model_len < fit.wanted_model_len
    note = f", shortened from {fit.wanted_model_len:,}: the KV cache holds no more" if shortened else ""
    num_full = fit.num_kv_blocks * fit.block_size / fit.max_model_len
    text = f"{fit.max_model_len:,} tokens{note}; {num_full:.1f} such sequences fit at once"
    yield Finding("model", "max_model_len", fit.max_model_len, text, "warn" if shortened else "ok")


def _memory_verdict(fit: Fit, free: int) -> Finding:
    needed = fit.weight_bytes + fit.kv_cache_bytes
    text = f"{needed / GIB:.2f} of {free / GIB:.2f} GiB"
    if needed > free:
        return Finding("model", "fits", False, f"needs {text} that are free", "fail")
    return Finding("model", "fits", True, f"takes {text} that are free")


def _cpuinfo() -> tuple[str, frozenset[str]]:
    """The processor's name and its feature flags."""
    fields: dict[str, str] = {}
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    model = fields.get("model name") or platform.processor() or platform.machine()
    return model, frozenset((fields.get("flags") or fields.get("Features") or "").split())
