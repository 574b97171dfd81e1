"""What the control loop costs where it has nothing to gain: short contexts, every feature on against every one off.

    python benchmarks/control_overhead.py [--model demo] [--sequences 8] [--tokens 128] [--arms micro macro+evict all]

Two engines in one process take turns, one decode step each, so that both see the same machine, and who goes first
changes each time; the figure is the median of the ratios of neighbouring steps, with a bootstrap interval. The arm none
is a second plain engine: the noise. All arms take two to three minutes on two quiet cores.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator

from etserve.config import ControlConfig, EngineConfig
from etserve.engine.building import build_engine
from etserve.engine.llm_engine import LLMEngine
from etserve.outputs import GenerateRequest
from etserve.sampling_params import SamplingParams

Control = dict[str, str | float]
MICRO: Control = {"temperature_mode": "two_sided", "target_entropy_nats": 2.0}
MACRO: Control = {"priority_mode": "entropic"}
MESO: Control = {"pruning": "on"}
EVICT: Control = {"eviction": "pressure"}
ARMS: dict[str, Control] = {
    "none": {},
    "micro": MICRO,
    "macro": MACRO,
    "meso": MESO,
    "evict": EVICT,
    "all": MICRO | MACRO | MESO | EVICT,
}
PROMPT_TOKENS = 64
NUM_RESAMPLES = 2000


def settings_of(arm: str) -> Control:
    """Of one arm, or of several joined by +. Raises ValueError for another name."""
    merged: Control = {}
    for name in arm.split("+"):
        if name not in ARMS:
            raise ValueError(f"unknown arm {name!r}: {', '.join(ARMS)}, or several joined by +")
        merged |= ARMS[name]
    return merged


def make_engine(model: str, control: Control) -> LLMEngine:
    bits = 2 if "pruning" in control else 0
    settings = ControlConfig(**control)  # type: ignore[arg-type]
    return build_engine(EngineConfig(model=model, num_kv_blocks=1024, pruning_sketch_bits=bits, control=settings))


def fill(engine: LLMEngine, num_sequences: int, num_tokens: int, round_index: int) -> None:
    rng = random.Random(round_index)  # the same prompts for both engines
    for index in range(num_sequences):
        prompt = [rng.randrange(1000, 20_000) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=0.8, seed=index, max_tokens=num_tokens, ignore_eos=True)
        engine.add_request(GenerateRequest(request_id=f"{round_index}-{index}", prompt_token_ids=prompt, params=params))


def decode_seconds(engine: LLMEngine, num_sequences: int) -> Iterator[float]:
    """Time of each step that decodes all sequences."""
    while engine.has_work:
        begin = time.perf_counter()
        _, stats = engine.step()
        seconds = time.perf_counter() - begin
        if stats.num_decode_tokens == num_sequences and not stats.num_prefill_tokens:
            yield seconds


def take_turns(first: Iterator[float], second: Iterator[float]) -> list[tuple[float, float]]:
    """One step each until either has no more; who begins changes with every pair."""
    pairs: list[tuple[float, float]] = []
    while True:
        one, other = (first, second) if len(pairs) % 2 == 0 else (second, first)
        begun, answered = next(one, None), next(other, None)
        if begun is None or answered is None:
            return pairs
        pairs.append((begun, answered) if one is first else (answered, begun))


def compare(plain: LLMEngine, steered: LLMEngine, args: argparse.Namespace) -> tuple[float, float, float, float]:
    """Median of steered / plain, its 95 % interval, and the plain median in seconds."""
    pairs: list[tuple[float, float]] = []
    for index in range(args.rounds):
        for engine in (plain, steered):
            fill(engine, args.sequences, args.tokens, index)
        pairs += take_turns(decode_seconds(plain, args.sequences), decode_seconds(steered, args.sequences))
        for engine in (plain, steered):
            while engine.has_work:
                engine.step()
    ratios = [b / a for a, b in pairs]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    low, high = medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES)]
    return statistics.median(ratios), low, high, statistics.median(a for a, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="joined by + they are one arm")
    args = parser.parse_args()
    try:
        settings = {arm: settings_of(arm) for arm in args.arms}
    except ValueError as error:
        parser.error(str(error))
    plain = make_engine(args.model, {})
    print("| arm | step time relative to off | 95 % interval | off, ms a step |\n|---|---|---|---|")
    for arm, control in settings.items():
        middle, low, high, seconds = compare(plain, make_engine(args.model, control), args)
        print(f"| {arm} | {middle:.3f} | {low:.3f} to {high:.3f} | {seconds * 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    main()
