"""What `etserve calibrate` found of a model, and the files that it writes. Entropies in nats."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from etserve.bench.errors import BenchError

MAX_LOSS = 0.003  # relative rise of the mean negative log-likelihood that the chosen epsilon may cost
MAX_NATS = 20.0  # of an entropy or a divergence in the settings


class EpsilonLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What a constant epsilon costs."""

    epsilon: float
    relative_loss: float  # of the mean negative log-likelihood: 0.003 is 0.3 %
    kept_share: float


class RiskBin(msgspec.Struct, frozen=True, kw_only=True):
    """Steps with an entropy in [low_nats, high_nats)."""

    low_nats: float
    high_nats: float
    mean_divergence_nats: float
    num_steps: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured of one model."""

    model: str
    temperature: float
    num_tokens: int  # that the model wrote
    mean_entropy_nats: float  # of H_ctl: at the temperature, before truncation
    quantiles_nats: dict[str, float]  # of H_raw
    losses: list[EpsilonLoss] = []  # empty: nothing can be skipped
    risks: list[RiskBin] = []
    risk_epsilon: float | None = None  # that the risks were measured at

    @property
    def epsilon(self) -> float | None:
        """The largest one within MAX_LOSS, all smaller ones being so too; None: not even the smallest, or unknown."""
        found = None
        for loss in sorted(self.losses, key=lambda each: each.epsilon):
            if loss.relative_loss > MAX_LOSS:
                break
            found = loss.epsilon
        return found


def settings_of(found: Calibration) -> dict[str, float | list[list[float]]]:
    """Fields of the control section."""
    settings = {"mean_entropy_nats": found.mean_entropy_nats}
    low, high = found.quantiles_nats["0.25"], found.quantiles_nats["0.75"]
    if high > low:
        settings |= {"entropy_low_nats": low, "entropy_high_nats": high}
    if found.epsilon is not None:
        settings["epsilon"] = found.epsilon
    rounded: dict[str, float | list[list[float]]] = {name: round(value, 4) for name, value in settings.items()}
    risks = risk_pairs(found.risks)
    return {**rounded, "verify_risks_nats": risks} if risks else rounded


def risk_pairs(risks: Sequence[RiskBin]) -> list[list[float]]:
    """[upper edge, mean divergence] of each bin, rounded; a bin that rounding leaves empty goes with the one before."""
    pairs: list[list[float]] = []
    for risk in risks:
        edge, divergence = round(min(risk.high_nats, MAX_NATS), 4), risk.mean_divergence_nats
        if edge > (pairs[-1][0] if pairs else 0.0):
            is_bounded = divergence <= MAX_NATS  # a NaN is not
            pairs.append([edge, round(max(0.0, divergence), 6) if is_bounded else MAX_NATS])
    return pairs


def as_toml(found: Calibration) -> str:
    """A file that a start finds by the model, or for `--config`: the settings, and as comments what they come from."""
    lines = [
        f"# Measured by `etserve calibrate` on {found.model}: {found.num_tokens} tokens of its own text at temperature",
        f"# {found.temperature:g}. Entropies belong to the model: use this file with no other.",
        "",
        "[control]",
        *_setting_lines(found),
    ]
    lines += ["", "# quantiles of H_raw, nats: " + ", ".join(f"{q} {h:.3f}" for q, h in found.quantiles_nats.items())]
    if found.losses and found.epsilon is None:
        lines.append(f"# no epsilon stays within a loss of {MAX_LOSS:.1%}: leave pruning off")
    for loss in found.losses:
        lines.append(
            f"# epsilon {loss.epsilon:g}: NLL {loss.relative_loss:+.3%}, reads {loss.kept_share:.1%} of blocks"
        )
    return "\n".join(lines) + "\n"


def _setting_lines(found: Calibration) -> Iterator[str]:
    at = "" if found.risk_epsilon is None else f", at epsilon {found.risk_epsilon:g}"
    for name, value in settings_of(found).items():
        if isinstance(value, list):
            yield f"{name} = [  # entropies up to the first: mean KL from dense attention{at}"
            yield from (f"    {pair}," for pair in value)
            yield "]"
        else:
            yield f"{name} = {value}"


def write_calibration(found: Calibration, path: Path) -> None:
    """The settings as TOML, everything measured as JSON beside it. Raises BenchError when a file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_toml(found), encoding="utf-8")
        path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
