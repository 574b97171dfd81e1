"""Rotary embedding tables. Formulas and names: transformers' modeling_rope_utils, which the tests compare with.

Tables are made once, for one length, so variants that depend on the running length (dynamic, longrope) take that one:
a token's rotation never depends on how far its sequence has come.
"""

import math
from collections.abc import Callable

import torch

from etserve.models.types import DecoderSpec, RopeSpec

# inv_freq f32 [head_dim / 2], and the factor on cos and sin
Frequencies = tuple[torch.Tensor, float]


def rope_tables(spec: DecoderSpec, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, f32 [max_len, head_dim / 2], the variant's attention factor folded in."""
    inv_freq, attention_factor = _VARIANTS[spec.rope.rope_type](spec, max_len)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def _inv_freq(theta: float, dim: int) -> torch.Tensor:
    inv_freq: torch.Tensor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    return inv_freq


def _number(rope: RopeSpec, name: str, default: float | None = None) -> float | None:
    value = dict(rope.parameters).get(name, default)
    return value if value is None or isinstance(value, float) else None


def _needed(rope: RopeSpec, name: str) -> float:
    value = _number(rope, name)
    if value is None:
        raise ValueError(f"rope_type {rope.rope_type} needs {name}")
    return value


def _list(rope: RopeSpec, name: str) -> torch.Tensor:
    value = dict(rope.parameters)[name]
    if not isinstance(value, tuple):
        raise ValueError(f"rope_type {rope.rope_type} needs a list {name}")
    return torch.tensor(value, dtype=torch.float32)


def _default(spec: DecoderSpec, _max_len: int) -> Frequencies:
    return _inv_freq(spec.rope.theta, spec.head_dim), 1.0


def _linear(spec: DecoderSpec, _max_len: int) -> Frequencies:
    return _inv_freq(spec.rope.theta, spec.head_dim) / _needed(spec.rope, "factor"), 1.0


def _dynamic(spec: DecoderSpec, max_len: int) -> Frequencies:
    """NTK scaling at `max_len`; within the trained length it is the default."""
    factor, dim = _needed(spec.rope, "factor"), spec.head_dim
    length = max(max_len, spec.max_position)
    stretch = (factor * length / spec.max_position) - (factor - 1)
    return _inv_freq(spec.rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(spec: DecoderSpec, _max_len: int) -> Frequencies:
    rope, dim = spec.rope, spec.head_dim
    factor, length = _needed(rope, "factor"), _needed(rope, "original_max_position_embeddings")
    low = _yarn_dimension(spec, _number(rope, "beta_fast", 32.0) or 32.0, length)
    high = _yarn_dimension(spec, _number(rope, "beta_slow", 1.0) or 1.0, length)
    if _number(rope, "truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    plain = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    return (1.0 / (factor * plain)) * (1 - kept) + (1.0 / plain) * kept, _yarn_attention_factor(rope, factor)


def _yarn_dimension(spec: DecoderSpec, rotations: float, length: float) -> float:
    """The dimension that turns `rotations` times within the trained length."""
    return (spec.head_dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(spec.rope.theta))


def _yarn_attention_factor(rope: RopeSpec, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = _number(rope, "attention_factor")
    if given is not None:
        return given
    mscale, mscale_all = _number(rope, "mscale"), _number(rope, "mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def _longrope(spec: DecoderSpec, max_len: int) -> Frequencies:
    """Long factors where `max_len` goes beyond the trained length, short ones elsewhere."""
    rope, dim = spec.rope, spec.head_dim
    length = _needed(rope, "original_max_position_embeddings")
    factors = _list(rope, "long_factor" if max_len > length else "short_factor")
    given = _number(rope, "attention_factor")
    factor = _number(rope, "factor") or spec.max_position / length
    attention = (
        given if given is not None else math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    )
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (factors * rope.theta**exponents), attention


def _llama3(spec: DecoderSpec, _max_len: int) -> Frequencies:
    """Slow dimensions are divided by the factor, fast ones kept, those between blended."""
    rope = spec.rope
    inv_freq = _inv_freq(rope.theta, spec.head_dim)
    factor, length = _needed(rope, "factor"), _needed(rope, "original_max_position_embeddings")
    low, high = _needed(rope, "low_freq_factor"), _needed(rope, "high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > length / low, inv_freq / factor, inv_freq)
    blend = (length / wavelength - low) / (high - low)
    is_between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(is_between, (1 - blend) * scaled / factor + blend * scaled, scaled), 1.0


def _divided(spec: DecoderSpec, _max_len: int) -> Frequencies:
    """GGUF files carry Llama 3's scaling as one divisor per frequency (tensor rope_freqs)."""
    return _inv_freq(spec.rope.theta, spec.head_dim) / _list(spec.rope, "divisors"), 1.0


_VARIANTS: dict[str, Callable[[DecoderSpec, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "divided": _divided,
}
