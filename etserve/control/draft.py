"""How far to run ahead: draft lengths from entropy, and when drafted tokens must be verified. Knows no model.

Section 5 (last paragraph) and section 4 ("verification in entropic time") of the entropic-control page. Units: nats.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

ENTROPY_TO_REJECTION = 0.2  # gamma of 1 - sqrt(gamma H), the entropy bound on acceptance of AdaEDL (arXiv 2410.18351)


def acceptance_estimate(entropy_nats: float) -> float:
    """Return 1 - sqrt(0.2 H) cut to [0, 1]: the chance that one drafted token is accepted; 0 for unknown H."""
    if not math.isfinite(entropy_nats):
        return 0.0
    return max(0.0, 1.0 - math.sqrt(ENTROPY_TO_REJECTION * max(0.0, entropy_nats)))


def expected_accepted(acceptance: float, length: int) -> float:
    """Return a + a^2 + ... + a^length: drafted tokens expected to survive when each stands on the one before."""
    return math.fsum(acceptance**i for i in range(1, length + 1))


def draft_length(entropy_nats: float, threshold: float, max_length: int) -> int:
    """Return the largest k <= max_length with a^k >= threshold: the last token still pays for itself.

    `threshold` (lambda, in (0, 1]) is the cost of one more drafted token in units of a plain step. A sure sequence
    (H = 0) gets max_length, an unsure or unknown one 0.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold must be in (0, 1], got {threshold}")
    acceptance = acceptance_estimate(entropy_nats)
    length, survival = 0, acceptance
    while length < max_length and survival >= threshold:
        length, survival = length + 1, survival * acceptance
    return length


def allocate_drafts(entropies_nats: Sequence[float], budget: int, threshold: float, max_length: int) -> list[int]:
    """Hand `budget` draft tokens to the sequences where the next one is likeliest to survive.

    Greedy over a_i^k, which is best possible because the gain of each further token only falls. Ties go to the
    earlier sequence. No length exceeds draft_length(H_i, threshold, max_length).
    """
    limits = [draft_length(h, threshold, max_length) for h in entropies_nats]
    acceptances = [acceptance_estimate(h) for h in entropies_nats]
    lengths = [0] * len(limits)
    queue = [(-a, i) for i, a in enumerate(acceptances) if limits[i] > 0]
    heapq.heapify(queue)
    for _ in range(budget):
        if not queue:
            break
        survival, i = heapq.heappop(queue)
        lengths[i] += 1
        if lengths[i] < limits[i]:
            heapq.heappush(queue, (survival * acceptances[i], i))
    return lengths


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a dense check of k drafted tokens gives: the first `num_accepted` stay and `next_token_id` follows them."""

    num_accepted: int
    next_token_id: int


def accept_greedy(draft_token_ids: Sequence[int], dense_token_ids: Sequence[int]) -> Verdict:
    """Accept the longest prefix on which draft and dense argmax agree, then the dense token after it.

    `dense_token_ids` [k + 1] are the argmaxes at the k drafted positions and the one after. The produced text is that
    of dense greedy decoding, token by token. Raises ValueError when the lengths do not fit.
    """
    if len(dense_token_ids) != len(draft_token_ids) + 1:
        raise ValueError(f"{len(draft_token_ids)} drafted tokens need {len(draft_token_ids) + 1} dense ones")
    accepted = 0
    for drafted, dense in zip(draft_token_ids, dense_token_ids, strict=False):
        if drafted != dense:
            break
        accepted += 1
    return Verdict(accepted, dense_token_ids[accepted])


def acceptance_probability(dense: float, draft: float) -> float:
    """Return min(1, p / q) for the drafted token's probabilities: speculative sampling (arXiv 2211.17192).

    A token that the draft could not have drawn (q <= 0), or an unknown probability, is never accepted.
    """
    if not (draft > 0.0 and dense >= 0.0):
        return 0.0
    return min(1.0, dense / draft)


def residual_distribution(dense: Sequence[float], draft: Sequence[float]) -> list[float]:
    """Return max(0, p - q) normalised: what a rejected token is redrawn from, so that the output follows p exactly.

    Where p never exceeds q (equal distributions, up to rounding) nothing can be rejected; p itself is returned.
    """
    excess = [max(0.0, p - q) for p, q in zip(dense, draft, strict=True)]
    total = math.fsum(excess)
    return [x / total for x in excess] if total > 0.0 else list(dense)
