"""How far to run ahead: draft lengths from entropy, and when drafted tokens must be verified. Knows no model.

Section 5 (last paragraph) and section 4 ("verification in entropic time") of the entropic-control page. Units: nats.
A draft is accepted where the plain engine draws the same token (runner/drafts.py), so nothing here changes any output.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

ENTROPY_TO_REJECTION = 0.2  # gamma of 1 - sqrt(gamma H), the entropy bound on acceptance of AdaEDL (arXiv 2410.18351)
FORGETTING = 0.9  # of the recent counts of drafts, per decode step


def acceptance_estimate(entropy_nats: float) -> float:
    """Return 1 - sqrt(0.2 H) cut to [0, 1]: the chance that one drafted token is accepted; 0 for unknown H."""
    if not math.isfinite(entropy_nats):
        return 0.0
    return max(0.0, 1.0 - math.sqrt(ENTROPY_TO_REJECTION * max(0.0, entropy_nats)))


def expected_accepted(acceptance: float, length: int) -> float:
    """Return a + a^2 + ... + a^length: drafted tokens expected to survive when each stands on the one before."""
    return math.fsum(acceptance**i for i in range(1, length + 1))


def draft_length(acceptance: float, threshold: float, max_length: int) -> int:
    """Return the largest k <= max_length with a^k >= threshold: the last token still pays for itself.

    `threshold` (lambda, in (0, 1]) is the cost of one more drafted token in units of what an accepted one saves.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold must be in (0, 1], got {threshold}")
    length, survival = 0, acceptance
    while length < max_length and survival >= threshold:
        length, survival = length + 1, survival * acceptance
    return length


def allocate_drafts(acceptances: Sequence[float], limits: Sequence[int], budget: int) -> list[int]:
    """Hand `budget` draft tokens to the sequences where the next one is likeliest to survive, at most `limits` each.

    Greedy over a_i^k, which is best possible because the gain of each further token only falls. Ties go to the
    earlier sequence.
    """
    if sum(limits) <= budget:
        return list(limits)
    lengths = [0] * len(limits)
    queue = [(-a, i) for i, a in enumerate(acceptances) if limits[i] > 0]
    heapq.heapify(queue)
    for _ in range(budget):
        survival, i = heapq.heappop(queue)  # never empty: the limits exceed the budget
        lengths[i] += 1
        if lengths[i] < limits[i]:
            heapq.heappush(queue, (survival * acceptances[i], i))
    return lengths


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """How one choice's drafts have fared: replaced at each of its decode steps."""

    num_drafted: int = 0
    num_accepted: int = 0  # of them, so far as they are in the output
    recent_trials: float = 0.0  # drafted tokens that were put to the test, older ones forgotten
    recent_hits: float = 0.0

    def observe(self, num_drafted: int, num_agreed: int) -> "DraftRecord":
        """Take in one decode step: the first of the drafted tokens that is not drawn ends the test.

        A step without a draft forgets as well, so that a choice is tried again in the end.
        """
        return replace(
            self,
            num_drafted=self.num_drafted + num_drafted,
            recent_trials=FORGETTING * self.recent_trials + min(num_drafted, num_agreed + 1),
            recent_hits=FORGETTING * self.recent_hits + num_agreed,
        )

    def accept(self) -> "DraftRecord":
        """One drafted token is in the output."""
        return replace(self, num_accepted=self.num_accepted + 1)


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """How long a draft pays. Raises ValueError when a value is out of range.

    With W the cost of a step that no sequence adds to (the weights) and c that of one more row, a decode of B sequences
    costs W + B c, and an accepted token saves one sequence's share of it: lambda = c / (W/B + c) = r B / (1 + r B),
    r = c / W. So the more sequences share a step, the surer a draft must be.
    """

    max_tokens: int = 8
    row_cost: float = 0.3  # r
    prior_trials: float = 2.0  # so many tests weighs what entropy says beside what was measured

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not (0.0 < self.row_cost < math.inf and 0.0 < self.prior_trials < math.inf):
            raise ValueError("max_tokens must be >= 1, row_cost and prior_trials finite and > 0")

    def threshold(self, num_decodes: int) -> float:
        """Return lambda of a step that so many sequences share, >= 1 of them."""
        cost = self.row_cost * max(1, num_decodes)
        return cost / (1.0 + cost)

    def acceptance(self, record: DraftRecord, entropy_nats: float) -> float:
        """Return the chance that a drafted token is drawn: what was measured of late, leaning on what entropy says."""
        prior = self.prior_trials * acceptance_estimate(entropy_nats)
        return (prior + record.recent_hits) / (self.prior_trials + record.recent_trials)

    def length(self, acceptance: float, threshold: float, entropy_nats: float) -> int:
        """Return how many tokens to draft: none for one who is lost (or unknown), however well it went before."""
        if acceptance_estimate(entropy_nats) < threshold:
            return 0
        return draft_length(acceptance, threshold, self.max_tokens)


@dataclass(frozen=True, slots=True)
class RiskTable:
    """Entropy of a step computed with skipped attention -> KL in nats to expect against dense (made by calibration).

    `entropies_nats` ascends strictly; between the knots the table is linear, beyond its ends constant.
    """

    entropies_nats: tuple[float, ...]
    divergences_nats: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.entropies_nats or len(self.entropies_nats) != len(self.divergences_nats):
            raise ValueError("a risk table needs as many divergences as entropies, and at least one")
        if not all(math.isfinite(x) and x >= 0.0 for x in self.entropies_nats + self.divergences_nats):
            raise ValueError("a risk table holds finite values >= 0")
        if any(a >= b for a, b in zip(self.entropies_nats, self.entropies_nats[1:], strict=False)):
            raise ValueError("entropies of a risk table must ascend")

    @classmethod
    def of_bins(cls, bins: Sequence[tuple[float, float]]) -> "RiskTable":
        """From (upper edge of a bin of entropies, mean divergence within), nats: each mean holds at its bin's middle.

        The first bin begins at 0. Raises ValueError unless the edges ascend from above 0.
        """
        lows = [0.0, *(edge for edge, _ in bins)]
        if any(low >= high for low, (high, _) in zip(lows, bins, strict=False)):
            raise ValueError("the edges of a risk table's bins must ascend from above 0")
        middles = tuple(0.5 * (low + high) for low, (high, _) in zip(lows, bins, strict=False))
        return cls(middles, tuple(divergence for _, divergence in bins))

    def risk_nats(self, entropy_nats: float) -> float:
        """Return the expected divergence; infinite for unknown H, so that it is verified at once."""
        if not math.isfinite(entropy_nats):
            return math.inf
        right = bisect_right(self.entropies_nats, entropy_nats)
        if right == 0:
            return self.divergences_nats[0]
        if right == len(self.entropies_nats):
            return self.divergences_nats[-1]
        low, high = self.entropies_nats[right - 1 : right + 1]
        share = (entropy_nats - low) / (high - low)
        return (1.0 - share) * self.divergences_nats[right - 1] + share * self.divergences_nats[right]


@dataclass(frozen=True, slots=True)
class DraftRun:
    """Tokens produced with skipped attention since the last dense check of one choice: replaced at each token."""

    num_tokens: int = 0
    risk_nats: float = 0.0  # sum of the expected divergences

    def observe(self, table: RiskTable, entropy_nats: float) -> "DraftRun":
        """Add one drafted token whose own (pruned) entropy was measured."""
        return replace(self, num_tokens=self.num_tokens + 1, risk_nats=self.risk_nats + table.risk_nats(entropy_nats))

    def is_check_due(self, budget_nats: float, max_tokens: int) -> bool:
        """Whether the drafted tokens must run again densely: the risk is spent, or the run is long enough."""
        return self.num_tokens > 0 and (self.risk_nats >= budget_nats or self.num_tokens >= max_tokens)


# Of the demo model at epsilon 0.1, from section 4 of the page: a mean of 0.006 nats a token, 41 % of it where the
# step's own entropy is in its top quarter. That the lower quarters share the rest as 1 : 2 : 3 is a guess of ours.
DEMO_RISKS = RiskTable((0.6, 1.9, 3.0, 4.5), (0.0024, 0.0047, 0.0071, 0.0098))


@dataclass(frozen=True, slots=True)
class VerifyLaw:
    """When tokens drawn with blocks skipped are computed again densely. Raises ValueError when out of range.

    lossless: they are guesses until then, and nobody sees them; bounded: they stand, and their keys and values are
    renewed.
    """

    mode: Literal["bounded", "lossless"]
    budget_nats: float = 0.03  # of expected divergence, summed over a run
    max_tokens: int = 16
    table: RiskTable = DEMO_RISKS

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget_nats < math.inf or self.max_tokens < 1:
            raise ValueError("the budget must be >= 0 and finite, max_tokens >= 1")

    def observe(self, run: DraftRun, entropy_nats: float) -> DraftRun:
        """Add one token whose own entropy, measured with blocks skipped, is known."""
        return run.observe(self.table, entropy_nats)

    def is_due(self, run: DraftRun) -> bool:
        return run.is_check_due(self.budget_nats, self.max_tokens)
