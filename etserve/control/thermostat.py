"""The micro loop: a temperature for each token, steered by entropy. Knows no logits; draws nothing.

Section 6 of the entropic-control page. Per choice one `Thermostat`, replaced at each output token: a value that
survives preemption and retries with its sequence. With u = ln T the identity dH/du = V (varentropy) makes
du = kappa * e / V a Newton step, whatever the vocabulary. H_ctl and V are measured after bias, penalties and grammar,
at the temperature in force, before top-k, top-p and min-p. Units: nats.
"""

import math
from dataclasses import dataclass
from typing import Literal

Mode = Literal["off", "cool", "two_sided", "edt", "mirostat", "fixed"]
Side = Literal["none", "low", "high"]

TARGETED_MODES = ("cool", "two_sided", "mirostat")  # steer towards `target_nats`
MEASURED_MODES = ("cool", "two_sided", "edt", "mirostat")  # need H_ctl of each token
SAMPLING_ORDER = ("penalties", "mask", "temperature", "top_k", "top_p", "min_p")
_NOWHERE: Side = "none"
AUTO_TARGET_SHARE = 0.9  # of the calibrated mean of H_ctl


@dataclass(frozen=True, slots=True)
class ThermostatConfig:
    """Gains and bounds. Raises ValueError when a value is out of range."""

    mode: Mode = "off"
    target_nats: float = 2.0  # H*; in mirostat the target surprise
    fixed_temperature: float = 1.0  # mode fixed: the control arm, at the steered arm's mean
    smoothing: float = 1.0 / 16.0  # weight of the newest token in both averages
    deadzone_nats: float = 0.1
    gain: float = 0.2  # kappa
    leak: float = 0.01  # pull back to the client's temperature, per token
    max_step: float = 0.1  # |du|
    min_varentropy: float = 0.25  # divisor's floor
    freeze_varentropy: float = 0.05  # below, temperature has no hold on entropy
    warmup_tokens: int = 4
    lowest_share: float = 0.5  # T >= 0.5 T_user
    highest_share: float = 1.5  # T <= 1.5 T_user in two_sided; 1 in cool
    edt_base: float = 0.8
    edt_theta: float = 1.0
    edt_lowest_share: float = 0.05  # T must stay above 0 to divide by
    mirostat_rate: float = 0.1  # eta

    def __post_init__(self) -> None:
        finite = (self.target_nats, self.deadzone_nats, self.gain, self.max_step, self.edt_theta, self.mirostat_rate)
        if not all(math.isfinite(x) and x >= 0.0 for x in finite):
            raise ValueError("target, deadzone, gains and steps must be finite and >= 0")
        if not (0.0 < self.smoothing <= 1.0 and 0.0 <= self.leak <= 1.0 and 0.0 < self.edt_base < 1.0):
            raise ValueError("smoothing must be in (0, 1], leak in [0, 1], edt_base in (0, 1)")
        if not (0.0 < self.lowest_share <= 1.0 <= self.highest_share < math.inf and 0.0 < self.edt_lowest_share <= 1.0):
            raise ValueError("temperature bounds must enclose the client's temperature and be > 0")
        if not (self.min_varentropy > 0.0 and self.fixed_temperature > 0.0 and self.warmup_tokens >= 0):
            raise ValueError("min_varentropy and fixed_temperature must be > 0, warmup_tokens >= 0")


@dataclass(frozen=True, slots=True)
class Thermostat:
    """State of one choice."""

    user_temperature: float
    is_bypassed: bool  # greedy: measured, never steered
    log_offset: float = 0.0  # u - u0 = ln(T / T_user)
    entropy_nats: float = math.nan  # EMA of H_ctl; NaN before the first known one
    varentropy: float = math.nan  # EMA of V, nats^2
    num_tokens: int = 0
    max_surprisal_nats: float = math.inf  # mirostat: cut tokens more surprising than this (always keep the likeliest)
    temperature_sum: float = 0.0  # of the temperatures in force at the observed tokens
    saturated: Side = "none"  # clamped, with the error pushing further out

    @property
    def mean_temperature(self) -> float:
        """Mean over the observed tokens: what the `fixed` control arm is given."""
        return self.temperature_sum / self.num_tokens if self.num_tokens else self.user_temperature


def target_entropy_nats(requested: float | None, calibrated_mean: float | None) -> float | None:
    """Return H*: the request's, else 0.9 of the model's calibrated mean of H_ctl, else None (do not steer)."""
    for value, share in ((requested, 1.0), (calibrated_mean, AUTO_TARGET_SHARE)):
        if value is not None and math.isfinite(value):
            return share * value
    return None


def start(config: ThermostatConfig, user_temperature: float, top_k: int = 0) -> Thermostat:
    """Begin at the client's temperature; temperature 0 and top_k 1 are greedy and bypass every mode."""
    is_greedy = user_temperature <= 0.0 or top_k == 1
    limit = 2.0 * config.target_nats if config.mode == "mirostat" and not is_greedy else math.inf
    return Thermostat(user_temperature, is_greedy, max_surprisal_nats=limit)


def temperature(config: ThermostatConfig, state: Thermostat) -> float:
    """Return T for the next token; exactly the client's where the mode is off or bypassed."""
    if state.is_bypassed or config.mode in ("off", "mirostat"):
        return state.user_temperature
    if config.mode == "fixed":
        return config.fixed_temperature
    return state.user_temperature * math.exp(state.log_offset)


def observe(
    config: ThermostatConfig,
    state: Thermostat,
    entropy_nats: float,
    varentropy: float,
    *,
    surprisal_nats: float = math.nan,
    is_forced: bool = False,
) -> Thermostat:
    """Take in one output token, measured while `temperature(config, state)` was in force.

    `surprisal_nats` is -ln p of the drawn token (mirostat); `is_forced`: the grammar left one token. In `edt` H is
    taken at temperature 1, and acts one token late. What is unknown (non-finite) or forced moves nothing.
    """
    entropy, spread = state.entropy_nats, state.varentropy
    offset, limit, saturated = state.log_offset, state.max_surprisal_nats, _NOWHERE
    num_tokens = state.num_tokens + 1
    is_known = math.isfinite(entropy_nats) and math.isfinite(varentropy) and min(entropy_nats, varentropy) >= 0.0
    if is_known and not is_forced:
        entropy = _average(entropy, entropy_nats, config.smoothing)
        spread = _average(spread, varentropy, config.smoothing)
        if state.is_bypassed:
            pass
        elif config.mode in ("cool", "two_sided"):
            offset, saturated = _steer(config, offset, entropy, spread, num_tokens)
        elif config.mode == "edt":
            offset = edt_log_offset(config, entropy_nats)
        elif config.mode == "mirostat":
            limit = _mirostat_limit(config, state, surprisal_nats)
    return Thermostat(  # at every token of every choice: dataclasses.replace takes four times as long
        user_temperature=state.user_temperature,
        is_bypassed=state.is_bypassed,
        log_offset=offset,
        entropy_nats=entropy,
        varentropy=spread,
        num_tokens=num_tokens,
        max_surprisal_nats=limit,
        temperature_sum=state.temperature_sum + temperature(config, state),
        saturated=saturated,
    )


def control_step(config: ThermostatConfig, entropy_nats: float, varentropy: float) -> float:
    """Return du = clip(kappa * deadzone(H* - H) / max(V, 0.25), +-0.1)."""
    error = deadzone(config.target_nats - entropy_nats, config.deadzone_nats)
    return _clip(config.gain * error / max(varentropy, config.min_varentropy), -config.max_step, config.max_step)


def deadzone(error: float, width: float) -> float:
    """Return 0 within +-width and the distance to the zone outside: continuous, so nothing jumps at its edge."""
    return math.copysign(max(0.0, abs(error) - width), error)


def edt_log_offset(config: ThermostatConfig, entropy_nats: float) -> float:
    """Return ln(T / T_user) of EDT (arXiv 2403.14541): T = T_user * 0.8^(theta / H), kept above 0."""
    lowest = math.log(config.edt_lowest_share)
    if entropy_nats <= 0.0:
        return lowest if config.edt_theta > 0.0 else 0.0
    return max(lowest, math.log(config.edt_base) * config.edt_theta / entropy_nats)


def _steer(
    config: ThermostatConfig, offset: float, entropy_nats: float, varentropy: float, num_tokens: int
) -> tuple[float, Side]:
    """Move u - u0 by one leaky integral step, or freeze it where the integral would only wind up.

    Both averages have the newest token in them. Returns u - u0, and where it is held though the error pushes on.
    """
    if num_tokens <= config.warmup_tokens or varentropy < config.freeze_varentropy:
        return offset, "none"
    low = math.log(config.lowest_share)
    high = 0.0 if config.mode == "cool" else math.log(config.highest_share)
    step = control_step(config, entropy_nats, varentropy)
    if step < 0.0 and offset <= low:
        return offset, "low"
    if step > 0.0 and offset >= high:
        return offset, "high"
    return _clip((1.0 - config.leak) * offset + step, low, high), "none"


def _mirostat_limit(config: ThermostatConfig, state: Thermostat, surprisal_nats: float) -> float:
    """Return mu - eta * (S - tau) of mirostat v2 (arXiv 2007.14966)."""
    if not math.isfinite(surprisal_nats):
        return state.max_surprisal_nats
    return state.max_surprisal_nats - config.mirostat_rate * (surprisal_nats - config.target_nats)


def _average(before: float, new: float, weight: float) -> float:
    return new if math.isnan(before) else before + weight * (new - before)


def _clip(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))
