"""What steers a request: the server's settings, overridden by what the request itself asks. Torch-free."""

from etserve.config import ControlConfig
from etserve.control import choice
from etserve.control.choice import ChoiceControl, ChoiceLaws
from etserve.control.eviction import EvictionConfig
from etserve.control.thermostat import TARGETED_MODES
from etserve.errors import RequestError
from etserve.sampling_params import EntropicParams, SamplingParams

MAX_SPANS = 4096


def start_control(config: ControlConfig, params: SamplingParams) -> ChoiceControl:
    """The state of a new choice. `params` have passed check_steering."""
    wanted = params.entropic
    is_pruned = (config.pruning if wanted.pruning is None else wanted.pruning) == "on"
    protects = config.kv_protect if wanted.kv_protect is None else wanted.kv_protect
    evicts = config.eviction if wanted.eviction is None else wanted.eviction
    budget = config.block_budget if wanted.block_budget is None else wanted.block_budget
    laws = ChoiceLaws(
        thermostat=config.thermostat_law(wanted.temperature_mode, wanted.target_entropy_nats),
        pruning=config.pruning_law(wanted.epsilon) if is_pruned else None,
        protected_spans=params.entropic.protected_spans if (is_pruned or evicts != "off") and protects else (),
        verification=config.verify_law(wanted.verify) if is_pruned else None,
        ranks_by_entropy=config.priority_mode != "fcfs",
        eviction=None if evicts == "off" else EvictionConfig(),
        block_budget=budget if evicts == "budget" else None,
    )
    steers = laws.thermostat.mode != "off" or laws.pruning is not None or laws.eviction is not None
    if not (steers or laws.ranks_by_entropy):
        laws = ChoiceLaws()  # nothing steers: targets and gains do not matter
    return choice.start(laws, params.temperature, params.top_k)


def drafts_ahead(config: ControlConfig, params: SamplingParams) -> bool:
    """Whether the next tokens of the request may be guessed and computed ahead."""
    return config.speculation != "off" and params.entropic.speculation != "off"


def check_steering(params: SamplingParams, config: ControlConfig, sketch_bits: int, can_evict: bool = True) -> None:
    """Raise RequestError for what this engine cannot do, whatever the load, or out of the laws' bounds."""
    wanted = params.entropic
    _check_estimator(wanted, config)
    for name, value, most in (
        ("target_entropy_nats", wanted.target_entropy_nats, 20.0),
        ("epsilon", wanted.epsilon, 0.5),
    ):
        if value is not None and not 0.0 <= value <= most:  # NaN is within no bounds
            raise _refusal(name, f"it must be in [0, {most}]")
    mode = config.temperature_mode if wanted.temperature_mode is None else wanted.temperature_mode
    if mode in TARGETED_MODES and wanted.target_entropy_nats is None and config.target() is None:
        raise _refusal("target_entropy_nats", f"{mode} needs it, for the model has no calibrated one")
    if wanted.pruning == "on" and not config.can_prune(sketch_bits):
        raise _refusal("pruning", "this server keeps no key sketches (pruning_sketch_bits)", "unsupported_parameter")
    _check_eviction(wanted, config, can_evict)
    _check_verify(wanted, config)
    if wanted.speculation == "on" and config.speculation == "off":
        raise _refusal("speculation", "this server drafts no tokens (speculation)", "unsupported_parameter")
    spans = wanted.protected_spans
    if len(spans) > MAX_SPANS or any(not 0 <= start <= end for start, end in spans):
        raise _refusal("protected_spans", f"at most {MAX_SPANS} spans, each with 0 <= start <= end")


def _check_estimator(wanted: EntropicParams, config: ControlConfig) -> None:
    """A biased entropy steers nobody, whoever asks."""
    if config.entropy_estimator != "topk_renorm":
        return
    for name in ("temperature_mode", "pruning", "eviction"):
        if getattr(wanted, name) not in (None, "off"):
            problem = "this server's entropies are for display only (entropy_estimator topk_renorm)"
            raise _refusal(name, problem, "unsupported_parameter")


def _check_eviction(wanted: EntropicParams, config: ControlConfig, can_evict: bool) -> None:
    evicts = config.eviction if wanted.eviction is None else wanted.eviction
    if evicts != "off" and not can_evict:
        raise _refusal("eviction", "it takes a model without a sliding window", "unsupported_parameter")
    if wanted.block_budget is not None and evicts != "budget":
        raise _refusal("block_budget", "it takes eviction budget")
    if wanted.block_budget is not None and wanted.block_budget < EvictionConfig().min_kept_blocks:
        raise _refusal("block_budget", f"it must be at least {EvictionConfig().min_kept_blocks}")
    if evicts == "budget" and wanted.block_budget is None and config.block_budget is None:
        raise _refusal("block_budget", "eviction budget needs it")


def _check_verify(wanted: EntropicParams, config: ControlConfig) -> None:
    """The server's own `verify` is for the requests that are pruned: it refuses no other."""
    is_pruned = (wanted.pruning or config.pruning) == "on"
    if wanted.verify not in (None, "off") and not is_pruned:
        raise _refusal("verify", "it takes pruning on")
    verify = config.verify if wanted.verify is None else wanted.verify
    if is_pruned and verify != "off" and (wanted.eviction or config.eviction) != "off":
        raise _refusal("verify", "it takes eviction off")


def _refusal(name: str, problem: str, code: str = "invalid_value") -> RequestError:
    param = f"entropic.{name}"
    return RequestError(f"`{param}`: {problem}.", param=param, code=code)
