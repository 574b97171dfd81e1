"""What an arm costs in quality, token by token, against dense attention of the same text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.skipping.bed import Bed
from etserve.kernels.selection import BlockSelection

HEADER = "| context | arm | kept | KL nats/token | top-1 agreement | ΔNLL ± s.e. | estimated missing mass |"
DOCUMENT_HEADER = "| context | document | NLL | kept | KL nats/token | ΔNLL ± s.e. |"


@dataclass
class Dense:
    """What dense attention gave, by step."""

    log_probabilities: list[torch.Tensor] = field(default_factory=list)  # [documents, V]
    masses: list[NDArray[np.float32]] = field(default_factory=list)  # [documents, max_blocks]


class Score:
    """Columns of figures, one per document and step."""

    def __init__(self) -> None:
        self._steps: list[dict[str, NDArray[np.generic]]] = []

    def add(self, **columns: NDArray[np.generic]) -> None:
        """One step: each column [documents]."""
        self._steps.append(columns)

    def column(self, name: str) -> NDArray[np.float64]:
        """[steps, documents]"""
        return np.array([step[name] for step in self._steps], np.float64)

    @property
    def kept_share(self) -> float:
        """Of the blocks of all layers."""
        return float(self.column("read").sum() / self.column("total").sum())

    def row(self, context: int, name: str) -> str:
        """A line of the table of HEADER."""
        missing = self.column("missing").mean()
        cells = (
            f"{self.kept_share:.1%}",
            f"{self.column('divergence').mean():.4f}",
            f"{self.column('agrees').mean():.1%}",
            _with_error(self.column("excess")),
            "" if math.isnan(missing) else f"{missing:.3f}",
        )
        return f"| {context} | {name} | {' | '.join(cells)} |"

    def document_row(self, context: int, document: int, name: str) -> str:
        """A line of the table of DOCUMENT_HEADER: one document alone."""
        nll, divergence, read, total = (self.column(key)[:, document] for key in ("nll", "divergence", "read", "total"))
        cells = f"{nll.mean():.3f} | {read.sum() / total.sum():.1%} | {divergence.mean():.4f}"
        return f"| {context} | {name} | {cells} | {_with_error(self.column('excess')[:, document])} |"


def _with_error(values: NDArray[np.float64]) -> str:
    """Mean, and its standard error as if tokens were independent."""
    error = values.std(ddof=1) / math.sqrt(values.size) if values.size > 1 else math.nan
    return f"{values.mean():+.4f} ± {error:.4f}"


def compare(dense: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> dict[str, NDArray[np.generic]]:
    """Log-probabilities [documents, V] of the same positions, and the tokens that follow: columns of a Score.

    divergence KL(dense || found), agrees (same likeliest token), nll of what was found, excess of it over dense.
    """
    nll = [-rows.gather(1, targets[:, None])[:, 0] for rows in (dense, found)]
    return {
        "divergence": (dense.exp() * (dense - found)).sum(-1).numpy(),
        "agrees": (dense.argmax(-1) == found.argmax(-1)).numpy(),
        "nll": nll[1].numpy(),
        "excess": (nll[1] - nll[0]).numpy(),
    }


def run_arms(bed: Bed, branches: Sequence[int], selections: Sequence[BlockSelection], dense: Dense) -> list[Score]:
    """Score one arm per branch, all by selections [steps] of one rule.

    An empty `dense` is filled from the first arm, which then must be dense.
    """
    count, fills = len(bed.documents), not dense.log_probabilities
    scores = [Score() for _ in branches]
    for step, rows in enumerate(bed.decode(branches, selections, wants_masses=fills)):
        counts, targets = bed.counts, bed.targets(step)
        if fills and counts.block_mass is not None:
            dense.log_probabilities.append(rows[:count].clone())
            dense.masses.append(counts.block_mass[:count].copy())
        for index, score in enumerate(scores):
            own = slice(index * count, (index + 1) * count)
            score.add(
                **compare(dense.log_probabilities[step], rows[own], targets),
                read=counts.read_blocks[own],
                total=counts.total_blocks[own],
                missing=counts.missing_mass[own],
            )
    return scores
