"""Low-bit rotated key sketches in plain Python: the oracle of the KV write and selection kernels' arithmetic.

Section 4, "Key sketch", of the entropic-control page. Of a full block the sketch keeps the mean key mu and per token
x = R(k - mu) in 1 or 2 bits per dimension with one scale, rms(x). R = Hadamard x random signs is orthonormal, so inner
products survive it, and what it mixes is near Gaussian, for which the levels are Lloyd-Max's. A token's score is then
s = (q.mu + <Rq, code>) / sqrt(d), a block's log mass the logsumexp over its tokens.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Bits = Literal[1, 2]
Vector = Sequence[float]

# Levels in units of the rms, code 0 first, and where one code ends and the next begins (both even about 0).
LEVELS: dict[int, tuple[float, ...]] = {1: (-0.7979, 0.7979), 2: (-1.51, -0.45, 0.45, 1.51)}
THRESHOLDS: dict[int, tuple[float, ...]] = {1: (0.0,), 2: (-0.98, 0.0, 0.98)}

# |x - code| <= this times |x|, for any x: (a - level)^2 <= a^2 + level_0^2 in each dimension, and mean a^2 is 1.
WORST_ERROR: dict[int, float] = {bits: math.sqrt(1.0 + min(abs(x) for x in LEVELS[bits]) ** 2) for bits in (1, 2)}


@dataclass(frozen=True, slots=True)
class BlockSketch:
    """What is kept of one full block's keys for one KV head (S tokens, d dimensions)."""

    mean: tuple[float, ...]  # [d], not rotated
    codes: tuple[tuple[int, ...], ...]  # [S][d], 0 .. 2^bits - 1
    scales: tuple[float, ...]  # [S], rms of the rotated differences
    bits: Bits = 2


def rotation_signs(dim: int, seed: int) -> tuple[float, ...]:
    """Return dim random signs (+1.0 or -1.0), keyed by seed: the same on every machine."""
    bits: list[int] = []
    counter = 0
    while len(bits) < dim:
        digest = hashlib.blake2b(f"{seed}:{counter}".encode(), digest_size=64).digest()
        bits.extend((byte >> k) & 1 for byte in digest for k in range(8))
        counter += 1
    return tuple(1.0 if bit else -1.0 for bit in bits[:dim])


def rotate(vector: Vector, signs: Sequence[float]) -> list[float]:
    """Return R v: signs, then an orthonormal Hadamard transform.

    Where d is no power of two, one transform per run of the largest power of two that divides d (80 = 5 x 16):
    still orthonormal, mixing less.
    """
    mixed = [v * s for v, s in zip(vector, signs, strict=True)]
    size = len(mixed) & -len(mixed)
    width = 1
    while width < size:
        for start in range(0, len(mixed), 2 * width):
            for i in range(start, start + width):
                a, b = mixed[i], mixed[i + width]
                mixed[i], mixed[i + width] = a + b, a - b
        width *= 2
    norm = 1.0 / math.sqrt(size) if size else 1.0
    return [norm * v for v in mixed]


def quantise(vector: Vector, bits: Bits = 2) -> tuple[tuple[int, ...], float]:
    """Return the codes of the nearest levels and the scale rms(vector); a zero vector has scale 0."""
    scale = math.sqrt(math.fsum(v * v for v in vector) / len(vector))
    return tuple(sum(v > t * scale for t in THRESHOLDS[bits]) for v in vector), scale


def reconstruct(codes: Sequence[int], scale: float, bits: Bits = 2) -> list[float]:
    """Return the levels that the codes stand for."""
    return [scale * LEVELS[bits][code] for code in codes]


def sketch_block(keys: Sequence[Vector], signs: Sequence[float], bits: Bits = 2) -> BlockSketch:
    """Sketch a block of keys [S][d], as stored in the cache (after RoPE)."""
    mean = tuple(math.fsum(column) / len(keys) for column in zip(*keys, strict=True))
    quantised = [quantise(rotate([k - m for k, m in zip(key, mean, strict=True)], signs), bits) for key in keys]
    return BlockSketch(mean, tuple(codes for codes, _ in quantised), tuple(scale for _, scale in quantised), bits)


def estimate_scores(query: Vector, sketch: BlockSketch, signs: Sequence[float]) -> list[float]:
    """Return estimated attention scores [S] = (q.mu + <Rq, code>) / sqrt(d)."""
    rotated = rotate(query, signs)
    base = _dot(query, sketch.mean)
    root = math.sqrt(len(query))
    return [
        (base + _dot(rotated, reconstruct(codes, scale, sketch.bits))) / root
        for codes, scale in zip(sketch.codes, sketch.scales, strict=True)
    ]


def exact_scores(query: Vector, keys: Sequence[Vector]) -> list[float]:
    """Return q.k / sqrt(d) for each key [S][d]."""
    root = math.sqrt(len(query))
    return [_dot(query, key) / root for key in keys]


def log_mass(scores: Sequence[float]) -> float:
    """Return logsumexp of a block's scores: its unnormalised attention mass; NaN stays NaN."""
    if any(math.isnan(score) for score in scores):
        return math.nan
    top = max(scores)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(score - top) for score in scores))


def score_error_bound(query: Vector, scale: float, bits: Bits = 2) -> float:
    """Return the most that an estimated score can be off: |q| |k - mu| WORST_ERROR / sqrt(d), for any query and key.

    Cauchy-Schwarz, with |k - mu| = scale sqrt(d). Near-Gaussian differences stay far below it.
    """
    return WORST_ERROR[bits] * math.sqrt(math.fsum(q * q for q in query)) * scale


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
