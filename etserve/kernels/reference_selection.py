"""The choice of blocks in plain torch and Python, by the laws' own functions: the oracle of the native one."""

import math
from dataclasses import dataclass

import torch

from etserve.control.pruning import group_masses, select_blocks
from etserve.kernels.reference_attention import BLOCK_SIZE
from etserve.kernels.reference_sketch import EXACT_BITS, estimated_scores, sketch_keys
from etserve.kernels.selection import BlockSelection, SelectionRule, layer_seed

MASS_UNIT = 2.0**-30  # masses are whole numbers of it: their sums are exact in any order


def exact_log_masses(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """True log mass per head and block: q [H, D], keys [L, Hkv, D] as stored -> f64 [H, ceil(L / 16)]."""
    (num_heads, head_dim), (length, num_kv_heads, _) = q.shape, keys.shape
    grouped = q.double().view(num_kv_heads, -1, head_dim)
    scores = scale * torch.einsum("kgd,lkd->kgl", grouped, keys.double()).reshape(num_heads, length)
    padded = torch.nn.functional.pad(scores, (0, -length % BLOCK_SIZE), value=-math.inf)
    return padded.view(num_heads, -1, BLOCK_SIZE).logsumexp(-1)


def estimated_log_masses(q: torch.Tensor, keys: torch.Tensor, scale: float, bits: int) -> torch.Tensor:
    """Log mass per head and block: q [H, D], keys [L, Hkv, D] as stored -> f64 [H, ceil(L / 16)].

    Full blocks by their sketch, the last one, if it is not full, by its keys themselves.
    """
    (num_heads, head_dim), (length, num_kv_heads, _) = q.shape, keys.shape
    full = length // BLOCK_SIZE * BLOCK_SIZE
    sketch = sketch_keys(keys[:full].view(-1, BLOCK_SIZE, num_kv_heads, head_dim), bits)
    scores = estimated_scores(q, sketch, scale).view(num_heads, -1, BLOCK_SIZE)
    parts = [scores.logsumexp(-1)]
    if full < length:
        parts.append(exact_log_masses(q, keys[full:], scale))
    return torch.cat(parts, dim=1)


def rounded_group_masses(log_masses: torch.Tensor, num_kv_heads: int) -> list[list[float]]:
    """[H, N] -> [Hkv][N]: control.pruning.group_masses in whole MASS_UNITs."""
    groups = log_masses.view(num_kv_heads, -1, log_masses.shape[1]).tolist()
    return [[m if math.isnan(m) else round(m / MASS_UNIT) * MASS_UNIT for m in group_masses(group)] for group in groups]


def always_read(rule: SelectionRule, num_blocks: int, protected: list[int]) -> frozenset[int]:
    """Blocks that every choice keeps: the first and last ones and `protected`."""
    recent = range(max(0, num_blocks - rule.recent_blocks), num_blocks)
    return frozenset((*range(min(rule.sink_blocks, num_blocks)), *recent, *(b for b in protected if b < num_blocks)))


def minimum_kept(rule: SelectionRule, num_blocks: int) -> int:
    """The fewest blocks to keep; a placebo's share is one more bound."""
    share = rule.min_kept_share if rule.selector == "sketch" else max(rule.min_kept_share, rule.share)
    return min(num_blocks, max(1, rule.min_kept_blocks, math.ceil(share * num_blocks)))


def choose_blocks(rule: SelectionRule, masses: list[float], epsilon: float, protected: list[int]) -> tuple[int, ...]:
    """The blocks that one KV head of a sequence beyond min_context_tokens reads, by sketched masses."""
    num_blocks = len(masses)
    return select_blocks(masses, epsilon, always_read(rule, num_blocks, protected), minimum_kept(rule, num_blocks))


def placebo_blocks(
    rule: SelectionRule, context: int, kv_head: int, protected: list[int], layer: int = 0
) -> tuple[int, ...]:
    """The blocks that a placebo reads: those it likes least go first, ties by index."""
    num_blocks = -(-context // BLOCK_SIZE)
    seed = layer_seed(rule, layer)
    if rule.selector == "recency":
        likes = [float(i) for i in range(num_blocks)]
    else:
        place = _mixed(seed ^ (context << 32 | kv_head << 24))
        likes = [float(_mixed((place + i) & _WORD) >> 40) for i in range(num_blocks)]
    fixed = always_read(rule, num_blocks, protected)
    others = sorted(set(range(num_blocks)) - fixed, key=lambda i: (likes[i], i))
    skipped = set(others[: num_blocks - minimum_kept(rule, num_blocks)])
    return tuple(i for i in range(num_blocks) if i not in skipped)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What one query row reads."""

    kept: tuple[tuple[int, ...], ...]  # [Hkv], blocks
    missing: tuple[float, ...]  # [Hkv], estimated mass of what is skipped; NaN where a placebo skips

    def skipped(self, length: int) -> torch.Tensor:
        """Bool [Hkv, length], the positions not read."""
        mask = torch.ones(len(self.kept), -(-length // BLOCK_SIZE), dtype=torch.bool)
        for head, blocks in enumerate(self.kept):
            mask[head, list(blocks)] = False
        return mask.repeat_interleave(BLOCK_SIZE, 1)[:, :length]


def choose_for_row(
    selection: BlockSelection,
    sequence: int,
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    bits: int,
    layer: int = 0,
) -> RowChoice:
    """What the only query row of a sequence reads: q [H, D], keys [L, Hkv, D] as stored. `layer` counts for random.

    `bits`: of the sketches that masses are estimated by; EXACT_BITS: true masses.
    """
    rule, epsilon = selection.rule, float(selection.epsilon[sequence])
    length, num_kv_heads, _ = keys.shape
    num_blocks = -(-length // BLOCK_SIZE)
    if epsilon == 0.0 or length < rule.min_context_tokens:
        return RowChoice((tuple(range(num_blocks)),) * num_kv_heads, (0.0,) * num_kv_heads)
    protected = [] if selection.protected is None else selection.protected[sequence].nonzero()[0].tolist()
    if rule.selector != "sketch":
        kept = tuple(placebo_blocks(rule, length, head, protected, layer) for head in range(num_kv_heads))
        return RowChoice(kept, (math.nan,) * num_kv_heads)
    is_exact = bits == EXACT_BITS
    found = exact_log_masses(q, keys, scale) if is_exact else estimated_log_masses(q, keys, scale, bits)
    masses = rounded_group_masses(found, num_kv_heads)
    kept = tuple(choose_blocks(rule, row, epsilon, protected) for row in masses)
    missing = tuple(sum(set_aside(row, blocks)) for row, blocks in zip(masses, kept, strict=True))
    return RowChoice(kept, missing)


def set_aside(masses: list[float], kept: tuple[int, ...]) -> list[float]:
    """Masses of the blocks that are not kept."""
    chosen = set(kept)
    return [mass for block, mass in enumerate(masses) if block not in chosen]


_WORD = (1 << 64) - 1


def _mixed(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
