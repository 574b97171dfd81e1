"""What a comparison takes of the settings: the model, how it is run, and gains. The rest is up to its arms."""

from typing import Any

import msgspec

from etserve.config import ControlConfig, EngineConfig

# Sized by a workload, kept as an arm needs it, or of a server only: the lab sets them, whatever a file says.
UNUSED_ENGINE = frozenset(
    {
        "served_model_name",
        "max_num_seqs",
        "max_step_tokens",
        "num_kv_blocks",
        "kv_memory_bytes",
        "memory_fraction",
        "prefix_caching",
        "pruning_sketch_bits",
        "max_waiting_requests",
        "max_waiting_tokens",
    }
)
# Switched by the arms, or about messages, of which a comparison has none.
_OFF: dict[str, Any] = {
    "temperature_mode": "off",
    "fixed_temperature": 1.0,
    "priority_mode": "fcfs",
    "speculation": "off",
    "pruning": "off",
    "prune_selector": "sketch",
    "prune_share": 1.0,
    "kv_protect": False,
    "verify": "off",
    "eviction": "off",
    "block_budget": None,
    "evict_selector": "score",
}
UNUSED = frozenset({*UNUSED_ENGINE, *_OFF})  # a command that measures by them would ignore their flags


def plain(control: ControlConfig) -> ControlConfig:
    """The settings with everything off: gains and calibrated entropies stay, for the arms to switch on."""
    return msgspec.structs.replace(control, **_OFF)


def used(config: EngineConfig) -> dict[str, Any]:
    """What a comparison depends on of the engine's settings, by name."""
    found: dict[str, Any] = msgspec.to_builtins(config)
    return {name: value for name, value in found.items() if name not in UNUSED_ENGINE | {"control"}}
