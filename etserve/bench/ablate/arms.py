"""What is compared: an arm is a setting of the control loop. Knows no engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from etserve.bench.errors import BenchError
from etserve.config import ControlConfig

SKETCH_BITS = 2
MAX_EPSILON = 0.5  # that settings may have
_MICRO = {"temperature_mode": "cool"}
_MACRO = {"priority_mode": "entropic"}
_MESO = {"pruning": "on"}
_PAPER = {"temperature_mode": "two_sided", "priority_mode": "paper", "pruning": "on", "epsilon_swing": 1.0}


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the table.

    `placebo_of`: the arm whose gain it tests, by doing as much of the same blindly. `matches`: the figure that it takes
    from that arm's first round, so that both do equally much.
    """

    name: str
    description: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of ControlConfig
    placebo_of: str | None = None
    matches: str | None = None  # kept_share | mean_temperature
    epsilon_factor: float = 1.0  # on the epsilon of the settings that all arms share

    @property
    def is_lossy(self) -> bool:
        """Whether the model's distributions are no longer the plain engine's for the same text."""
        is_skipping = self.changes.get("pruning") == "on" and self.changes.get("verify") != "lossless"
        return is_skipping or self.changes.get("eviction", "off") != "off"

    @property
    def sketch_bits(self) -> int:
        """Of the key sketches that its engine keeps: none where it does not select by them."""
        is_selecting = self.changes.get("pruning") == "on" and self.changes.get("prune_selector") is None
        return SKETCH_BITS if is_selecting else 0


BASELINE = "baseline"
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(BASELINE, "the plain engine: everything off"),
        Arm("micro", "thermostat, cool", _MICRO),
        Arm("macro", "entropic priority with finish bonus and ageing", _MACRO),
        Arm("meso", "blocks skipped by key sketches, epsilon steered by entropy", _MESO),
        Arm("loose", "as meso, with twice its epsilon", _MESO, epsilon_factor=2.0),
        Arm(
            "verified",
            "as meso, keys and values renewed densely when its risk is spent",
            {**_MESO, "verify": "bounded"},
        ),
        Arm("lossless", "as meso, every token checked densely before it counts", {**_MESO, "verify": "lossless"}),
        Arm("full", "all three scales", {**_MICRO, **_MACRO, **_MESO}),
        Arm("paper", "all three as the paper words them", _PAPER),
        Arm("ngram", "drafts by prompt lookup, as long as entropy lets them be", {"speculation": "ngram"}),
        Arm("evict", "blocks given up under memory pressure, before a sequence is", {"eviction": "pressure"}),
        Arm(
            "random-evict",
            "as evict, whichever block",
            {"eviction": "pressure", "evict_selector": "random"},
            placebo_of="evict",
        ),
        Arm(
            "fixed-temperature",
            "one temperature, the thermostat's mean",
            {"temperature_mode": "fixed"},
            placebo_of="micro",
            matches="mean_temperature",
        ),
        Arm("random-priority", "priorities drawn anew for each step", {"priority_mode": "random"}, "macro"),
        Arm(
            "random-blocks",
            "as many blocks, drawn at random",
            {"pruning": "on", "prune_selector": "random"},
            placebo_of="meso",
            matches="kept_share",
        ),
        Arm(
            "recent-blocks",
            "as many blocks, the newest",
            {"pruning": "on", "prune_selector": "recency"},
            placebo_of="meso",
            matches="kept_share",
        ),
        Arm("constant-epsilon", "the same sketches, epsilon not steered", {**_MESO, "epsilon_swing": 0.0}, "meso"),
    )
}


def check_estimator(control: ControlConfig) -> None:
    """Raise BenchError where entropies are read in a way that may steer nothing."""
    if control.entropy_estimator == "topk_renorm":
        raise BenchError("entropy_estimator topk_renorm is for display only: this takes exact or mid")


def placebos_of(name: str) -> list[Arm]:
    """The arms that an arm must beat. The full loop answers for the placebos of its parts elsewhere."""
    return [arm for arm in ARMS.values() if arm.placebo_of == name]


def select(names: str | None) -> list[Arm]:
    """Arms by comma-separated names, the baseline always first; None: all. Raises BenchError for another name.

    An arm that a chosen placebo takes its measure from comes along, and before it.
    """
    wanted = list(ARMS) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in ARMS:
            raise BenchError(f"unknown arm {name!r}: {', '.join(ARMS)}")
    needed = {ARMS[name].placebo_of for name in wanted if ARMS[name].matches is not None}
    return [arm for arm in ARMS.values() if arm.name == BASELINE or arm.name in wanted or arm.name in needed]


def control_of(arm: Arm, base: ControlConfig, matched: float | None = None, num_layers: int = 0) -> ControlConfig:
    """The arm's settings over `base`, whose calibrated values all arms share.

    `matched`: the figure that the arm matches, as its law's first round measured it. `num_layers` of the model turns a
    share of all block reads into one of the layers that skip. Raises ValueError where a figure is missing.
    """
    changes = dict(arm.changes)
    if arm.epsilon_factor != 1.0:
        changes["epsilon"] = min(MAX_EPSILON, arm.epsilon_factor * base.epsilon)
    if arm.matches is not None:
        if matched is None:
            raise ValueError(f"{arm.name} needs the {arm.matches} of {arm.placebo_of}")
        if arm.matches == "kept_share":
            changes["prune_share"] = share_of_skipping_layers(matched, base.pruning_law().dense_layers, num_layers)
        else:
            changes["fixed_temperature"] = matched
    return msgspec.structs.replace(base, **changes)


def share_of_skipping_layers(kept_share: float, dense_layers: int, num_layers: int) -> float:
    """Share of blocks that the layers which skip must read for `kept_share` of all reads, in (0, 1]."""
    if num_layers <= dense_layers:
        return 1.0
    share = (kept_share * num_layers - dense_layers) / (num_layers - dense_layers)
    return min(1.0, max(0.01, share))
