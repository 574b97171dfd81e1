"""Entropic time of one choice: tau = sum of max(0, H[t-1] - H[t]) over its output tokens (arXiv 2603.03310).

Its companions say how much of tau is more than noise: tau earns about half a nat a token from noise alone.
"""

from dataclasses import dataclass

DEADBAND_NATS = 0.05  # changes of H up to this are taken for none
RATCHET_WEIGHT = 0.25  # of the newest entropy in the average whose minimum is the ratchet


@dataclass(frozen=True, slots=True)
class EntropyClock:
    """Replaced, never changed, at each output token. Units: nats. Without a token yet, `count` is 0.

    tau_ratchet <= tau and tau_deadband <= tau, for any entropies.
    """

    count: int = 0
    entropy_nats: float = 0.0  # of the latest token
    first_entropy_nats: float = 0.0  # of the first: the prompt earns no credit
    tau_nats: float = 0.0  # downward variation
    tau_up_nats: float = 0.0  # upward variation
    nats_resolved: float = 0.0  # sum of H
    tau_deadband_nats: float = 0.0  # downward variation of the level that ignores small changes
    level_nats: float = 0.0  # that level: the latest entropy that lay more than DEADBAND_NATS off the one before
    tau_ratchet_nats: float = 0.0  # fall of the running minimum of the average: what never came back
    average_nats: float = 0.0  # EMA of H, from the first token's
    surprisal_nats: float = 0.0  # sum of -ln p of the drawn tokens, raw logits

    def observe(self, entropy_nats: float, surprisal_nats: float = 0.0) -> "EntropyClock":
        """Advance by one output token of raw next-token entropy `entropy_nats`, drawn at -ln p = `surprisal_nats`.

        |tau - tau_up - (H_first - H_last)| stays at rounding error.
        """
        first = self.first_entropy_nats if self.count else entropy_nats
        drop = self.entropy_nats - entropy_nats if self.count else 0.0
        fall = self.level_nats - entropy_nats if self.count else 0.0
        before = self.average_nats if self.count else entropy_nats
        average = before + RATCHET_WEIGHT * (entropy_nats - before)
        return EntropyClock(
            count=self.count + 1,
            entropy_nats=entropy_nats,
            first_entropy_nats=first,
            tau_nats=self.tau_nats + max(0.0, drop),
            tau_up_nats=self.tau_up_nats + max(0.0, -drop),
            nats_resolved=self.nats_resolved + entropy_nats,
            tau_deadband_nats=self.tau_deadband_nats + (fall if fall > DEADBAND_NATS else 0.0),
            level_nats=entropy_nats if not self.count or abs(fall) > DEADBAND_NATS else self.level_nats,
            tau_ratchet_nats=max(self.tau_ratchet_nats, first - average),
            average_nats=average,
            surprisal_nats=self.surprisal_nats + surprisal_nats,
        )

    @property
    def mean_entropy_nats(self) -> float:
        return self.nats_resolved / self.count if self.count else 0.0
