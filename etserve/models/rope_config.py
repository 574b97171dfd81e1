"""RoPE settings in all the spellings that configs have, to one RopeSpec."""

import math
from pathlib import Path
from typing import Any

from etserve.errors import ModelError
from etserve.models.config_file import ConfigFile
from etserve.models.types import RopeSpec

DEFAULT_THETA = 10_000.0
# rope_type -> the settings it needs, and those it may have
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "original_max_position_embeddings",
    ),
    "longrope": ("factor", "attention_factor", "original_max_position_embeddings"),
    "llama3": ("original_max_position_embeddings",),
}
_KNOWN = {name for table in (_NEEDED, _OPTIONAL) for names in table.values() for name in names}
_OWN_LENGTH = ("yarn", "longrope", "llama3")  # variants that need original_max_position_embeddings


def read_rope(config: ConfigFile, max_position: int, head_dim: int, path: Path) -> RopeSpec:
    """`rope_scaling` goes before `rope_parameters` (transformers 5), and both before a bare `rope_theta`.

    Raises ModelError naming file and field.
    """
    settings = dict(config.rope_scaling or config.rope_parameters or {})
    where = f"{path}: {'rope_scaling' if config.rope_scaling else 'rope_parameters'}"
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ModelError(f"{where}: rope_type {kind!r} is not supported ({', '.join(_NEEDED)} are)")
    theta = settings.pop("rope_theta", None)
    theta = _number(where, "rope_theta", DEFAULT_THETA if theta is None else theta)
    if config.rope_theta is not None and "rope_theta" not in (config.rope_scaling or config.rope_parameters or {}):
        theta = config.rope_theta
    _check_partial(where, settings.pop("partial_rotary_factor", None), config.partial_rotary_factor)
    unknown = sorted(set(settings) - _KNOWN)
    if unknown:
        raise ModelError(f"{where}: {unknown[0]} is not supported")
    if kind in _OWN_LENGTH and settings.get("original_max_position_embeddings") is None:
        settings["original_max_position_embeddings"] = config.original_max_position_embeddings or max_position
    return RopeSpec(theta, kind, _parameters(kind, settings, head_dim, where))


def _parameters(
    kind: str, settings: dict[str, Any], head_dim: int, where: str
) -> tuple[tuple[str, float | tuple[float, ...]], ...]:
    chosen: list[tuple[str, float | tuple[float, ...]]] = []
    for name in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())):
        value = settings.get(name)
        if value is None:
            if name in _NEEDED[kind]:
                raise ModelError(f"{where}: {name} is missing for rope_type {kind}")
        elif name in ("short_factor", "long_factor"):
            chosen.append((name, _factors(where, name, value, head_dim // 2)))
        elif name == "truncate":
            chosen.append((name, float(bool(value))))
        else:
            chosen.append((name, _number(where, name, value)))
    return tuple(chosen)


def _check_partial(where: str, own: object, top: float | None) -> None:
    """The decoders rotate whole heads."""
    for value in (own, top):
        if value is not None and value != 1.0:
            raise ModelError(f"{where}: partial_rotary_factor {value!r} is not supported")


def _factors(where: str, name: str, value: object, length: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != length:
        raise ModelError(f"{where}: {name} must be a list of {length} numbers")
    return tuple(_number(where, name, item) for item in value)


def _number(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{where}: {name} must be a positive number, got {str(value)[:40]!r}")
    return float(value)
