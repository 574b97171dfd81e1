"""What is asked of a server: how many tokens in and out, when, and which prompts share what. Knows no server."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from etserve.bench.errors import BenchError
from etserve.bench.prompts import OPENING_TOKENS, Piece, Prompt, PromptMaker
from etserve.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceEntry


class Lengths(msgspec.Struct, frozen=True):
    """A token count: fixed when low equals high, else drawn from a log-normal clipped to [low, high].

    The median is the geometric mean of the bounds, and the bounds lie two standard deviations from it.
    """

    low: int
    high: int

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        if self.low == self.high:
            return [self.low] * count
        middle, spread = np.log(self.low * self.high) / 2.0, np.log(self.high / self.low) / 4.0
        drawn = np.rint(generator.lognormal(middle, spread, count))
        return [int(n) for n in np.clip(drawn, self.low, self.high)]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one workload. Closed loop: `concurrency` is set; open loop: `rate` or a trace."""

    name: str
    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    concurrency: int | None = None
    rate: float | None = None  # arrivals per second
    burstiness: float = 1.0  # shape of the Gamma gaps: 1 is Poisson, below 1 burstier, above 1 more regular
    shared_prefix_tokens: int = 0  # leading part of prompt_tokens that all requests have in common
    num_repeats: int = 1  # how many times a prompt says its own passage: above 1 the answer goes on copying it
    trace: str | None = None  # the trace file's name


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, ready to send. `arrival_seconds` is None in a closed loop."""

    index: int
    prompt: Prompt
    num_output_tokens: int
    arrival_seconds: float | None = None


STANDARD: dict[str, Workload] = {
    "W1": Workload(
        name="W1", num_requests=8, concurrency=1, prompt_tokens=Lengths(128, 128), output_tokens=Lengths(128, 128)
    ),
    "W2": Workload(
        name="W2", num_requests=16, concurrency=8, prompt_tokens=Lengths(128, 128), output_tokens=Lengths(128, 128)
    ),
    "W3": Workload(
        name="W3", num_requests=64, concurrency=32, prompt_tokens=Lengths(256, 256), output_tokens=Lengths(128, 128)
    ),
    "W4": Workload(
        name="W4", num_requests=8, concurrency=8, prompt_tokens=Lengths(1536, 1536), output_tokens=Lengths(256, 256)
    ),
    "W5": Workload(
        name="W5",
        num_requests=32,
        concurrency=32,
        prompt_tokens=Lengths(1056, 1056),
        shared_prefix_tokens=1024,
        output_tokens=Lengths(64, 64),
    ),
    "W6": Workload(
        name="W6", num_requests=180, rate=3.0, prompt_tokens=Lengths(32, 512), output_tokens=Lengths(16, 160)
    ),
    # What editing code or extracting from a text is like for a drafter: the answer is mostly in the prompt.
    "W7": Workload(
        name="W7",
        num_requests=8,
        concurrency=1,
        prompt_tokens=Lengths(384, 384),
        output_tokens=Lengths(128, 128),
        num_repeats=3,
    ),
}
W6_SECONDS = 60.0


def standard(name: str, *, rate: float | None = None) -> Workload:
    """One of W1 to W7; `rate` replaces W6's, which keeps its 60 seconds. Raises BenchError for another name."""
    workload = STANDARD.get(name.upper())
    if workload is None:
        raise BenchError(f"unknown workload {name!r}: {', '.join(STANDARD)} or custom")
    if rate is None:
        return workload
    if workload.rate is None:
        raise BenchError(f"{workload.name} is a closed loop: it takes no rate")
    return msgspec.structs.replace(workload, rate=rate, num_requests=max(1, round(rate * W6_SECONDS)))


def scaled(workload: Workload, factor: float) -> Workload:
    """The workload with token counts and number of requests multiplied, for smoke tests; nothing falls to 0."""
    if not 0.0 < factor <= 1.0:
        raise BenchError(f"scale must be in (0, 1], got {factor}")
    if factor == 1.0:
        return workload

    def lengths(given: Lengths) -> Lengths:
        return Lengths(max(4, round(given.low * factor)), max(4, round(given.high * factor)))

    num_requests = max(2, round(workload.num_requests * factor))
    return msgspec.structs.replace(
        workload,
        name=f"{workload.name}*{factor:g}",
        num_requests=num_requests,
        concurrency=min(workload.concurrency, num_requests) if workload.concurrency else None,
        prompt_tokens=lengths(workload.prompt_tokens),
        output_tokens=lengths(workload.output_tokens),
        shared_prefix_tokens=round(workload.shared_prefix_tokens * factor),
    )


def plan(workload: Workload, maker: PromptMaker, seed: int) -> list[PlannedRequest]:
    """Every request of one round. Equal arguments give equal requests; another seed shares no prompt with this one."""
    generator = np.random.default_rng(seed)
    num_in = workload.prompt_tokens.draw(generator, workload.num_requests)
    num_out = workload.output_tokens.draw(generator, workload.num_requests)
    arrivals = _arrivals(workload, generator)
    prompts = _prompts(workload, num_in, maker, seed)
    return [PlannedRequest(i, prompts[i], num_out[i], arrivals[i]) for i in range(workload.num_requests)]


def plan_trace(entries: list[TraceEntry], maker: PromptMaker, seed: int) -> list[PlannedRequest]:
    """The entries at their arrival times; equal block hashes become equal text."""
    blocks: dict[tuple[int, int], Piece] = {}
    return [
        PlannedRequest(
            i,
            _hashed_prompt(entry, maker, seed, blocks)
            if entry.block_hashes
            else maker.prompt(entry.num_prompt_tokens, (seed, i)),
            entry.num_output_tokens,
            entry.arrival_seconds,
        )
        for i, entry in enumerate(entries)
    ]


def warmup(planned: list[PlannedRequest], count: int, maker: PromptMaker, seed: int) -> list[PlannedRequest]:
    """A few requests of the plan's shapes with other prompts and short outputs; nobody counts them."""
    return [
        replace(
            request,
            prompt=maker.prompt(request.prompt.num_tokens, (seed, request.index, 0x3A)),
            num_output_tokens=min(16, request.num_output_tokens),
            arrival_seconds=None,
        )
        for request in planned[:count]
    ]


def describe(workload: Workload) -> dict[str, Any]:
    """The settings as plain data for the result file."""
    described: dict[str, Any] = msgspec.to_builtins(workload)
    return described


def _arrivals(workload: Workload, generator: np.random.Generator) -> list[float | None]:
    if workload.rate is None:
        return [None] * workload.num_requests
    if workload.rate <= 0.0 or workload.burstiness <= 0.0:
        raise BenchError("rate and burstiness must be above 0")
    scale = 1.0 / (workload.rate * workload.burstiness)
    gaps = generator.gamma(workload.burstiness, scale, workload.num_requests)
    return [float(at) for at in np.cumsum(gaps) - gaps[0]]


def _prompts(workload: Workload, num_in: list[int], maker: PromptMaker, seed: int) -> list[Prompt]:
    shared = workload.shared_prefix_tokens
    if workload.num_repeats > 1:
        return [_repeated(count, workload.num_repeats, maker, (seed, i)) for i, count in enumerate(num_in)]
    if not shared:
        return [maker.prompt(count, (seed, i)) for i, count in enumerate(num_in)]
    if shared >= min(num_in):
        raise BenchError(f"a shared prefix of {shared} tokens leaves nothing of a prompt of {min(num_in)}")
    prefix = maker.piece(maker.body_tokens(shared), (seed, 0x5EED))
    return [
        maker.joined([prefix, maker.piece(count - shared, (seed, i), leading_space=True)])
        for i, count in enumerate(num_in)
    ]


def _repeated(num_tokens: int, num_repeats: int, maker: PromptMaker, key: tuple[int, ...]) -> Prompt:
    """One passage over and over, behind an opening of what does not divide."""
    size, rest = divmod(maker.body_tokens(num_tokens) - OPENING_TOKENS, num_repeats)
    opening = maker.piece(OPENING_TOKENS + rest, (*key, 0))
    passage = maker.piece(size, (*key, 1), leading_space=True)
    return maker.joined([opening, *[passage] * num_repeats])


def _hashed_prompt(entry: TraceEntry, maker: PromptMaker, seed: int, blocks: dict[tuple[int, int], Piece]) -> Prompt:
    pieces = []
    left = maker.body_tokens(entry.num_prompt_tokens)
    for position, block_hash in enumerate(entry.block_hashes):
        size = min(left, MOONCAKE_BLOCK_TOKENS)
        left -= size
        if size < 1:
            break
        if (block_hash, size) not in blocks:
            blocks[block_hash, size] = maker.piece(size, (seed, block_hash, size), leading_space=position > 0)
        pieces.append(blocks[block_hash, size])
    return maker.joined(pieces)
