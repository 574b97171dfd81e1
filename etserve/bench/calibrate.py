"""`etserve calibrate`: measure what the laws must know of a model. Entropies in nats.

H* and the quartiles are those of text that the model writes itself; epsilon and the table from entropy to expected
divergence are measured on held-out text, one decode step a token.
"""

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.bench.ablate.arms import SKETCH_BITS, check_estimator
from etserve.bench.ablate.drive import Driver
from etserve.bench.ablate.lab import Lab
from etserve.bench.ablate.scoring import TextBatch
from etserve.bench.ablate.texts import ScoredText, quality_texts
from etserve.bench.ablate.workloads import Arrival, QualityPlan
from etserve.bench.calibration import Calibration, EpsilonLoss, RiskBin
from etserve.bench.errors import BenchError
from etserve.bench.prompts import PromptMaker
from etserve.config import BLOCK_SIZE, ControlConfig, EngineConfig
from etserve.models.types import Decoder
from etserve.runner.estimating import EntropyReader, reader_of

EPSILONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
MIN_SKIPPING_CONTEXT = 512 + 128 + 1  # below it no decode step of a text skips anything
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Progress = Callable[[str], None]


class Written(msgspec.Struct, frozen=True):
    """Entropies of a model's own text, one value a token."""

    raw_nats: list[float]
    controlled_nats: list[float]  # at the temperature that it was drawn at


def calibrate_model(
    config: EngineConfig, *, temperature: float, num_tokens: int, context_tokens: int, num_texts: int = 8
) -> Calibration:
    """Measure a model. Lengths are cut to its context; where it cannot skip blocks, no epsilon is looked for.

    Entropies are read as the settings say, for the laws will be told them so. Raises ModelError for the model,
    BenchError for a temperature of 0 or an estimate that steers nothing.
    """
    check_estimator(config.control)
    lab = Lab(config)
    room = lab.loaded().max_model_len
    output_tokens = min(128, room // 2)
    written = measure_written(
        lab,
        temperature=temperature,
        num_prompts=max(1, num_tokens // output_tokens),
        prompt_tokens=min(128, room // 4),
        output_tokens=output_tokens,
    )
    found = Calibration(
        model=lab.model_name,
        temperature=temperature,
        num_tokens=len(written.raw_nats),
        mean_entropy_nats=_mean(written.controlled_nats),
        quantiles_nats=quantiles(written.raw_nats),
    )
    if room < MIN_SKIPPING_CONTEXT or lab.loaded().spec.sliding_window:
        return found
    decoder = lab.loaded(SKETCH_BITS).decoder
    texts = quality_texts(_documents(num_texts, context_tokens), lab.tokenizer, room).documents
    found = msgspec.structs.replace(found, losses=measure_epsilons(decoder, texts, config.control))
    epsilon = config.control.epsilon if found.epsilon is None else found.epsilon  # that later starts will have
    risks = measure_risks(decoder, texts, config.control, epsilon=epsilon)
    return msgspec.structs.replace(found, risks=risks, risk_epsilon=epsilon)


def _documents(count: int, context_tokens: int) -> QualityPlan:
    return QualityPlan(
        num_documents=count,
        prefix_tokens=context_tokens,
        scored_tokens=128,
        num_cloze=0,
        num_needles=0,
        needle_tokens=0,
    )


def measure_written(
    lab: Lab, *, temperature: float, num_prompts: int, prompt_tokens: int, output_tokens: int, seed: int = 0
) -> Written:
    """Let the plain engine write, and read the text again. Raises BenchError for a temperature of 0."""
    if temperature <= 0.0:
        raise BenchError(f"temperature must be above 0, got {temperature:g}")
    maker = PromptMaker(lab.tokenizer, send_ids=True)
    arrivals = [
        Arrival(i, [int(t) for t in maker.prompt(prompt_tokens, (seed, i)).content], output_tokens, 0.0, seed + i)
        for i in range(num_prompts)
    ]
    blocks = -(-(prompt_tokens + output_tokens) // BLOCK_SIZE) * num_prompts + 1
    engine = lab.engine(_reading(lab), 0, num_kv_blocks=blocks)
    runs, _ = Driver(engine, arrivals, None, temperature).run()
    found = Written([], [])
    for arrival, run in zip(arrivals, runs, strict=True):
        found.raw_nats.extend(run.entropies)
        text = [*arrival.prompt_token_ids, *run.token_ids]
        start, reader = len(arrival.prompt_token_ids), reader_of(lab.config.control)
        found.controlled_nats.extend(_entropies(lab.loaded().decoder, text, start, temperature, reader))
    return found


def _reading(lab: Lab) -> ControlConfig:
    """Nothing steers; entropies are read as the lab's settings say."""
    control = lab.config.control
    return ControlConfig(entropy_estimator=control.entropy_estimator, estimator_top_k=control.estimator_top_k)


@torch.inference_mode()
def _entropies(
    decoder: Decoder, token_ids: list[int], num_prompt_tokens: int, temperature: float, reader: EntropyReader
) -> list[float]:
    """H of softmax(logits / temperature) at each output token, from one dense pass."""
    count = len(token_ids) - 1  # the last token's own logits are nobody's
    width = -(-count // BLOCK_SIZE)
    batch = StepBatch(
        token_ids=np.array(token_ids[:count], np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.arange(1, width + 1, dtype=np.int32)[None],
        logit_rows=np.arange(num_prompt_tokens - 1, count, dtype=np.int32),
    )
    hidden = decoder.forward(batch, decoder.allocate_cache(width + 1))
    found: list[float] = []
    for start in range(0, len(hidden), 64):
        logits = decoder.logits(hidden[start : start + 64]) / temperature
        found += reader.row_pass(logits).entropy.tolist()
    return found


def measure_epsilons(
    decoder: Decoder, texts: Sequence[ScoredText], control: ControlConfig, progress: Progress = lambda _: None
) -> list[EpsilonLoss]:
    """What each constant epsilon costs on the texts. `decoder` keeps key sketches."""
    batch = TextBatch(decoder, texts)
    law = msgspec.structs.replace(control, pruning="on", epsilon_swing=0.0)
    dense = _mean([nll for found in batch.score(ControlConfig()) for nll in found.nll_nats])
    losses = []
    for epsilon in EPSILONS:
        scores = batch.score(msgspec.structs.replace(law, epsilon=epsilon))
        nll = _mean([value for found in scores for value in found.nll_nats])
        kept = _mean([value for found in scores for value in found.kept_fractions])
        losses.append(EpsilonLoss(epsilon=epsilon, relative_loss=nll / dense - 1.0, kept_share=kept))
        progress(f"epsilon {epsilon:g}")
    return losses


def measure_risks(
    decoder: Decoder,
    texts: Sequence[ScoredText],
    control: ControlConfig,
    num_bins: int = 8,
    epsilon: float | None = None,
) -> list[RiskBin]:
    """Expected KL(dense || skipped) by entropy: every second step is run both ways, a watchdog's check.

    `epsilon`: None for that of `control`.
    """
    law = msgspec.structs.replace(
        control,
        pruning="on",
        epsilon=control.epsilon if epsilon is None else epsilon,
        epsilon_swing=0.0,
        watchdog_steps=1,
        watchdog_divergence_nats=20.0,
    )
    scores = TextBatch(decoder, texts).score(law)
    entropies = np.array([value for found in scores for value in found.divergence_entropies])
    divergences = np.array([value for found in scores for value in found.divergences])
    if not len(entropies):
        return []
    edges = np.unique(np.quantile(entropies, np.linspace(0.0, 1.0, num_bins + 1)))
    edges = np.append(edges[:-1], np.nextafter(edges[-1], np.inf)) if len(edges) > 1 else np.append(edges, np.inf)
    bins = []
    for low, high in itertools.pairwise(edges):
        inside = divergences[(entropies >= low) & (entropies < high)]
        mean = float(inside.mean()) if len(inside) else 0.0
        bins.append(
            RiskBin(low_nats=float(low), high_nats=float(high), mean_divergence_nats=mean, num_steps=len(inside))
        )
    return bins


def quantiles(entropies: Sequence[float]) -> dict[str, float]:
    """By name, "0.25" and so on."""
    values = np.quantile(np.array(entropies), QUANTILES)
    return {f"{q:g}": float(value) for q, value in zip(QUANTILES, values, strict=True)}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
