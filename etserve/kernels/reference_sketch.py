"""Key sketches in plain torch, float64 inside: what the native ones mean. Knows nothing of their layout."""

from dataclasses import dataclass
from functools import cache

import torch

from etserve.control.sketch import THRESHOLDS, rotate, rotation_signs

ROTATION_SEED = 0  # one rotation for every model: sketches never leave the process
EXACT_BITS = 16  # in place of 1 or 2 bits: the keys themselves, the best that any sketch could do; reference only

# The law's levels as the kernels round them: whole numbers of a unit.
LEVELS: dict[int, tuple[float, ...]] = {
    1: (-57 / 71.44, 57 / 71.44),
    2: (-57 / 37.76, -17 / 37.76, 17 / 37.76, 57 / 37.76),
}


@dataclass(frozen=True, slots=True)
class TorchSketch:
    """Of N full blocks of 16 tokens."""

    means: torch.Tensor  # f64 [N, Hkv, D], rounded to bf16
    levels: torch.Tensor  # f64 [N, 16, Hkv, D], in units of the scale
    scales: torch.Tensor  # f64 [N, 16, Hkv], rms of the rotated differences, rounded to bf16


@cache
def rotation(head_dim: int) -> torch.Tensor:
    """R, f64 [head_dim, head_dim]: R @ x is control.sketch.rotate(x)."""
    signs = rotation_signs(head_dim, ROTATION_SEED)
    return torch.tensor([rotate(row, signs) for row in torch.eye(head_dim).tolist()], dtype=torch.float64).T


def sketch_keys(keys: torch.Tensor, bits: int) -> TorchSketch:
    """Sketch keys [N, 16, Hkv, D] as they are stored in the cache."""
    wide = keys.double()
    means = wide.mean(1).to(torch.bfloat16).double()
    rotated = (wide - means[:, None]) @ rotation(keys.shape[-1]).T.to(keys.device)
    rms = rotated.square().mean(-1).sqrt()
    thresholds = torch.tensor(THRESHOLDS[bits], dtype=torch.float64, device=keys.device)
    codes = (rotated[..., None] > thresholds * rms[..., None, None]).sum(-1)
    levels = torch.tensor(LEVELS[bits], dtype=torch.float64, device=keys.device)[codes]
    return TorchSketch(means, levels, rms.to(torch.bfloat16).double())


def estimated_scores(q: torch.Tensor, sketch: TorchSketch, scale: float) -> torch.Tensor:
    """Scores of one query row, q [H, D] -> f64 [H, N * 16]: scale * (q.mean + <Rq, levels>), Rq rounded to bytes."""
    num_heads, head_dim = q.shape
    num_kv_heads = sketch.means.shape[1]
    grouped = q.double().view(num_kv_heads, num_heads // num_kv_heads, head_dim)
    rotated = grouped @ rotation(head_dim).T.to(q.device)
    unit = rotated.abs().amax(-1, keepdim=True).clamp_min(1e-300) / 127
    rounded = (rotated / unit).round() * unit
    base = torch.einsum("kgd,nkd->kgn", grouped, sketch.means)[..., None]
    code = torch.einsum("kgd,ntkd->kgnt", rounded, sketch.levels) * sketch.scales.permute(2, 0, 1)[:, None]
    return (scale * (base + code)).reshape(num_heads, -1)
