"""Settings: read once from TOML < environment < flags, checked, frozen. The only module that reads the environment.

Below all of them lies what was measured of the model, if anything was.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from etserve.control import priority, thermostat
from etserve.control.draft import DEMO_RISKS, DraftLaw, RiskTable, VerifyLaw
from etserve.control.entropy import Estimator
from etserve.control.pruning import PruningConfig
from etserve.errors import ConfigError

BLOCK_SIZE = 16  # tokens per KV block, of all layers and KV heads; the native kernels are built for it
ENVIRONMENT_PREFIX = "ETSERVE_"

Origin = Literal["default", "calibration", "file", "environment", "flag"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
HttpUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://\S+$", max_length=2048)]
Fraction = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Nats = Annotated[float, msgspec.Meta(ge=0.0, le=20.0)]
WaitSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)]
UpperNats = Annotated[float, msgspec.Meta(gt=0.0, le=20.0)]


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The control loop's three scales (docs/control.md). All off: the plain engine, bit for bit. Entropies in nats."""

    # measuring: what stands for the entropy of a row, wherever it steers or is told (control/entropy.py)
    entropy_estimator: Estimator = "exact"  # mid: off by tenths of a nat; topk_renorm: biased low, for display only
    estimator_top_k: Annotated[int, msgspec.Meta(ge=1, le=64)] = 64  # likeliest tokens that the estimates go by
    # micro: the temperature of each token
    temperature_mode: thermostat.Mode = "off"
    target_entropy_nats: Nats | None = None  # H*; in mirostat the target surprise
    mean_entropy_nats: Nats | None = None  # of H_ctl, calibrated: 0.9 of it is the target where none is given
    fixed_temperature: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 1.0  # of mode fixed
    thermostat_gain: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 0.2
    # macro: who gets the step
    priority_mode: priority.Mode = "fcfs"
    gain_weight: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    finish_weight: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    decode_wait_seconds: WaitSeconds = 0.2  # a sequence that waited so long outranks all of its class served since
    waiting_wait_seconds: WaitSeconds = 1.0
    batch_wait_seconds: WaitSeconds = 10.0  # of requests with priority > 0
    # drafts: guesses at the next tokens, verified in the step that computes them; no output depends on them
    speculation: Literal["off", "ngram"] = "off"  # ngram: what followed when the text last ended so
    max_draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=32)] = 8
    draft_row_cost: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 0.3  # of one row, in units of the weights' cost
    # meso: which blocks a step reads
    pruning: Literal["off", "on"] = "off"  # what a request gets that says nothing of it
    prune_selector: Literal["sketch", "random", "recency"] = "sketch"  # the latter two are placebos
    prune_share: Fraction = 1.0  # of the blocks that a placebo reads
    epsilon: Annotated[float, msgspec.Meta(ge=0.0, le=0.5)] = 0.1  # attention mass that a head may miss
    epsilon_swing: Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)] = 0.2  # 0: constant; 1: as the paper; < 0: reversed
    entropy_low_nats: Nats = 1.3  # the model's quartiles of H_raw, calibrated
    entropy_high_nats: Nats = 3.6
    jump_nats: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 3.0  # entropy so far above its average: dense
    jump_dense_steps: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 8  # for so many steps
    watchdog_steps: Positive = 64  # between two comparisons with dense attention
    watchdog_divergence_nats: Nats = 0.05  # above it twice running: pruning is off for the request
    kv_protect: bool = False  # system messages are always read, and never evicted
    # tokens drawn with blocks skipped are computed again densely, several in one step
    verify: Literal["off", "bounded", "lossless"] = "off"  # lossless: held back until then; bounded: only KV is renewed
    verify_budget_nats: Nats = 0.03  # of expected divergence, summed over the tokens since the last time
    verify_max_tokens: Annotated[int, msgspec.Meta(ge=1, le=32)] = 16
    # (entropy, expected divergence) pairs, calibrated: the first is a bin's upper edge; none: the built-in table
    verify_risks_nats: tuple[tuple[UpperNats, Nats], ...] = ()
    # under memory pressure, or a sequence's own budget: which blocks give their memory back for good
    eviction: Literal["off", "pressure", "budget"] = "off"  # what a request gets that says nothing of it
    block_budget: Annotated[int, msgspec.Meta(ge=32)] | None = None  # blocks that a sequence holds at most, of budget
    evict_selector: Literal["score", "random"] = "score"  # random is a placebo

    def __post_init__(self) -> None:
        """Raises ValueError where the laws themselves refuse the values together."""
        self.thermostat_law()
        self.priority_law()
        self.pruning_law()
        self.risk_table()
        if self.entropy_estimator == "topk_renorm" and self.is_steering:
            raise ValueError(
                "entropy_estimator topk_renorm is biased low and for display only: it takes temperature_mode, "
                "priority_mode, pruning, eviction and speculation off"
            )
        if self.temperature_mode in thermostat.TARGETED_MODES and self.target() is None:
            raise ValueError(f"temperature_mode {self.temperature_mode} takes target_entropy_nats or mean_entropy_nats")
        if self.verify != "off" and self.eviction != "off":
            raise ValueError("verify takes eviction off: what is evicted cannot be computed again")
        if self.eviction == "budget" and self.block_budget is None:
            raise ValueError("eviction budget takes block_budget")

    @property
    def is_steering(self) -> bool:
        """Whether anything is on that entropy may steer, for requests that do not say."""
        modes = (self.temperature_mode, self.pruning, self.eviction, self.speculation)
        return self.priority_mode != "fcfs" or any(mode != "off" for mode in modes)

    def can_prune(self, sketch_bits: int) -> bool:
        """Whether attention can skip with so many bits of sketch: placebos need none."""
        return sketch_bits > 0 or self.prune_selector != "sketch"

    def target(self) -> float | None:
        """H* of a request that gives none; None: nothing to steer to."""
        return thermostat.target_entropy_nats(self.target_entropy_nats, self.mean_entropy_nats)

    def thermostat_law(
        self, mode: thermostat.Mode | None = None, target_nats: float | None = None
    ) -> thermostat.ThermostatConfig:
        """The law with a request's own mode and target where it gives them."""
        target = self.target() if target_nats is None else target_nats
        return thermostat.ThermostatConfig(
            mode=self.temperature_mode if mode is None else mode,
            target_nats=0.0 if target is None else target,
            fixed_temperature=self.fixed_temperature,
            gain=self.thermostat_gain,
        )

    def priority_law(self) -> priority.PriorityConfig:
        return priority.PriorityConfig(
            mode=self.priority_mode,
            gain_weight=self.gain_weight,
            finish_weight=self.finish_weight,
            decode_wait_seconds=self.decode_wait_seconds,
            waiting_wait_seconds=self.waiting_wait_seconds,
            batch_wait_seconds=self.batch_wait_seconds,
        )

    def verify_law(self, mode: Literal["off", "bounded", "lossless"] | None = None) -> VerifyLaw | None:
        """The law in a request's own mode where it gives one; None: nothing is verified."""
        wanted = self.verify if mode is None else mode
        if wanted == "off":
            return None
        return VerifyLaw(wanted, self.verify_budget_nats, self.verify_max_tokens, self.risk_table())

    def risk_table(self) -> RiskTable:
        """Divergence to expect by entropy: as calibrated, else the built-in one."""
        return RiskTable.of_bins(self.verify_risks_nats) if self.verify_risks_nats else DEMO_RISKS

    def draft_law(self) -> DraftLaw:
        return DraftLaw(self.max_draft_tokens, self.draft_row_cost)

    def pruning_law(self, epsilon: float | None = None) -> PruningConfig:
        """The law with a request's own epsilon where it gives one."""
        return PruningConfig(
            epsilon=self.epsilon if epsilon is None else epsilon,
            swing=self.epsilon_swing,
            entropy_low_nats=self.entropy_low_nats,
            entropy_high_nats=self.entropy_high_nats,
            jump_nats=self.jump_nats,
            dense_steps_after_jump=self.jump_dense_steps,
            check_interval=self.watchdog_steps,
            max_divergence_nats=self.watchdog_divergence_nats,
        )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process is started with."""

    model: str = "demo"  # "demo", a Hugging Face folder, or a .gguf file
    served_model_name: str | None = None  # None: "demo" or the file's own name
    dtype: Dtype = "auto"  # of weights and matrix products; auto: the checkpoint's, a GGUF file's own blocks included
    quantize: Literal["none", "q8_0", "q4_0", "q4_1"] = "none"  # round matrices to blocks at load; native only
    kv_dtype: Literal["auto", "bfloat16", "float16", "float32", "int8"] = (
        "auto"  # auto: float32 if dtype is, else bfloat16
    )
    backend: Literal["auto", "native", "torch"] = "auto"  # auto: native where csrc is built; torch: the slow oracle
    device: Literal["cpu", "cuda"] = "cpu"  # cuda: weights and KV cache on a GPU (docs/gpu.md)
    cuda_graphs: bool = True  # on device cuda, replay decode steps as captured graphs
    threads: NonNegative = 0  # 0: the cores this process may use (affinity and cgroup)
    max_model_len: Positive | None = None  # None: the model's own context length
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64  # running at once
    max_step_tokens: Annotated[int, msgspec.Meta(ge=16, le=65_536)] = 512  # one step's token budget
    num_kv_blocks: Positive | None = None  # None: from kv_memory_bytes
    kv_memory_bytes: Positive | None = None  # None: memory_fraction of what is free, at most max_num_seqs contexts
    memory_fraction: Fraction = 0.5
    prefix_caching: bool = True
    pruning_sketch_bits: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0  # per key dimension, to skip by; 0: none kept
    max_waiting_requests: Positive = 512
    max_waiting_tokens: Positive = 262_144
    control: ControlConfig = ControlConfig()  # the file's table [control]: what steers is the engine

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        if self.control.pruning == "on" and not self.control.can_prune(self.pruning_sketch_bits):
            raise ValueError("pruning takes pruning_sketch_bits of 1 or 2")
        if self.control.verify != "off" and not self.control.can_prune(self.pruning_sketch_bits):
            raise ValueError("verify takes pruning_sketch_bits of 1 or 2: without them nothing is ever skipped")
        if self.device == "cuda" and self.quantize != "none":
            raise ValueError("device cuda runs float weights only: quantize none")
        keeps_weights_dtype = self.device == "cuda" and self.backend != "torch"
        if keeps_weights_dtype and self.kv_dtype in ("float32", "int8") and self.kv_dtype != self.dtype:
            raise ValueError(f"kv_dtype {self.kv_dtype}: device cuda keeps the KV cache in the weights' dtype (auto)")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the front end is started with."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8000
    insecure: bool = False  # allow a non-loopback address without API keys
    api_keys_file: str | None = None  # one key a line; ETSERVE_API_KEYS (comma separated) adds to it
    api_keys: tuple[str, ...] = ()  # from the environment or a TOML file, never from argv
    allowed_hosts: tuple[str, ...] = ()  # Host headers; empty: any, but loopback names only where no key is needed
    engine_start_timeout_seconds: WaitSeconds = 600.0  # a first start that takes longer has failed
    drain_delay_seconds: Seconds = 0.0  # after SIGTERM: not ready, but still accepting
    drain_timeout_seconds: Seconds = 30.0
    header_timeout_seconds: Seconds = 10.0
    body_timeout_seconds: Seconds = 30.0
    write_timeout_seconds: Seconds = 30.0  # a client that stops reading for so long is dropped
    keep_alive_comment_seconds: Seconds = 10.0  # SSE comment on a silent stream
    max_body_bytes: Positive = 4 * 1024 * 1024
    requests_per_minute: Positive | None = None  # of each API key; without keys, of all clients. None: no limit
    tokens_per_minute: Positive | None = None  # the same of tokens, prompt and output
    compat_metrics: bool = False
    otlp_endpoint: HttpUrl | None = None  # of a collector's OTLP traces; None: no tracing, and no SDK imported
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both halves. A TOML file spells them [engine], [control] and [server]."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    @property
    def control(self) -> ControlConfig:
        return self.engine.control


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "engine": EngineConfig,
    "control": ControlConfig,
    "server": ServerConfig,
}
# What belongs to a model, and so may come from a file that is looked up by it: it switches nothing on.
CALIBRATED = frozenset({"mean_entropy_nats", "entropy_low_nats", "entropy_high_nats", "epsilon", "verify_risks_nats"})
_QUARTILES = frozenset({"entropy_low_nats", "entropy_high_nats"})  # one scale: a stronger source replaces both
_LISTS = frozenset({"api_keys", "allowed_hosts"})
_PAIRS = frozenset({"verify_risks_nats"})
_CARRIER = "control"  # the engine's field that holds the table of the same name


def load_config(
    path: Path | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
    calibration: Path | None = None,
) -> Config:
    """Merge calibration < file < environment < flags and check every value.

    The environment spells a field `ETSERVE_<FIELD>`, whichever its section. Flags that are None are not set.
    `calibration` may set what belongs to a model (CALIBRATED). Raises ConfigError with the field's name.
    """
    merged: dict[str, dict[str, Any]] = {}
    for _, source in _sources(path, flags, environment, calibration):
        for section, values in source.items():
            merged.setdefault(section, {}).update({k: v for k, v in values.items() if v is not None})
    if _CARRIER in merged.get("engine", {}):
        raise ConfigError(f"engine.{_CARRIER} is not a setting: [{_CARRIER}] is a table of its own")
    if _CARRIER in merged:
        merged.setdefault("engine", {})[_CARRIER] = merged.pop(_CARRIER)
    try:
        return msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace(f"$.engine.{_CARRIER}", f"$.{_CARRIER}")) from None


def setting_origins(
    path: Path | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
    calibration: Path | None = None,
) -> dict[str, dict[str, Origin]]:
    """Say where each field that is set came from, by section; a field that is missing has its default.

    Arguments as for `load_config`, which checks them.
    """
    origins: dict[str, dict[str, Origin]] = {}
    for origin, sections in _sources(path, flags, environment, calibration):
        for section, values in sections.items():
            origins.setdefault(section, {}).update({k: origin for k, v in values.items() if v is not None})
    return origins


def named_model(
    path: Path | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The model that these settings name, nothing else of them checked. Raises ConfigError for the file."""
    found = [source.get("engine", {}).get("model") for _, source in _sources(path, flags, environment, None)]
    return str(next((name for name in reversed(found) if name is not None), EngineConfig().model))


def _sources(
    path: Path | None,
    flags: Mapping[str, Mapping[str, Any]] | None,
    environment: Mapping[str, str] | None,
    calibration: Path | None,
) -> tuple[tuple[Origin, Mapping[str, Mapping[str, Any]]], ...]:
    """The weakest first."""
    stronger: tuple[tuple[Origin, Mapping[str, Mapping[str, Any]]], ...] = (
        ("file", _read_file(path)),
        ("environment", _from_environment(os.environ if environment is None else environment)),
        ("flag", flags or {}),
    )
    calibrated = _read_calibration(calibration)
    if any(_sets_quartile(source) for _, source in stronger):
        calibrated = {_CARRIER: {k: v for k, v in calibrated.get(_CARRIER, {}).items() if k not in _QUARTILES}}
    return (("calibration", calibrated), *stronger)


def _sets_quartile(source: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(source.get(_CARRIER, {}).get(name) is not None for name in _QUARTILES)


def calibration_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The user's own calibrations: etserve/calibration under $XDG_CONFIG_HOME or ~/.config."""
    given = (os.environ if environment is None else environment).get("XDG_CONFIG_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".config") / "etserve" / "calibration"


def _read_calibration(path: Path | None) -> dict[str, dict[str, Any]]:
    found = _read_file(path)
    others = [section for section in found if section != _CARRIER]
    others += [f"{_CARRIER}.{name}" for name in found.get(_CARRIER, {}) if name not in CALIBRATED]
    if others:
        raise ConfigError(f"{path}: a calibration cannot set {', '.join(others)}")
    if len(_QUARTILES & found.get(_CARRIER, {}).keys()) == 1:
        raise ConfigError(f"{path}: a calibration sets both quartiles of the entropy, or none")
    return found


def _read_file(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for section, values in found.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a table: [engine], [control] or [server]")
    return found


def spelled_out(name: str, text: str) -> str | list[str] | list[list[str]]:
    """A variable's or flag's text as a file spells the field: lists have commas between, pairs a colon within."""
    if name not in _LISTS | _PAIRS:
        return text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return [part.split(":") for part in parts] if name in _PAIRS else parts


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for section, struct in _SECTIONS.items():
        for field in msgspec.structs.fields(struct):
            if field.type is ControlConfig:
                continue
            text = environment.get(ENVIRONMENT_PREFIX + field.name.upper())
            if text is not None:
                found.setdefault(section, {})[field.name] = spelled_out(field.name, text)
    return found
