"""What the loop holds of one choice: the laws that steer it, and their states. Replaced at each output token.

The state is a value of the sequence, so preemption keeps it and recomputation, which draws nothing, never moves it.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from etserve.control import pruning, thermostat
from etserve.control.draft import VerifyLaw
from etserve.control.eviction import EvictionConfig
from etserve.control.priority import DropAverage
from etserve.control.pruning import PruningConfig, PruningState
from etserve.control.thermostat import Side, Thermostat, ThermostatConfig

Fallback = Literal["jump", "unknown", "low_entropy", "watchdog"]
FALLBACKS: tuple[Fallback, ...] = ("jump", "unknown", "low_entropy", "watchdog")
END_WEIGHT = 0.2  # of the newest token in the average of p(EOS)


@dataclass(frozen=True, slots=True)
class ChoiceLaws:
    """What steers one choice, fixed at its arrival. The default steers nothing."""

    thermostat: ThermostatConfig = field(default_factory=ThermostatConfig)
    pruning: PruningConfig | None = None  # None: every step is dense
    protected_spans: tuple[tuple[int, int], ...] = ()  # [start, end) of prompt tokens whose blocks are always read
    verification: VerifyLaw | None = None  # of what was drawn with blocks skipped
    ranks_by_entropy: bool = False  # the macro loop asks for drops and nearness of the end
    eviction: EvictionConfig | None = None  # None: no block is given back before the end
    block_budget: int | None = None  # blocks to hold at most, as far as the guards allow; None: evict under pressure


@dataclass(frozen=True, slots=True)
class TokenMeasure:
    """What the loop wants to know of one drawn token, beside its raw entropy. NaN: not measured."""

    entropy_nats: float = math.nan  # H_ctl: penalties, bias and grammar applied, at the temperature in force
    varentropy: float = math.nan
    surprisal_nats: float = math.nan  # -ln p of the drawn token in the same distribution
    is_forced: bool = False  # the grammar left one token
    end_probability: float = math.nan  # p(EOS) of the raw logits
    kept_fraction: float = 1.0  # share of KV blocks that attention read
    skipped_mass: float = 0.0  # attention mass that the blocks left out were estimated to hold
    divergence_nats: float | None = None  # KL(dense || skipped), where the watchdog compared them


NOT_MEASURED = TokenMeasure()
_NO_LAWS = ChoiceLaws()
_UNSTEERED = Thermostat(1.0, is_bypassed=True)
_NO_PRUNING = PruningState()
_NO_DROPS = DropAverage()


@dataclass(frozen=True, slots=True)
class ChoiceControl:
    """State of one choice under its laws."""

    laws: ChoiceLaws = _NO_LAWS
    thermostat: Thermostat = _UNSTEERED
    pruning: PruningState = _NO_PRUNING
    drops: DropAverage = _NO_DROPS
    end_probability: float = 0.0  # average of p(EOS)
    num_tokens: int = 0
    kept_sum: float = 0.0  # of the kept fractions
    fallback: Fallback | None = None  # why skipping stepped back at the latest token

    @property
    def steers_temperature(self) -> bool:
        return self.laws.thermostat.mode != "off" and not self.thermostat.is_bypassed

    @property
    def measures_temperature(self) -> bool:
        """Whether H_ctl of each token is wanted."""
        return self.laws.thermostat.mode in thermostat.MEASURED_MODES and not self.thermostat.is_bypassed

    @property
    def is_measured(self) -> bool:
        """Whether tokens are measured for the loop beyond their raw entropy."""
        return self.laws.ranks_by_entropy or self.measures_temperature

    @property
    def temperature(self) -> float:
        """Of the next token, where `steers_temperature`."""
        return thermostat.temperature(self.laws.thermostat, self.thermostat)

    @property
    def saturated(self) -> Side:
        """Where the thermostat was clamped at the latest token."""
        return self.thermostat.saturated if self.steers_temperature else "none"

    @property
    def kept_fraction_mean(self) -> float:
        return self.kept_sum / self.num_tokens if self.num_tokens else 1.0

    @property
    def num_sure_dense_tokens(self) -> float:
        """Contexts below so many tokens are read whole, whatever entropy the tokens to come will have."""
        law = self.laws.pruning
        if law is None or self.is_lossless or self.pruning.disabled_reason is not None:
            return math.inf
        return law.min_context_tokens

    @property
    def is_lossless(self) -> bool:
        """Whether blocks are skipped for guesses alone: every token that stands is drawn densely."""
        return self.laws.verification is not None and self.laws.verification.mode == "lossless"

    def guess_epsilon(self, context_tokens: int) -> float:
        """Attention mass that a guess at the next token may miss; 0: a guess would cost as much as the token."""
        if self.laws.pruning is None or not self.is_lossless:
            return 0.0
        return pruning.allowed_epsilon(self.laws.pruning, self.pruning, context_tokens)

    def epsilon(self, context_tokens: int) -> float:
        """Attention mass that the next step may miss; 0: dense."""
        if self.laws.pruning is None or self.is_lossless:
            return 0.0
        return pruning.epsilon(self.laws.pruning, self.pruning, context_tokens)

    def check_epsilon(self, context_tokens: int) -> float:
        """At the watchdog's checks the epsilon of the pass that is compared with the dense one, else 0."""
        law = self.laws.pruning
        if law is None or self.is_lossless or not pruning.is_check_due(law, self.pruning, context_tokens):
            return 0.0
        return pruning.allowed_epsilon(law, self.pruning, context_tokens)

    def observe(self, entropy_nats: float, measured: TokenMeasure = NOT_MEASURED) -> "ChoiceControl":
        """Take in one output token: its H_raw, and what else was measured."""
        laws = self.laws
        if laws is _NO_LAWS:
            return self
        skipping, fallback = self._observe_pruning(entropy_nats, measured)
        return ChoiceControl(
            laws=laws,
            thermostat=self._observe_temperature(measured) if self.steers_temperature else self.thermostat,
            pruning=skipping,
            drops=self.drops.observe(entropy_nats) if laws.ranks_by_entropy else self.drops,
            end_probability=self._observe_end(measured.end_probability),
            num_tokens=self.num_tokens + 1,
            kept_sum=self.kept_sum + measured.kept_fraction,
            fallback=fallback,
        )

    def _observe_temperature(self, measured: TokenMeasure) -> Thermostat:
        return thermostat.observe(
            self.laws.thermostat,
            self.thermostat,
            measured.entropy_nats,
            measured.varentropy,
            surprisal_nats=measured.surprisal_nats,
            is_forced=measured.is_forced,
        )

    def _observe_end(self, probability: float) -> float:
        if not math.isfinite(probability):
            return self.end_probability
        return self.end_probability + END_WEIGHT * (probability - self.end_probability)

    def _observe_pruning(self, entropy_nats: float, measured: TokenMeasure) -> tuple[PruningState, Fallback | None]:
        law, before = self.laws.pruning, self.pruning
        if law is None:
            return before, None
        after = pruning.observe(law, before, entropy_nats)
        if measured.divergence_nats is not None:
            after = pruning.observe_check(law, after, measured.divergence_nats)
        return after, _fallback(law, before, after, entropy_nats)


def start(laws: ChoiceLaws, user_temperature: float, top_k: int = 0) -> ChoiceControl:
    """Begin at the client's temperature. Under laws that steer nothing the state never changes."""
    if laws == _NO_LAWS:
        return ChoiceControl()
    return ChoiceControl(laws, thermostat.start(laws.thermostat, user_temperature, top_k))


def _fallback(law: PruningConfig, before: PruningState, after: PruningState, entropy_nats: float) -> Fallback | None:
    """Say which guard this token has set off; None where all stand as before."""
    if after.disabled_reason is not None:
        return "watchdog" if before.disabled_reason is None else None
    if not math.isfinite(entropy_nats):
        return "unknown"
    if after.dense_steps_left > before.dense_steps_left:
        return "jump"
    return "low_entropy" if before.low_steps < law.unknown_steps <= after.low_steps else None
