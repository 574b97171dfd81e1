"""The macro loop: who gets the step. Orders candidates by a pure key; knows no sequences, blocks or clock.

Section 5 of the entropic-control page. The rank serves decode slots, prefill chunks and, read from its end, the choice
of a victim under memory pressure.

    P = w_g * g + w_f * f + age        w_g + w_f <= 1, g and f in [0, 1]
    g = rho / (rho + median rho)       rho = EMA_0.2(max(0, -dH)) / C, nats per unit of cost
    f = nearness of the end            max(h / (h + tokens left), EMA of p(EOS))
    age = time since last service / W  W = 0.2 s decode, 1 s waiting, 10 s batch

Why nobody starves: whoever has waited W outranks everyone of his class served since, as g and f together add at most 1.
So of n candidates of a class each can overtake him once more at most: with B slots he is served by the
(floor((n - 1) / B) + 1)-th step that begins after t0 + W. Arrivals after t0 + W never overtake, however many.
"""

import hashlib
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["fcfs", "paper", "entropic", "entropic_inverse", "random"]
ServiceClass = Literal["decode", "waiting", "batch"]

NEUTRAL_GAIN = 0.5  # g of the median, and of whom we know nothing


@dataclass(frozen=True, slots=True)
class PriorityConfig:
    """Weights and waiting times. Raises ValueError when the ageing bound would not hold."""

    mode: Mode = "fcfs"
    gain_weight: float = 0.5  # w_g
    finish_weight: float = 0.5  # w_f
    finish_half_tokens: float = 16.0  # tokens left at which f is one half
    decode_wait_seconds: float = 0.2  # W per class
    waiting_wait_seconds: float = 1.0
    batch_wait_seconds: float = 10.0
    forced_age: float = 2.0  # from this age on a candidate comes before the unforced ones
    forced_share: float = 0.25  # of the slots, kept for overdue candidates that do not decode yet

    def __post_init__(self) -> None:
        if not (min(self.gain_weight, self.finish_weight) >= 0.0 and self.gain_weight + self.finish_weight <= 1.0):
            raise ValueError("gain_weight and finish_weight must be >= 0 and add up to at most 1")
        waits = (self.decode_wait_seconds, self.waiting_wait_seconds, self.batch_wait_seconds, self.finish_half_tokens)
        if not all(0.0 < w < math.inf for w in waits):
            raise ValueError("waiting times and finish_half_tokens must be > 0 and finite")
        if not (self.forced_age >= 1.0 and 0.0 < self.forced_share < 1.0):
            raise ValueError("forced_age must be >= 1 and forced_share in (0, 1)")

    def wait_seconds(self, service_class: ServiceClass) -> float:
        """Return W of the class."""
        if service_class == "decode":
            return self.decode_wait_seconds
        return self.waiting_wait_seconds if service_class == "waiting" else self.batch_wait_seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the law knows of one sequence that could use the step. NaN: unknown."""

    arrival: int  # running number, unique
    service_class: ServiceClass
    seconds_since_service: float  # since arrival or preemption for one that waits
    drop_per_cost: float = math.nan  # rho
    tokens_left: float = math.inf  # estimate
    end_probability: float = 0.0  # EMA of p(EOS)
    entropy_nats: float = math.nan  # latest H_raw
    seed: int = 0  # random mode


@dataclass(frozen=True, slots=True)
class DropAverage:
    """EMA_0.2 of the entropy drops max(0, H[t-1] - H[t]) of one sequence: replaced at each token."""

    entropy_nats: float = math.nan  # latest known
    drop_nats: float = math.nan  # NaN before the second token

    def observe(self, entropy_nats: float, weight: float = 0.2) -> "DropAverage":
        """Take in one token's H_raw; an unknown one (non-finite) changes nothing."""
        if not math.isfinite(entropy_nats):
            return self
        if math.isnan(self.entropy_nats):
            return replace(self, entropy_nats=entropy_nats)
        drop = max(0.0, self.entropy_nats - entropy_nats)
        average = drop if math.isnan(self.drop_nats) else (1.0 - weight) * self.drop_nats + weight * drop
        return DropAverage(entropy_nats, average)

    def per_cost(self, cost: float) -> float:
        """Return rho; `cost` is the marginal C of its next token. NaN where drop or cost is unknown."""
        return self.drop_nats / cost if math.isfinite(cost) and cost > 0.0 else math.nan


def median_drop_per_cost(candidates: Iterable[Candidate]) -> float:
    """Return the median of the known rho, 0 when none is known."""
    known = [c.drop_per_cost for c in candidates if c.drop_per_cost >= 0.0]  # NaN compares false
    return statistics.median(known) if known else 0.0


def gain(drop_per_cost: float, median: float) -> float:
    """Return g in [0, 1]: one half at the median and for the unknown."""
    if not drop_per_cost >= 0.0 or drop_per_cost == median:
        return NEUTRAL_GAIN
    return 1.0 / (1.0 + median / drop_per_cost) if drop_per_cost > 0.0 else 0.0


def finish_nearness(tokens_left: float, end_probability: float, half_tokens: float) -> float:
    """Return f in [0, 1]; what is unknown (NaN) counts as far from the end."""
    by_count = half_tokens / (half_tokens + max(0.0, tokens_left)) if tokens_left < math.inf else 0.0
    by_probability = min(1.0, end_probability) if end_probability > 0.0 else 0.0
    return max(by_count, by_probability)


def age(candidate: Candidate, config: PriorityConfig) -> float:
    """Return time since last service in units of the class's W; a clock gone astray counts as just served."""
    seconds = candidate.seconds_since_service
    return seconds / config.wait_seconds(candidate.service_class) if seconds > 0.0 else 0.0


def standing(candidate: Candidate, median: float, config: PriorityConfig, step: int = 0) -> float:
    """Return w_g g + w_f f, in [0, 1]: P of the steered modes is this plus age.

    entropic_inverse turns g around and leaves f; random replaces both by an even draw, so that either placebo keeps
    the ageing bound and differs in what it knows alone.
    """
    if config.mode == "random":
        return (config.gain_weight + config.finish_weight) * _draw(candidate, step)
    share = gain(candidate.drop_per_cost, median)
    if config.mode == "entropic_inverse":
        share = 1.0 - share
    nearness = finish_nearness(candidate.tokens_left, candidate.end_probability, config.finish_half_tokens)
    return config.gain_weight * share + config.finish_weight * nearness


def rank(candidates: Sequence[Candidate], slots: int, step: int, config: PriorityConfig) -> list[Candidate]:
    """Order all candidates, best first; the caller serves as many as the step takes (`slots` are expected to).

    Decode goes before what does not decode yet, in every mode. fcfs: by arrival, nothing else. The other modes put
    overdue candidates (age >= 2) first within their group, and keep a quarter of the slots for overdue non-decoding
    ones, longest overdue first: a flood on either side cannot shut out the other.
    """
    if config.mode == "fcfs":
        return sorted(candidates, key=lambda c: (c.service_class != "decode", c.arrival))
    median = median_drop_per_cost(candidates)
    decoding = [c for c in candidates if c.service_class == "decode"]
    others = [c for c in candidates if c.service_class != "decode"]
    decoding.sort(key=lambda c: _key(c, median, config, step))
    others.sort(key=lambda c: _key(c, median, config, step))
    num_forced = sum(is_forced(c, config) for c in others)
    reserved = min(num_forced, forced_slots(slots, step, config))
    return others[:reserved] + decoding + others[reserved:]


def is_forced(candidate: Candidate, config: PriorityConfig) -> bool:
    """Whether the candidate is overdue: age >= 2."""
    return age(candidate, config) >= config.forced_age


def forced_slots(slots: int, step: int, config: PriorityConfig) -> int:
    """Return how many of this step's slots overdue non-decoding candidates may claim before decode.

    Spread evenly: over any run of steps the sum is within 1 of share x slots x steps. One slot: every fourth step.
    """
    return math.floor((step + 1) * slots * config.forced_share) - math.floor(step * slots * config.forced_share)


def choose_victim(candidates: Sequence[Candidate], slots: int, step: int, config: PriorityConfig) -> Candidate | None:
    """Return who gives his blocks up when memory is short: the last in rank; None without candidates."""
    order = rank(candidates, slots, step, config)
    return order[-1] if order else None


def _key(candidate: Candidate, median: float, config: PriorityConfig, step: int) -> tuple[float, ...]:
    """Sort key, ascending: the overdue by how long they are, then the mode's own order; ties by age, then arrival."""
    waited = age(candidate, config)
    if waited >= config.forced_age:
        allowed = config.forced_age * config.wait_seconds(candidate.service_class)
        return (0.0, allowed - candidate.seconds_since_service, candidate.arrival)
    if config.mode == "paper":
        rho = candidate.drop_per_cost if candidate.drop_per_cost >= 0.0 else median
        entropy = candidate.entropy_nats if math.isfinite(candidate.entropy_nats) else 0.0
        return (1.0, -rho, -entropy, candidate.arrival)
    return (1.0, -standing(candidate, median, config, step) - waited, -waited, candidate.arrival)


def _draw(candidate: Candidate, step: int) -> float:
    """Return a number in [0, 1) keyed by seed, arrival and step: the same on every machine."""
    text = f"{candidate.seed}:{candidate.arrival}:{step}".encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) / 2.0**53
