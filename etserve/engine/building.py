"""From settings to a warm engine: find, load, size, warm up; each phase timed."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from etserve.config import BLOCK_SIZE, ControlConfig, EngineConfig
from etserve.control.cost import ModelShape
from etserve.engine.costs import CostMeter
from etserve.engine.llm_engine import EngineParts, LLMEngine
from etserve.engine.resources import count_cores, fit_context, free_memory_bytes, num_kv_blocks
from etserve.errors import ConfigError
from etserve.kernels import native
from etserve.kernels.reference_attention import kv_head_bytes
from etserve.kernels.selection import SelectionRule, rule_of
from etserve.kv.manager import KVCacheManager
from etserve.log import get_logger, log_facts
from etserve.models.files import resolve_model
from etserve.models.loader import LoadedModel, load_model
from etserve.models.types import Decoder, KVCache
from etserve.outputs import GenerateRequest, ModelInfo
from etserve.runner.device_sampler import DeviceSampler
from etserve.runner.estimating import EntropyReader, reader_of
from etserve.runner.grammar import GrammarCompiler
from etserve.runner.model_runner import ModelRunner, model_shape
from etserve.runner.sampler import Sampler
from etserve.sampling_params import SamplingParams
from etserve.scheduler.eviction import Evictor
from etserve.scheduler.lookup import PromptLookup
from etserve.scheduler.policy import LawPolicy
from etserve.scheduler.scheduler import Scheduler
from etserve.scheduler.speculation import Speculation
from etserve.tokenizer.loading import load_tokenizer
from etserve.tokenizer.tokenizer import Tokenizer

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """KV entries and the names of their contents. Engines that take turns with one of them share prompts."""

    cache: KVCache
    manager: KVCacheManager

    @staticmethod
    def of(decoder: Decoder, num_kv_blocks: int, prefix_caching: bool = True) -> "Memory":
        """`num_kv_blocks` without the null block 0."""
        return Memory(decoder.allocate_cache(num_kv_blocks + 1), KVCacheManager(num_kv_blocks + 1, prefix_caching))


class _Phases:
    """Seconds by phase, in order."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self.seconds[name] = self._now() - begin


def build_engine(config: EngineConfig, now: Callable[[], float] = time.monotonic) -> LLMEngine:
    """Load the model and return an engine that has run a step. Raises ModelError or ConfigError, one line each."""
    phases = _Phases(now)
    set_threads(config.threads)
    with phases.phase("tokenizer"):
        files = resolve_model(config.model)
        tokenizer = load_tokenizer(files)
    with phases.phase("weights"):
        loaded = load_model(config, files)
    with phases.phase("kv_cache"):
        parts = assemble(config, loaded, tokenizer, config.served_model_name or files.name, phases.seconds, now)
    engine = LLMEngine(parts)
    with phases.phase("warm_up"):
        warm_up(engine)
    log_facts(
        _log,
        logging.INFO,
        "engine ready",
        model=parts.info.model_name,
        backend=parts.info.backend,
        dtype=parts.info.dtype,
        num_kv_blocks=parts.info.num_kv_blocks,
        max_model_len=parts.info.max_model_len,
        seconds=round(sum(phases.seconds.values()), 3),
    )
    return engine


def set_threads(num_threads: int) -> None:
    """Give torch and the native kernels so many threads; 0: the cores this process may use."""
    count = num_threads or count_cores()
    torch.set_num_threads(count)
    if native.is_available():
        native.set_num_threads(count)


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    model_name: str,
    startup_seconds: dict[str, float],
    now: Callable[[], float] = time.monotonic,
    memory: Memory | None = None,
) -> EngineParts:
    """Size the pool and put scheduler, runner and sampler around a loaded model.

    `memory`: made for this decoder, of config.num_kv_blocks, and used by no other engine at the same time.
    """
    decoder, spec = loaded.decoder, loaded.spec
    block_bytes = decoder.kv_bytes_per_block()
    num_blocks = num_kv_blocks(config, block_bytes, loaded.max_model_len, free_bytes(config))
    max_model_len = fit_context(config, num_blocks, loaded.max_model_len)
    if max_model_len < loaded.max_model_len:
        log_facts(_log, logging.WARNING, "context shortened to what the KV cache holds", max_model_len=max_model_len)
    can_evict = not spec.sliding_window
    if config.control.eviction != "off" and not can_evict:
        raise ConfigError("eviction takes a model without a sliding window")
    eos_token_ids = tuple(loaded.eos_token_ids)
    grammars = GrammarCompiler(
        spec.vocab_size,
        tokenizer.token_bytes,
        sorted(tokenizer.special_token_ids),
        eos_token_ids,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    sampler = _sampler(loaded, grammars, reader_of(config.control))
    shape = _model_shape(loaded, block_bytes)
    if memory is None:
        memory = Memory.of(decoder, num_blocks - 1, config.prefix_caching)
    runner = ModelRunner(decoder, memory.cache, sampler, shape, selection_rule(config.control))
    costs, law = CostMeter(shape), config.control.priority_law()
    scheduler = Scheduler(
        memory.manager,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=eos_token_ids,
        now=now,
        policy=None if law.mode == "fcfs" else LawPolicy(law, costs.next_token),
        evictor=Evictor(memory.manager, is_random=config.control.evict_selector == "random"),
        speculation=_speculation(config.control, eos_token_ids),
    )
    info = ModelInfo(
        model_name=model_name,
        architecture=spec.architecture,
        num_parameters=loaded.num_parameters,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        dtype=loaded.dtype,
        quantization=loaded.quantization,
        kv_dtype=loaded.kv_dtype,
        num_kv_blocks=num_blocks - 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=list(eos_token_ids),
        backend=decoder.backend,
        startup_seconds=startup_seconds,
        weight_bytes=decoder.weight_bytes,
        kv_cache_bytes=runner.cache_bytes,
        pruning_sketch_bits=config.pruning_sketch_bits,
        speculation=config.control.speculation,
        can_evict=can_evict,
        pruning=config.control.pruning,
        eviction=config.control.eviction,
        kv_protect=config.control.kv_protect,
        entropy_estimator=config.control.entropy_estimator,
    )
    return EngineParts(config, info, tokenizer, scheduler, runner, sampler, costs, now)


def _sampler(loaded: LoadedModel, grammars: GrammarCompiler, reader: EntropyReader) -> Sampler:
    """It draws where the logits lie."""
    eos_token_ids, kernels = tuple(loaded.eos_token_ids), loaded.kernels
    if kernels is None:
        return Sampler(eos_token_ids, grammars, reader)
    return DeviceSampler(eos_token_ids, grammars, kernels, reader)


def free_bytes(config: EngineConfig) -> int:
    """Of the memory that the KV cache is to lie in."""
    return torch.cuda.mem_get_info()[0] if config.device == "cuda" else free_memory_bytes()


def _speculation(control: ControlConfig, eos_token_ids: tuple[int, ...]) -> Speculation | None:
    if control.speculation == "off":
        return None
    return Speculation(PromptLookup(), control.draft_law(), eos_token_ids)


def _model_shape(loaded: LoadedModel, block_bytes: int) -> ModelShape:
    """What a block takes beyond keys and values is sketches."""
    spec = loaded.spec
    num_entries = 2 * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim  # of one block in one layer
    layer_bytes = block_bytes / spec.num_layers
    if loaded.decoder.backend.startswith("torch/"):  # makes its sketches anew, and keeps int8 entries wide
        return model_shape(spec, layer_bytes / num_entries)
    kv_bytes = 2 * spec.num_kv_heads * kv_head_bytes(spec.head_dim, getattr(torch, loaded.kv_dtype))
    return model_shape(spec, kv_bytes / num_entries, (layer_bytes - kv_bytes) / BLOCK_SIZE)


def selection_rule(control: ControlConfig) -> SelectionRule:
    """The guards of the law, and which blocks go: the law's choice, or a placebo's."""
    law = rule_of(control.pruning_law())
    return replace(law, selector=control.prune_selector, share=control.prune_share)


def warm_up(engine: LLMEngine) -> None:
    """Run one prefill and one decode step, so that the first client pays for no first-time work."""
    params = SamplingParams(max_tokens=min(2, engine.info.max_model_len - 1), temperature=1.0, seed=0, ignore_eos=True)
    prompt = [0] * max(1, min(32, engine.info.max_model_len - 2))
    engine.add_request(
        GenerateRequest(request_id="warm-up", prompt_token_ids=prompt, params=params, cache_salt=b"warm-up")
    )
    while engine.has_work:
        engine.step()
