"""Settings: read once from TOML < environment < flags, checked, frozen. The only module that reads the environment."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from etserve.errors import ConfigError

BLOCK_SIZE = 16  # tokens per KV block, of all layers and KV heads; the native kernels are built for it
ENVIRONMENT_PREFIX = "ETSERVE_"

Origin = Literal["default", "file", "environment", "flag"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
HttpUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://\S+$", max_length=2048)]
Fraction = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process is started with."""

    model: str = "demo"  # "demo", a Hugging Face folder, or a .gguf file
    served_model_name: str | None = None  # None: "demo" or the file's own name
    dtype: Dtype = "auto"  # of weights and matrix products; auto: the checkpoint's, bfloat16 for quantised ones
    kv_dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: float32 if dtype is, else bfloat16
    backend: Literal["auto", "native", "torch"] = "auto"  # auto: native where csrc is built; torch: the slow oracle
    threads: NonNegative = 0  # 0: the cores this process may use (affinity and cgroup)
    max_model_len: Positive | None = None  # None: the model's own context length
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64  # running at once
    max_step_tokens: Annotated[int, msgspec.Meta(ge=16, le=65_536)] = 512  # one step's token budget
    num_kv_blocks: Positive | None = None  # None: from kv_memory_bytes
    kv_memory_bytes: Positive | None = None  # None: memory_fraction of what is free, at most max_num_seqs contexts
    memory_fraction: Fraction = 0.5
    prefix_caching: bool = True
    max_waiting_requests: Positive = 512
    max_waiting_tokens: Positive = 262_144


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the front end is started with."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8000
    insecure: bool = False  # allow a non-loopback address without API keys
    api_keys_file: str | None = None  # one key a line; ETSERVE_API_KEYS (comma separated) adds to it
    api_keys: tuple[str, ...] = ()  # from the environment or a TOML file, never from argv
    allowed_hosts: tuple[str, ...] = ()  # Host headers; empty: any, but loopback names only where no key is needed
    drain_delay_seconds: Seconds = 0.0  # after SIGTERM: not ready, but still accepting
    drain_timeout_seconds: Seconds = 30.0
    header_timeout_seconds: Seconds = 10.0
    body_timeout_seconds: Seconds = 30.0
    write_timeout_seconds: Seconds = 30.0  # a client that stops reading for so long is dropped
    keep_alive_comment_seconds: Seconds = 10.0  # SSE comment on a silent stream
    max_body_bytes: Positive = 4 * 1024 * 1024
    compat_metrics: bool = False
    otlp_endpoint: HttpUrl | None = None  # of a collector's OTLP traces; None: no tracing, and no SDK imported
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both halves, as a TOML file spells them: [engine] and [server]."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()


_SECTIONS: dict[str, type[msgspec.Struct]] = {"engine": EngineConfig, "server": ServerConfig}


def load_config(
    path: Path | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Merge file < environment < flags and check every value.

    The environment spells a field `ETSERVE_<FIELD>`, whichever its section. Flags that are None are not set.
    Raises ConfigError with the field's name.
    """
    merged = _read_file(path)
    for source in (_from_environment(os.environ if environment is None else environment), flags or {}):
        for section, values in source.items():
            merged.setdefault(section, {}).update({k: v for k, v in values.items() if v is not None})
    try:
        return msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def setting_origins(
    path: Path | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Origin]]:
    """Say where each field that is set came from, by section; a field that is missing has its default.

    Arguments as for `load_config`, which checks them.
    """
    sources: tuple[tuple[Origin, Mapping[str, Mapping[str, Any]]], ...] = (
        ("file", _read_file(path)),
        ("environment", _from_environment(os.environ if environment is None else environment)),
        ("flag", flags or {}),
    )
    origins: dict[str, dict[str, Origin]] = {}
    for origin, sections in sources:
        for section, values in sections.items():
            origins.setdefault(section, {}).update({k: origin for k, v in values.items() if v is not None})
    return origins


def _read_file(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for section, values in found.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a table, [engine] or [server]")
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for section, struct in _SECTIONS.items():
        for field in msgspec.structs.fields(struct):
            text = environment.get(ENVIRONMENT_PREFIX + field.name.upper())
            if text is not None:
                is_list = field.name in ("api_keys", "allowed_hosts")
                found.setdefault(section, {})[field.name] = (
                    [part.strip() for part in text.split(",") if part.strip()] if is_list else text
                )
    return found
