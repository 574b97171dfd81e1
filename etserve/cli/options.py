"""One command-line option per field of a config struct, so that no setting lacks its flag."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer

from etserve.config import (
    Config,
    ControlConfig,
    EngineConfig,
    ServerConfig,
    calibration_folder,
    load_config,
    named_model,
    spelled_out,
)
from etserve.errors import ModelError
from etserve.models.calibration_files import find_calibration
from etserve.models.files import resolve_model

# Never on a command line: other users of the machine can read it.
SECRET_FIELDS = frozenset({"api_keys"})
# The model is an argument or --model, which each command spells itself; control is a section of its own.
OWN_FIELDS = frozenset({"model", "control"})

ENGINE_HELP = {
    "served_model_name": "Name that clients use. Default: demo, or the file's own name.",
    "dtype": "Of weights and matrix products. auto: the checkpoint's, a GGUF file's own blocks included.",
    "quantize": "Round the matrices to blocks of 8 or 4 bits at load.",
    "kv_dtype": "Of the KV cache. int8: one scale per token and KV head, half the memory.",
    "backend": "native: our kernels; torch: the slow reference.",
    "device": "cuda: weights and KV cache on a GPU.",
    "cuda_graphs": "On device cuda: replay decode steps as captured graphs.",
    "threads": "0: every core this process may use.",
    "max_model_len": "Longest prompt + output in tokens. Default: the model's own.",
    "max_num_seqs": "Sequences running at once.",
    "max_step_tokens": "Tokens computed in one step.",
    "num_kv_blocks": "KV cache size in blocks of 16 tokens. Default: from the memory options.",
    "kv_memory_bytes": "KV cache size in bytes.",
    "memory_fraction": "Share of free memory that the KV cache may take.",
    "prefix_caching": "Reuse the KV entries of equal prompt beginnings.",
    "pruning_sketch_bits": "Bits per key dimension kept to skip blocks by; 0: none.",
    "max_waiting_requests": "Queue bound; beyond it requests get 429.",
    "max_waiting_tokens": "Queue bound in prompt tokens.",
}
CONTROL_HELP = {
    "entropy_estimator": "What stands for the entropy of a row. topk_renorm is biased low: it steers nothing.",
    "estimator_top_k": "Likeliest tokens that an estimate goes by.",
    "temperature_mode": "What steers each token's temperature.",
    "target_entropy_nats": "Entropy that the temperature is steered to.",
    "mean_entropy_nats": "Calibrated mean entropy of the model: 0.9 of it is the target where none is given.",
    "fixed_temperature": "Of temperature mode fixed.",
    "thermostat_gain": "How fast the temperature follows.",
    "priority_mode": "Who gets the step.",
    "gain_weight": "Weight of entropy resolved per cost in the priority.",
    "finish_weight": "Weight of the nearness of the end in the priority.",
    "decode_wait_seconds": "A decoding sequence that waited so long outranks those served since.",
    "waiting_wait_seconds": "The same for one that does not decode yet.",
    "batch_wait_seconds": "The same for one with priority > 0.",
    "speculation": "What guesses tokens to be verified several at a time.",
    "max_draft_tokens": "Most tokens guessed at once for a sequence.",
    "draft_row_cost": "What one more row costs a step, in units of what the weights cost it.",
    "pruning": "Whether attention skips blocks, for requests that do not say.",
    "prune_selector": "Which blocks are read; random and recency are placebos.",
    "prune_share": "Share of the blocks that a placebo reads.",
    "epsilon": "Share of attention mass that a head may miss.",
    "epsilon_swing": "How much entropy moves epsilon. 0: not at all; 1: as the paper has it.",
    "entropy_low_nats": "Lower quartile of the model's entropy.",
    "entropy_high_nats": "Upper quartile of the model's entropy.",
    "jump_nats": "Entropy so far above its running mean makes the next steps dense.",
    "jump_dense_steps": "How many steps are dense after such a jump.",
    "watchdog_steps": "Steps between two comparisons with dense attention.",
    "watchdog_divergence_nats": "Divergence from dense attention that turns skipping off, if found twice running.",
    "verify": "Whether what was drawn with blocks skipped is computed again densely; lossless: before it is told.",
    "verify_budget_nats": "Expected divergence after which that is done.",
    "verify_max_tokens": "Tokens after which it is done at the latest.",
    "verify_risks_nats": "Its table: entropies up to H have divergence KL, as H:KL,H:KL,... Default: a built-in one.",
    "kv_protect": "Never skip or evict the blocks of system messages.",
    "eviction": "When blocks are taken from running sequences for good, for requests that do not say.",
    "block_budget": "Blocks that a sequence holds at most under eviction budget.",
    "evict_selector": "Which blocks go; random is a placebo.",
}
SERVER_HELP = {
    "host": "Address to listen on.",
    "port": "0: any free one.",
    "insecure": "Listen beyond this machine without API keys.",
    "api_keys_file": "File with one API key a line.",
    "allowed_hosts": "Host headers to accept, comma separated. Default: any.",
    "engine_start_timeout_seconds": "How long the engine may take to load the model at the start.",
    "drain_delay_seconds": "After SIGTERM: not ready, but still accepting.",
    "drain_timeout_seconds": "After SIGTERM: how long running requests may take to finish.",
    "header_timeout_seconds": "How long a client may take to send its headers.",
    "body_timeout_seconds": "How long a client may take to send its body.",
    "keep_alive_comment_seconds": "Comment on a stream that has been silent for so long.",
    "write_timeout_seconds": "How long a client may leave its answer unread.",
    "max_body_bytes": "Largest request body.",
    "requests_per_minute": "Completions that each API key may ask for in a minute. Default: no limit.",
    "tokens_per_minute": "Tokens, prompt and output, that each API key may use in a minute. Default: no limit.",
    "compat_metrics": "Also export the metric names that vLLM's dashboards look for.",
    "otlp_endpoint": "Send traces to this collector (OTLP over HTTP); needs the extra otel.",
    "log_level": "Of the JSON log on standard error.",
}
SECTIONS: dict[str, tuple[type[msgspec.Struct], Mapping[str, str]]] = {
    "engine": (EngineConfig, ENGINE_HELP),
    "control": (ControlConfig, CONTROL_HELP),
    "server": (ServerConfig, SERVER_HELP),
}

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file: engine, control, server.")]


def with_config_options(
    *sections: str, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these sections; it receives the set ones as `flags={section: {field: value}}`.

    `without`: fields that it has no use for. Values stay as typed: load_config checks them, so that a flag, a variable
    and a file fail with the same words.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        owners = {name: section for section in sections for name in flag_fields(section) if name not in without}
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(section, name))
            for name, section in owners.items()
        ]

        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> None:
            flags: dict[str, dict[str, Any]] = {section: {} for section in sections}
            for name, section in owners.items():
                flags[section][name] = _parsed(name, values.pop(name, None))
            command(*args, flags=flags, **values)

        wrapped.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        return wrapped

    return decorate


def flag_fields(section: str) -> list[str]:
    """Fields of a section that have a flag."""
    struct, _ = SECTIONS[section]
    return [name for name in struct.__struct_fields__ if name not in SECRET_FIELDS | OWN_FIELDS]


def read_config(path: Path | None, flags: Mapping[str, Mapping[str, Any]], model: str | None) -> Config:
    """Calibration of the model < file < environment < flags, with the model as one of the flags."""
    given = with_model(flags, model)
    calibration = find_model_calibration(path, flags, model)
    return load_config(path, given, calibration=calibration)


def with_model(flags: Mapping[str, Mapping[str, Any]], model: str | None) -> dict[str, dict[str, Any]]:
    """The flags, the model among them."""
    merged = {section: dict(values) for section, values in flags.items()}
    merged.setdefault("engine", {})["model"] = model
    return merged


def find_model_calibration(path: Path | None, flags: Mapping[str, Mapping[str, Any]], model: str | None) -> Path | None:
    """What was measured of the model that these settings name; None as well where there is no such model."""
    try:
        return find_calibration(resolve_model(named_model(path, with_model(flags, model))), calibration_folder())
    except (ModelError, OSError):
        return None  # whoever needs the model says what is wrong with it


def _parsed(name: str, value: Any) -> Any:
    return spelled_out(name, value) if isinstance(value, str) else value


def _annotation(section: str, name: str) -> Any:
    struct, helps = SECTIONS[section]
    field = next(field for field in msgspec.structs.fields(struct) if field.name == name)
    flag = "--" + name.replace("_", "-")
    shown, choices = _shown_default(field.default), _choices(field.type)
    text = (
        helps.get(name, name.replace("_", " ") + ".")
        + (f" One of {', '.join(choices)}." if choices else "")
        + (f" Default: {shown}." if shown else "")
    )
    panel = section.capitalize()
    if field.type is bool:
        declared = f"{flag}/--no-{name.replace('_', '-')}"
        return Annotated[bool | None, typer.Option(declared, help=text, rich_help_panel=panel, show_default=False)]
    return Annotated[
        str | None,
        typer.Option(flag, help=text, metavar=_metavar(field.type), rich_help_panel=panel, show_default=False),
    ]


def _shown_default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or value == () else str(value)


def _choices(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _metavar(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return _metavar(next(part for part in get_args(kind) if part is not type(None)))
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return {int: "N", float: "X"}.get(base, "TEXT")
