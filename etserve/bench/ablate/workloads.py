"""What every arm is asked: prompts, lengths, arrivals and seeds, equal for all arms of a round. Knows no engine."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from etserve.bench.errors import BenchError
from etserve.bench.prompts import PromptMaker
from etserve.bench.workloads import Lengths, Workload, plan
from etserve.config import BLOCK_SIZE

PresetName = Literal["smoke", "standard"]


class AblationWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and the engine that it meets."""

    load: Workload
    arms: tuple[str, ...]  # those that it can tell something of
    temperature: float = 0.8
    max_num_seqs: int = 64
    max_step_tokens: int = 512
    # KV blocks by what all requests of one wave need together; below 1 the pool runs short and sequences are preempted
    pool_share: float = 1.0
    # all arms of a round share one memory in which the prompts are read before the clock starts: what is measured is
    # decoding, and the prompts' own cost is kept beside it
    has_read_prompts: bool = False
    few_rounds: tuple[str, ...] = ()  # arms that run `Preset.few_rounds` times: placebos, and laws of no claim here

    @property
    def name(self) -> str:
        return self.load.name


class QualityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much text the quality suite scores."""

    num_documents: int
    prefix_tokens: int  # read densely
    scored_tokens: int  # one by one, as a decode step reads
    num_cloze: int
    num_needles: int
    needle_tokens: int  # of the text around each


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """One size of the whole comparison."""

    name: str
    rounds: int
    few_rounds: int
    workloads: tuple[AblationWorkload, ...]
    quality: QualityPlan

    def rounds_of(self, workload: AblationWorkload, arm: str) -> int:
        return min(self.rounds, self.few_rounds) if arm in workload.few_rounds else self.rounds


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a round."""

    index: int
    prompt_token_ids: list[int]
    num_output_tokens: int
    due_seconds: float
    seed: int


_MICRO_ARMS = ("baseline", "micro", "fixed-temperature")
_MACRO_ARMS = ("macro", "random-priority")
_MESO_ARMS = ("meso", "loose", "verified", "lossless", "random-blocks", "recent-blocks", "constant-epsilon")
# They back a claim or deny it, and few rounds do; `meso` where there is next to nothing to skip as well.
_PLACEBOS = (
    "fixed-temperature",
    "random-priority",
    "random-blocks",
    "recent-blocks",
    "constant-epsilon",
    "random-evict",
    "paper",
)
_EVICT_ARMS = ("evict", "random-evict")


def _load(
    name: str,
    num: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    *,
    concurrency: int | None = None,
    rate: float | None = None,
) -> Workload:
    return Workload(
        name=name,
        num_requests=num,
        prompt_tokens=Lengths(*prompt),
        output_tokens=Lengths(*output),
        concurrency=concurrency,
        rate=rate,
    )


STANDARD = Preset(
    name="standard",
    rounds=5,
    few_rounds=3,
    workloads=(
        AblationWorkload(
            load=_load("long-context", 8, (3072, 7680), (256, 256), concurrency=8),
            arms=("baseline", *_MESO_ARMS, "full", "paper"),
            has_read_prompts=True,
            few_rounds=_PLACEBOS,
        ),
        AblationWorkload(
            load=_load("memory-bound", 10, (1024, 1792), (128, 256), concurrency=10),
            arms=("baseline", *_MACRO_ARMS, "meso", "full", *_EVICT_ARMS),
            pool_share=0.6,
            few_rounds=("macro", *_PLACEBOS),
        ),
        AblationWorkload(
            load=_load("short-chat", 16, (64, 192), (64, 128), concurrency=8),
            arms=(*_MICRO_ARMS, *_MACRO_ARMS, "meso", "full", "ngram"),
            few_rounds=_PLACEBOS,
        ),
        AblationWorkload(
            load=_load("mixed", 14, (64, 2048), (32, 160), rate=1.0),
            arms=("baseline", *_MACRO_ARMS, "meso", "full"),
            max_num_seqs=6,  # below what is open at once: who gets a slot matters
            few_rounds=("meso", *_PLACEBOS),
        ),
    ),
    quality=QualityPlan(
        num_documents=8, prefix_tokens=3072, scored_tokens=256, num_cloze=80, num_needles=24, needle_tokens=2048
    ),
)
SMOKE = Preset(
    name="smoke",
    rounds=2,
    few_rounds=1,
    workloads=(
        AblationWorkload(
            load=_load("short-chat", 3, (24, 48), (8, 12), concurrency=2),
            arms=(*_MICRO_ARMS, *_MACRO_ARMS, "ngram"),
        ),
        AblationWorkload(
            load=_load("long-context", 2, (640, 704), (16, 16), concurrency=2),
            arms=("baseline", *_MESO_ARMS, "full", "paper"),
            has_read_prompts=True,
            few_rounds=_PLACEBOS,
        ),
        AblationWorkload(
            load=_load("memory-bound", 4, (96, 128), (32, 48), concurrency=4),
            arms=("baseline", *_MACRO_ARMS, *_EVICT_ARMS),
            pool_share=0.6,
        ),
    ),
    quality=QualityPlan(
        num_documents=2, prefix_tokens=640, scored_tokens=24, num_cloze=2, num_needles=2, needle_tokens=640
    ),
)
PRESETS: dict[PresetName, Preset] = {"smoke": SMOKE, "standard": STANDARD}


def choose(name: PresetName, workloads: str | None = None, rounds: int | None = None) -> Preset:
    """A preset, with only some of its workloads (comma separated) or another number of rounds. Raises BenchError."""
    preset = PRESETS[name]
    known = {workload.name: workload for workload in preset.workloads}
    wanted = list(known) if workloads is None else [part.strip() for part in workloads.split(",") if part.strip()]
    for part in wanted:
        if part not in known:
            raise BenchError(f"unknown workload {part!r}: {', '.join(known)}")
    return msgspec.structs.replace(
        preset,
        workloads=tuple(w for w in preset.workloads if w.name in wanted),
        rounds=rounds or preset.rounds,
        few_rounds=min(preset.few_rounds, rounds or preset.rounds),
    )


def check_context(workload: AblationWorkload, max_model_len: int) -> None:
    """Raise BenchError unless the model's context holds the longest request."""
    longest = workload.load.prompt_tokens.high + workload.load.output_tokens.high
    if longest > max_model_len:
        raise BenchError(
            f"{workload.name} asks for {longest} tokens, the model takes {max_model_len}: choose other --workloads"
        )


def arrivals(workload: AblationWorkload, maker: PromptMaker, seed: int) -> list[Arrival]:
    """The requests of one round; `maker` must send ids. Equal seeds give equal requests, whatever the arm."""
    planned = plan(workload.load, maker, seed)
    return [
        Arrival(
            index=request.index,
            prompt_token_ids=[int(token) for token in request.prompt.content],
            num_output_tokens=request.num_output_tokens,
            due_seconds=request.arrival_seconds or 0.0,
            seed=seed * 1000 + request.index,
        )
        for request in planned
    ]


_DECODE_WEIGHT = 5.0  # of a token that is drawn, by one that is read in a prompt


def weight_of(workload: AblationWorkload) -> float:
    """About how long a round of an arm takes, by other pieces: tokens, those that are decoded counting more."""
    load = workload.load
    prompt, output = ((each.low + each.high) / 2 for each in (load.prompt_tokens, load.output_tokens))
    return load.num_requests * ((0.5 if workload.has_read_prompts else 1.0) * prompt + _DECODE_WEIGHT * output)


def weight_of_quality(plan: QualityPlan) -> float:
    """About how long one arm's quality takes, by the same measure."""
    scored = plan.num_documents * plan.scored_tokens * _DECODE_WEIGHT
    read = plan.num_documents * plan.prefix_tokens + plan.num_needles * plan.needle_tokens + plan.num_cloze * 512
    return scored + read / 4  # beginnings are read once for all arms


def blocks_of(requests: list[Arrival]) -> int:
    """KV blocks that all these requests hold when each has its last token."""
    return sum(-(-(len(r.prompt_token_ids) + r.num_output_tokens) // BLOCK_SIZE) for r in requests)


def pool_blocks(workload: AblationWorkload, requests: list[Arrival]) -> int:
    """Blocks of the engine that serves them: of the longest ones that are open at once, by the pool's share."""
    at_once = workload.load.concurrency or workload.load.num_requests
    longest = sorted(requests, key=lambda r: len(r.prompt_token_ids) + r.num_output_tokens, reverse=True)
    alone = blocks_of(longest[:1])
    return max(alone + 1, int(workload.pool_share * blocks_of(longest[:at_once])) + 1)
