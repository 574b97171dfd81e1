"""`etserve bench step`: where a decode step's time goes, over batch sizes and contexts.

The contexts are never read: their blocks are filled with a constant and announced as cached, which costs a dense step
exactly what real ones cost. So nothing is skipped here; see `etserve ablate` for that.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from etserve.bench import ceilings
from etserve.bench.ablate.lab import Lab
from etserve.bench.ceilings import Ceilings
from etserve.bench.errors import BenchError
from etserve.bench.phases import MeasuresPhases, measured
from etserve.config import BLOCK_SIZE, ControlConfig
from etserve.engine.building import Memory
from etserve.engine.llm_engine import LLMEngine
from etserve.kernels import rows
from etserve.outputs import GenerateRequest, StepStats
from etserve.sampling_params import SamplingParams
from etserve.sequence import Sequence as TokenSequence

_WARM_STEPS = 2
_FILL = 0.01  # of keys and values: untouched memory would be one page, read from the cache
_TOP = 20  # likeliest tokens of the row pass
_PRODUCTS = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # torch has them too, as its own kernels
Progress = Callable[[str], None]
_Timed = tuple[StepStats, dict[str, float]]  # and the seconds by phase


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the faster half of the steps of one batch size and context. Everything is of one step."""

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


def profile_steps(
    lab: Lab, batches: Sequence[int], contexts: Sequence[int], num_steps: int, progress: Progress = lambda _: None
) -> StepReport:
    """Every batch size at every context. Raises BenchError where the model does not hold a context, or cannot tell."""
    loaded = lab.loaded()
    if not isinstance(loaded.decoder, MeasuresPhases):
        raise BenchError(f"the backend {loaded.decoder.backend} times no phases: this takes the native one")
    for context in contexts:
        if context + num_steps + _WARM_STEPS + 1 > loaded.max_model_len:
            raise BenchError(f"a context of {context} tokens does not leave {num_steps} of {loaded.max_model_len}")
    limits = ceilings.measure(_PRODUCTS.get(loaded.dtype))
    profiles = []
    for context in contexts:
        memory = _filled(lab, max(batches), context + num_steps + _WARM_STEPS + 1)
        for batch in batches:
            profiles.append(_profile(lab, memory, batch, context, num_steps, limits))
            progress(f"{batch} sequences at {context} tokens")
    return StepReport(
        model=lab.model_name,
        backend=loaded.decoder.backend,
        dtype=loaded.dtype,
        gb_per_second=limits.gb_per_second,
        gflop_per_second=limits.gflop_per_second,
        profiles=profiles,
    )


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _filled(lab: Lab, num_sequences: int, num_tokens: int) -> Memory:
    memory = lab.memory(0, num_sequences * (_blocks(num_tokens) + 1) + 8)
    tensor = getattr(memory.cache, "tensor", None)
    if not isinstance(tensor, torch.Tensor):
        raise BenchError("this backend's cache cannot be filled")
    tensor.fill_(_FILL)
    return memory


def _prompt(index: int, context: int, vocab: int) -> list[int]:
    """Different ones: a shared block would be read from the cache."""
    generator = np.random.default_rng((index, context))
    return [int(token) for token in generator.integers(0, vocab, context)]


def _announce(memory: Memory, index: int, prompt: list[int]) -> None:
    """Have the memory take its constant for this prompt's entries."""
    seq = TokenSequence(
        seq_id=-1 - index,
        request_id="bench",
        choice=0,
        params=SamplingParams(),
        seed=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_output_tokens=0,
        arrival_seconds=0.0,
    )
    if memory.manager.admit(seq) is None:
        raise BenchError(f"no room for {len(prompt)} tokens")
    seq.num_computed_tokens = len(prompt)
    memory.manager.commit(seq)
    memory.manager.free(seq)


def _profile(lab: Lab, memory: Memory, batch: int, context: int, num_steps: int, limits: Ceilings) -> StepProfile:
    loaded = lab.loaded()
    prompts = [_prompt(index, context, loaded.spec.vocab_size) for index in range(batch)]
    for index, prompt in enumerate(prompts):
        _announce(memory, index, prompt)
    engine = lab.engine(
        ControlConfig(),
        0,
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
        with measured(loaded.decoder) as phases:
            stats = engine.step()[1]
        timed.append((stats, phases))
    _drain(engine)
    return _summarise(batch, context, timed, lab, limits)


def _summarise(batch: int, context: int, timed: Sequence[_Timed], lab: Lab, limits: Ceilings) -> StepProfile:
    if any(stats.num_decode_tokens != batch or stats.num_prefill_tokens for stats, _ in timed):
        raise BenchError(f"{batch} sequences at {context} tokens did not decode side by side")
    fast = sorted(timed, key=lambda each: each[0].step_seconds)[: (len(timed) + 1) // 2]

    def mean(of: Callable[[StepStats], float]) -> float:
        return float(np.mean([of(stats) for stats, _ in fast]))

    loaded = lab.loaded()
    flops, num_bytes, weight_bytes = mean(lambda s: s.flops), mean(lambda s: s.bytes_read), loaded.decoder.weight_bytes
    return StepProfile(
        num_sequences=batch,
        context_tokens=context,
        num_steps=len(fast),
        step_seconds=mean(lambda s: s.step_seconds),
        phases={name: float(np.mean([phases[name] for _, phases in fast])) for name in fast[0][1]},
        row_seconds=_row_seconds(batch, loaded.spec.vocab_size),
        schedule_seconds=mean(lambda s: s.schedule_seconds),
        flops=flops,
        bytes_read=num_bytes,
        weight_bytes=weight_bytes,
        ceiling_seconds=limits.seconds(weight_bytes, num_bytes - weight_bytes, flops),
    )


def _row_seconds(num_rows: int, vocab: int) -> float:
    """Best of a few: measure and draw so many rows."""
    logits = torch.randn(num_rows, vocab)
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        rows.row_pass(logits, _TOP)
        rows.sample(logits, 1.0, 0, 1.0, 0.0, 0.5)
        best = min(best, time.perf_counter() - begin)
    return best


def _drain(engine: LLMEngine) -> None:
    while engine.has_work:
        engine.step()
