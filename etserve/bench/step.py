"""`etserve bench step`: where a decode step's time goes, over batch sizes and contexts, under the settings given.

Without skipping the contexts are never read (see contexts.py); where blocks are skipped they are text that the model
has read. What would change the make-up of a step is refused: drafts, verification, eviction.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from etserve.bench import ceilings
from etserve.bench.ablate.lab import Lab
from etserve.bench.ablate.quality import settings_of
from etserve.bench.ceilings import Ceilings, best_seconds
from etserve.bench.contexts import ConstantContexts, Contexts, TextContexts
from etserve.bench.errors import BenchError
from etserve.bench.phases import MeasuresPhases, measured
from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.engine.building import Memory
from etserve.engine.llm_engine import LLMEngine
from etserve.kernels import rows
from etserve.models.loader import LoadedModel
from etserve.outputs import GenerateRequest, StepStats
from etserve.runner.estimating import EntropyReader, reader_of
from etserve.sampling_params import SamplingParams

_WARM_STEPS = 2
_TOP = 20  # likeliest tokens of the row pass
_PRODUCTS = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # torch has them too, as its own kernels
Progress = Callable[[str], None]
_Timed = tuple[StepStats, dict[str, float]]  # and the seconds by phase


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps of one batch size and context. Everything is of one step.

    Dense steps all do the same, so the faster half of them counts; where blocks are skipped, all count: some may be
    dense, and the rest are not alike.
    """

    num_sequences: int
    context_tokens: int
    num_steps: int
    step_seconds: float
    phases: dict[str, float]  # seconds of the decoder's calls
    row_seconds: float  # measuring and drawing so many rows, timed alone
    schedule_seconds: float
    flops: float
    bytes_read: float
    weight_bytes: int
    ceiling_seconds: float
    kept_share: float = 1.0  # of the KV blocks, that attention read

    @property
    def python_seconds(self) -> float:
        """Whatever is neither in the decoder nor in the row pass nor in the scheduler."""
        known = sum(self.phases.values()) + self.row_seconds + self.schedule_seconds
        return max(0.0, self.step_seconds - known)

    @property
    def gb_per_second(self) -> float:
        return self.bytes_read / self.step_seconds * 1e-9

    @property
    def gflop_per_second(self) -> float:
        return self.flops / self.step_seconds * 1e-9


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, and what the machine can do."""

    model: str
    backend: str
    dtype: str
    gb_per_second: float
    gflop_per_second: float | None  # None: the weights are in a format of which no ceiling is known
    profiles: list[StepProfile]
    settings: dict[str, Any] = {}  # of the control loop and its sketches, where they are not the defaults


def profile_steps(
    lab: Lab, batches: Sequence[int], contexts: Sequence[int], num_steps: int, progress: Progress = lambda _: None
) -> StepReport:
    """Every batch size at every context. Raises BenchError where the model does not hold a context, or cannot tell.

    Steps run under the lab's own settings; BenchError as well for those that `check_settings` refuses.
    """
    check_settings(lab.config)
    bits = lab.config.pruning_sketch_bits
    loaded = lab.loaded(bits)
    _check_model(loaded, max(contexts), num_steps)
    limits = ceilings.measure(_PRODUCTS.get(loaded.dtype))
    is_skipping = lab.config.control.pruning == "on"
    source: Contexts = TextContexts(lab, bits) if is_skipping else ConstantContexts(lab, bits)
    profiles = []
    for context in contexts:
        memory = source.memory(max(batches), context + num_steps + _WARM_STEPS + 1)
        for batch in batches:
            prompts = source.prompts(batch, context)
            source.prepare(memory, prompts)
            timed = _time_steps(lab, memory, prompts, num_steps)
            profiles.append(_summarise(context, timed, lab, limits, len(prompts)))
            progress(f"{batch} sequences at {context} tokens")
    return StepReport(
        model=lab.model_name,
        backend=loaded.decoder.backend,
        dtype=loaded.dtype,
        gb_per_second=limits.gb_per_second,
        gflop_per_second=limits.gflop_per_second,
        profiles=profiles,
        settings=settings_of(lab.config.control) | ({"pruning_sketch_bits": bits} if bits else {}),
    )


def _check_model(loaded: LoadedModel, context: int, num_steps: int) -> None:
    if not isinstance(loaded.decoder, MeasuresPhases):
        raise BenchError(f"the backend {loaded.decoder.backend} times no phases: this takes the native one")
    if context + num_steps + _WARM_STEPS + 1 > loaded.max_model_len:
        raise BenchError(f"a context of {context} tokens does not leave {num_steps} of {loaded.max_model_len}")


def check_settings(config: EngineConfig) -> None:
    """Raise BenchError for what makes a step more, or something else, than one token of each sequence."""
    for name in ("speculation", "verify", "eviction"):
        if getattr(config.control, name) != "off":
            raise BenchError(f"{name} is not profiled: steps would not be of one token each; set it off")


def _time_steps(lab: Lab, memory: Memory, prompts: list[list[int]], num_steps: int) -> list[_Timed]:
    """Decode steps of all prompts side by side."""
    control, bits, batch = lab.config.control, lab.config.pruning_sketch_bits, len(prompts)
    engine = lab.engine(
        control,
        bits,
        num_kv_blocks=memory.cache.num_blocks - 1,
        max_num_seqs=batch,
        max_step_tokens=max(512, batch * BLOCK_SIZE),
        memory=memory,
    )
    params = SamplingParams(temperature=1.0, max_tokens=num_steps + _WARM_STEPS + 1, ignore_eos=True, seed=0)
    for index, prompt in enumerate(prompts):
        engine.add_request(GenerateRequest(request_id=str(index), prompt_token_ids=prompt, params=params))
    for _ in range(1 + _WARM_STEPS):
        engine.step()
    timed: list[_Timed] = []
    for _ in range(num_steps):
        with measured(lab.loaded(bits).decoder) as phases:
            stats = engine.step()[1]
        timed.append((stats, phases))
    _drain(engine)
    return timed


def _summarise(context: int, timed: Sequence[_Timed], lab: Lab, limits: Ceilings, batch: int) -> StepProfile:
    if any(stats.num_decode_tokens != batch or stats.num_prefill_tokens for stats, _ in timed):
        raise BenchError(f"{batch} sequences at {context} tokens did not decode side by side")
    config = lab.config
    if config.control.pruning == "on":
        counted = list(timed)
    else:
        counted = sorted(timed, key=lambda each: each[0].step_seconds)[: (len(timed) + 1) // 2]

    def mean(of: Callable[[StepStats], float]) -> float:
        return float(np.mean([of(stats) for stats, _ in counted]))

    loaded = lab.loaded(config.pruning_sketch_bits)
    flops, num_bytes, weight_bytes = mean(lambda s: s.flops), mean(lambda s: s.bytes_read), loaded.decoder.weight_bytes
    return StepProfile(
        num_sequences=batch,
        context_tokens=context,
        num_steps=len(counted),
        step_seconds=mean(lambda s: s.step_seconds),
        phases={name: float(np.mean([phases[name] for _, phases in counted])) for name in counted[0][1]},
        row_seconds=_row_seconds(batch, loaded.spec.vocab_size, reader_of(config.control)),
        schedule_seconds=mean(lambda s: s.schedule_seconds),
        flops=flops,
        bytes_read=num_bytes,
        weight_bytes=weight_bytes,
        ceiling_seconds=limits.seconds(weight_bytes, num_bytes - weight_bytes, flops),
        kept_share=mean(lambda s: _kept_share(s, batch)),
    )


def _kept_share(stats: StepStats, batch: int) -> float:
    """Mean over the sequences of a step; those that might not skip read every block."""
    return (sum(stats.kept_fractions) + batch - len(stats.kept_fractions)) / batch


def _row_seconds(num_rows: int, vocab: int, reader: EntropyReader) -> float:
    """Best of a few: measure and draw so many rows."""
    logits = torch.randn(num_rows, vocab)

    def measure_and_draw() -> None:
        reader.row_pass(logits, _TOP)
        rows.sample(logits, 1.0, 0, 1.0, 0.0, 0.5)

    return best_seconds(measure_and_draw, 8)


def _drain(engine: LLMEngine) -> None:
    while engine.has_work:
        engine.step()
