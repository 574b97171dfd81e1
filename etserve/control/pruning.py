"""The meso loop: how much attention mass a step may miss. The kernel decides which blocks; knows no keys and no cache.

Section 4 of the entropic-control page. Per choice one `PruningState`, replaced at each output token. Units: nats.

    eps_t = eps_0 * (1 + s * 2 * clamp((H_mid - Hbar) / (H_hi - H_lo), -1/2, 1/2))      Hbar = EMA_1/4(H_raw)

Loose when sure, tight when lost; a negative swing s is the reversed placebo. Dense (0) overrules: after a jump of H,
on unknown H, on short contexts, at the watchdog's checks, and for good once it has found damage twice running.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PruningConfig:
    """Gains and guards. Raises ValueError when a value is out of range."""

    epsilon: float = 0.1  # eps_0: share of attention mass that a head may miss; 0: dense
    swing: float = 0.2  # s; 1: as the paper has it
    entropy_low_nats: float = 1.3  # the model's quartiles of H_raw
    entropy_high_nats: float = 3.6
    smoothing: float = 0.25  # weight of the newest token in Hbar
    jump_nats: float = 3.0  # H_raw above the Hbar before it
    dense_steps_after_jump: int = 8
    unknown_entropy_nats: float = 0.05  # Hbar below: over-confident, not safe
    unknown_steps: int = 16
    unknown_epsilon: float = 0.05
    check_interval: int = 64  # steps between the watchdog's dense checks
    max_divergence_nats: float = 0.05
    max_strikes: int = 2  # failed checks running
    sink_blocks: int = 1
    recent_blocks: int = 4
    min_kept_blocks: int = 8
    min_kept_share: float = 0.03
    min_context_tokens: int = 512
    dense_layers: int = 2

    def __post_init__(self) -> None:
        if not -1.0 <= self.swing <= 1.0:
            raise ValueError(f"swing must be in [-1, 1], got {self.swing}")
        if not (self.epsilon >= 0.0 and self.epsilon * (1.0 + abs(self.swing)) < 1.0):
            raise ValueError("epsilon must be >= 0 and below 1 at its loosest")
        if not 0.0 <= self.entropy_low_nats < self.entropy_high_nats < math.inf:
            raise ValueError("entropy quartiles must ascend")
        if not (0.0 < self.smoothing <= 1.0 and 0.0 <= self.min_kept_share <= 1.0 and self.unknown_epsilon >= 0.0):
            raise ValueError("smoothing must be in (0, 1], min_kept_share in [0, 1], unknown_epsilon >= 0")
        counts = (self.dense_steps_after_jump, self.sink_blocks, self.recent_blocks, self.min_kept_blocks)
        if min(*counts, self.min_context_tokens, self.dense_layers) < 0:
            raise ValueError("counts must be >= 0")
        if min(self.unknown_steps, self.check_interval, self.max_strikes) < 1:
            raise ValueError("unknown_steps, check_interval and max_strikes must be >= 1")


@dataclass(frozen=True, slots=True)
class PruningState:
    """State of one choice."""

    entropy_nats: float = math.nan  # Hbar; NaN before the first known H
    dense_steps_left: int = 0
    low_steps: int = 0  # steps running with Hbar below the unknown floor
    steps_since_check: int = 0
    strikes: int = 0
    disabled_reason: str | None = None  # dense for the rest of the request


def observe(config: PruningConfig, state: PruningState, entropy_nats: float) -> PruningState:
    """Take in one step's H_raw; a non-finite one makes the next step dense and moves no average."""
    dense_left = max(0, state.dense_steps_left - 1)
    since_check = state.steps_since_check + 1
    if not math.isfinite(entropy_nats):
        return replace(state, dense_steps_left=max(1, dense_left), steps_since_check=since_check)
    before = entropy_nats if math.isnan(state.entropy_nats) else state.entropy_nats
    average = before + config.smoothing * (entropy_nats - before)
    jumped = entropy_nats - before >= config.jump_nats
    return PruningState(
        entropy_nats=average,
        dense_steps_left=config.dense_steps_after_jump if jumped else dense_left,
        low_steps=state.low_steps + 1 if average < config.unknown_entropy_nats else 0,
        steps_since_check=since_check,
        strikes=state.strikes,
        disabled_reason=state.disabled_reason,
    )


def steered_epsilon(config: PruningConfig, state: PruningState) -> float:
    """Return eps_t of the law and the unknown floor alone, whatever else asks for dense."""
    span = config.entropy_high_nats - config.entropy_low_nats
    middle = config.entropy_low_nats + 0.5 * span
    lean = min(0.5, max(-0.5, (middle - state.entropy_nats) / span))
    epsilon = config.epsilon * (1.0 + config.swing * 2.0 * lean)
    return min(epsilon, config.unknown_epsilon) if state.low_steps >= config.unknown_steps else epsilon


def allowed_epsilon(config: PruningConfig, state: PruningState, context_tokens: int) -> float:
    """Return the epsilon that skipping may use in this step, 0 where it must be dense; a check does not count."""
    is_dense = (
        state.disabled_reason is not None
        or math.isnan(state.entropy_nats)
        or state.dense_steps_left > 0
        or context_tokens < config.min_context_tokens
    )
    return 0.0 if is_dense else steered_epsilon(config, state)


def epsilon(config: PruningConfig, state: PruningState, context_tokens: int) -> float:
    """Return the epsilon of the pass whose output is used; 0: dense, also at the watchdog's checks."""
    return 0.0 if is_check_due(config, state, context_tokens) else allowed_epsilon(config, state, context_tokens)


def is_check_due(config: PruningConfig, state: PruningState, context_tokens: int) -> bool:
    """Whether this step runs dense and once more with `allowed_epsilon`, to be compared.

    Steps that are dense anyway postpone the check: there is nothing to compare.
    """
    return state.steps_since_check >= config.check_interval and allowed_epsilon(config, state, context_tokens) > 0.0


def observe_check(config: PruningConfig, state: PruningState, divergence_nats: float) -> PruningState:
    """Take in KL(dense || skipped) of a check; an unknown divergence counts as damage."""
    strikes = 0 if divergence_nats <= config.max_divergence_nats else state.strikes + 1
    reason = "watchdog" if strikes >= config.max_strikes else state.disabled_reason
    return replace(state, steps_since_check=0, strikes=strikes, disabled_reason=reason)


def disable(state: PruningState, reason: str) -> PruningState:
    """Turn skipping off for the rest of the request; the first reason stays."""
    return replace(state, disabled_reason=state.disabled_reason or reason)


def is_dense_layer(config: PruningConfig, layer: int) -> bool:
    """Whether the layer reads every block always."""
    return layer < config.dense_layers


def protected_blocks(
    config: PruningConfig, num_blocks: int, protected_spans: Iterable[tuple[int, int]] = ()
) -> frozenset[int]:
    """Return the blocks that every step reads: sinks, the last ones, all that touch a span [start, end) of tokens."""
    kept = set(range(min(config.sink_blocks, num_blocks)))
    kept.update(range(max(0, num_blocks - config.recent_blocks), num_blocks))
    for start, end in protected_spans:
        if end > start:
            kept.update(range(max(0, start // BLOCK_TOKENS), min(num_blocks, -(-end // BLOCK_TOKENS))))
    return frozenset(kept)


def minimum_kept(config: PruningConfig, num_blocks: int) -> int:
    """Return the fewest blocks a head may read: max(8, 3 % of them), at most all."""
    return min(num_blocks, max(config.min_kept_blocks, math.ceil(config.min_kept_share * num_blocks)))


def group_masses(log_masses_by_head: Sequence[Sequence[float]]) -> list[float]:
    """Return per block the largest softmax share over the query heads of one KV head.

    [heads][blocks] of estimated log mass -> [blocks]. Sums to 1 or more, so a missing sum of at most epsilon over
    these holds for each head alone. A head with an unknown entry makes every block unknown.
    """
    by_head = [_softmax(row) for row in log_masses_by_head]
    if any(math.isnan(mass) for row in by_head for mass in row):
        return [math.nan] * len(by_head[0])
    return [max(column) for column in zip(*by_head, strict=True)]


def select_blocks(masses: Sequence[float], epsilon: float, protected: Collection[int], minimum: int) -> tuple[int, ...]:
    """Return the blocks to read, ascending: skip from the smallest mass while the missing sum stays <= epsilon.

    Protected blocks stay and at least `minimum` blocks in all. Of equal masses the older is skipped first. epsilon <= 0
    or NaN, or any unknown mass, is dense. Slow oracle of the kernels' rule.
    """
    everything = tuple(range(len(masses)))
    if not epsilon > 0.0 or any(math.isnan(mass) for mass in masses):
        return everything
    skipped: set[int] = set()
    missing = 0.0
    for block in sorted(set(everything) - set(protected), key=lambda b: (masses[b], b)):
        missing += masses[block]
        if missing > epsilon or len(masses) - len(skipped) <= minimum:
            break
        skipped.add(block)
    return tuple(block for block in everything if block not in skipped)


def skip_divergence_nats(missing_mass: float) -> float:
    """Return -ln(1 - m): the exact KL of a head's renormalised distribution from its dense one."""
    return math.inf if missing_mass >= 1.0 else -math.log1p(-missing_mass)


def skip_output_bound(missing_mass: float, largest_value_norm: float) -> float:
    """Return 2 m max|v|: no head's output moves further when mass m is skipped."""
    return 2.0 * missing_mass * largest_value_norm


def _softmax(log_masses: Sequence[float]) -> list[float]:
    """Shares of a row; -inf entries get 0, a row without a finite entry or with NaN or +inf is unknown."""
    top = max(log_masses)
    if not math.isfinite(top) or any(math.isnan(x) for x in log_masses):
        return [math.nan] * len(log_masses)
    weights = [math.exp(x - top) for x in log_masses]
    total = math.fsum(weights)
    return [w / total for w in weights]
