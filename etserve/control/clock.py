"""Entropic time of one choice: tau = sum of max(0, H[t-1] - H[t]) over its output tokens (arXiv 2603.03310)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EntropyClock:
    """Replaced, never changed, at each output token. Units: nats. Without a token yet, `count` is 0."""

    count: int = 0
    entropy_nats: float = 0.0  # of the latest token
    first_entropy_nats: float = 0.0  # of the first: the prompt earns no credit
    tau_nats: float = 0.0  # downward variation
    tau_up_nats: float = 0.0  # upward variation
    nats_resolved: float = 0.0  # sum of H

    def observe(self, entropy_nats: float) -> "EntropyClock":
        """Advance by one output token, whose raw next-token entropy was `entropy_nats`.

        |tau - tau_up - (H_first - H_last)| stays at rounding error.
        """
        drop = self.entropy_nats - entropy_nats if self.count else 0.0
        return EntropyClock(
            count=self.count + 1,
            entropy_nats=entropy_nats,
            first_entropy_nats=self.first_entropy_nats if self.count else entropy_nats,
            tau_nats=self.tau_nats + max(0.0, drop),
            tau_up_nats=self.tau_up_nats + max(0.0, -drop),
            nats_resolved=self.nats_resolved + entropy_nats,
        )

    @property
    def mean_entropy_nats(self) -> float:
        return self.nats_resolved / self.count if self.count else 0.0
